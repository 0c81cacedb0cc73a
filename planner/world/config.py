"""What is fixed at start: layout, chunking, and the cost model that orders sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from planner.capacity import Layout


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Cost of a batch of copies of one direction, nanoseconds (SRC-04)."""

    batch_ns: float
    operation_ns: float
    ns_per_byte: float

    def of(self, operations: int, size: int) -> float:
        """max(batch + operations, bytes): copies overlap their own set-up."""
        if not operations:
            return 0.0
        return max(self.batch_ns + operations * self.operation_ns, size * self.ns_per_byte)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Startup-fixed costs. They order sources and decide nothing else (SRC-07)."""

    h2d: TransferCost = TransferCost(10_000, 2_000, 0.05)
    d2h: TransferCost = TransferCost(10_000, 2_000, 0.05)
    d2d: TransferCost = TransferCost(5_000, 1_000, 0.001)
    token_ns: float = 20_000
    """Prefill, per token."""
    pair_ns: float = 0.1
    """Prefill, per attention pair (SRC-05)."""

    def prefill_ns(self, reused: int, remaining: int) -> float:
        """Cost of computing ``remaining`` tokens after ``reused`` ones."""
        return remaining * self.token_ns + attention_pairs(reused, remaining) * self.pair_ns


def attention_pairs(reused: int, remaining: int) -> int:
    """B * S' + S' * (S' + 1) / 2 (SRC-05)."""
    return reused * remaining + remaining * (remaining + 1) // 2


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """Everything that `advance` may know about the engine."""

    layout: Layout
    prefill_chunk: int = 256
    """Most tokens of one prefill unit; a multiple of the page size."""
    cache: bool = True
    """False: every request is root-only (CAT-23)."""
    policy: Literal["incremental"] = "incremental"
    cost: CostModel = field(default_factory=CostModel)
    anchors: int = 4
    """Explicit private anchors of a record (CAT-01)."""
    markers: int = 4
    """Caller markers of a request (CAT-12)."""
    digest: int = 256
    """Observed positions kept as demand evidence (EV-04)."""
