"""Prefill apart from the state: what it leaves in the pools, its memory, and its threads."""

import threading
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ninfer_jax as nj
from ninfer_jax.config import EngineConfig
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program import apart, startup, units
from ninfer_jax.program import program as programs
from ninfer_jax.program.apart import Apart, Launchers
from ninfer_jax.program.plans import PrefillPlan
from planner.world import PublishTable, RunPrefill

OPTIONS = {
    "max_context": 320, "max_concurrency": 3, "kv_capacity": 15 * 64, "device_state_slots": 4,
    "host_capacity_bytes": 1 << 20, "prefill_chunk": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(goldens):
    return nj.load_model(goldens / "tiny-qwen3.5-dense")


@pytest.fixture(scope="module")
def program(model):
    program = startup.start(model, EngineConfig(**OPTIONS))
    yield program
    program.close()


@pytest.fixture(scope="module")
def on_the_pools(model):
    return jax.jit(partial(units.prefill, model.config))


@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 192), length=st.integers(1, 128), seed=st.integers(0, 2**32))
def test_it_leaves_what_a_unit_on_the_pools_leaves(program, on_the_pools, start, length, seed):
    """KV-33, ST-08: the image of a slot and pages of its own, from any slot; nothing else changes, null page and slot
    included. Scratches hold NaN of who was there before."""
    rng = np.random.default_rng(seed)
    bucket = program._bucket(length)
    tokens = np.zeros(bucket, np.int32)
    tokens[:length] = rng.integers(0, 1000, length)
    end = start + length
    blocks = -(-end // 64)
    table = np.zeros(5, np.int32)
    table[:blocks] = 1 + rng.permutation(15)[:blocks]
    read, write = rng.integers(1, program.limits.slots + 1, 2)
    plan = PrefillPlan(
        tokens, *map(np.int32, (start, length)), table, *map(np.int32, (read, write))
    )
    before = jax.tree.map(
        lambda x: 0.1 * rng.standard_normal(x.shape, np.float32), jax.device_get(program._state)
    )
    for _ in range(apart.SCRATCHES):
        (first, *others) = program._apart._free
        poisoned = jax.tree.map(lambda x: x + np.nan, first)
        program._apart._free.clear()
        program._apart._free.extend([*others, poisoned])
    got = program._apart.prefill(program._units, program._params, jax.device_put(before), plan)
    want = on_the_pools(program._params, before, plan)
    (state, hidden), (want_state, want_hidden) = jax.device_get((got, want))
    assert np.abs(hidden - want_hidden)[:length].max() < 1e-4
    images = (jax.tree.leaves(s.images) for s in (state, want_state, before))
    for mine, theirs, old in zip(*images, strict=True):
        assert np.abs(mine[write] - theirs[write]).max() < 1e-4
        assert np.array_equal(np.delete(mine, write, axis=0), np.delete(old, write, axis=0))
    changed = table[start // 64 : blocks]
    pools = (jax.tree.leaves(s.kv) for s in (state, want_state, before))
    for mine, theirs, old in zip(*pools, strict=True):
        for block in range(start // 64, blocks):
            held = min(64, end - 64 * block)
            page = table[block]
            assert np.abs(mine[:, page, :, :held] - theirs[:, page, :, :held]).max() < 1e-4
        assert np.array_equal(np.delete(mine, changed, axis=1), np.delete(old, changed, axis=1))


def test_only_small_models_with_short_contexts_run_apart(model, program, monkeypatch):
    """Results are the same on the pools."""
    ids = np.random.default_rng(0).integers(0, 1000, 300).astype(np.int32)

    def hidden(program):
        program.publish_table(PublishTable(0, 0, (9, 4)))
        chunks = ((0, 100), (100, 128), (0, 30))
        commands = [RunPrefill(0, 0, 0, a, b - a, 1, 1) for a, b in chunks]
        out = [program.prefill(c, ids[c.start : c.start + c.length]) for c in commands]
        return [np.asarray(h)[c.length - 1] for c, h in zip(commands, out, strict=True)]

    want = hidden(program)
    assert program._apart is not None
    for module, name in ((programs, "LARGE_BYTES"), (apart, "MOST_BYTES")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, 0)
            other = startup.start(model, EngineConfig(**OPTIONS))
        assert other._apart is None
        assert np.abs(np.subtract(hidden(other), want)).max() < 1e-4
        other.close()


def test_memory_is_counted(program):
    """CAP-19: scratches are workspace; what is allowed for them is what they take."""
    scratches = sum(x.nbytes for s in program._apart._free for x in jax.tree.leaves(s))
    assert program._apart.nbytes == scratches
    temporary = max(u.memory_analysis().temp_size_in_bytes for u in program._units.values())
    assert program.memory()["workspace"] == temporary + scratches
    limits = program.limits
    pages = sum(p.page_bytes for p in limits.layout.pools)
    assert scratches == apart.SCRATCHES * (6 * pages + 2 * limits.layout.image_bytes)


@pytest.mark.parametrize("name", ["take", "place"])
def test_pools_are_changed_in_place(program, model, name):
    """CAP-24, KV-43: no copy of a pool or of a scratch."""
    state = jax.eval_shape(
        partial(new_device_state, model.config, pages=400, slots=60, dtype="float32")
    )
    made = Apart(model.config, program.limits)
    unit = made.units(state)[name]
    memory = unit.function.lower(*unit.args).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 1 << 16
    made.close()


def test_threads_take_turns_and_end():
    launchers = Launchers(2)
    names = [launchers.launch(threading.get_ident) for _ in range(6)]
    assert len(set(names)) == 2
    assert names[:2] * 3 == names
    assert threading.get_ident() not in names
    launchers.close()
    assert not {t.ident for t in threading.enumerate()} & set(names)


def test_an_error_reaches_the_caller_and_the_thread_goes_on():
    launchers = Launchers(1)
    with pytest.raises(ZeroDivisionError):
        launchers.launch(lambda x: 1 // x, 0)
    assert launchers.launch(lambda x: 1 // x, 1) == 1
    launchers.close()
