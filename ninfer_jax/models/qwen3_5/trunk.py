"""The text trunk: prefill over a chunk, decode of one token, and a plain forward without a cache.

All three are pure functions of parameters, state and inputs. The layers run as a loop over the repeating pattern of the
architecture (three Gated DeltaNet layers, one attention layer), so compile time does not grow with depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.models.qwen3_5 import layers
from ninfer_jax.models.qwen3_5.params import Layer, SeparateLayers, TextParameters
from ninfer_jax.models.qwen3_5.state import DeviceState, KVPool, StateImages
from pallas_kernels.dispatch import Implementation
from pallas_kernels.norms import rms_norm
from pallas_kernels.paged_attention import append_kv, paged_attention

LayerKind = tuple[str, str]
"""(mixer, MLP) of a layer: a member of `layer_types` and one of `ffn_types`."""
Pattern = tuple[tuple[LayerKind, int], ...]
Carry = TypeVar("Carry")
Out = TypeVar("Out")


Mixer = Callable[[str, Any, Array, Array, Carry], tuple[Array, Carry]]
"""`mixer(kind, p, index, x, carry) -> (out, carry)`; index counts the layers of the kind."""


def logits(
    params: TextParameters | SeparateLayers, hidden: Float[Array, "*n H"]
) -> Float[Array, "*n V"]:
    """float32 logits of final-norm hidden states; the head is the embedding where the checkpoint ties them."""
    head = params.embed if params.lm_head is None else params.lm_head
    return layers.project(hidden, head)


def prefill(
    config: Qwen3_5Config,
    params: TextParameters,
    state: DeviceState,
    tokens: Int[Array, "B T"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    block_tables: Int[Array, "B L"],
    slots: Int[Array, " B"],
    read_slots: Int[Array, " B"] | None = None,
) -> tuple[DeviceState, Float[Array, "B T H"]]:
    """Run T tokens of each row, continuing from the row's StateImage and pages.

    Args:
      state: slot `read_slots[b]` holds row b's image at position `starts[b]`; its pages hold positions 0..starts[b]-1.
        A row that starts at 0 reads zeros instead of its slot.
      tokens: token ids; columns past a row's length are ignored.
      starts: position of each row's first token.
      lengths: valid tokens of each row, 0..T.
      block_tables: physical pages, mapped at least up to `starts + lengths` (KV-24).
      slots: StateImage slot of each row, where its new state goes.
      read_slots: slot each row continues from; None: its own. A row that reads another's leaves it as it is (ST-08).

    Returns:
      The state after `lengths` tokens, and final-norm hidden states (meaningless past a row's length).
    """
    return _cached(config, params, state, tokens, starts, lengths, block_tables, slots, read_slots)


def decode(
    config: Qwen3_5Config,
    params: TextParameters | SeparateLayers,
    state: DeviceState,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    block_tables: Int[Array, "B L"],
    slots: Int[Array, " B"],
    read_slots: Int[Array, " B"] | None = None,
) -> tuple[DeviceState, Float[Array, "B H"]]:
    """Run one token of each row; arguments as in `prefill`. A row in slot 0 does not run; its result is meaningless.

    Returns:
      The next state, and final-norm hidden states. A row's result does not depend on the other rows.
    """
    ones = jnp.ones_like(positions)
    state, hidden = _cached(
        config, params, state, tokens[:, None], positions, ones, block_tables, slots, read_slots
    )
    return state, hidden[:, 0]


def forward(
    config: Qwen3_5Config, params: TextParameters, tokens: Int[Array, "B T"]
) -> Float[Array, "B T H"]:
    """Final-norm hidden states of whole sequences from position 0, without a cache; differentiable."""
    return forward_with_layers(config, params, tokens)[0]


def forward_with_layers(
    config: Qwen3_5Config, params: TextParameters, tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H"], Float[Array, "N B T H"]]:
    """`forward`, and the residual stream after each of the N layers."""
    B, T = tokens.shape
    scale = config.head_dim**-0.5
    lengths = jnp.full((B,), T, jnp.int32)
    nv, dk, dv = (
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )

    def mixer(kind: str, p: Any, _: Array, x: Array, carry: None) -> tuple[Array, None]:
        if kind == "full_attention":
            return layers.full_attention(
                config, p, x, rope, lambda q, k, v: layers.causal_attention(q, k, v, scale)
            ), None
        window = jnp.zeros((B, config.linear_conv_kernel_dim - 1, p.conv.shape[0]), x.dtype)
        memory = jnp.zeros((B, nv, dk, dv), jnp.float32)
        return layers.linear_attention(config, p, x, lengths, window, memory, "reference")[0], None

    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    rope = layers.rope_tables(positions, config.rotary_dim, config.rope_theta)
    x, _, outputs = _layers(config, params, params.embed[tokens], None, mixer, "reference")
    return rms_norm(x, params.final_norm, eps=config.rms_norm_eps), outputs


def _cached(
    config: Qwen3_5Config,
    params: TextParameters | SeparateLayers,
    state: DeviceState,
    tokens: Int[Array, "B T"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    block_tables: Int[Array, "B L"],
    slots: Int[Array, " B"],
    read_slots: Int[Array, " B"] | None,
) -> tuple[DeviceState, Float[Array, "B T H"]]:
    B, T = tokens.shape
    sources = slots if read_slots is None else read_slots
    positions = starts[:, None] + jnp.arange(T, dtype=starts.dtype)[None, :]
    rope = layers.rope_tables(positions, config.rotary_dim, config.rope_theta)
    continues = starts > 0
    # On CPU decode goes row by row where rows have memory of their own: a row that does not run then costs nothing, one
    # that does reads no more pages than it has, and XLA's scatter is slower than updates in turn.
    by_row = B > 1 and T == 1 and jax.default_backend() == "cpu"
    each = _in_turn(slots > 0) if by_row else _all_at_once

    def mixer(
        kind: str, p: Any, index: Array, x: Array, state: DeviceState
    ) -> tuple[Array, DeviceState]:
        kv, images = state.kv, state.images
        if kind == "full_attention":

            def attend(q: Array, k: Array, v: Array) -> Array:
                nonlocal kv
                rows = (q, k, v, block_tables, starts, lengths)
                kv, out = each(partial(_attend, config, index), kv, rows)
                return out

            out = layers.full_attention(config, p, x, rope, attend)
            return out, replace(state, kv=kv)
        window = jnp.where(continues[:, None, None], images.window[sources, index], 0)
        memory = jnp.where(continues[:, None, None, None], images.recurrent[sources, index], 0)
        out, window, memory = layers.linear_attention(config, p, x, lengths, window, memory)
        images, _ = each(partial(_put_images, index), images, (slots, window, memory))
        return out, replace(state, images=images)

    x, state, _ = _layers(config, params, params.embed[tokens], state, mixer)
    return state, rms_norm(x, params.final_norm, eps=config.rms_norm_eps)


def _attend(
    config: Qwen3_5Config,
    index: Array,
    kv: KVPool,
    q: Float[Array, "B T Nq D"],
    k: Float[Array, "B T Nk D"],
    v: Float[Array, "B T Nk D"],
    *where: Array,
) -> tuple[KVPool, Float[Array, "B T Nq D"]]:
    """Append keys and values of a layer, and attend; `where` are block tables, starts and lengths."""
    kv = KVPool(k=append_kv(kv.k, k, index, *where), v=append_kv(kv.v, v, index, *where))
    return kv, paged_attention(q, kv.k, kv.v, index, *where, scale=config.head_dim**-0.5)


def _put_images(
    index: Array, images: StateImages, slots: Int[Array, " B"], window: Array, memory: Array
) -> tuple[StateImages, tuple[()]]:
    """Write one layer of each row's image. On a GPU a scatter copies the whole pool, an update of one slot does not."""

    def put(pool: Array, new: Array) -> Array:
        if len(slots) > 1:
            return pool.at[slots, index].set(new)
        start = (slots[0], index, *(jnp.int32(0),) * (pool.ndim - 2))
        return jax.lax.dynamic_update_slice(pool, new[None].astype(pool.dtype), start)

    return StateImages(put(images.window, window), put(images.recurrent, memory)), ()


def _all_at_once(
    run: Callable[..., tuple[Carry, Out]], memory: Carry, rows: tuple[Array, ...]
) -> tuple[Carry, Out]:
    return run(memory, *rows)


def _in_turn(active: Bool[Array, " B"]) -> Callable[..., tuple[Carry, Out]]:
    """`_all_at_once` one row at a time, for those that are active; the others' results are zeros."""
    order, count = jnp.argsort(~active, stable=True), jnp.sum(active)

    def each(
        run: Callable[..., tuple[Carry, Out]], memory: Carry, rows: tuple[Array, ...]
    ) -> tuple[Carry, Out]:
        def one(i: Array, carry: tuple[Carry, Out]) -> tuple[Carry, Out]:
            memory, out = carry
            row = order[i]
            own = [jax.lax.dynamic_slice_in_dim(x, row, 1) for x in rows]
            memory, new = run(memory, *own)
            put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=row, axis=0)
            return memory, jax.tree.map(put, out, new)

        shapes = jax.eval_shape(run, memory, *rows)[1]
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, count, one, (memory, empty))

    return each


