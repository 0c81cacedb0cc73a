"""Any mix equals each request's solo tokens, never stalls, and leaves nothing behind."""

import random
import threading

import numpy as np
import pytest

import ninfer_jax as nj
from ninfer_jax import SamplingParams

PRESETS = {
    # pages for a little more than one request, so that pausing is common
    "tight, Host": {
        "kv_capacity": 12 * 64,
        "host_capacity_bytes": 8 << 20,
        "device_state_slots": 2,
    },
    "tight, no Host": {"kv_capacity": 12 * 64, "host_capacity_bytes": 0, "device_state_slots": 0},
    "roomy": {"kv_capacity": 28 * 64, "host_capacity_bytes": 1 << 20, "device_state_slots": 6},
}
REQUESTS = 60
SLOW_REQUESTS = 500


def workload(seed, count):
    """Prompts that share prefixes, with every kind of option: (prompt, params, options, cancel after)."""
    rng = random.Random(seed)
    ids = np.random.default_rng(seed)
    trunks = [ids.integers(0, 990, n).tolist() for n in (90, 150, 260)]
    sessions = {}
    out = []
    for i in range(count):
        kind = rng.random()
        if kind < 0.5:
            trunk = rng.choice(trunks)
            prompt = trunk[: rng.randint(1, len(trunk))]
            prompt = prompt + ids.integers(0, 990, rng.choice([0, 1, 7, 64, 65])).tolist()
        elif kind < 0.7 and out:
            prompt = rng.choice(out)[0]
        else:
            prompt = ids.integers(0, 990, rng.choice([1, 2, 63, 64, 65, 200, 300])).tolist()
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            seed=i,
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            max_tokens=rng.choice([1, 2, 8, 30, 64, 130]),
            ignore_eos=True,
        )
        options = {"cache": "off" if rng.random() < 0.1 else "read_write"}
        if rng.random() < 0.3:
            options["session"] = f"s{rng.randrange(5)}"
            sessions.setdefault(options["session"], []).append(i)
        if rng.random() < 0.2 and len(prompt) > 3:
            options["markers"] = [rng.randrange(1, len(prompt))]
        if rng.random() < 0.2 and len(prompt) > 3:
            options["anchors"] = [rng.randrange(1, len(prompt))]
        cancel = rng.randrange(1, 20) if rng.random() < 0.1 else None
        out.append((prompt, params, options, cancel))
    return out


def run(goldens, preset, seed, count):
    with nj.load(
        goldens / "tiny-qwen3.5-dense",
        max_concurrency=4,
        max_context=448,
        prefill_chunk=64,
        dtype="float32",
        **PRESETS[preset],
    ) as engine:
        work = workload(seed, count)
        want = {}
        for prompt, params, _, _ in work:
            key = (tuple(prompt), params.seed)
            (out,) = engine.generate([prompt], params, cache="off", use_tqdm=False)
            want[key] = out.outputs[0].token_ids
        engine.clear_cache()
        handles = [engine.submit(p, s, **o) for p, s, o, _ in work]
        results = [None] * len(handles)

        def consume(i, cancel):
            for n, _ in enumerate(handles[i], start=1):
                if n == cancel:
                    handles[i].cancel()
            results[i] = handles[i].wait()

        threads = [
            threading.Thread(target=consume, args=(i, w[3])) for i, w in enumerate(work) if w[3]
        ]
        for t in threads:
            t.start()
        faults = []
        for i, (prompt, params, _, cancel) in enumerate(work):
            out = results[i] = handles[i].wait(timeout=300)
            got, expected = out.outputs[0].token_ids, want[tuple(prompt), params.seed]
            if cancel:
                expected = expected[: len(got)]
            if got != expected:
                faults.append(
                    (i, len(prompt), out.num_cached_tokens, engine.explain(out.request_id))
                )
        for t in threads:
            t.join()
        engine.clear_cache()
        assert engine.idle
        return faults, engine.stats()


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_mix_equals_solo_runs(goldens, preset):
    faults, stats = run(goldens, preset, 11, REQUESTS)
    assert not faults, faults[:3]
    if preset != "roomy":
        assert sum(stats["preemptions"].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("preset", list(PRESETS))
def test_five_hundred_requests_equal_solo_runs(goldens, preset):
    faults, _ = run(goldens, preset, 12, SLOW_REQUESTS)
    assert not faults, faults[:3]
