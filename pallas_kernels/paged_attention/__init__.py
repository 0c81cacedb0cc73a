"""Attention over a paged KV cache, and the write of new keys and values into its pages."""

from pallas_kernels.paged_attention.api import append_kv, attention_decode, paged_attention

__all__ = ["append_kv", "attention_decode", "paged_attention"]
