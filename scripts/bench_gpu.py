"""How near the device's limits the engine runs on one GPU, on models of public shapes with random bfloat16 weights.

    python -m scripts.bench_gpu [--models 0.8B,4B,27B,35B-A3B] [--parts NAMES] [--out FILE] [--huggingface MODELS]

Ceilings are measured in the same run: copy bandwidth, and the rate of a large matrix product. Parts, for each model
but for ``ops``:

- ``ops``: decode attention of 8 x 32,768 tokens and the delta rule's step of 8 rows, alone. `pallas_kernels/*/` has
  benches of all ops.
- ``start``: seconds to an engine that can answer, cold and again, with the executables that the first start kept on
  disk: in a folder of this run's own, so that cold is cold, or else where JAX_COMPILATION_CACHE_DIR says.
- ``decode``: step time of the decode unit and greedy sampling, next step launched before the last is read, and the
  share of the time that its bytes (weights, states, keys and values) take at the copy bandwidth.
- ``kernels``: what a profile of decode steps says of the device: how much of the time it idles, between the first
  kernel and the last, and which kernels take longest. Under the profiler XLA launches kernel by kernel, not as a graph.
  The same of prompts, if another part runs prompts.
- ``prefill``: a prompt through the largest units, and the share of the matrix rate that its products reach.
- ``generate``: tokens/s of `Engine.generate` against the bare step rate, and of sampling with top-k and top-p against
  greedy.
- ``hit``: time to the first token of a 16,000-token prompt that is wholly in the cache.
- ``sampling``: what sampling adds to a greedy step, with temperature alone and with Qwen's top-k and top-p.
- ``score``: windows of 2,048 tokens, share of the matrix rate; and questions of 65 to 400 tokens with four short
  continuations each.
- ``ladder``: prompts up to max_context, twice, on the capacity that was chosen automatically.

With `--huggingface`, transformers runs on the same shapes first, in a process of its own.

Results go to FILE as they come (JSON), a line each to stderr, and at the end a table of those that `TARGETS` asks for.
Exit code 1: one of them is missed; 2: no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import ninfer_jax as nj
from artifacts import open_checkpoint
from ninfer_jax.config import PAGE_TOKENS, EngineConfig, Limits
from ninfer_jax.engine.engine import Engine
from ninfer_jax.frontend import Frontend
from ninfer_jax.models.model import Model
from ninfer_jax.program import startup
from ninfer_jax.program.plans import SamplingRows
from ninfer_jax.program.program import Program
from ninfer_jax.program.readback import read
from pallas_kernels.gated_delta import decode_bench as delta_bench
from pallas_kernels.gated_delta import decode_shapes as delta
from pallas_kernels.measuring import device_events
from pallas_kernels.paged_attention import decode_bench as attention_bench
from pallas_kernels.paged_attention import decode_shapes as attention
from planner.world import DecodeRow, PublishTable, RunDecode, RunPrefill
from scripts.provenance import measured_with

CONTEXT = 2048
PARTS = (
    "ops",
    "start",
    "decode",
    "kernels",
    "prefill",
    "generate",
    "hit",
    "sampling",
    "score",
    "ladder",
)
PREFILLS = {"start", "prefill", "generate", "hit", "ladder"}
"""Parts that run prompts."""
PROMPTS = {
    "27B": (2048, 30_000),
    "4B": (30_000,),
    "0.8B": (2048,),
    "9B": (2048,),
    "35B-A3B": (2048,),
}


@dataclass(frozen=True)
class Target:
    """What a figure of some row of a part has to reach."""

    part: str
    row: dict[str, Any]
    """Fields that tell the row."""
    figure: str
    must: float
    goal: float | None = None
    at_most: bool = False
    """It must not be above `must`, instead of not below."""

    @property
    def name(self) -> str:
        return " ".join(map(str, (self.part, *self.row.values(), self.figure)))

    def measured(self, document: dict[str, Any]) -> list[float]:
        """The figure in those rows of a document; in a document of several runs there may be more than one."""
        rows = document.get(self.part, [])
        return [r[self.figure] for r in rows if self.row.items() <= r.items() and self.figure in r]

    def met(self, value: float) -> bool:
        return value <= self.must if self.at_most else value >= self.must


def _of(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model} | fields


TARGETS = (
    Target("decode", _of("27B", rows=1), "share", 0.92, 0.96),
    Target("decode", _of("27B", rows=8), "share", 0.90, 0.96),
    Target("decode", _of("4B", rows=1), "share", 0.82, 0.90),
    Target("decode", _of("4B", rows=8), "share", 0.80, 0.90),
    Target("decode", _of("0.8B", rows=1), "share", 0.45, 0.65),
    Target("decode", _of("0.8B", rows=8), "share", 0.45, 0.65),
    Target("decode", _of("35B-A3B", rows=1), "share", 0.60, 0.80),
    Target("decode", _of("35B-A3B", rows=8), "share", 0.65, 0.80),
    Target("ops", {"op": "attention_decode"}, "share", 0.80, 0.90),
    Target("ops", {"op": "gated_delta_decode"}, "share", 0.75, 0.90),
    Target("prefill", _of("27B", tokens=2048), "share", 0.70, 0.82),
    Target("prefill", _of("27B", tokens=30_000), "share", 0.72, 0.85),
    Target("prefill", _of("4B", tokens=30_000), "share", 0.65, 0.78),
    Target("score", _of("4B", tokens=2048), "share", 0.45),
    Target("hit", _of("27B", which="warm"), "ttft_ms", 60, 25, at_most=True),
    Target("start", _of("27B", which="cold"), "seconds", 120, 60, at_most=True),
    Target("start", _of("27B", which="again"), "seconds", 20, 10, at_most=True),
    Target("sampling", _of("4B", rows=8, rules="temperature"), "of_step", 0.04, at_most=True),
    *(
        Target("generate", _of(model, requests=n), "of_bare_step", 0.93)
        for model in ("4B", "27B")
        for n in (1, 8)
    ),
    *(
        Target("kernels", _of(model, rows=n), "idle", most, at_most=True)
        for model, most in (("4B", 0.10), ("27B", 0.03))
        for n in (1, 8)
    ),
)


@dataclass
class Ceilings:
    """What the device can do, measured."""

    copy: float
    """Bytes/s of a copy, read and write counted."""
    product: float
    """Operations/s of a large bfloat16 matrix product."""


@dataclass
class Results:
    """Collects rows, prints each, and keeps the file up to date."""

    out: Path | None
    document: dict[str, Any] = field(default_factory=dict)

    def add(self, part: str, **row: Any) -> None:
        self.document.setdefault(part, []).append(row)
        print(
            part, *(f"{name}={value}" for name, value in row.items()), file=sys.stderr, flush=True
        )
        self.save()

    def save(self) -> None:
        if self.out:
            self.out.write_text(json.dumps(self.document, indent=1) + "\n")


def seconds(
    run: Callable[[], Any],
    repeats: int = 3,
    choose: Callable[[list[float]], float] = statistics.median,
) -> float:
    """The chosen one of the times of a call, waited for."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return choose(times)


