"""RMS norms of the Qwen3.5 family."""

from pallas_kernels.norms.api import gated_rms_norm, rms_norm

__all__ = ["gated_rms_norm", "rms_norm"]
