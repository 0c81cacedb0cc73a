"""Counters of one engine (OBS-01): what was asked, what was reused, what was really computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ninfer_jax.engine.request import Request
from planner import Layout
from planner.world import Note, RunTransfer


@dataclass
class Spread:
    """Count, sum and maximum of a time, seconds."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, seconds: float) -> None:
        """One more observation."""
        self.count += 1
        self.total += seconds
        self.most = max(self.most, seconds)

    def as_dict(self) -> dict[str, float]:
        """Plain numbers."""
        mean = self.total / self.count if self.count else 0.0
        return {"count": self.count, "mean": mean, "max": self.most}


@dataclass
class Stats:
    """Written by the worker only; a reader may see a number one step old."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    replayed_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    cycles: int = 0
    nan_rows: int = 0
    preemptions: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    copied_bytes: Counter[str] = field(default_factory=Counter)
    transfers: int = 0
    failed_transfers: int = 0
    queue_time: Spread = field(default_factory=Spread)
    first_token_time: Spread = field(default_factory=Spread)

    def ended(self, request: Request) -> None:
        """A request ended for its consumer."""
        outputs = request.sequences
        if all(s.finish_reason != "abort" for s in outputs):
            self.finished += 1
        elif any(s.failed for s in outputs):
            self.failed += 1
        else:
            self.cancelled += 1

    def note(self, note: Note) -> None:
        """The planner explained a decision."""
        self.notes[note.kind] += 1

    def transfer(self, command: RunTransfer, layout: Layout) -> None:
        """A copy batch was started."""
        self.transfers += 1
        for copy in command.copies:
            size = (
                layout.image_bytes if copy.kind == "image" else layout.pools[copy.pool].page_bytes
            )
            self.copied_bytes[copy.direction] += size

    def as_dict(self) -> dict[str, Any]:
        """A snapshot of plain values; times in seconds."""
        return {
            "requests": {
                "submitted": self.submitted,
                "finished": self.finished,
                "cancelled": self.cancelled,
                "failed": self.failed,
                "sequences": self.sequences,
            },
            "tokens": {
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "computed": self.computed_tokens,
                "replayed": self.replayed_tokens,
                "generated": self.generated_tokens,
            },
            "cache": {
                "saved": self.notes["saved"],
                "skipped": self.notes["skipped"],
                "evicted": self.notes["evicted"],
                "missed": self.notes["miss"],
                "revoked": self.notes["revoked"],
            },
            "preemptions": {form: self.preemptions[form] for form in ("snapshot", "replay")},
            "transfers": {
                "batches": self.transfers,
                "failed": self.failed_transfers,
                "bytes": {d: self.copied_bytes[d] for d in ("h2d", "d2h", "d2d")},
            },
            "cycles": self.cycles,
            "decode_steps": self.decode_steps,
            "nan_rows": self.nan_rows,
            "queue_seconds": self.queue_time.as_dict(),
            "first_token_seconds": self.first_token_time.as_dict(),
        }