def ceilings() -> Ceilings:
    words = jnp.arange(1 << 29, dtype=jnp.uint32)
    flip = jax.jit(lambda x: x ^ jnp.uint32(1))
    # A ceiling is the best that was seen.
    copied = seconds(lambda: [flip(words) for _ in range(5)], 8, min) / 5
    a, b = (
        jax.random.normal(jax.random.key(i, impl="rbg"), shape, jnp.bfloat16)
        for i, shape in enumerate([(8192, 5120), (5120, 17408)])
    )
    product = jax.jit(lambda a, b: a @ b)
    multiplied = seconds(lambda: [product(a, b) for _ in range(5)], 8, min) / 5
    return Ceilings(2 * words.nbytes / copied, 2 * 8192 * 5120 * 17408 / multiplied)


def decode_bytes(model: Model, program: Program, rows: int) -> float:
    """Bytes that a step at `CONTEXT` must move: weights once, states in and out, keys and values; of routed experts
    those that `rows` random choices hit on average."""
    config, params = model.config, model.params
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    total = float(size(params))
    if not config.tie_word_embeddings:
        total -= params.embed.nbytes
    if (sparse := params.sparse_mlp) is not None:
        missed = (1 - config.num_experts_per_tok / config.num_experts) ** rows
        total -= missed * (sparse.experts_gate_up.nbytes + sparse.experts_down.nbytes)
    layout = program.limits.layout
    pages = CONTEXT // PAGE_TOKENS * layout.pools[0].page_bytes
    return total + rows * (2 * layout.image_bytes + pages)


