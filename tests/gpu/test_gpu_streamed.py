"""On a Hopper GPU: the decode path of large models, on few layers of public widths."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ninfer_jax as nj
from artifacts import open_checkpoint
from ninfer_jax.config import EngineConfig
from ninfer_jax.engine.engine import Engine
from ninfer_jax.frontend import Frontend
from ninfer_jax.models.geometries import GEOMETRIES, random_weights
from ninfer_jax.models.model import Model
from ninfer_jax.models.qwen3_5 import streamed, trunk
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program import executables, startup
from ninfer_jax.program.program import Program
from planner.world import DecodeRow, PublishTable, RunDecode, RunPrefill

pytestmark = pytest.mark.gpu
SLOTS, PAGES = 6, 24


def model(name, layers=4):
    whole = GEOMETRIES[name]
    config = replace(
        whole, num_hidden_layers=layers, layer_types=whole.layer_types[:layers],
        ffn_types=whole.ffn_types[:layers], vocab_size=2048,
    )  # fmt: skip
    return Model(params=random_weights(config, dtype=jnp.bfloat16, seed=1), config=config)


def filled_state(config):
    rng = np.random.default_rng(0)
    state = new_device_state(config, pages=PAGES, slots=SLOTS, dtype=jnp.bfloat16)
    fill = lambda x: jnp.asarray(0.5 * rng.standard_normal(x.shape, np.float32), x.dtype)  # noqa: E731
    return jax.tree.map(fill, state)


def rows():
    """One that goes on, one that forks, one that does not run, one at its first token."""
    i32 = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    tables = np.arange(1, 1 + PAGES).reshape(4, -1)
    tables[2] = 0
    return (
        i32([5, 900, 0, 77]),
        i32([200, 63, 0, 0]),
        tables,
        i32([1, 3, 0, 4]),
        i32([1, 2, 0, 4]),
    )


@pytest.mark.parametrize("name", ["0.8B", "27B", "35B-A3B"])
def test_a_step_equals_the_plain_one_in_float32(name):
    m = model(name)
    assert streamed.unfit(m.config, m.params, 4) is None
    state = filled_state(m.config)
    step = jax.jit(lambda p, s, *a: streamed.decode(m.config, p, s, *a))
    got, logits = step(m.params, state, *rows())
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)  # noqa: E731

    def plain(params, state, *args):
        state, hidden = trunk.decode(m.config, params, state, *args)
        return state, trunk.logits(params, hidden)

    want, exact = jax.jit(plain)(wide(m.params), wide(state), *rows())

    def error(got, want):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        return np.linalg.norm(got - want) / np.linalg.norm(want)

    running = jnp.array([0, 1, 3])
    # A bfloat16 router can choose another expert where two are nearly equal.
    most = 0.1 if name == "35B-A3B" else 3e-2
    assert error(logits[running], exact[running]) < most
    for slot in (1, 3, 4):
        assert error(got.images.recurrent[slot], want.images.recurrent[slot]) < most
        assert error(got.images.window[slot], want.images.window[slot]) < most
    for slot in (2, 5):  # read from, and not concerned
        assert (got.images.recurrent[slot] == state.images.recurrent[slot]).all()
    assert error(got.kv.k[:, 1:], want.kv.k[:, 1:]) < most
    assert error(got.kv.v[:, 1:], want.kv.v[:, 1:]) < most

    alone = [x.at[1:].set(0) if x.ndim == 1 else x for x in rows()]
    _, again = step(m.params, state, *alone)
    assert (again[0] == logits[0]).all(), "a row depends on its neighbours"


def test_warm_equals_cold():
    """The second answer to a prompt comes from what the first one left, and is the same."""
    m = model("0.8B")
    assert streamed.unfit(m.config, m.params, 4) is None
    program = startup.start(m, EngineConfig(max_context=1024, max_concurrency=4, prefill_chunk=256))
    resources = open_checkpoint(nj.shipped_model("demo")).frontend
    frontend = Frontend.from_resources(resources, vocab_size=m.config.vocab_size)
    rng = np.random.default_rng(3)
    sampling = nj.SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True)
    with Engine(m, frontend, program, "random") as engine:
        for length in (1, 63, 64, 65, 300, 700):
            prompt = rng.integers(0, 2000, length).tolist()
            cold, warm = (engine.generate([prompt], sampling, use_tqdm=False)[0] for _ in range(2))
            assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
            assert warm.num_cached_tokens == length - 1


def test_kept_executables_give_equal_bits(tmp_path, monkeypatch):
    """CAP-21: kernels come back from disk as they were kept, and no unit is lowered."""
    m = model("0.8B")
    config = EngineConfig(max_context=1024, max_concurrency=4, prefill_chunk=256)
    limits = startup.resolve(config, m.config, startup.measure())
    monkeypatch.setattr(executables, "_IMPORTED", time.time() + 60)  # edited right before, maybe
    tokens = np.random.default_rng(4).integers(0, 2000, 60).astype(np.int32)
    lowered, results = set(), []
    listen = lambda name, *_, fun_name="", **__: "mlir" in name and lowered.add(fun_name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for folder in (None, tmp_path / "units", tmp_path / "units"):
            jax.clear_caches()
            lowered.clear()
            program = Program(m, limits, folder)
            loads = bool(results[1:])
            assert {
                f"jit({unit})" in lowered for unit in ("decode", "prefill", "gather_pages")
            } == {not loads}
            program.publish_table(PublishTable(0, 0, (1,)))
            out = [program.prefill(RunPrefill(0, 0, 0, 0, 60, 1, 1), tokens)]
            for position in range(60, 63):
                token = 7 if position == 60 else -1
                step = RunDecode(0, (DecodeRow(0, 0, position, token, 1, 1),))
                decoded = program.decode(step)
                out += [decoded.logits[0], decoded.sampled[:, 0]]
            results.append([np.asarray(x).tobytes() for x in out])
            program.close()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert results[0] == results[1] == results[2]
