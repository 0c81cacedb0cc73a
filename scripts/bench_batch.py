"""What ordering by shared prefixes saves in a batch job; prints one JSON document.

    python -m scripts.bench_batch [--model NAME] [--out FILE]

500 completions in random order, each with one of 10 beginnings of 600 tokens and an ending of its own, once in the
order of the file without a cache and once ordered with it. ``cached``: reused prompt tokens by those that need not be
computed if every beginning is computed once (at least 0.85). ``wall``: seconds ordered by seconds unordered (at most
0.4). ``equal``: rows whose text is the same in both runs; prompts are computed in other pieces, so a near tie may fall
otherwise.
Exit code 1: a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ninfer_jax as nj
from scripts.provenance import measured_with

ROWS, PREFIXES, PREFIX_TOKENS = 500, 10, 600
MAX_CONTEXT, MAX_TOKENS = 1024, 256
CACHED_SHARE, WALL_RATIO = 0.85, 0.4
WORDS = [
    "the",
    "one",
    "two",
    "red",
    "small",
    "river",
    "house",
    "story",
    "answer",
    "because",
    "under",
]


def lines(engine: nj.Engine, rows: int, max_tokens: int) -> list[dict[str, Any]]:
    """The job, in random order."""
    luck = random.Random(0)

    def text(words: int) -> str:
        return " ".join(luck.choice(WORDS) for _ in range(words))

    encode = engine.frontend.tokenizer.encode
    heads = [list(encode(text(900)))[:PREFIX_TOKENS] for _ in range(PREFIXES)]
    assert all(len(head) == PREFIX_TOKENS for head in heads)
    job = [
        {
            "custom_id": f"row-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": [*heads[i % PREFIXES], *encode(text(luck.randint(10, 30)))],
                "max_tokens": luck.randint(max(1, max_tokens // 2), max_tokens),
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for i in range(rows)
    ]
    luck.shuffle(job)
    return job


def answers(path: Path) -> dict[str, str]:
    """Text of each row."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in rows}


def measure(engine: nj.Engine, rows: int, max_tokens: int) -> dict[str, Any]:
    """Both runs on one engine, which starts each of them without anything kept."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.jsonl")
        source.write_text("".join(json.dumps(x) + "\n" for x in lines(engine, rows, max_tokens)))
        runs, texts = {}, {}
        for name, on in (("unordered_uncached", False), ("ordered_cached", True)):
            output = Path(folder, name)
            runs[name] = nj.run_batch(source, output, engine, ordered=on, cache=on, progress=False)
            texts[name] = answers(output)
            engine.clear_cache()
    slow, fast = runs["unordered_uncached"], runs["ordered_cached"]
    assert slow.answered == fast.answered == rows
    possible = (rows - PREFIXES) * PREFIX_TOKENS
    a, b = texts.values()
    return {
        "rows": rows,
        "prompt_tokens": fast.prompt_tokens,
        "generated_tokens": fast.generated_tokens,
        "cached_tokens": fast.cached_tokens,
        "possible_tokens": possible,
        "cached": round(fast.cached_tokens / possible, 4),
        "unordered_uncached_s": round(slow.seconds, 2),
        "ordered_cached_s": round(fast.seconds, 2),
        "wall": round(fast.seconds / slow.seconds, 4),
        "equal": sum(a[k] == b[k] for k in a),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rows <= PREFIXES:  # each beginning would be computed once in both runs: nothing to save
        parser.error(f"--rows must be more than the {PREFIXES} beginnings; got {args.rows}")
    if not 1 <= args.max_tokens <= MAX_TOKENS:
        parser.error(f"--max-tokens must be 1 to {MAX_TOKENS}; got {args.max_tokens}")
    with nj.load(args.model, max_context=MAX_CONTEXT) as engine:
        result = measure(engine, args.rows, args.max_tokens)
    result = {
        "bench": "batch",
        "passed": result["cached"] >= CACHED_SHARE and result["wall"] <= WALL_RATIO,
        "model": args.model,
        **result,
        **measured_with(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    sys.exit(not result["passed"])


if __name__ == "__main__":
    main()