def prompt_operations(model: Model, tokens: int) -> float:
    """Operations of the products and of causal attention for a prompt; of routed experts the chosen ones."""
    config, params = model.config, model.params
    weights = sum(x.size for x in jax.tree.leaves(params)) - params.embed.size
    if params.lm_head is not None:
        weights -= params.lm_head.size
    if (sparse := params.sparse_mlp) is not None:
        unused = 1 - config.num_experts_per_tok / config.num_experts
        weights -= int(unused * (sparse.experts_gate_up.size + sparse.experts_down.size))
    heads = config.num_attention_heads * config.head_dim
    attention = 2 * heads * tokens * tokens * config.layer_types.count("full_attention")
    return 2.0 * weights * tokens + attention


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200_000, count).astype(np.int32)


def start(model: Model, **options: Any) -> Program:
    options = {
        "max_concurrency": 8,
        "max_context": 32_768,
        "host_capacity_bytes": 1 << 30,
    } | options
    return startup.start(model, EngineConfig(**options))


def mapped(program: Program, rows: int, tokens: int) -> None:
    """Give each lane its own pages for positions 0..tokens."""
    blocks = tokens // PAGE_TOKENS + 1
    for lane in range(rows):
        first = 1 + lane * blocks
        program.publish_table(PublishTable(lane, 0, tuple(range(first, first + blocks))))


Sample = Callable[[jax.Array], jax.Array]
"""Sampling after a step: logits to `Decoded.sampled`."""


def decode_step(program: Program, rows: int, sample: Sample | None = None) -> Callable[[int], Any]:
    """What launches step i of `rows` rows at `CONTEXT`, and gives what it samples, not read yet; greedy by default.

    Rows begin with different tokens, or all would choose the same experts.
    """
    mapped(program, rows, CONTEXT + 64)

    def step(i: int) -> Any:
        tokens = [77 + 997 * r if i == 0 else -1 for r in range(rows)]
        command = RunDecode(
            i, tuple(DecodeRow(r, r, CONTEXT + i, t, 1 + r, 1 + r) for r, t in enumerate(tokens))
        )
        logits, sampled = program.decode(command)
        return sampled if sample is None else sample(logits)

    return step


def run_steps(step: Callable[[int], Any], first: int, count: int) -> None:
    """Each is launched before the last is read, as in the engine."""
    before = step(first)
    for i in range(first + 1, first + count):
        after = step(i)
        read(before)
        before = after
    jax.block_until_ready(before)


def samplers(program: Program) -> dict[str, Sample]:
    """Sampling of all lanes by rules: temperature alone, and what Qwen's generation configs ask for."""
    n = program.limits.max_concurrency
    zeros, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    plain = SamplingRows(
        ones, np.zeros(n, np.int32), ones, zeros, zeros, zeros, ones, np.zeros((n, 2), np.uint32)
    )
    truncated = replace(plain, top_k=np.full(n, 20, np.int32), top_p=np.full(n, 0.95, np.float32))
    plain, truncated = program.put(plain), program.put(truncated)
    return {
        "temperature": lambda logits: program.sample_plain(logits, plain),
        "top-k 20, top-p 0.95": lambda logits: program.sample(logits, truncated),
    }


