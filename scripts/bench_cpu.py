"""Compare this runtime with Hugging Face transformers on CPU: tokens/s of prefill and greedy decode.

    python -m scripts.bench_cpu [DIR ...] [--out FILE] [--repeats N]

Both sides run the same prompts of a checkpoint folder's golden.npz in float32, in one process, taking turns. Hugging
Face runs with torch's default number of threads and with one; we are held to the faster. Prints a table to stderr and
one JSON document to stdout (or FILE). Exit code 1: we are behind somewhere, less than 5 x ahead in batch-1 decode, or
noise swallowed a measurement; 2: torch or transformers is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import ninfer_jax as nj
from scripts.provenance import commit

ROOT = Path(__file__).parent.parent
CHECKPOINTS = tuple(
    ROOT / "tests" / "goldens" / name
    for name in ("tiny-qwen3.5-dense", "tiny-qwen3.5-moe", "tiny-qwen3.5-vl", "tiny-qwen3-next")
)
BATCHES = (1, 8)
DECODE_TOKENS = 64
"""Tokens a row over which decode is timed: a run of one more, minus a run of one."""
REPEATS = 9
REST_S = 0.3
"""Pause before a side's turn: threads of the other side's library spin for a while after its last operation."""
LEAST_RATIO = 1.0
"""We must be ahead everywhere ..."""
LEAST_RATIO_DECODE_1 = 5.0
"""... and this far ahead in decode at batch 1."""

Prompts = list[list[int]]


@dataclass(frozen=True)
class Side:
    """One of the runtimes, ready to run a fixed batch."""

    first_token: Callable[[], Any]
    """Run the prompts up to their first token."""
    generate: Callable[[int], Prompts]
    """Continue every prompt greedily by a number of tokens, end-of-sequence ignored; returns the new tokens."""


@dataclass(frozen=True)
class Speed:
    """Tokens/s of a batch, all its rows together. None: noise swallowed the measurement."""

    prefill: float | None
    decode: float | None


@dataclass(frozen=True)
class Row:
    """One line of the result: tokens/s of both sides."""

    checkpoint: str
    batch: int
    phase: str
    ours: float | None
    huggingface_by_threads: dict[int, float | None]
    """By number of torch threads."""

    @property
    def huggingface(self) -> float | None:
        """The better of Hugging Face's numbers: the default number of threads suffers most on a busy machine."""
        speeds = [s for s in self.huggingface_by_threads.values() if s is not None]
        return max(speeds, default=None)

    @property
    def ratio(self) -> float | None:
        """How far ahead we are."""
        complete = None not in (self.ours, *self.huggingface_by_threads.values())
        return self.ours / self.huggingface if complete else None

    @property
    def passed(self) -> bool:
        strict = self.phase == "decode" and self.batch == 1
        least = LEAST_RATIO_DECODE_1 if strict else LEAST_RATIO
        return self.ratio is not None and self.ratio >= least

    def as_json(self) -> dict[str, Any]:
        """The row with rounded numbers."""
        return {
            "checkpoint": self.checkpoint,
            "batch": self.batch,
            "phase": self.phase,
            "ours": _rounded(self.ours, 1),
            "huggingface": _rounded(self.huggingface, 1),
            "ratio": _rounded(self.ratio, 2),
            "huggingface_by_threads": {
                str(n): _rounded(s, 1) for n, s in self.huggingface_by_threads.items()
            },
            "passed": self.passed,
        }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def prompts_of(folder: Path, batch: int) -> Prompts:
    """The golden prompt for each row; rows after the first differ from it in their first token."""
    with np.load(folder / "golden.npz") as golden:
        first = golden["input_ids"].reshape(-1).tolist()
    return [[first[0] + row, *first[1:]] for row in range(batch)]


def our_side(folder: Path, prompts: Prompts, **config: Any) -> Side:
    """`Engine.generate` with as many rows as prompts."""
    engine = nj.load(folder, max_concurrency=len(prompts), dtype="float32", **config)

    def generate(tokens: int) -> Prompts:
        params = nj.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = engine.generate(prompts, params, cache="off", use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]

    return Side(first_token=lambda: generate(1), generate=generate)


