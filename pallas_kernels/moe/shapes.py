"""Real sizes of sparse layers, shared by tests and bench."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one sparse layer: E experts, the top `top_k` of them a token, H hidden, `width` of every expert."""

    E: int
    top_k: int
    H: int
    width: int


SHAPES = {
    "35B-A3B": Shape(E=256, top_k=8, H=2048, width=512),
    "80B-A3B": Shape(E=512, top_k=10, H=2048, width=512),
}
"""Qwen3.5-35B-A3B and Qwen3-Next-80B-A3B; both renormalise and have one shared expert of the same width."""
