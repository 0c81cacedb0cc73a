"""The gated delta rule: the recurrent mixer of Gated DeltaNet layers."""

from pallas_kernels.gated_delta.api import (
    Records,
    boundary_tokens,
    gated_delta_chunked,
    gated_delta_chunked_fused,
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_step,
    gated_delta_verify,
)

__all__ = [
    "Records",
    "boundary_tokens",
    "gated_delta_chunked",
    "gated_delta_chunked_fused",
    "gated_delta_commit",
    "gated_delta_decode",
    "gated_delta_step",
    "gated_delta_verify",
]
