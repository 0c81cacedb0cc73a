"""Compare scoring with Hugging Face transformers on CPU: scored tokens/s of the demo model.

    python -m scripts.bench_scoring [--out FILE] [--repeats N]

Jobs in float32, both sides in one process, taking turns: a text in windows of 512 tokens, where both sides have the
same to compute, and contexts with several short continuations each, which Hugging Face computes again for each of them.
Hugging Face runs its own model on a folder written from the shipped weights, a row a window or pair, sorted by length,
as lm-evaluation-harness does, in batches of several sizes and with one and torch's default number of threads; we are
held to the fastest of these. Prints a table to stderr and one JSON document to stdout (or FILE). Exit code 1: less than
twice as fast somewhere; 2: torch or transformers is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import ninfer_jax as nj
from ninfer_jax.scoring.windows import text_windows
from scripts import bench_cpu
from scripts.demo_model import geometry
from scripts.demo_model.export import write_trunk

ROOT = Path(__file__).resolve().parent.parent
WINDOW, STRIDE = 512, 256
TEXT_TOKENS = WINDOW + 7 * STRIDE
CONTEXTS, CHOICES = 16, 4
SHOTS = {"zero-shot": (40, 160), "few-shot": (300, 700)}
"""Range of context lengths in tokens: a question alone, and behind solved ones."""
REPEATS = 3
BATCHES = (1, 8)
"""Rows that Hugging Face runs together."""
LEAST_RATIO = 2.0
SAME = 2e-2
"""Most that a sequence's mean log-probability may differ between the sides."""

Pair = tuple[list[int], list[int]]
"""What is given, and what is scored after it."""
Run = Callable[[], list[float]]
"""Score a job; a sum a sequence."""


@dataclass(frozen=True)
class Row:
    """One line of the result: scored tokens/s of both sides."""

    job: str
    ours: float
    huggingface_by_way: dict[str, float]

    @property
    def huggingface(self) -> float:
        """The fastest of Hugging Face's ways."""
        return max(self.huggingface_by_way.values())

    @property
    def ratio(self) -> float:
        return self.ours / self.huggingface

    @property
    def passed(self) -> bool:
        return self.ratio >= LEAST_RATIO

    def as_json(self) -> dict[str, Any]:
        """The row with rounded numbers."""
        return {
            "job": self.job,
            "ours": round(self.ours, 1),
            "huggingface": round(self.huggingface, 1),
            "ratio": round(self.ratio, 2),
            "huggingface_by_way": {way: round(s, 1) for way, s in self.huggingface_by_way.items()},
            "passed": self.passed,
        }


def text_of(ids: list[int]) -> list[int]:
    """The text to score, repeated as often as it takes."""
    return (ids * (1 + TEXT_TOKENS // len(ids)))[:TEXT_TOKENS]


def window_pairs(text: list[int]) -> list[Pair]:
    """What each window of the text is given, and what it scores."""
    return [
        (text[w.begin : w.first], text[w.first : w.end])
        for w in text_windows(len(text), WINDOW, STRIDE)
    ]


def choice_pairs(text: list[int], lengths: tuple[int, int]) -> list[Pair]:
    """Contexts of lengths in a range, each with continuations of 1 to 8 tokens."""
    rng = np.random.default_rng(0)
    choices = []
    for _ in range(CONTEXTS):
        length = int(rng.integers(*lengths))
        begin = int(rng.integers(len(text) - length))
        for _ in range(CHOICES):
            at, size = (int(x) for x in rng.integers((0, 1), (len(text) - 10, 9)))
            choices.append((text[begin : begin + length], text[at : at + size]))
    return choices


def our_windows(engine: nj.Engine, text: list[int]) -> Run:
    """`Engine.perplexity`, summed by window."""
    firsts = [w.first for w in text_windows(len(text), WINDOW, STRIDE)]

    def run() -> list[float]:
        found = engine.perplexity(text, window=WINDOW, stride=STRIDE).logprobs.astype(np.float64)
        return np.add.reduceat(found, firsts).tolist()

    return run


def our_choices(engine: nj.Engine, pairs: list[Pair]) -> Run:
    """`Engine.score`, which computes shared contexts once."""
    contexts, continuations = (list(side) for side in zip(*pairs, strict=True))
    return lambda: [s.sum_logprob for s in engine.score(contexts, continuations)]


def huggingface_side(model: Any, pairs: list[Pair], batch: int, threads: int) -> Run:
    """A forward pass over each whole pair, right-padded batches of similar length."""
    import torch

    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))

    @torch.inference_mode()
    def run() -> list[float]:
        torch.set_num_threads(threads)
        sums = [0.0] * len(pairs)
        for first in range(0, len(order), batch):
            some = order[first : first + batch]
            rows = [pairs[i][0] + pairs[i][1] for i in some]
            width = max(map(len, rows)) - 1
            ids = torch.tensor([(row[:-1] + [0] * width)[:width] for row in rows])
            logits = model(input_ids=ids, use_cache=False).logits
            for b, i in enumerate(some):
                context, after = pairs[i]
                begin = len(context) - 1
                scored = logits[b, begin : begin + len(after)].float().log_softmax(-1)
                chosen = scored.gather(1, torch.tensor(after)[:, None])
                sums[i] = float(chosen.double().sum())
        return sums

    return run


