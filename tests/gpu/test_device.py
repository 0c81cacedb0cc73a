"""On an accelerator: goldens in float32 and bfloat16, and neighbours that must not matter. Run by `make test-gpu`."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transfer_cases import PAGES, Machinery, copy, random_batch

import ninfer_jax as nj
from ninfer_jax.program import readback, sampler, startup, units
from ninfer_jax.program.plans import DecodePlan, SamplingRows
from scripts.parity import compare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "name", ["tiny-qwen3.5-dense", "tiny-qwen3.5-moe", "tiny-qwen3.5-vl", "tiny-qwen3-next"]
)
def test_goldens_in_float32(goldens, name):
    checks = list(compare(goldens / name, logits=2e-3, states=2e-4))
    assert not [c for c in checks if not c.passed]


@pytest.mark.parametrize(
    ("name", "most"), [("tiny-qwen3.5-dense", 6e-2), ("tiny-qwen3-next", 6e-2)]
)
def test_goldens_in_bfloat16(goldens, name, most):
    golden = np.load(goldens / name / "golden.npz")
    model = nj.load_model(goldens / name)
    assert model.params.embed.dtype == jax.numpy.bfloat16
    run = jax.jit(nj.prefill, static_argnames="capacity")
    got = np.asarray(run(model, golden["input_ids"], capacity=256)[0])
    assert np.linalg.norm(got - golden["logits"]) < most * np.linalg.norm(golden["logits"])


def test_a_request_does_not_depend_on_its_neighbours(goldens):
    engine = nj.load(goldens / "tiny-qwen3.5-dense", max_context=320, dtype="float32")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 990, n).tolist() for n in (1, 64, 65, 130, 200, 7, 33, 250, 12)]
    params = [
        nj.SamplingParams(temperature=0.8, seed=i, max_tokens=24, ignore_eos=True) for i in range(9)
    ]
    together = engine.generate(prompts, params, use_tqdm=False)
    for prompt, sampling, result in zip(prompts, params, together, strict=True):
        (alone,) = engine.generate(prompt, sampling)
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids


def test_plain_sampling_draws_what_full_sampling_does():
    """UN-11: bit for bit, so that a row does not notice which sampler its neighbours call for."""
    B, V = 8, 248_320
    rng = np.random.default_rng(0)
    zeros, none, ones = np.zeros(B, np.float32), np.zeros(B, np.int32), np.ones(B, np.float32)
    temperature = np.array([0.3, 0.7, 1, 1, 1.5, 2, 1, 0], np.float32)
    seed = rng.integers(0, 2**32, (B, 2)).astype(np.uint32)
    rows = SamplingRows(temperature, none, ones, zeros, zeros, zeros, ones, seed)
    truncated = rows.replace(top_k=np.array([0, 0, 0, 0, 0, 0, 40, 0], np.int32))
    state = sampler.new_sampler_state(B, V)
    plain, full = jax.jit(units.sample_plain), jax.jit(units.sample)
    for position in range(50):
        logits = jax.numpy.asarray(3 * rng.standard_normal((B, V), np.float32))
        plan = DecodePlan.null(B, 1)
        plan.positions[:], plan.sampled[:] = position, 1
        sampled = np.stack([np.argmax(logits, axis=1), ones]).astype(np.int32)
        assert np.array_equal(sampler.greedy(logits)[0], sampled[0])
        got = np.asarray(plain(logits, sampled, plan, rows))
        assert np.array_equal(got, full(state, logits, sampled, plan, rows)[1])
        mixed = np.asarray(full(state, logits, sampled, plan, truncated)[1])
        assert np.array_equal(np.delete(got, 6, axis=1), np.delete(mixed, 6, axis=1))


def test_results_are_read_while_the_device_works_on(monkeypatch):
    """From any thread, by the driver's own copy, with everything launched behind them still to come."""

    @jax.jit
    def step(x, m):
        return x * 3 + 1, jax.lax.fori_loop(0, 20, lambda _, m: m @ m / 4096, m)

    x, m = jnp.arange(16, dtype=jnp.int32).reshape(2, 8), jnp.ones((4096, 4096), jnp.bfloat16)
    assert readback._context(jax.devices()[0]) is not None
    monkeypatch.setattr(readback, "np", SimpleNamespace(empty=np.empty))  # no other way than that
    steps, want = [], np.arange(16).reshape(2, 8)
    for _ in range(50):
        x, m = step(x, m)
        steps.append(x)
    first = readback.read(steps[0])
    assert not steps[-1].is_ready()
    assert (first == want * 3 + 1).all()
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(readback.read, steps):
            want = (want * 3 + 1).astype(np.int32)
            assert (got == want).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_move_exact_bits(goldens, dtype):
    """TX-02, DEV-05: random batches of all kinds, one at a time and several under way at once."""
    rng = np.random.default_rng(0)
    machinery = Machinery(nj.load_model(goldens / "tiny-qwen3.5-dense").config, dtype, rng)
    for _ in range(20):
        machinery.start(*random_batch(machinery, rng)).complete()
        machinery.require_equal()
    size = machinery.size["page"]
    under_way = [
        machinery.start(copy("page", "d2h", p, i * size), copy("page", "d2d", p % PAGES + 1, p))
        for i, p in enumerate(rng.permutation(PAGES)[:12] + 1)
    ]
    for transfer in under_way:
        transfer.complete()
        assert transfer.ready()
    machinery.require_equal()
    machinery.transfers.close()


def test_automatic_capacity_keeps_to_the_budget(goldens, monkeypatch):
    """CAP-05, CAP-08, CAP-19, CAP-20: on a device that counts its memory."""
    options = {"max_concurrency": 8, "host_capacity_bytes": 0, "max_context": 1024}
    full = nj.load(goldens / "tiny-qwen3.5-dense", **options)
    memory = full.memory()
    assert full.limits.pages == 8 * 16
    assert memory["preparation_growth_bytes"] >= memory["kv"] + memory["state_images"]
    page = full.limits.layout.pools[0].page_bytes
    least = memory["runtime_reservation_bytes"] - (8 * 16 - 16) * page
    spare = 2 << 20  # room for up to 64 pages beyond the least; the budget is in MiB
    budget = (startup.measure().in_use + memory["weights"] + least + (1 << 30) + spare) >> 20
    monkeypatch.setenv(startup.BUDGET_VARIABLE, str(budget))
    less = nj.load(goldens / "tiny-qwen3.5-dense", **options)
    assert 16 < less.limits.pages <= 16 + spare // page
    assert startup.measure().in_use <= budget << 20
