"""Real shapes of attention in a prefill chunk, shared by tests and bench."""

from __future__ import annotations

from typing import NamedTuple


class PrefillShape(NamedTuple):
    """One call: B rows of T new tokens, each behind `start` cached ones; N query heads on K KV heads."""

    B: int
    T: int
    N: int
    K: int
    start: int


HEADS = {"0.8B": (8, 2), "4B": (16, 4), "9B": (16, 4), "27B": (24, 4), "35B-A3B": (16, 2)}
"""Query and KV heads of the public models."""

SHAPES = {
    f"{model}-t2048-after-{start}": PrefillShape(1, 2048, *HEADS[model], start)
    for model in HEADS
    for start in (0, 8192, 28_672)
} | {
    "27B-t4096-after-0": PrefillShape(1, 4096, 24, 4, 0),
    "27B-t512-after-8192": PrefillShape(1, 512, 24, 4, 8192),
    "27B-t64-after-8192": PrefillShape(1, 64, 24, 4, 8192),
    "27B-scoring": PrefillShape(4, 2048, 24, 4, 0),
}