def step_seconds(program: Program, rows: int, sample: Sample | None = None) -> float:
    """Time of a decode step: the median of 5 runs of 40."""
    step = decode_step(program, rows, sample)
    run_steps(step, 0, 5)
    return seconds(lambda: run_steps(step, 5, 40), 5) / 40


def kernel_times(run: Callable[[], Any], times: int = 1) -> dict[str, Any]:
    """What the device does while `run` does something so many times: share of the time that it idles, and, for each
    time, how long kernels and the longest of them take."""
    events = device_events(run)
    taken: dict[str, float] = {}
    for _, duration, name in events:
        taken[name] = taken.get(name, 0.0) + duration
    busy = sum(taken.values())
    span = max(e[0] + e[1] for e in events) - min(e[0] for e in events)
    longest = sorted(taken.items(), key=lambda item: -item[1])[:12]
    return {
        "busy_us": round(busy / times / 1e3, 1),
        "idle": round(1 - busy / span, 4),
        "longest_us": {name: round(t / times / 1e3, 1) for name, t in longest},
    }


def decode_kernels(program: Program, rows: int) -> dict[str, Any]:
    """`kernel_times` of decode steps."""
    step, steps = decode_step(program, rows), 8
    run_steps(step, 0, 5)
    return kernel_times(lambda: run_steps(step, 5, steps), steps)


def prefill(program: Program, tokens: int) -> Callable[[], Any]:
    """What runs a prompt of so many tokens through units, and gives what the last one gives, not waited for."""
    mapped(program, 1, tokens)
    prompt, chunk = random_tokens(tokens), program.limits.prefill_chunk

    def run() -> Any:
        hidden = None
        for at in range(0, tokens, chunk):
            part = prompt[at : at + chunk]
            hidden = program.prefill(RunPrefill(0, 0, 0, at, len(part), 1, 1), part)
        return hidden

    return run


def engine_on(model: Model, program: Program | Limits) -> Engine:
    """With the small tokenizer of the demo, whose text means nothing to this model."""
    resources = open_checkpoint(nj.shipped_model("demo")).frontend
    frontend = Frontend.from_resources(resources, vocab_size=model.config.vocab_size)
    return Engine(model, frontend, program, "random")


def greedy(tokens: int) -> nj.SamplingParams:
    return nj.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def sampled(tokens: int) -> nj.SamplingParams:
    """As Qwen's generation configs ask."""
    return nj.SamplingParams(
        temperature=1, top_k=20, top_p=0.95, seed=0, max_tokens=tokens, ignore_eos=True
    )


def generated_rate(
    engine: Engine, requests: int, params: Callable[[int], nj.SamplingParams] = greedy
) -> float:
    """Tokens/s of decode, first tokens and prefill left out: from the difference of two lengths, median of three."""
    prompts = [random_tokens(CONTEXT, seed=i).tolist() for i in range(requests)]

    def run(length: int) -> float:
        begin = time.perf_counter()
        engine.generate(prompts, params(length), use_tqdm=False, cache="off")
        return time.perf_counter() - begin

    run(4)
    # A host that stalls once would decide a single one.
    took = statistics.median(run(144) - run(16) for _ in range(3))
    return requests * 128 / took


