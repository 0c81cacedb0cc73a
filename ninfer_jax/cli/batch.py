"""`ninfer batch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ninfer_jax.batch import run_batch
from ninfer_jax.errors import InputError
from ninfer_jax.ray import ProcessorConfig
from ninfer_jax.ray import run_batch as run_on_ray

Input = Annotated[Path, typer.Option("--input", "-i", help="OpenAI batch requests (JSON Lines).")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where answers are appended.")]
Model = Annotated[str, typer.Option("--model", "-m", help="demo, or a model folder.")]
Context = Annotated[int | None, typer.Option(help="Most tokens of prompt plus output.")]
Concurrency = Annotated[int, typer.Option(help="Requests that run together, 1 to 8.")]
Chunk = Annotated[
    int | None, typer.Option(help="Most tokens of one prefill step.", show_default="by device")
]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Ordered = Annotated[bool, typer.Option(help="Run rows that share a beginning together.")]
Cache = Annotated[bool, typer.Option(help="Reuse what prompts share.")]
Drain = Annotated[float, typer.Option(help="Seconds that an interrupted run may go on.")]
Ray = Annotated[bool, typer.Option("--ray", help="Run on a Ray cluster (extra ray).")]
Replicas = Annotated[int, typer.Option(help="Engines, with --ray.")]
Gpus = Annotated[float, typer.Option(help="GPUs of an engine, with --ray.")]
Cpus = Annotated[float, typer.Option(help="CPU cores of an engine, with --ray.")]
Rows = Annotated[int, typer.Option(help="Rows an engine gets at a time, with --ray.")]
Show = Annotated[bool, typer.Option("--progress/--no-progress", help="A bar on stderr.")]

_WITHOUT_RAY = ("ordered", "drain")
_WITH_RAY = ("num_replicas", "num_gpus", "num_cpus", "batch_size")


def batch(
    context: typer.Context,
    input: Input,
    output: Output,
    model: Model = "demo",
    max_context: Context = None,
    max_concurrency: Concurrency = 8,
    prefill_chunk: Chunk = None,
    dtype: Dtype = "auto",
    ordered: Ordered = True,
    cache: Cache = True,
    drain: Drain = 30.0,
    progress: Show = True,
    ray: Ray = False,
    num_replicas: Replicas = 1,
    num_gpus: Gpus = 0,
    num_cpus: Cpus = 1,
    batch_size: Rows = 512,
) -> None:
    """Answer a file of requests; run it again after any end to go on where it was."""
    _refuse_unused(context, _WITHOUT_RAY if ray else _WITH_RAY, "with" if ray else "without")
    stdout = sys.stdout
    engine: dict[str, Any] = {
        "max_context": max_context,
        "max_concurrency": max_concurrency,
        "prefill_chunk": prefill_chunk,
        "dtype": dtype,
    }
    if ray:
        config = ProcessorConfig(
            model=model,
            num_replicas=num_replicas,
            num_gpus=num_gpus,
            num_cpus=num_cpus,
            batch_size=batch_size,
            cache=cache,
            engine=engine,
        )
        # Ray prints what its workers say to stdout, at any time until the process ends.
        sys.stdout = sys.stderr
        summary = run_on_ray(input, output, config, progress=progress)
    else:
        summary = run_batch(
            input,
            output,
            model,
            ordered=ordered,
            cache=cache,
            drain=drain,
            progress=progress,
            **engine,
        )
    print(json.dumps(summary.to_json()), file=stdout)
    if summary.interrupted:
        print(
            f"ninfer: interrupted; {summary.rows - summary.remaining} of {summary.rows} rows are in {output}. "
            "Run the same command again for the others.",
            file=sys.stderr,
        )
        sys.exit(130)
    if summary.remaining:  # their lines are not what they were when the run began
        print(
            f"ninfer: {input} was changed during the run, or differs between machines; {summary.remaining} of "
            f"{summary.rows} rows have no line in {output}. Run the same command again.",
            file=sys.stderr,
        )
        sys.exit(1)


def _refuse_unused(context: typer.Context, names: tuple[str, ...], where: str) -> None:
    """Refuse an option that would change nothing."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{option.opts[0]} has no effect {where} --ray; leave it out")
