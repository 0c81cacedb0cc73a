"""Routed experts: a few of many small gated MLPs for each token."""

from pallas_kernels.moe.api import route, routed_experts, sparse_layer

__all__ = ["route", "routed_experts", "sparse_layer"]