def _kinds(config: Qwen3_5Config) -> tuple[LayerKind, ...]:
    return tuple(zip(config.layer_types, config.ffn_types, strict=True))


def layer_pattern(config: Qwen3_5Config) -> tuple[Pattern, int]:
    """The shortest pattern of layers that repeats to the whole depth, as (kind, run length) pairs, and how often."""
    kinds = _kinds(config)
    for period in range(1, len(kinds) + 1):
        repeats, rest = divmod(len(kinds), period)
        if rest == 0 and kinds == kinds[:period] * repeats:
            runs = itertools.groupby(kinds[:period])
            return tuple((kind, len(list(run))) for kind, run in runs), repeats
    raise AssertionError("a sequence repeats itself once")


def _layers(
    config: Qwen3_5Config,
    params: TextParameters | SeparateLayers,
    x: Array,
    carry: Carry,
    mixer: Mixer[Carry],
    implementation: Implementation = None,
) -> tuple[Array, Carry, Array]:
    """Run all layers: a loop over the repeats of the pattern, inside it one over each run of equal layers.

    A body indexes the stacked parameters by its layer, so there is one copy of the code a kind, whatever the depth. On
    a GPU the inner loops are unrolled: XLA gives a matrix product its layer of a stack without a copy only where the
    index is linear in the counter of one loop. `SeparateLayers` run without any loop.
    `implementation` is of the experts.
    Also returns the output of every layer [N, B, T, H]; where nobody reads them, the compiler drops them.
    """
    one_layer = partial(_one_layer, config, mixer, implementation)
    if isinstance(params, SeparateLayers):
        after_each = []
        for i, (kind, layer) in enumerate(zip(_kinds(config), params.layers, strict=True)):
            index = config.layer_types[:i].count(kind[0])
            x, carry = one_layer(layer, kind, _Place(0, 0, 0), index, x, carry)
            after_each.append(x)
        return x, carry, jnp.stack(after_each)

    pattern, repeats = layer_pattern(config)

    def one_group(
        loop: tuple[Array, Array, Carry], _: None
    ) -> tuple[tuple[Array, Array, Carry], Array]:
        group, x, carry = loop
        before: list[LayerKind] = []
        outputs = []
        for kind, length in pattern:
            first = _place(kind, before, group, pattern)

            def body(
                inner: tuple[Array, Carry], i: Array, kind: LayerKind = kind, first: _Place = first
            ) -> tuple[tuple[Array, Carry], Array]:
                at = first.shifted(i)
                inner = one_layer(params, kind, at, at.mixer, *inner)
                return inner, inner[0]

            if length == 1 or _unroll_runs():
                for i in range(length):
                    (x, carry), after = body((x, carry), jnp.int32(i))
                    outputs.append(after[None])
            else:
                steps = jnp.arange(length, dtype=jnp.int32)
                (x, carry), after = jax.lax.scan(body, (x, carry), steps)
                outputs.append(after)
            before += [kind] * length
        return (group + 1, x, carry), jnp.concatenate(outputs)

    start = (jnp.int32(0), x, carry)
    (_, x, carry), outputs = jax.lax.scan(one_group, start, None, length=repeats)
    return x, carry, outputs.reshape(-1, *x.shape)


