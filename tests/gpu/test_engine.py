"""On an accelerator: the engine's promises of reuse and pausing, with real transfers between Device and Host."""

import numpy as np
import pytest

import ninfer_jax as nj

pytestmark = pytest.mark.gpu


def greedy(n):
    return nj.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def test_warm_equals_cold(goldens):
    """Tokens of Hugging Face for every length, three times; then for pairs with a shared prefix."""
    cases = np.load(goldens / "prefix_cases.npz")
    with nj.load(
        goldens / "tiny-qwen3.5-dense", max_concurrency=4, max_context=512, dtype="float32"
    ) as engine:
        for i, length in enumerate(cases["lens"].tolist()):
            for turn in range(3):
                (out,) = engine.generate(
                    [cases[f"prompt_{length}"].tolist()], greedy(32), use_tqdm=False
                )
                assert out.outputs[0].token_ids == cases["greedy"][i].tolist()
                assert not turn or out.num_cached_tokens == length - 1
        for row, (prefix, suffix, which) in enumerate(cases["pair_case"].tolist()):
            tail = cases[f"suffix_{prefix}_{suffix}_{'ab'[which]}"].tolist()
            prompt = [*cases[f"prefix_{prefix}"].tolist(), *tail]
            for _ in range(2):
                (out,) = engine.generate([prompt], greedy(32), use_tqdm=False)
                assert out.outputs[0].token_ids == cases["pair_greedy"][row].tolist()


@pytest.mark.parametrize("host", [64 << 20, 0], ids=["snapshot", "replay"])
def test_preempted_equals_unpreempted(goldens, host):
    """X-15 with sampling and penalties: both requests give the tokens of their solo runs."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 990, 192).tolist() for _ in range(2)]
    params = nj.SamplingParams(
        temperature=0.9, seed=7, presence_penalty=0.5, max_tokens=256, ignore_eos=True
    )
    with nj.load(
        goldens / "tiny-qwen3.5-dense",
        max_concurrency=2,
        max_context=448,
        kv_capacity=512,
        prefill_chunk=64,
        dtype="float32",
        host_capacity_bytes=host,
    ) as engine:
        want = [
            engine.generate([p], params, cache="off", use_tqdm=False)[0].outputs[0].token_ids
            for p in prompts
        ]
        handles = [engine.submit(p, params) for p in prompts]
        assert [h.wait().outputs[0].token_ids for h in handles] == want
        assert sum(engine.stats()["preemptions"].values()) >= 1
