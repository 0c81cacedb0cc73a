"""Host cost of the engine's cycle: everything but the device's work, at full concurrency.

The program is replaced by one that returns the same tokens at once. Prints one JSON line; times are CPU time of the
process, so that other load on the machine does not count.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import time
from typing import Any

import numpy as np

import ninfer_jax as nj
from ninfer_jax.engine import Engine


class _Array(np.ndarray):
    """A host array with the methods of device arrays that the engine calls."""

    def copy_to_host_async(self) -> None:
        pass

    def block_until_ready(self) -> _Array:
        return self


class NullProgram:
    """Takes every command and computes nothing."""

    def __init__(self, limits: Any) -> None:
        self.limits = limits
        rows = limits.max_concurrency
        self._tokens = np.full(rows, 300, np.int32).view(_Array)
        self._healthy = np.ones(rows, bool).view(_Array)

    def publish_table(self, command: Any) -> None:
        pass

    def prefill(self, command: Any, tokens: np.ndarray) -> _Array:
        return self._tokens

    def decode(self, command: Any) -> _Array:
        return self._tokens

    def sample_greedy(self, logits: Any) -> tuple[_Array, _Array]:
        return self._tokens, self._healthy

    def start_transfer(self, command: Any) -> NullProgram:
        return self

    def ready(self) -> bool:
        return True

    def complete(self) -> None:
        pass

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--profile", action="store_true", help="where the time goes, on stderr")
    args = parser.parse_args()
    with nj.load("demo", max_context=2048) as real:
        limits, frontend, model = real.limits, real.frontend, real.model
    params = nj.SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    with Engine(model, frontend, NullProgram(limits), "null") as engine:  # type: ignore[arg-type]
        prompts = [[i + 1] * 64 for i in range(limits.max_concurrency)]
        engine.generate(prompts, params, use_tqdm=False)
        before = engine.stats()["decode_steps"]
        profile = cProfile.Profile()
        if args.profile:
            turn = engine._worker._turn
            engine._worker._turn = lambda: profile.runcall(turn)  # type: ignore[method-assign]
        started = time.process_time()
        engine.generate([[9, *p] for p in prompts], params, use_tqdm=False)
        elapsed = time.process_time() - started
        steps = engine.stats()["decode_steps"] - before
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    print(
        json.dumps(
            {
                "bench": "engine_cycle",
                "rows": limits.max_concurrency,
                "decode_steps": steps,
                "rows_per_step": round(args.tokens * limits.max_concurrency / steps, 2),
                "us_per_step": round(1e6 * elapsed / steps, 1),
                "us_per_token": round(1e6 * elapsed / (args.tokens * limits.max_concurrency), 2),
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    main()