def _one_layer(
    config: Qwen3_5Config,
    mixer: Mixer[Carry],
    implementation: Implementation,
    stacks: TextParameters | Layer,
    kind: LayerKind,
    at: _Place,
    index: Array | int,
    x: Array,
    carry: Carry,
) -> tuple[Array, Carry]:
    """One layer, which stands `at` a place of the stacks; `index` counts the layers with its kind of mixer."""
    mixer_kind, mlp_kind = kind
    eps = config.rms_norm_eps
    own = stacks.linear_attention if mixer_kind == "linear_attention" else stacks.full_attention
    y = rms_norm(x, stacks.input_norm[at.layer], eps=eps)
    out, carry = mixer(mixer_kind, take_layer(own, at.mixer), jnp.asarray(index), y, carry)
    x = x + out
    y = rms_norm(x, stacks.post_attention_norm[at.layer], eps=eps)
    if mlp_kind == "dense":
        return x + layers.dense_mlp(take_layer(stacks.dense_mlp, at.mlp), y), carry
    assert stacks.sparse_mlp is not None
    return x + layers.sparse_mlp(config, stacks.sparse_mlp, at.mlp, y, implementation), carry


def _unroll_runs() -> bool:
    return jax.default_backend() == "gpu"


class _Place(NamedTuple):
    """Where a layer's parameters stand: among all layers, those with its mixer, and those with its MLP."""

    layer: Array | int
    mixer: Array | int
    mlp: Array | int

    def shifted(self, i: Array) -> _Place:
        return _Place(self.layer + i, self.mixer + i, self.mlp + i)


def _place(kind: LayerKind, before: list[LayerKind], group: Array, pattern: Pattern) -> _Place:
    """The place of the first layer of a run: `before` are the layers ahead of it in its group."""
    period = [k for k, length in pattern for _ in range(length)]

    def count(same: Callable[[LayerKind], bool]) -> Array:
        return group * sum(map(same, period)) + sum(map(same, before))

    return _Place(
        count(lambda k: True), count(lambda k: k[0] == kind[0]), count(lambda k: k[1] == kind[1])
    )


def take_layer(stacked: Any, index: Array | int) -> Any:
    """One layer's parameters out of a stacked tree."""
    return jax.tree.map(
        lambda w: jax.lax.dynamic_index_in_dim(w, index, axis=0, keepdims=False), stacked
    )
