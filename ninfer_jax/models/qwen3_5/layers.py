"""The sublayers of the text trunk (model_math section 3): gated attention, Gated DeltaNet, dense and sparse MLP.

Each takes one layer's parameters (the stacked tree, sliced) and activations [B, T, H].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.models.qwen3_5.params import DenseMLP, FullAttention, LinearAttention, SparseMLP
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta import gated_delta_chunked_fused, gated_delta_step
from pallas_kernels.moe import sparse_layer
from pallas_kernels.norms import gated_rms_norm, rms_norm

Attend = Callable[
    [Float[Array, "B T Nq D"], Float[Array, "B T Nk D"], Float[Array, "B T Nk D"]],
    Float[Array, "B T Nq D"],
]


def linear(x: Float[Array, "*n i"], weight: Float[Array, "o i"]) -> Float[Array, "*n o"]:
    """`x @ weight.T` in x's dtype, accumulated in float32. float32 operands keep full precision on every platform."""
    return _product(x, weight, x.dtype)


def project(x: Float[Array, "*n i"], weight: Float[Array, "o i"]) -> Float[Array, "*n o"]:
    """`x @ weight.T` left in float32."""
    return _product(x, weight, jnp.float32)


def _product(x: Array, weight: Array, dtype: Any) -> Array:
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def rope_tables(
    positions: Int[Array, "B T"], rotary_dim: int, theta: float
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """float32 cosine and sine of the rotary angles; half = rotary_dim / 2.

    All three MRoPE axes are equal for text, which makes the interleaved form plain rope.
    """
    half = rotary_dim // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / half
    frequency = jnp.asarray(theta, jnp.float32) ** -exponent
    angle = positions.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T N D"]:
    """Rope on the first 2 * half channels, pairs (j, j + half); the rest passes."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def causal_attention(
    q: Float[Array, "B T Nq D"],
    k: Float[Array, "B T Nk D"],
    v: Float[Array, "B T Nk D"],
    scale: float,
) -> Float[Array, "B T Nq D"]:
    """Plain causal attention of a whole sequence with itself; differentiable.

    On a GPU in a 16-bit dtype cuDNN computes it; elsewhere the T x T scores are made, softmax in float32.
    """
    B, T, Nq, D = q.shape
    if jax.default_backend() == "gpu" and q.dtype != jnp.float32:
        # cuDNN wants an even length; what is added at the end is seen by no real query.
        q, k, v = (jnp.pad(a, [(0, 0), (0, T % 2), (0, 0), (0, 0)]) for a in (q, k, v))
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, implementation="cudnn"
        )[:, :T]
    Nk = k.shape[2]
    grouped = q.reshape(B, T, Nk, Nq // Nk, D)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum(
        "btkgd,bskd->bkgts", grouped, k, precision=exact, preferred_element_type=jnp.float32
    )
    row = jnp.arange(T)
    seen = (row[None, :] <= row[:, None])[None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * scale, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v, precision=exact)
    return out.reshape(B, T, Nq, D)


def full_attention(
    config: Qwen3_5Config,
    p: FullAttention,
    x: Float[Array, "B T H"],
    rope: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
    attend: Attend,
) -> Float[Array, "B T H"]:
    """Gated full attention (section 3.1). `attend` sees q, k after norm and rope, and raw v."""
    B, T, _ = x.shape
    Nq, Nk, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    fused = linear(x, p.qkv_proj)
    q_gate, k, v = jnp.split(fused, [2 * Nq * D, (2 * Nq + Nk) * D], axis=-1)
    # Query and gate are interleaved by head, not two halves of the projection.
    q, gate = jnp.split(q_gate.reshape(B, T, Nq, 2 * D), 2, axis=-1)
    q = rotate(rms_norm(q, p.q_norm, eps=config.rms_norm_eps), *rope)
    k = rotate(rms_norm(k.reshape(B, T, Nk, D), p.k_norm, eps=config.rms_norm_eps), *rope)
    out = attend(q, k, v.reshape(B, T, Nk, D)) * jax.nn.sigmoid(gate)
    return linear(out.reshape(B, T, Nq * D), p.o_proj)


def linear_attention(
    config: Qwen3_5Config,
    p: LinearAttention,
    x: Float[Array, "B T H"],
    lengths: Int[Array, " B"],
    window: Float[Array, "B W C"],
    state: Float[Array, "B nv dk dv"],
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T H"], Float[Array, "B W C"], Float[Array, "B nv dk dv"]]:
    """Gated DeltaNet (section 3.2): returns the output, the convolution window and the state after `lengths` tokens.

    `implementation` is of the delta rule over several tokens; only "reference" has a derivative everywhere.
    """
    B, T, _ = x.shape
    nk, nv = config.linear_num_key_heads, config.linear_num_value_heads
    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    conv, val = 2 * nk * dk + nv * dv, nv * dv
    cuts = [conv, conv + val, conv + val + nv]
    qkv, z, b, a = jnp.split(linear(x, p.in_proj), cuts, axis=-1)
    qkv, window = causal_conv(qkv, p.conv, window, lengths)
    beta = jax.nn.sigmoid(b).astype(jnp.float32)
    step = jax.nn.softplus(a.astype(jnp.float32) + p.dt_bias[None, None])
    g = -jnp.exp(p.a_log)[None, None] * step
    if T == 1:
        q, k, v = jnp.split(qkv[:, 0], [nk * dk, 2 * nk * dk], axis=-1)
        heads = (q.reshape(B, nk, dk), k.reshape(B, nk, dk), v.reshape(B, nv, dv))
        o, state = gated_delta_step(*heads, g[:, 0], beta[:, 0], state)
        o = o[:, None]
    else:
        o, state, _ = gated_delta_chunked_fused(
            qkv, g, beta, state, lengths, implementation=implementation
        )
    o = gated_rms_norm(o, z.reshape(B, T, nv, dv), p.norm, eps=config.rms_norm_eps)
    return linear(o.reshape(B, T, nv * dv), p.out_proj), window, state


def dense_mlp(p: DenseMLP, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """`down(silu(gate x) * up x)`."""
    gate, up = jnp.split(linear(x, p.gate_up_proj), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, p.down_proj)


def sparse_mlp(
    config: Qwen3_5Config,
    p: SparseMLP,
    layer: Int[Array, ""] | int,
    x: Float[Array, "B T H"],
    implementation: Implementation = None,
) -> Float[Array, "B T H"]:
    """Routed experts plus the gated shared expert (section 3.3), of one layer of the whole stack."""
    rows = x.reshape(-1, x.shape[-1])
    return sparse_layer(
        rows,
        p.router,
        p.shared_gate,
        p.experts_gate_up,
        p.experts_down,
        p.shared_gate_up,
        p.shared_down,
        layer,
        top_k=config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
        implementation=implementation,
    ).reshape(x.shape)
