"""A decode step on CPU as a loop over stacks of layers, and layer by layer (`SeparateLayers`), of random weights.

    python -m scripts.bench_layers [--model 0.8B] [--out FILE]

Both run in one process, in turns, in engines of one row and of eight, in float32. `read_gb_s` is the weights' bytes by
the time of a step, `copy_gb_s` what copying an array of the largest layer's size reads. Prints one JSON document. Exit
code 1: layer by layer is not faster.
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
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

import ninfer_jax as nj
from ninfer_jax.config import PAGE_TOKENS, EngineConfig
from ninfer_jax.models.model import Model
from ninfer_jax.program import program as programs
from ninfer_jax.program import startup
from ninfer_jax.program.program import Program
from pallas_kernels.measuring import seconds
from planner.world import DecodeRow, PublishTable, RunDecode
from scripts.provenance import measured_with

ROWS = (1, 8)
FORMS = {"loop": sys.maxsize, "layer_by_layer": 0}
"""`program.LARGE_BYTES` that makes each."""


def start(model: Model, form: str, rows: int) -> tuple[Program, float]:
    """A program of so many rows, each with a page, and the seconds that it took to start."""
    options = EngineConfig(max_concurrency=rows, max_context=256, prefill_chunk=PAGE_TOKENS)
    begin = time.perf_counter()
    with patch.object(programs, "LARGE_BYTES", FORMS[form]):
        program = startup.start(model, options)
    took = time.perf_counter() - begin
    for lane in range(rows):
        program.publish_table(PublishTable(lane, 0, (1 + lane,)))
    return program, took


def step_seconds(program: Program, position: int) -> float:
    """One step of all rows."""
    lanes = range(program.limits.max_concurrency)
    rows = tuple(DecodeRow(r, r, position, 7 + r, 1 + r, 1 + r) for r in lanes)
    begin = time.perf_counter()
    jax.block_until_ready(program.decode(RunDecode(0, rows)))
    return time.perf_counter() - begin


def measure(model: Model, repeats: int) -> dict[str, Any]:
    """Medians of `repeats` steps of each form and number of rows."""
    weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
    started = {(form, rows): start(model, form, rows) for form in FORMS for rows in ROWS}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in started}
    for i in range(repeats + 1):
        for key, (program, _) in started.items():
            times[key].append(step_seconds(program, i))
    steps = {key: statistics.median(taken[1:]) for key, taken in times.items()}
    largest = max(x.nbytes // len(x) for x in jax.tree.leaves(model.params) if x.ndim == 3)
    source, target = np.ones(largest, np.uint8), np.ones(largest, np.uint8)
    return {
        "weight_bytes": weights,
        "copy_gb_s": round(largest / seconds(np.copyto, target, source) / 1e9, 1),
        "steps": [
            {
                "form": form, "rows": rows, "ms": round(took * 1e3, 1),
                "read_gb_s": round(weights / took / 1e9, 1),
                "start_s": round(started[form, rows][1], 1),
            }
            for (form, rows), took in steps.items()
        ],
        "faster": {str(n): round(steps["loop", n] / steps["layer_by_layer", n], 2) for n in ROWS},
    }  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="0.8B")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured = measure(nj.random_model(args.model, dtype=jnp.float32), args.repeats)
    document = {
        "bench": "layers_cpu", "model": args.model, **measured, **measured_with(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    text = json.dumps(document, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return int(min(measured["faster"].values()) <= 1)


if __name__ == "__main__":
    sys.exit(main())
