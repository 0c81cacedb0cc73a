"""Copy batches against numpy: contents of pages, slots and arena after random batches, on real programs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ninfer_jax as nj
from ninfer_jax.config import EngineConfig
from ninfer_jax.errors import EngineFailure
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program import copies
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
        """All sources first, then all destinations."""
        held = []
        for c in batch:
            places = getattr(self, c.kind)
            size = len(places[0])
            if c.direction == "init":
                held.append(bytes(size))
            elif c.direction == "h2d":
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
        units = {k: u.compile() for k, u in self.transfers.units(self.state).items()}
        self.state = self.transfers.install(units, self.state)
        self.truth = Truth(self.state, self.transfers.arena)
        self.size = {"page": self.layout.pools[0].page_bytes, "image": self.layout.image_bytes}

    def start(self, *batch):
        self.truth.run(batch)
        self.state, transfer = self.transfers.start(self.state, RunTransfer(1, tuple(batch)))
        return transfer

    def require_equal(self):
        require_equal(self.state, self.transfers.arena, self.truth)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def machinery(request, goldens):
    config = nj.load_model(goldens / "tiny-qwen3.5-dense").config
    machinery = Machinery(config, request.param, np.random.default_rng(0))
    yield machinery
    machinery.transfers.close()


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


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(machinery, seed):
    """KV-05, KV-12, KV-46, TX-02: whole payloads, any places, every source read before it is overwritten."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        transfer = machinery.start(*random_batch(machinery, rng))
        transfer.complete()
        assert transfer.ready()
        machinery.require_equal()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 16, 17, 24])
def test_there_and_back_is_exact(machinery, count):
    """HOST-04, ST-02: over one, several and many calls, for all bits; the arena is packed."""
    rng = np.random.default_rng(count)
    pages = rng.permutation(PAGES)[:count] + 1
    size = machinery.size["page"]
    offsets = [int(i) * size + 4 for i in rng.permutation(count)]
    before = [machinery.truth.page[p] for p in pages]
    machinery.start(
        *(copy("page", "d2h", p, o) for p, o in zip(pages, offsets, strict=True))
    ).complete()
    for p, o in zip(pages, offsets, strict=True):
        assert machinery.transfers.arena[o : o + size].tobytes() == machinery.truth.page[p]
    targets = rng.permutation(PAGES)[:count] + 1
    back = [copy("page", "h2d", o, t) for o, t in zip(offsets, targets, strict=True)]
    machinery.start(*back).complete()
    machinery.require_equal()
    assert [machinery.truth.page[t] for t in targets] == before


def test_a_batch_inside_the_device_is_ready_at_once(machinery):
    """DEV-04: its order is that of the data; the world need not wait."""
    transfer = machinery.start(
        copy("image", "d2d", 1, 2), copy("image", "init", 0, 3), copy("page", "d2d", 4, 5)
    )
    assert transfer.ready()
    transfer.complete()
    machinery.require_equal()
    assert machinery.truth.image[3] == bytes(machinery.size["image"])


def test_a_batch_may_exchange_places(machinery):
    """Over several calls as well: all sources are read first."""
    rotation = [copy("page", "d2d", 1 + i, 1 + (i + 5) % PAGES) for i in range(PAGES)]
    machinery.start(*rotation, copy("image", "d2d", 1, 2), copy("image", "d2d", 2, 1)).complete()
    machinery.require_equal()


def test_a_copy_reads_what_was_written_before_and_nothing_later(machinery):
    """TX-02, DEV-05: order of launches is order of effects, while nothing waits."""
    size = machinery.size["page"]
    transfers = [
        machinery.start(copy("page", "d2h", 1, 0)),
        machinery.start(copy("page", "d2d", 2, 1)),
        machinery.start(copy("page", "d2h", 1, size)),
        machinery.start(copy("page", "d2d", 3, 1), copy("page", "d2h", 2, 2 * size)),
    ]
    for transfer in reversed(transfers):
        transfer.complete()
        transfer.complete()  # asking again changes nothing
    machinery.require_equal()


def bad_batches():
    yield [copy("page", "d2d", 1, 0)], "1..24"  # a null destination
    yield [copy("page", "d2h", 25, 0)], "1..24"
    yield [copy("image", "d2d", 7, 1)], "1..6"
    yield [copy("image", "h2d", -4, 1)], "arena"
    yield [copy("image", "d2h", 1, (2 << 20) - 8)], "arena"
    yield [copy("page", "init", 0, 1)], "page"
    yield [Copy("page", "d2d", 1, 1, 2, 1)], "page"  # there is no second pool
    yield [copy("page", "d2d", 1, 2), copy("page", "h2d", 0, 2)], "writes there too"
    yield [copy("page", "d2h", 1, 0), copy("page", "d2h", 2, 8)], "meet"
    yield [copy("page", "h2d", 0, 1), copy("page", "d2h", 2, 8)], "meet"


@pytest.mark.parametrize(("batch", "words"), list(bad_batches()))
def test_a_malformed_batch_launches_nothing(machinery, batch, words):
    """INV-07: a wrong id would be silent corruption, so it is refused before anything is donated."""
    before = machinery.state
    with pytest.raises(EngineFailure, match=words):
        machinery.transfers.start(machinery.state, RunTransfer(1, tuple(batch)))
    assert machinery.state is before
    machinery.require_equal()


def test_two_readers_of_one_extent_may_meet(machinery):
    """One saved page may be restored to two places."""
    machinery.start(copy("page", "h2d", 0, 1), copy("page", "h2d", 0, 2)).complete()
    machinery.require_equal()


def test_a_copy_that_fails_says_so_when_it_is_completed(machinery, monkeypatch):
    """TX-16, TX-19: the failure is raised where the engine asks, and nothing is under way then."""

    def fail(staged, offsets):
        raise OSError("broken")

    monkeypatch.setattr(machinery.transfers, "_land", fail)
    command = RunTransfer(7, (copy("page", "d2h", 1, 0), copy("image", "d2h", 1, 1 << 19)))
    machinery.state, transfer = machinery.transfers.start(machinery.state, command)
    with pytest.raises(EngineFailure, match="transaction 7"):
        transfer.complete()
    assert transfer.ready()
    machinery.require_equal()


@pytest.mark.parametrize("count", range(60))
def test_calls_cover_a_batch_and_waste_less_than_half(count):
    for buckets in ((1, 4, 16), (1,), (1, 4)):
        cut = copies.calls(count, buckets)
        assert sum(n for n, _ in cut) == count
        assert all(b in buckets and n <= b < 2 * n for n, b in cut)


def test_transfers_work_in_place(machinery):
    """KV-43, DEV-06: a unit needs room for its payloads, never for another pool."""
    for name, unit in machinery.transfers._units.items():
        kind, n = (
            machinery.transfers.kinds[name.split("_")[1].split("/")[0]],
            int(name.split("/")[1]),
        )
        assert unit.memory_analysis().temp_size_in_bytes <= 2 * n * kind.size + 4096, name


def test_a_call_is_bounded_in_bytes():
    """CAP-24: staging does not grow with the batch."""
    assert copies.page_kind(100, 4 << 20).buckets == (1, 4, 16)
    assert copies.page_kind(100, 16 << 20).buckets == (1, 4)
    assert copies.page_kind(100, 256 << 20).buckets == (1,)
    assert copies.image_kind(16, 1 << 10).buckets == (1,)
