"""Copy batches and what they must do, in numpy; for `program/test_transfers.py` and the tests on an accelerator."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.config import EngineConfig
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program import executables
from ninfer_jax.program.startup import Machine, resolve
from ninfer_jax.program.transfers import Transfers
from planner import Copy
from planner.world import RunTransfer

PAGES, SLOTS = 24, 6
RAM = 1 << 34


class Truth:
    """The same contents in numpy: one payload of bytes a page, a slot, and the arena."""

    def __init__(self, state, arena):
        k, v = (np.asarray(x) for x in (state.kv.k, state.kv.v))
        self.page = [
            b"".join(plane[layer, page].tobytes() for layer in range(len(k)) for plane in (k, v))
            for page in range(k.shape[1])
        ]
        fields = [np.asarray(x) for x in (state.images.window, state.images.recurrent)]
        self.image = [b"".join(f[s].tobytes() for f in fields) for s in range(len(fields[0]))]
        self.arena = arena.copy()

    def run(self, batch):
        """All sources first, then all destinations. An image of position 0 is not written."""
        held = []
        batch = [c for c in batch if c.direction != "init"]
        for c in batch:
            places = getattr(self, c.kind)
            size = len(places[0])
            if c.direction == "h2d":
                held.append(self.arena[c.source : c.source + size].tobytes())
            else:
                held.append(places[c.source])
        for c, data in zip(batch, held, strict=True):
            if c.direction == "d2h":
                self.arena[c.destination : c.destination + len(data)] = np.frombuffer(
                    data, np.uint8
                )
            else:
                getattr(self, c.kind)[c.destination] = data


def require_equal(state, arena, truth):
    got = Truth(state, arena)
    assert got.page[1:] == truth.page[1:]  # what is in the null places, nobody reads
    assert got.image[1:] == truth.image[1:]
    assert np.array_equal(got.arena, truth.arena)


class Machinery:
    """Transfers over random contents, without a model around them."""

    def __init__(self, config, dtype, rng, host_bytes=2 << 20):
        options = EngineConfig(
            max_context=PAGES * 64, max_concurrency=1, device_state_slots=SLOTS - 1,
            host_capacity_bytes=host_bytes, dtype=dtype,
        )  # fmt: skip
        config = replace(config, max_position_embeddings=PAGES * 64)
        self.layout = resolve(options, config, Machine("cpu", None, RAM)).layout
        state = new_device_state(config, pages=PAGES, slots=SLOTS, dtype=jnp.dtype(dtype))

        def noise(x):  # any bits, NaN among them
            raw = rng.integers(0, 256, x.size * x.dtype.itemsize, np.uint8)
            return jax.device_put(raw.view(x.dtype).reshape(x.shape))

        self.state = jax.tree.map(noise, state)
        self.transfers = Transfers(self.layout, self.state, jax.devices()[0])
        self.transfers.arena[:] = rng.integers(0, 256, host_bytes, np.uint8)
        units = executables.compiled(
            self.transfers.units(self.state), jax.devices()[0], {}, None, None
        )
        self.state = self.transfers.install(units, self.state)
        self.truth = Truth(self.state, self.transfers.arena)
        self.size = {"page": self.layout.pools[0].page_bytes, "image": self.layout.image_bytes}

    def start(self, *batch):
        self.truth.run(batch)
        self.state, transfer = self.transfers.start(self.state, RunTransfer(1, tuple(batch)))
        return transfer

    def require_equal(self):
        require_equal(self.state, self.transfers.arena, self.truth)


def copy(kind, direction, source, destination):
    return Copy(kind, direction, 0 if kind == "page" else -1, int(source), int(destination), 1)


def random_batch(m, rng):
    """Copies of all kinds at once. Destinations differ; a source may be the destination of another copy."""
    batch, cursor = [], int(rng.integers(0, 64))
    for kind, places in (("page", PAGES), ("image", SLOTS)):
        free = list(rng.permutation(places) + 1)
        offsets = []
        for _ in range(rng.integers(0, places // 2 + 1)):  # arena extents in order, with gaps
            offsets.append(cursor)
            cursor += m.size[kind] + 4 * int(rng.integers(0, 5))
        inside = [free.pop() for _ in range(rng.integers(0, places // 3 + 1))]
        for offset in offsets:
            if rng.integers(2):
                batch.append(copy(kind, "d2h", rng.integers(1, places + 1), offset))
            elif free:
                batch.append(copy(kind, "h2d", offset, free.pop()))
        batch += [copy(kind, "d2d", rng.integers(1, places + 1), target) for target in inside]
        if kind == "image" and free:
            batch.append(copy(kind, "init", 0, free.pop()))
    assert cursor <= m.transfers.arena.size
    return [batch[i] for i in rng.permutation(len(batch))]
