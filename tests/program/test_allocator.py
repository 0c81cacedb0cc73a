"""Lanes, slots and pages: nothing is held twice, nothing is lost (allocated + available = capacity)."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ninfer_jax.config import EngineConfig
from ninfer_jax.errors import CapacityError, InputError
from ninfer_jax.program.allocator import Allocator, pages_for

LIMITS = EngineConfig(max_context=400, max_concurrency=3, kv_capacity=640).resolve(
    model_context=4096, platform="cpu"
)


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


@pytest.mark.parametrize(
    ("capacity", "pages"), [(1000, 16), (1025, 17), (3072, 48), (999, None), (3073, None)]
)
def test_worked_example_x01(capacity, pages):
    """X-01: S = 1000, C = 3 gives L = 16 and M in 16..48 (CAP-02, CAP-03)."""
    config = EngineConfig(max_context=1000, max_concurrency=3, kv_capacity=capacity)
    if pages is None:
        with pytest.raises(CapacityError, match=r"16\.\.48 pages"):
            config.resolve(model_context=4096, platform="cpu")
    else:
        limits = config.resolve(model_context=4096, platform="cpu")
        assert (limits.blocks, limits.pages) == (16, pages)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrency": 0}, {"max_concurrency": 9}, {"max_concurrency": True}, {"max_context": 0},
        {"max_context": 1.5}, {"kv_capacity": -1}, {"prefill_chunk": 100}, {"dtype": "fp8"}, {"seed": -1},
        {"max_contxt": 5},
    ],
)  # fmt: skip
def test_a_bad_option_is_named(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        EngineConfig.from_dict(wrong)


def test_context_over_the_models_limit():
    with pytest.raises(InputError, match="4096"):
        EngineConfig(max_context=5000).resolve(model_context=4096, platform="cpu")
    default = EngineConfig().resolve(model_context=262144, platform="gpu")
    assert (default.max_context, default.dtype) == (4096, "bfloat16")
