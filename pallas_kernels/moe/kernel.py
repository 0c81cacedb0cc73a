"""The Mosaic GPU kernels of a whole sparse layer: `few` for up to 16 tokens, `many` for more."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import not_hopper
from pallas_kernels.moe import few, many, reference


def unavailable(
    dtype: jnp.dtype, *, E: int, H: int, width: int, shared_width: int, top_k: int
) -> str | None:
    """Why the kernels cannot run here for these sizes, or None."""
    sizes = {"E": E, "H": H, "width": width, "shared_width": shared_width, "top_k": top_k}
    if (why := not_hopper() or unfit(dtype, **sizes)) is not None:
        return why
    blocks, processors = few.blocks(H, width), jax.local_devices()[0].core_count
    return (
        f"{blocks} blocks do not fit {processors} multiprocessors" if blocks > processors else None
    )


def unfit(
    dtype: jnp.dtype, *, E: int, H: int, width: int, shared_width: int, top_k: int
) -> str | None:
    """Why the kernels cannot be built for these sizes on any device, or None."""
    if dtype != jnp.bfloat16:
        return f"dtype is {dtype}, not bfloat16"
    if H % 1024 or width % few.CHUNK:
        return f"H={H} must be a multiple of 1024 and the expert width {width} of {few.CHUNK}"
    if shared_width != width:
        return f"the shared expert's width {shared_width} is not the experts' width {width}"
    if E % 32 or few.blocks(H, width) < E // few.ROWS:
        return f"E={E} must be a multiple of 32 up to {few.ROWS * few.blocks(H, width)}"
    if top_k > 16:
        return f"top_k={top_k} is above 16"
    if few.ring(H) < 2:
        return f"H={H} leaves no shared memory for weights"
    return None


def sparse_layer(
    x: jax.Array,
    router: jax.Array,
    shared_gate: jax.Array,
    experts_gate_up: jax.Array,
    experts_down: jax.Array,
    shared_gate_up: jax.Array,
    shared_down: jax.Array,
    layer: jax.Array,
    *,
    top_k: int,
    normalise: bool,
) -> jax.Array:
    """See `api.sparse_layer`."""
    n = x.shape[0]
    if n <= reference.GATHER_TOKENS:
        pieces = []
        for start in range(0, n, few.ROWS):
            rows = min(few.ROWS, n - start)
            parts = few.experts_of_few(
                jnp.pad(x[start : start + rows], ((0, few.ROWS - rows), (0, 0))),
                router,
                shared_gate,
                experts_gate_up,
                experts_down,
                shared_gate_up,
                shared_down,
                layer,
                rows=rows,
                top_k=top_k,
                normalise=normalise,
            )
            pieces.append(jnp.sum(parts[:, :rows], axis=0).astype(x.dtype))
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
    weights, experts = reference.route(reference.linear(x, router[layer]), top_k, normalise)
    routed = many.experts_of_many(x, weights, experts, experts_gate_up, experts_down, layer)
    shared = (shared_gate[layer], shared_gate_up[layer], shared_down[layer])
    return routed + reference.shared_expert(x, *shared)
