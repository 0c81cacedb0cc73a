"""Routed experts in plain JAX: a gather for few tokens; for many, all experts or expert-sorted blocks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_EXACT = jax.lax.Precision.HIGHEST
GATHER_TOKENS = 16
"""Up to this many tokens rows are independent. The chosen experts' weights are gathered, one product a (token, expert)
pair, unless there are fewer experts than pairs."""
DENSE_RATIO = 4
"""Up to this many experts for each chosen one, all experts are computed."""
_BLOCK = 64


def route(
    logits: Float[Array, "n E"], top_k: int, normalise: bool
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """See `api.route`."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), top_k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights.astype(logits.dtype), experts


def form(n: int, k: int, E: int) -> Callable[..., Float[Array, "n H"]]:
    """Which of the forms below computes n tokens with k of E experts each."""
    if n <= GATHER_TOKENS and n * k < E:
        return gathered
    if n <= GATHER_TOKENS or DENSE_RATIO * k >= E:
        return all_experts
    return sorted_blocks


def gathered(
    x: Float[Array, "n H"],
    weights: Float[Array, "n k"],
    experts: Int[Array, "n k"],
    gate_up: Float[Array, "E two_i H"],
    down: Float[Array, "E H i"],
) -> Float[Array, "n H"]:
    """Each token against the gathered weights of its own experts. Rows are independent bit for bit."""
    h = jnp.einsum(
        "nh,nkfh->nkf", x, gate_up[experts], precision=_EXACT, preferred_element_type=jnp.float32
    ).astype(x.dtype)
    gate, up = jnp.split(h, 2, axis=-1)
    y = jnp.einsum(
        "nki,nkhi->nkh",
        jax.nn.silu(gate) * up,
        down[experts],
        precision=_EXACT,
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)
    return jnp.sum(y * weights[:, :, None], axis=1)


def all_experts(
    x: Float[Array, "n H"],
    weights: Float[Array, "n k"],
    experts: Int[Array, "n k"],
    gate_up: Float[Array, "E two_i H"],
    down: Float[Array, "E H i"],
) -> Float[Array, "n H"]:
    """Every expert on every token, unchosen ones weighted by zero: two large products, E / k times the arithmetic."""
    n, E = x.shape[0], gate_up.shape[0]
    # A sum over the choices, not a scatter: XLA's CPU backend runs a scatter update by update.
    chosen = experts[:, :, None] == jnp.arange(E, dtype=experts.dtype)[None, None, :]
    share = jnp.sum(jnp.where(chosen, weights[:, :, None], 0), axis=1, dtype=x.dtype)
    h = jax.lax.dot_general(
        x,
        gate_up.reshape(-1, x.shape[1]),
        (((1,), (1,)), ((), ())),
        precision=_EXACT,
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)
    gate, up = jnp.split(h.reshape(n, E, -1), 2, axis=-1)
    used = (share > 0)[:, :, None]  # a product with zero would let an overflow through as NaN
    weighted = jnp.where(used, jax.nn.silu(gate) * up * share[:, :, None], 0)
    return jnp.einsum(
        "nei,ehi->nh", weighted, down, precision=_EXACT, preferred_element_type=jnp.float32
    ).astype(x.dtype)


def sorted_blocks(
    x: Float[Array, "n H"],
    weights: Float[Array, "n k"],
    experts: Int[Array, "n k"],
    gate_up: Float[Array, "E two_i H"],
    down: Float[Array, "E H i"],
) -> Float[Array, "n H"]:
    """Pairs sorted by expert, cut into blocks of one expert each; every chosen expert's weights are read once a block.

    A block holds up to `_BLOCK` pairs. There are never more than pairs / _BLOCK + E non-empty blocks.
    """
    n, k = experts.shape
    E = gate_up.shape[0]
    pairs = n * k
    flat = experts.reshape(pairs)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(flat[order], jnp.arange(E + 1, dtype=flat.dtype)).astype(jnp.int32)
    first, count = ends[:-1], jnp.diff(ends)
    blocks = (count + _BLOCK - 1) // _BLOCK
    last_block = jnp.cumsum(blocks)
    first_block = last_block - blocks
    n_blocks = -(-pairs // _BLOCK) + E

    # Block b belongs to the first expert whose blocks end after b; blocks past the last one are empty.
    block = jnp.arange(n_blocks, dtype=jnp.int32)
    owner = jnp.searchsorted(last_block, block, side="right").astype(jnp.int32)
    used = owner < E
    owner = jnp.minimum(owner, E - 1)
    within = (block - first_block[owner]) * _BLOCK
    place = within[:, None] + jnp.arange(_BLOCK, dtype=jnp.int32)[None, :]
    filled = used[:, None] & (place < count[owner][:, None])
    # Empty places read pair 0, and nothing reads what they yield.
    pair = jnp.where(filled, order[jnp.minimum(first[owner][:, None] + place, pairs - 1)], 0)

    def one_block(_: None, b: tuple[Array, Array]) -> tuple[None, Array]:
        expert, pair = b
        rows = x[pair // k]
        h = jnp.matmul(
            rows, gate_up[expert].T, precision=_EXACT, preferred_element_type=jnp.float32
        ).astype(x.dtype)
        gate, up = jnp.split(h, 2, axis=-1)
        y = jnp.matmul(
            jax.nn.silu(gate) * up,
            down[expert].T,
            precision=_EXACT,
            preferred_element_type=jnp.float32,
        )
        return None, y.astype(x.dtype)

    _, y = jax.lax.scan(one_block, None, (owner, pair))
    rank = jnp.argsort(order).astype(jnp.int32) - first[flat]
    at = first_block[flat] * _BLOCK + rank
    back = y.reshape(-1, x.shape[1])[at]
    return jnp.sum(back.reshape(n, k, -1) * weights[:, :, None], axis=1)


def linear(x: Float[Array, "n i"], weight: Float[Array, "o i"]) -> Float[Array, "n o"]:
    """`x @ weight.T`, accumulated in float32."""
    return jnp.matmul(x, weight.T, precision=_EXACT, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


def shared_expert(
    x: Float[Array, "n H"],
    gate: Float[Array, "1 H"],
    gate_up: Float[Array, "two_is H"],
    down: Float[Array, "H is"],
) -> Float[Array, "n H"]:
    """`sigmoid(gate x) * down(silu(gate_proj x) * up x)`: what every token adds."""
    inner, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return jax.nn.sigmoid(linear(x, gate)) * linear(jax.nn.silu(inner) * up, down)
