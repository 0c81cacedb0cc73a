"""Lanes, slots and pages: nothing is held twice, nothing is lost (allocated + available = capacity)."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ninfer_jax.config import Limits
from ninfer_jax.program.allocator import Allocator, pages_for
from planner import Layout, PoolLayout

LIMITS = Limits(
    layout=Layout(400, 3, 64, (PoolLayout("main", 10, 64),), 3, 64, 0), reservation_bytes=0, prefill_chunk=256,
    chunk_buckets=(64, 256), policy="incremental", cache=True, max_queue=1, record=None, dtype="float32", seed=0,
)  # fmt: skip


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        order = np.random.default_rng(0).permutation(LIMITS.pages) + 1
        self.allocator = Allocator(LIMITS, order)
        self.held = []

    @rule(tokens=st.integers(1, 400), sequences=st.integers(1, 3))
    def admit(self, tokens, sequences):
        pages = sum(lease.pages for lease in self.held)
        fits = (
            sequences + len(self.held) <= 3
            and pages + sequences * pages_for(tokens) <= LIMITS.pages
        )
        assert self.allocator.can_admit(sequences, tokens) == fits
        if fits:
            self.held += [self.allocator.admit(tokens) for _ in range(sequences)]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.allocator.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def everything_is_somewhere_once(self):
        lanes, slots, pages = self.allocator.available
        assert lanes + len(self.held) == slots + len(self.held) == 3
        used = [p for lease in self.held for p in lease.block_table[: lease.pages].tolist()]
        assert len(used) == len(set(used)) == LIMITS.pages - pages
        assert all(1 <= p <= LIMITS.pages for p in used)
        assert len({lease.lane for lease in self.held}) == len(self.held)
        assert len({lease.slot for lease in self.held} - {0}) == len(self.held)
        for lease in self.held:
            assert not lease.block_table[lease.pages :].any()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
