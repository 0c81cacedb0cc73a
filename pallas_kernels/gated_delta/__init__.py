"""The gated delta rule: the recurrent mixer of Gated DeltaNet layers."""

from pallas_kernels.gated_delta.api import (
    boundary_tokens,
    gated_delta_chunked,
    gated_delta_chunked_fused,
    gated_delta_step,
)

__all__ = [
    "boundary_tokens",
    "gated_delta_chunked",
    "gated_delta_chunked_fused",
    "gated_delta_step",
]