def huggingface_side(folder: Path, prompts: Prompts, threads: int) -> Side:
    """transformers with its cache, eager attention and a number of torch threads."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)

    @torch.inference_mode()
    def first_token() -> Any:
        torch.set_num_threads(threads)
        # Like generate(): logits of the last position only.
        out = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1)

    @torch.inference_mode()
    def generate(tokens: int) -> Prompts:
        torch.set_num_threads(threads)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            use_cache=True,
            pad_token_id=0,
        )
        return out[:, ids.shape[1] :].tolist()

    return Side(first_token=first_token, generate=generate)


def measure(
    sides: Mapping[str, Side], prompts: Prompts, *, tokens: int, repeats: int
) -> dict[str, Speed]:
    """Median speeds of each side, warmed up first and then run in turns.

    Args:
      sides: what to measure, by name.
      prompts: the batch that the sides were made for; all prompts have the same length.
      tokens: tokens a row over which decode is timed.
      repeats: measurements of each side.

    Raises:
      ValueError: the sides do not generate the same tokens for the first prompt; their speeds say nothing then.
    """
    generated = {name: side.generate(tokens + 1) for name, side in sides.items()}
    if len({tuple(rows[0]) for rows in generated.values()}) > 1:
        raise ValueError(f"{' and '.join(sides)} generate different tokens for the same prompt")
    for side in sides.values():
        side.first_token()
    prefill: dict[str, list[float]] = {name: [] for name in sides}
    decode: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            time.sleep(REST_S)
            prefill[name].append(_seconds(side.first_token))
            one = _seconds(lambda side=side: side.generate(1))
            decode[name].append(_seconds(lambda side=side: side.generate(tokens + 1)) - one)
    return {
        name: Speed(
            prefill=_speed(sum(map(len, prompts)), prefill[name]),
            decode=_speed(len(prompts) * tokens, decode[name]),
        )
        for name in sides
    }


def _speed(tokens: int, seconds: list[float]) -> float | None:
    median = statistics.median(seconds)
    return tokens / median if median > 0 else None


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(folder: Path, batch: int, *, threads: list[int], repeats: int) -> list[Row]:
    """Both sides on one checkpoint and batch, Hugging Face with each number of torch threads."""
    prompts = prompts_of(folder, batch)
    sides = {"ours": our_side(folder, prompts)}
    sides |= {f"huggingface/{n}": huggingface_side(folder, prompts, n) for n in threads}
    speeds = measure(sides, prompts, tokens=DECODE_TOKENS, repeats=repeats)
    theirs = {n: speeds[f"huggingface/{n}"] for n in threads}
    return rows_of(folder.name, batch, speeds["ours"], theirs)


def rows_of(
    checkpoint: str, batch: int, ours: Speed, huggingface: Mapping[int, Speed]
) -> list[Row]:
    """Speeds as rows of the result, one a phase; Hugging Face's by number of threads."""
    return [
        Row(
            checkpoint,
            batch,
            phase,
            getattr(ours, phase),
            {n: getattr(speed, phase) for n, speed in huggingface.items()},
        )
        for phase in ("prefill", "decode")
    ]


def document(rows: list[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document: rows, and what they were measured on and with."""
    return {
        "bench": "cpu_vs_huggingface",
        "unit": "tokens/s",
        "passed": all(row.passed for row in rows),
        "rows": [row.as_json() for row in rows],
        "settings": dict(settings),
        "device": {"cpu": _cpu_model(), "cores": _cores()},
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _versions() -> Iterator[tuple[str, str | None]]:
    for package in ("jax", "torch", "transformers", "numpy"):
        try:
            yield package, version(package)
        except ModuleNotFoundError:
            yield package, None


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _print_table(rows: list[Row]) -> None:
    table = Table(title="tokens/s on CPU, float32")
    for column in ("checkpoint", "batch", "phase", "ours", "Hugging Face", "ratio", ""):
        table.add_column(column, justify="left" if column in ("checkpoint", "phase") else "right")
    for r in rows:
        verdict = "too noisy" if r.ratio is None else "ok" if r.passed else "BEHIND"
        numbers = (
            "-" if value is None else f"{value:.{digits}f}"
            for value, digits in ((r.ours, 0), (r.huggingface, 0), (r.ratio, 2))
        )
        table.add_row(r.checkpoint, str(r.batch), r.phase, *numbers, verdict)
    Console(stderr=True).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", default=CHECKPOINTS)
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
            f"bench_cpu needs {missing.name}; install the extra: pip install 'ninfer-jax[eval]'",
            file=sys.stderr,
        )
        return 2

    threads = sorted({1, torch.get_num_threads()})
    load = round(os.getloadavg()[0], 1)
    rows: list[Row] = []
    for folder in args.folders:
        for batch in BATCHES:
            print(f"{folder.name}, batch {batch} ...", file=sys.stderr)
            rows += compare(folder, batch, threads=threads, repeats=args.repeats)
    _print_table(rows)
    settings = {
        "dtype": "float32",
        "prompt_tokens": len(prompts_of(args.folders[0], 1)[0]),
        "decode_tokens": DECODE_TOKENS,
        "repeats": args.repeats,
        "huggingface_attention": "eager",
        "torch_threads": threads,
        "load_average_at_start": load,
    }
    text = json.dumps(document(rows, settings), indent=2) + "\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
