"""On an accelerator: goldens in float32 and bfloat16, and neighbours that must not matter. Run by `make test-gpu`."""

import jax
import numpy as np
import pytest

import ninfer_jax as nj
from scripts.parity import compare

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_an_accelerator():
    assert jax.devices()[0].platform != "cpu", "no accelerator: run these with `make test-gpu`"


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
