"""Impossible requests are refused with the numbers; what is admitted ends; a failed copy costs nothing but time."""

import numpy as np
import pytest

import ninfer_jax as nj
from ninfer_jax import SamplingParams

CONTEXT = 192


@pytest.fixture(scope="module")
def tight(goldens):
    """The smallest pool there is for this context: one request may need all of it."""
    with nj.load(
        goldens / "tiny-qwen3.5-dense",
        max_concurrency=2,
        max_context=CONTEXT,
        kv_capacity=CONTEXT,
        prefill_chunk=64,
        dtype="float32",
        host_capacity_bytes=16 << 20,
    ) as engine:
        yield engine


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 990, n).tolist()


def greedy(n):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


@pytest.mark.parametrize("length", [CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_lengths_around_max_context(tight, length):
    """ENG-07: prompt and outputs together stay within max_context; one more is refused and says so."""
    fits = CONTEXT - length
    if fits < 1:
        with pytest.raises(nj.InputError, match=str(CONTEXT)):
            tight.submit(ids(length), greedy(1))
        return
    (out,) = tight.generate([ids(length)], greedy(fits), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == fits
    with pytest.raises(nj.InputError, match=str(CONTEXT)):
        tight.submit(ids(length), greedy(fits + 1))


def test_any_admitted_request_ends_when_alone_and_beside_others(tight):
    """SCH-16: each needs the whole pool in the end; they take turns."""
    want = [
        tight.generate([ids(100, i)], greedy(92), cache="off", use_tqdm=False)[0] for i in range(4)
    ]
    handles = [tight.submit(ids(100, i), greedy(92)) for i in range(4)]
    for w, handle in zip(want, handles, strict=True):
        assert handle.wait(timeout=120).outputs[0].token_ids == w.outputs[0].token_ids


def test_a_failed_copy_becomes_a_replay(goldens, monkeypatch):
    """TX-10, TX-14, PR-04: a pause whose copies fail is repeated without them, and no token changes."""
    with nj.load(
        goldens / "tiny-qwen3.5-dense",
        max_concurrency=2,
        max_context=448,
        kv_capacity=512,
        prefill_chunk=64,
        dtype="float32",
        host_capacity_bytes=64 << 20,
    ) as engine:
        prompts = [ids(192, i) for i in range(2)]
        want = [
            engine.generate([p], greedy(256), cache="off", use_tqdm=False)[0].outputs[0].token_ids
            for p in prompts
        ]
        start = engine._program.start_transfer
        failed = []

        def fail_to_host(command):
            transfer = start(command)
            if any(c.direction == "d2h" for c in command.copies):
                complete = transfer.complete

                def broken():
                    complete()
                    failed.append(command.transaction)
                    raise nj.EngineFailure("the copy was lost")

                transfer.complete = broken
            return transfer

        monkeypatch.setattr(engine._program, "start_transfer", fail_to_host)
        handles = [engine.submit(p, greedy(256)) for p in prompts]
        assert [h.wait(timeout=120).outputs[0].token_ids for h in handles] == want
        assert failed
        assert engine.stats()["preemptions"]["replay"] >= 1
        monkeypatch.undo()
        engine.clear_cache()
        assert engine.idle