def measure(name: str, parts: tuple[str, ...], limits: Ceilings, results: Results) -> None:
    begin = time.perf_counter()
    model = nj.random_model(name)
    jax.block_until_ready(model.params)
    weights_s = time.perf_counter() - begin

    begin = time.perf_counter()
    # Where only steps are measured, the large prefill units need not be compiled.
    program = start(model) if set(parts) & PREFILLS else start(model, prefill_chunk=PAGE_TOKENS)
    results.add(
        "start", model=name, which="cold", seconds=round(time.perf_counter() - begin, 1),
        weights_seconds=round(weights_s, 1), bytes=program.memory(),
    )  # fmt: skip
    steps: dict[int, float] = {}
    if "decode" in parts:
        for rows in (8, 1):
            steps[rows] = step_seconds(program, rows)
            ideal = decode_bytes(model, program, rows) / limits.copy
            results.add(
                "decode", model=name, rows=rows, ms=round(steps[rows] * 1e3, 3),
                roofline_ms=round(ideal * 1e3, 3), share=round(ideal / steps[rows], 3),
            )  # fmt: skip
    if "sampling" in parts:
        bare = steps[8] if 8 in steps else step_seconds(program, 8)
        for rules, sample in samplers(program).items():
            extra = step_seconds(program, 8, sample) - bare
            results.add(
                "sampling", model=name, rows=8, rules=rules, extra_us=round(extra * 1e6, 1),
                of_step=round(extra / bare, 4),
            )  # fmt: skip
    if "prefill" in parts:
        for tokens in PROMPTS[name]:
            took = seconds(prefill(program, tokens))
            rate = prompt_operations(model, tokens) / took
            results.add(
                "prefill", model=name, tokens=tokens, ms=round(took * 1e3, 1),
                tflops=round(rate / 1e12, 1), share=round(rate / limits.product, 3),
            )  # fmt: skip
    engine = engine_on(model, program)
    if "generate" in parts:
        rates = {rows: generated_rate(engine, rows) for rows in (1, 8)}
        for rows, rate in rates.items():
            bare = {"of_bare_step": round(rate * steps[rows] / rows, 3)} if rows in steps else {}
            results.add("generate", model=name, requests=rows, tokens_per_s=round(rate, 1), **bare)
        of_greedy = generated_rate(engine, 8, sampled) / rates[8]
        results.add("generate", model=name, requests=8, sampled_of_greedy=round(of_greedy, 3))
    if "hit" in parts:
        prompt = random_tokens(16_000, seed=9).tolist()
        for which in ("cold", "warm", "warm"):
            (out,) = engine.generate([prompt], greedy(2), use_tqdm=False)
            assert out.metrics is not None
            results.add(
                "hit", model=name, which=which, cached=out.num_cached_tokens,
                ttft_ms=round(out.metrics.time_to_first_token * 1e3, 1),
            )  # fmt: skip
    if "ladder" in parts:
        longest = program.limits.max_context - 2
        for tokens in (1000, 4000, 16_000, longest) * 2:
            prompts = [random_tokens(tokens, seed=tokens + i).tolist() for i in range(2)]
            outs = engine.generate(prompts, greedy(2), use_tqdm=False)
            assert all(len(out.outputs[0].token_ids) == 2 for out in outs)
        results.add("ladder", model=name, longest=longest, pages=program.limits.pages, done=True)
    if "kernels" in parts:
        for rows in (8, 1):
            results.add("kernels", model=name, rows=rows, **decode_kernels(program, rows))
        for tokens in PROMPTS[name] if set(parts) & PREFILLS else ():
            run = prefill(program, tokens)
            jax.block_until_ready(run())
            results.add("kernels", model=name, tokens=tokens, **kernel_times(run))
    engine.close()
    del engine, program
    if "start" in parts:
        begin = time.perf_counter()
        again = start(model)
        results.add(
            "start", model=name, which="again", seconds=round(time.perf_counter() - begin, 1)
        )
        again.close()
    if "score" in parts and name == "4B":
        score(model, limits, results)


def ops(limits: Ceilings, results: Results) -> None:
    """The two ops of a decode step between its products, alone, on 8 rows of 27B."""
    for op, shape, bench, options in (
        ("attention_decode", attention.SHAPES["27B/B8/32k"], attention_bench, {"fused": True}),
        ("gated_delta_decode", delta.SHAPES["27B/B8"], delta_bench, {}),
    ):
        taken = bench.measure(shape, "pallas", **options)
        share = shape.bytes_moved / taken / limits.copy
        results.add("ops", op=op, us=round(taken * 1e6, 1), share=round(share, 3))