def measure(sides: Mapping[str, Run], pairs: list[Pair], repeats: int) -> dict[str, float]:
    """Scored tokens/s of each side, medians of runs in turns after one to warm up.

    Raises:
      ValueError: the sides do not agree, so that their speeds say nothing.
    """
    first = {name: np.array(side()) for name, side in sides.items()}
    sizes = np.array([len(after) for _, after in pairs])
    want = first["ours"]
    for name, got in first.items():
        worst = float(np.max(np.abs(got - want) / sizes))
        if not worst < SAME:
            raise ValueError(f"ours and {name} differ by {worst:.4f} nats a token")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            time.sleep(bench_cpu.REST_S)
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return {name: int(sizes.sum()) / statistics.median(s) for name, s in seconds.items()}


def huggingface_model(engine: nj.Engine, folder: Path) -> Any:
    """The demo's trunk as transformers runs it, from a folder written here."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    params = jax.tree.map(np.asarray, engine.model.params)
    write_trunk(folder, geometry.TRUNK, engine.model.config, params)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _print_table(rows: list[Row]) -> None:
    table = Table(title="scored tokens/s of the demo model on CPU, float32")
    for column in ("job", "ours", "Hugging Face", "ratio", ""):
        table.add_column(column, justify="left" if column == "job" else "right")
    for r in rows:
        verdict = "ok" if r.passed else "BEHIND"
        table.add_row(r.job, f"{r.ours:.0f}", f"{r.huggingface:.0f}", f"{r.ratio:.2f}", verdict)
    Console(stderr=True).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help="at least 1")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        import torch
        import transformers  # noqa: F401
    except ModuleNotFoundError as missing:
        print(
            f"bench_scoring needs {missing.name}; install the extra: pip install 'ninfer-jax[eval]'",
            file=sys.stderr,
        )
        return 2
    threads = sorted({1, torch.get_num_threads()})
    load = round(os.getloadavg()[0], 1)
    engine = nj.load("demo", purpose="scoring", dtype="float32")
    text = "\n".join(p.read_text() for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = huggingface_model(engine, Path(scratch) / "demo")
        ids = text_of(engine.frontend.tokenizer.encode(text))
        jobs = [(f"windows of {WINDOW}", window_pairs(ids), our_windows(engine, ids))]
        for name, lengths in SHOTS.items():
            pairs = choice_pairs(ids, lengths)
            jobs.append((f"{name}, {CHOICES} continuations", pairs, our_choices(engine, pairs)))
        for job, pairs, ours in jobs:
            print(f"{job} ...", file=sys.stderr)
            sides = {"ours": ours}
            sides |= {
                f"batch {b}, threads {n}": huggingface_side(model, pairs, b, n)
                for b in BATCHES
                for n in threads
            }
            speeds = measure(sides, pairs, args.repeats)
            rows.append(Row(job, speeds.pop("ours"), speeds))
    _print_table(rows)
    settings = {
        "model": "demo",
        "dtype": "float32",
        "window": WINDOW,
        "stride": STRIDE,
        "text_tokens": TEXT_TOKENS,
        "contexts": CONTEXTS,
        "continuations_a_context": CHOICES,
        "repeats": args.repeats,
        "load_average_at_start": load,
    }
    document = bench_cpu.document(rows, settings) | {
        "bench": "scoring_vs_huggingface",
        "unit": "scored tokens/s",
    }
    out = json.dumps(document, indent=2) + "\n"
    if args.out is None:
        sys.stdout.write(out)
    else:
        args.out.write_text(out)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
