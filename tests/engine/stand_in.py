"""A program without a device: the state of a slot is exactly which tokens it stands for.

The next token is a hash of all tokens so far, so a wrong fork, position, slot, page or replay changes the output.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np

from ninfer_jax.program.plans import Decoded
from planner import LayoutSpec, kv_planes, layout_for, pool_specs


class NoDevice:
    platform = "cpu"


NO_DEVICE = NoDevice()


class HostArray(np.ndarray):
    """A numpy array with the two methods of device arrays that the engine calls."""

    def devices(self):
        return {NO_DEVICE}

    def block_until_ready(self):
        return self


def array(values, dtype):
    return np.asarray(values, dtype).view(HostArray)


def next_token(tokens, vocab):
    data = np.asarray(tokens, np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % vocab


def limits(*, context=320, concurrency=4, pages=16, slots=4, host=1 << 20, queue=64, **more):
    spec = LayoutSpec(
        context, concurrency, pool_specs("none", kv_planes("bf16", 1, 1, 64)), 4096, slots, host
    )
    layout = layout_for(spec, pages)
    values = {
        "layout": layout, "max_context": context, "max_concurrency": concurrency, "pages": pages,
        "blocks": layout.logical_pages, "prefill_chunk": 128, "policy": "incremental", "cache": True,
        "max_queue": queue, "record": None, "seed": 0,
    }  # fmt: skip
    return SimpleNamespace(**values | more)


class StandInTransfer:
    def __init__(self, run, delay):
        self.run, self.delay = run, delay

    def ready(self):
        self.delay -= 1
        return self.delay < 0

    def complete(self):
        self.run()
        return True


class StandInProgram:
    """Slots and pages as dictionaries of tokens; copies move them."""

    def __init__(self, limits, vocab):
        self.limits, self.vocab = limits, vocab
        self.slots = {0: []}
        self.pages = {}
        self.host = {}
        self.tables = {lane: [0] * limits.blocks for lane in range(limits.max_concurrency)}
        self.sampled = [0] * limits.max_concurrency
        self.closed = False
        self.transfer_delay = 2
        self.decode_error = None
        self.sick = set()
        """Outputs after these prefixes are not finite."""
        self.units = []
        self.on_step = lambda count: None
        """Called with the number of units and copy batches before this one."""
        self._steps = 0

    def _step(self):
        self.on_step(self._steps)
        self._steps += 1

    def publish_table(self, command):
        row = self.tables[command.lane]
        row[command.start :] = [*command.pages, *[0] * self.limits.blocks][
            : self.limits.blocks - command.start
        ]

    def _run(self, lane, start, tokens, read_slot, write_slot):
        state = self.slots[read_slot] if start else []
        assert len(state) == start, (len(state), start)
        state = [*state, *tokens]
        table = self.tables[lane]
        for position in range(start, len(state)):
            page = table[position // 64]
            assert page, "writes to the null page"
            self.pages.setdefault(page, {})[position % 64] = state[position]
        held = [self.pages[table[i // 64]].get(i % 64) for i in range(len(state))]
        assert held == state, "the pages do not hold the history"
        self.slots[write_slot] = state
        return state

    def prefill(self, command, tokens):
        assert len(tokens) == command.length
        self._step()
        self.units.append(command)
        self._run(
            command.lane, command.start, tokens.tolist(), command.read_slot, command.write_slot
        )
        return array([0], np.float32)

    def decode(self, command):
        if self.decode_error is not None:
            raise self.decode_error
        self._step()
        self.units.append(command)
        healthy = [1] * self.limits.max_concurrency
        for row in command.rows:
            token = self.sampled[row.lane] if row.token < 0 else row.token
            state = self._run(row.lane, row.position, [token], row.read_slot, row.write_slot)
            if not row.replay:
                self.sampled[row.lane] = next_token(state, self.vocab)
            healthy[row.lane] = tuple(state) not in self.sick
        return Decoded(None, array([self.sampled, healthy], np.int32))

    def start_transfer(self, command):
        self._step()
        spaces = {
            ("image", "device"): self.slots, ("page", "device"): self.pages,
            ("image", "host"): self.host, ("page", "host"): self.host,
        }  # fmt: skip

        def run():
            for c in command.copies:
                if c.direction == "init":
                    self.slots[c.destination] = []
                    continue
                here, there = c.direction.split("2")
                place = {"d": "device", "h": "host"}
                source = spaces[c.kind, place[here]]
                target = spaces[c.kind, place[there]]
                content = source.get(c.source, {})
                target[c.destination] = content.copy()

        return StandInTransfer(run, self.transfer_delay)

    def put(self, tree):
        return tree

    def memory(self):
        return {}

    def close(self):
        self.closed = True