def score(model: Model, limits: Ceilings, results: Results) -> None:
    config = startup.scoring_config(EngineConfig(max_context=CONTEXT, purpose="scoring"))
    limits_of = startup.resolve(config, model.config, startup.measure())
    with engine_on(model, limits_of) as engine:
        windows = 16
        text = random_tokens(windows * CONTEXT).reshape(windows, CONTEXT).tolist()
        pairs = [row[:1] for row in text], [row[1:] for row in text]
        asked = questions()
        took, asked_took = (seconds(partial(engine.score, *job), 1) for job in (pairs, asked))
    head = 2.0 * model.config.vocab_size * model.config.hidden_size * CONTEXT
    rate = windows * (prompt_operations(model, CONTEXT) + head) / took
    results.add(
        "score", model="4B", tokens=CONTEXT, tokens_per_s=round(windows * CONTEXT / took),
        tflops=round(rate / 1e12, 1), share=round(rate / limits.product, 3),
    )  # fmt: skip
    results.add(
        "score", model="4B", continuations=len(asked[1]),
        continuations_per_s=round(len(asked[1]) / asked_took),
    )  # fmt: skip


def questions() -> tuple[list[list[int]], list[list[int]]]:
    """256 different contexts of 65 to 400 tokens with 4 continuations of 1 to 8 each."""
    rng = np.random.default_rng(0)
    contexts, continuations = [], []
    for i in range(256):
        context = random_tokens(int(rng.integers(65, 401)), seed=i).tolist()
        for j in range(4):
            contexts.append(context)
            size = int(rng.integers(1, 9))
            continuations.append(random_tokens(size, seed=1000 + 4 * i + j).tolist())
    return contexts, continuations


def missed(document: dict[str, Any]) -> list[str]:
    """Which targets were measured and are missed."""
    return [
        f"{target.name}: {value} {'>' if target.at_most else '<'} {target.must}"
        for target in TARGETS
        for value in target.measured(document)
        if not target.met(value)
    ]


def table(document: dict[str, Any]) -> Table:
    """What was measured beside what was asked for."""
    table = Table(title=f"{document['device']}, jax {document['versions']['jax']}")
    for column in ("figure", "measured", "must", "goal", ""):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for target in TARGETS:
        for value in target.measured(document):
            limits = ("" if x is None else str(x) for x in (target.must, target.goal))
            table.add_row(target.name, str(value), *limits, "ok" if target.met(value) else "missed")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="0.8B,4B,27B,35B-A3B")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--huggingface", metavar="MODELS", help="for example 0.8B,4B")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("no GPU: jax finds none", file=sys.stderr)
        return 2
    if jax.config.jax_compilation_cache_dir is None:
        kept = tempfile.TemporaryDirectory()  # until the process ends
        jax.config.update("jax_compilation_cache_dir", kept.name)
    results = Results(args.out)
    if args.huggingface:
        command = [
            sys.executable,
            "-m",
            "scripts.bench_gpu_huggingface",
            "--models",
            args.huggingface,
        ]
        ran = subprocess.run(command, capture_output=True, text=True)
        told = ran.stdout.strip().splitlines()
        results.add(
            "huggingface", **(json.loads(told[-1]) if told else {"error": ran.stderr[-400:]})
        )
    results.document |= {"date": datetime.now(UTC).date().isoformat()} | measured_with()
    limits = ceilings()
    results.add(
        "ceilings",
        copy_tb_per_s=round(limits.copy / 1e12, 3),
        matmul_tflops=round(limits.product / 1e12),
    )
    parts = tuple(args.parts.split(","))
    runs: dict[str, Callable[[Ceilings, Results], None]] = {
        name: partial(measure, name, parts) for name in args.models.split(",")
    }
    if "ops" in parts:
        runs = {"ops": ops} | runs
    for name, run in runs.items():
        try:
            run(limits, results)
        except Exception as error:  # the other models' results count as well
            results.add("errors", model=name, error=f"{type(error).__name__}: {str(error)[:400]}")
    short = missed(results.document)
    results.document["missed"] = short
    results.save()
    Console(stderr=True).print(table(results.document))
    print(json.dumps(results.document, indent=1))
    return 1 if short or "errors" in results.document else 0


if __name__ == "__main__":
    sys.exit(main())
