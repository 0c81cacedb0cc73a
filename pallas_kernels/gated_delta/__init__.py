"""The gated delta rule: the recurrent mixer of Gated DeltaNet layers."""

from pallas_kernels.gated_delta.api import (
    gated_delta_chunked,
    gated_delta_decode,
    gated_delta_step,
)

__all__ = ["gated_delta_chunked", "gated_delta_decode", "gated_delta_step"]
