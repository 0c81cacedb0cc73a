"""Causal depthwise convolution with a carried window."""

from pallas_kernels.causal_conv.api import causal_conv

__all__ = ["causal_conv"]
