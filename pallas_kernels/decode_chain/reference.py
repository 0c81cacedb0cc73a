"""A chain in plain jnp, with the kernel's cuts: a norm scales the result of the product that reads it, and what experts
read before they do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_chain.stages import Experts, Norm, Product, Stage, normed
from pallas_kernels.moe import sparse_layer


def chain(
    stages: tuple[Stage, ...],
    first: jax.Array | None,
    residual: jax.Array,
    weights: tuple[tuple[jax.Array, ...], ...],
    layers: jax.Array,
    running: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.chain`; any dtype, any sizes and any number of rows."""
    H = residual.shape[0]
    f32, dtype = jnp.float32, residual.dtype
    index = iter(range(layers.shape[0]))
    x: Any = first
    scale: Any = None
    for stage, own in zip(stages, weights, strict=True):
        of_layer = [stack[layers[next(index)]] for stack in own]
        if isinstance(stage, Norm):
            total = jnp.zeros((), f32)
        elif isinstance(stage, Experts):
            assert running is not None
            scaled = (x.astype(f32) * scale[:, None]).astype(dtype)
            total = jnp.where(running[:, None] > 0, _experts(stage, scaled, of_layer), 0)
        else:
            total = _product(x, of_layer[0])
            total = total if scale is None else total * scale[:, None]
        if normed(stage):
            stream = residual.T.astype(f32) + total.astype(dtype).astype(f32)
            residual = stream.astype(dtype).T
            stream = residual.T.astype(f32)
            x = (stream * (1 + of_layer[-1].astype(f32))[None]).astype(dtype)
            scale = jax.lax.rsqrt(jnp.sum(stream * stream, axis=1) / H + stage.eps)
        elif isinstance(stage, Product):
            if stage.kind == "swiglu":
                gate, up = (r.astype(dtype).astype(f32) for r in jnp.split(total, 2, axis=1))
                total = jax.nn.silu(gate) * up
            x, scale = total.astype(stage.dtype), None
    return x, residual


def _experts(stage: Experts, x: jax.Array, weights: list[Any]) -> jax.Array:
    """What a sparse layer adds for [rows, H]."""
    router, gate, gate_up, down, shared_gate_up, shared_down, _ = (w[None] for w in weights)
    return sparse_layer(
        x,
        router,
        gate[:, :1],
        gate_up,
        down,
        shared_gate_up,
        shared_down,
        0,
        top_k=stage.top_k,
        normalise=stage.normalise,
        implementation="reference",
    )


def _product(x: Any, weight: Any) -> jax.Array:
    """float32 `x @ weight.T`."""
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
