"""What the engine itself costs, and what its cache saves; prints one JSON document.

    python -m scripts.bench_engine [--model DIR] [--out FILE]

- ``loop``: host time of a decode cycle at 8 rows, on a program that computes nothing: the planner's share
  and the whole loop with sampling rows, output sessions and handles (microseconds; limits 200 and 500).
- ``requests``: host time of a request with a prompt of its own and one token, on that program, while hundreds wait:
  with nothing cached, and with the Host arena full of what others left (milliseconds; the latter at most 30).
- ``warm_hit``: time to the first token of a 4,000-token prompt, cold and warm (warm at most 5% of cold).
- ``throughput``: greedy decode tokens/s of one request and of eight (eight at least 3 x).

Ratios are taken within one run. Exit code 1: a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ninfer_jax as nj
from ninfer_jax.engine.engine import Engine
from ninfer_jax.program.program import Program
from planner.world import RunDecode, RunPrefill, RunTransfer
from scripts.provenance import measured_with

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "tests" / "goldens" / "tiny-qwen3.5-dense"
ROWS = 8
PLANNER_US, LOOP_US = 200.0, 500.0
FULL_CACHE_MS = 30.0
WARM_SHARE = 0.05
THROUGHPUT_RATIO = 3.0


class _Done:
    """A transfer that has nothing to copy."""

    def ready(self) -> bool:
        return True

    def complete(self) -> None:
        return None


class IdleProgram:
    """Answers like a `Program` and computes nothing: what is left is the host's own time."""

    def __init__(self, program: Program) -> None:
        self.limits = program.limits
        rows = self.limits.max_concurrency
        self._sampled = jax.numpy.array([[7] * rows, [1] * rows], jax.numpy.int32)
        self._hidden = jax.numpy.zeros(())

    def publish_table(self, order: Any) -> None:
        """Nothing."""

    def prefill(self, order: RunPrefill, tokens: Any) -> Any:
        """An array that is ready."""
        return self._hidden

    def decode(self, order: RunDecode) -> tuple[Any, Any]:
        """The same token for every row."""
        return None, self._sampled

    def install_row(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def start_transfer(self, order: RunTransfer) -> _Done:
        """Done."""
        return _Done()

    def close(self) -> None:
        """Nothing."""


def greedy(tokens: int) -> nj.SamplingParams:
    """Greedy, to the full length."""
    return nj.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def bench_loop(model: Path, tokens: int = 1500) -> dict[str, float]:
    """Host time of a cycle, planner and whole, medians over the cycles that decode 8 rows."""
    real = nj.load(model, max_concurrency=ROWS, max_context=2048, host_capacity_bytes=0)
    engine = Engine(real.model, real.frontend, IdleProgram(real._program), "idle")  # type: ignore[arg-type]
    worker = engine._worker
    planner: list[float] = []
    advance = worker._advance

    def timed(world: Any, event: Any) -> Any:
        start = time.perf_counter()
        out = advance(world, event)
        planner.append(time.perf_counter() - start)
        return out

    worker._advance = timed
    cycles: list[tuple[float, float, int]] = []
    turn = worker._turn

    def timed_turn() -> bool:
        planner.clear()
        start = time.perf_counter()
        out = turn()
        residents = sum(r.position >= r.prompt_length for r in worker.world.residents)
        cycles.append((time.perf_counter() - start, sum(planner), residents))
        return out

    worker._turn = timed_turn  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 900, 100).tolist() for _ in range(ROWS)]
    engine.generate(prompts, greedy(tokens), cache="off", use_tqdm=False)
    engine.close()
    real.close()
    full = [(a, b) for a, b, n in cycles if n == ROWS]
    whole = sorted(a for a, _ in full)
    return {
        "cycles": len(full),
        "planner_p50_us": round(1e6 * statistics.median(b for _, b in full), 1),
        "loop_p50_us": round(1e6 * whole[len(whole) // 2], 1),
        "loop_p99_us": round(1e6 * whole[int(0.99 * len(whole))], 1),
    }


def bench_requests(model: Path, requests: int = 300) -> dict[str, float]:
    """Host time of a request, first with no cache and then with a full one."""
    out: dict[str, float] = {"requests": requests}
    rng = np.random.default_rng(3)
    for name, cache, host in (("uncached_ms", "off", 0), ("full_cache_ms", "read_write", 20 << 20)):
        real = nj.load(model, max_concurrency=ROWS, max_context=512, host_capacity_bytes=host)
        engine = Engine(real.model, real.frontend, IdleProgram(real._program), "idle")  # type: ignore[arg-type]
        for _ in range(2):  # the first fills the cache
            prompts = [rng.integers(0, 900, 200).tolist() for _ in range(requests)]
            start = time.perf_counter()
            engine.generate(prompts, greedy(1), cache=cache, use_tqdm=False)  # type: ignore[arg-type]
            out[name] = round(1e3 * (time.perf_counter() - start) / requests, 3)
        assert engine._worker is not None
        out["checkpoints"] = len(engine._worker.world.physical.checkpoints)
        engine.close()
        real.close()
    return out


def bench_warm_hit(model: Path, length: int = 4000, repeats: int = 5) -> dict[str, float]:
    """Seconds to the first token of a long prompt: from nothing, and again."""
    with nj.load(model, max_concurrency=1, max_context=4096) as engine:
        rng = np.random.default_rng(1)
        cold, warm = [], []
        for _ in range(repeats):
            prompt = rng.integers(0, 900, length).tolist()
            for times in (cold, warm):
                out = engine.submit(prompt, greedy(1)).wait()
                times.append(out.metrics.first_token - out.metrics.arrival)
        assert out.num_cached_tokens == length - 1
    a, b = statistics.median(cold), statistics.median(warm)
    return {
        "prompt_tokens": length,
        "cold_s": round(a, 5),
        "warm_s": round(b, 5),
        "share": round(b / a, 4),
    }


def bench_throughput(model: Path, tokens: int = 200, repeats: int = 3) -> dict[str, float]:
    """Decode tokens/s of one and of eight requests in engines of that size."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 900, 20).tolist() for _ in range(ROWS)]
    speeds = {}
    for rows in (1, ROWS):
        with nj.load(model, max_concurrency=rows, max_context=512) as engine:
            best = 0.0
            for _ in range(repeats):
                start = time.perf_counter()
                engine.generate(prompts[:rows], greedy(tokens), cache="off", use_tqdm=False)
                best = max(best, rows * tokens / (time.perf_counter() - start))
            speeds[rows] = best
    return {
        "one_tokens_s": round(speeds[1], 1),
        "eight_tokens_s": round(speeds[ROWS], 1),
        "ratio": round(speeds[ROWS] / speeds[1], 2),
    }


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    loop = bench_loop(options.model)
    requests = bench_requests(options.model)
    warm = bench_warm_hit(options.model)
    throughput = bench_throughput(options.model)
    passed = (
        loop["planner_p50_us"] <= PLANNER_US
        and loop["loop_p50_us"] <= LOOP_US
        and requests["full_cache_ms"] <= FULL_CACHE_MS
        and warm["share"] <= WARM_SHARE
        and throughput["ratio"] >= THROUGHPUT_RATIO
    )
    result = {
        "bench": "engine",
        "passed": passed,
        "loop": loop,
        "requests": requests,
        "warm_hit": warm,
        "throughput": throughput,
        **measured_with(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = json.dumps(result, indent=2) + "\n"
    if options.out:
        options.out.write_text(text)
    sys.stdout.write(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
