"""`ninfer simulate` and `ninfer explain`: the planner without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ninfer_jax.errors import InputError
from planner import LayoutSpec, Plane, PoolSpec, explicit_pages, layout_for, page_limits
from planner.errors import PlannerError
from planner.world import WorldConfig
from planner.world.explain import explain as explain_record
from planner.world.journal import Journal
from planner.world.simulate import Report
from planner.world.simulate import simulate as run_trace
from planner.world.trace import load_trace

Trace = Annotated[Path, typer.Argument(help="Trace: one JSON object a line.")]
RecordFile = Annotated[Path, typer.Argument(help="A flight record (JSON Lines).")]
Ticket = Annotated[int | None, typer.Argument(help="One request; without it, everything.")]
Policy = Annotated[str, typer.Option(help="incremental.")]
Context = Annotated[int, typer.Option(help="Most tokens of prompt plus output.")]
Concurrency = Annotated[int, typer.Option(help="Requests that run together, 1 to 8.")]
Capacity = Annotated[int | None, typer.Option(help="KV tokens on the device; default: the most.")]
Slots = Annotated[int | None, typer.Option(help="State slots beyond the active ones.")]
Host = Annotated[int | None, typer.Option(help="Bytes of Host memory for context.")]
Chunk = Annotated[int, typer.Option(help="Most tokens of one prefill step.")]
TokenBytes = Annotated[int, typer.Option(help="KV bytes of one token.")]
StateBytes = Annotated[int, typer.Option(help="Bytes of one recurrent state.")]
RecordTo = Annotated[Path | None, typer.Option("--record", help="Write a flight record.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextmanager
def _user_errors() -> Iterator[None]:
    """What the planner refuses is a mistake in the user's options or files."""
    try:
        yield
    except PlannerError as error:
        raise InputError(str(error)) from error


def simulate(
    trace: Trace,
    policy: Policy = "incremental",
    max_context: Context = 32_768,
    max_concurrency: Concurrency = 8,
    kv_capacity: Capacity = None,
    device_state_slots: Slots = None,
    host_capacity: Host = None,
    prefill_chunk: Chunk = 256,
    token_bytes: TokenBytes = 65_536,
    state_bytes: StateBytes = 64 << 20,
    record: RecordTo = None,
    as_json: Json = False,
) -> None:
    """Run a workload trace through the planner on a virtual clock, without a model."""
    if policy != "incremental":
        raise InputError(f"policy {policy!r} is unknown; use incremental")
    with _user_errors():
        pages = page_limits(max_context, max_concurrency)[1]
        if kv_capacity is not None:
            pages = explicit_pages(kv_capacity, max_context, max_concurrency)
        spec = LayoutSpec(
            max_context,
            max_concurrency,
            (PoolSpec("main", (Plane("kv", token_bytes, 1, 1),)),),
            state_bytes,
            device_state_slots,
            host_capacity,
        )
        config = WorldConfig(layout_for(spec, pages), prefill_chunk=prefill_chunk)
        requests = load_trace(trace)
        if record is None:
            report = run_trace(requests, config)
        else:
            with Journal(record, config) as journal:
                report = run_trace(requests, config, journal=journal)
    print(json.dumps(report.to_json()) if as_json else _words(report))


def explain(record: RecordFile, request: Ticket = None) -> None:
    """Say in words what happened to a request of a flight record, and why."""
    with _user_errors():
        lines = explain_record(record, request)
    if not lines:
        raise InputError(f"{record} knows no request {request}")
    for line in lines:
        print(line)


def _words(r: Report) -> str:
    def times(name: str) -> str:
        p50, p90, p99 = (f"{1000 * t:,.1f}" for t in getattr(r, name))
        return f"{p50} / {p90} / {p99} ms (p50 / p90 / p99)"

    share = r.hit_tokens / r.prompt_tokens
    moved = ", ".join(f"{k} {v / 2**20:,.0f} MiB" for k, v in r.bytes_moved.items())
    rows = [
        ("requests", f"{r.requests}, {r.completed} completed, {r.failed} failed"),
        ("time", f"{r.seconds:,.2f} s, {r.tokens_per_second:,.1f} output tokens/s"),
        ("prompt", f"{r.prompt_tokens:,} tokens, {r.hit_tokens:,} reused ({share:.1%})"),
        ("computed", f"{r.computed_tokens:,} tokens first, {r.replayed_tokens:,} again"),
        ("output", f"{r.output_tokens:,} tokens"),
        ("paused", f"{r.snapshots} snapshots, {r.replays} replays, {r.restored_tokens:,} restored"),
        ("moved", moved),
        ("first token", times("ttft")),
        ("admission", times("admission")),
        ("unit wait", times("unit_wait")),
        ("largest gap", f"{1000 * r.largest_gap:,.1f} ms"),
        ("decisions", ", ".join(f"{k} {v}" for k, v in r.notes.items()) or "none"),
    ]
    return "\n".join(f"{name:12s} {value}" for name, value in rows)
