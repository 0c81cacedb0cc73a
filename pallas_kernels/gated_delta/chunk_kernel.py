"""The chunked gated delta rule on Hopper, in two Mosaic GPU kernels.

Notation of one chunk of 64 tokens of one value head, with raw bfloat16 rows k, q, v of a token, the reciprocal norms
rk, rq of keys and queries, the running sum c of the log decays and the state M before the chunk (all of it the chunked
form of Yang et al., arXiv:2412.06464; `reference.chunked`):

  A_ij = beta_i exp(c_i - c_j) rk_i rk_j (k_i . k_j) for j < i, else 0
  T    = (I + A)^-1 diag(beta)
  V'   = T (v - exp(c) rk (k M))              the values that the chunk writes
  o    = exp(c) rq (q M) + V' weighted by exp(c_i - c_j) rq_i rk_j (q_i . k_j) for j <= i
  M    = exp(c_last) M + (rk exp(c_last - c) k)^T V'

The first kernel works on all chunks at once and makes T, the weights, and the factors that belong to tokens. The second
walks over the chunks of a head with the state in registers. Norms and decays are never applied to q, k or M themselves
but to products in float32, so q, k and v enter every product as they are. The second kernel computes everything
transposed: the state, as M^T, is an accumulator and turns into the left operand of the next product without leaving
registers, and so do the values and the outputs that come from it; what stands on the right is as it came from memory.

(I + A)^-1 is built by merging diagonal blocks in pairs, 1 to 64, with products in float16: no entry of the inverse, or
of the products on the way, exceeds 1, and float16 rounds these 8 times finer than bfloat16. One Newton step with A in
two halves removes the error of these roundings, also for equal keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import not_hopper

CHUNK = 64
"""Tokens of a chunk."""
_D = 128
"""dk = dv of every published model."""
_PART = 64
"""Values of a head that one block of the second kernel carries: the rows of one wgmma."""
_SQUARE = (CHUNK, CHUNK)
_STAGES = 3
_L2_EPS = 1e-6
_WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
_WHOLE = plgpu.Layout.WGMMA
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def unavailable(q: Any, state: Any, *, nk: int) -> str | None:
    """Why the kernels cannot run on these arguments and the default device, or None."""
    return unsupported(q, state, nk=nk) or not_hopper()


def unsupported(q: Any, state: Any, *, nk: int) -> str | None:
    """Why the kernels cannot be built for arguments of these shapes and dtypes, or None."""
    if q.dtype != jnp.bfloat16:
        return f"it takes bfloat16 queries, keys and values, not {q.dtype}"
    if state.dtype != jnp.float32:
        return f"it takes a float32 state, not {state.dtype}"
    nv, dk, dv = state.shape[-3:]
    if (dk, dv) != (_D, _D):
        return f"it takes heads of {_D} channels, not {dk} and {dv}"
    return None if nv % nk == 0 else f"{nv} value heads do not divide among {nk} key heads"


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that wgmma and wide copies want."""
    minor = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, minor)), plgpu.SwizzleTransform(128))
    )


def _load(ref: Any, layout: Any) -> Any:
    return plgpu.layout_cast(ref[...], layout)


def _load_transposed(ref: Any) -> Any:
    return plgpu.layout_cast(_load(ref.T, _TRANSPOSED), _WHOLE)


def _store_transposed(ref: Any, x: Any) -> None:
    ref.T[...] = plgpu.layout_cast(x, _TRANSPOSED)
    plgpu.commit_smem()


def _rows(x: Any) -> Any:
    """x[i] at every [i, j]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, _SQUARE, (0,)), _WHOLE)


def _columns(x: Any) -> Any:
    """x[j] at every [i, j]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, _SQUARE, (1,)), _WHOLE)


def _product(*pairs: Any, meanwhile: Any = lambda: None) -> Any:
    """The sum of a @ b over pairs, in float32; `meanwhile` runs while the tensor cores do."""

    def body(acc: Any) -> Any:
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        meanwhile()
        return acc[...]

    shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])
    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))


def _inverse(a: Any, differ: Any, eye: Any, a_s: Any, x_s: Any) -> Any:
    """(I + A)^-1 for A = `a`, whose two halves are in `a_s`.

    differ: i ^ j below the diagonal, else 0: its highest bit is the size of the pair of blocks that [i, j] connects.
    """
    f16, f32 = jnp.float16, jnp.float32

    def published(x: Any) -> tuple[Any, Any]:
        half = x.astype(f16)

        def publish() -> None:
            x_s[...] = half
            plgpu.commit_smem()

        return half, publish

    # [[P, 0], [R, Q]]^-1 = [[P', 0], [-Q' R P', Q']], for all pairs of one size at once: X A has Q' R in the corners.
    x = eye - jnp.where(differ == 1, a, 0.0)
    for size in (2, 4, 8, 16, 32):
        half, publish = published(x)
        y = _product((half, a_s.at[0]), meanwhile=publish)
        y = jnp.where((differ >= size) & (differ < 2 * size), y, 0.0)
        x = x - _product((y.astype(f16), x_s))
    half, publish = published(x)
    y = _product((half, a_s.at[0]), (half, a_s.at[1]), meanwhile=publish)
    x = half.astype(f32)
    return x + _product(((eye - x - y).astype(f16), x_s))


def _within_chunks(
    lengths: Any,
    q_ref: Any,
    k_ref: Any,
    gates: Any,
    weights_out: Any,
    factors_out: Any,
    q_s: Any,
    k_s: Any,
    gates_s: Any,
    sums_s: Any,
    rk_s: Any,
    a_s: Any,
    x_s: Any,
    weights_s: Any,
    factors_s: Any,
    bar: Any,
    *,
    r: int,
    share: int,
    first: tuple[int, int],
) -> None:
    """One chunk of `share` of the r value heads of one key head.

    Of `weights_out` [B, nv, n, 2, C, C], index 0 is T and 1 the weights of o; of `factors_out` [B, nv, n, 4, C], 0 are
    what k M is multiplied by, 1 what V' is on its way into the state, 2 what q M is, and 3 is exp(c).
    """
    b, c, h = (jax.lax.axis_index(name) for name in ("row", "chunk", "head"))
    f32, f16, bf16 = jnp.float32, jnp.float16, jnp.bfloat16

    @pl.when(c * CHUNK < lengths[b])
    def _() -> None:
        tokens, heads = pl.ds(c * CHUNK, CHUNK), pl.ds(h * share, share)
        key_head = jax.lax.div(h, jnp.int32(r // share))
        plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, first[0] + key_head], q_s, bar)
        plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, first[1] + key_head], k_s, bar)
        # Twice, as compilers merge equal loads, and one load cannot have two layouts.
        plgpu.copy_gmem_to_smem(gates.at[b, c, heads], gates_s.at[0], bar)
        plgpu.copy_gmem_to_smem(gates.at[b, c, heads], gates_s.at[1], bar)
        plgpu.barrier_wait(bar)

        row = plgpu.broadcasted_iota(jnp.int32, _SQUARE, 0, layout=_WHOLE)
        col = plgpu.broadcasted_iota(jnp.int32, _SQUARE, 1, layout=_WHOLE)

        def reciprocal_norm(ref: Any) -> Any:
            x = _load(ref, _WHOLE).astype(f32)
            return jax.lax.rsqrt(jnp.sum(x * x, axis=1) + _L2_EPS)

        rk, rq = reciprocal_norm(k_s), reciprocal_norm(q_s) * _D**-0.5
        rk_s[...] = rk
        sums = []
        for j in range(share):
            # A coarse part whose sums are exact, and the rest: differences keep a small decay behind a large one.
            g = jnp.maximum(_load(gates_s.at[0, j, 0], _BY_COLUMN), -1000.0)
            coarse = jnp.round(g * 256.0) * (1.0 / 256.0)
            both = [
                jnp.sum(jnp.where(row >= col, _columns(part), 0.0), axis=1)
                for part in (coarse, g - coarse)
            ]
            sums_s[j, 0], sums_s[j, 1] = both
            sums.append(both)
        plgpu.commit_smem()
        rk_across = _columns(_load(rk_s, _BY_COLUMN))
        kk = _product((k_s, k_s.T)) * _rows(rk) * rk_across
        qk = _product((q_s, k_s.T)) * _rows(rq) * rk_across
        differ = jnp.where(row > col, row ^ col, 0)
        eye = jnp.where(row == col, 1.0, 0.0)

        for j in range(share):
            coarse, fine = sums[j]
            coarse_j, fine_j = (_load(sums_s.at[j, i], _BY_COLUMN) for i in range(2))
            beta = _load(gates_s.at[0, j, 1], _BY_ROW)
            between = (_rows(coarse) - _columns(coarse_j)) + (_rows(fine) - _columns(fine_j))
            decay = jnp.where(row >= col, jnp.exp(jnp.minimum(between, 0.0)), 0.0)
            a = jnp.where(row > col, kk * decay * _rows(beta), 0.0)
            most = a.astype(f16)
            a_s[0] = most
            a_s[1] = (a - most.astype(f32)).astype(f16)
            if j:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            weights_s[1] = (qk * decay).astype(bf16)
            plgpu.commit_smem()
            x = _inverse(a, differ, eye, a_s, x_s)
            weights_s[0] = (x * _columns(_load(gates_s.at[1, j, 1], _BY_COLUMN))).astype(bf16)
            decayed = jnp.exp(coarse + fine)
            last_coarse, last_fine = sums_s[j, 0, CHUNK - 1], sums_s[j, 1, CHUNK - 1]
            factors_s[0] = decayed * rk
            factors_s[1] = jnp.exp((last_coarse - coarse) + (last_fine - fine)) * rk
            factors_s[2] = decayed * rq
            factors_s[3] = decayed
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(weights_s, weights_out.at[b, h * share + j, c])
            plgpu.copy_smem_to_gmem(factors_s, factors_out.at[b, h * share + j, c])
        plgpu.wait_smem_to_gmem(0)


def _across_chunks(
    lengths: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    weights_ref: Any,
    factors_ref: Any,
    state_ref: Any,
    o_ref: Any,
    new_ref: Any,
    *rest: Any,
    r: int,
    first: tuple[int, int, int],
    n: int,
    stages: int,
    boundaries: bool,
) -> None:
    """All chunks of half the values of one value head."""
    after_ref = rest[0] if boundaries else None
    q_s, k_s, v_s, weights_s, factors_s, o_s, state_s, bars, state_bar = rest[boundaries:]
    b, h, part = (jax.lax.axis_index(name) for name in ("row", "head", "part"))
    f32, bf16 = jnp.float32, jnp.bfloat16
    values = pl.ds(part * _PART, _PART)
    key_head = jax.lax.div(h, jnp.int32(r))
    used = jnp.minimum(jax.lax.div(lengths[b] + (CHUNK - 1), jnp.int32(CHUNK)), n)

    def fetch(i: Any, slot: Any) -> None:
        tokens, bar = pl.ds(i * CHUNK, CHUNK), bars.at[slot]
        plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, first[1] + key_head], k_s.at[slot], bar)
        plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, first[0] + key_head], q_s.at[slot], bar)
        plgpu.copy_gmem_to_smem(v_ref.at[b, tokens, first[2] + h, values], v_s.at[slot], bar)
        plgpu.copy_gmem_to_smem(weights_ref.at[b, h, i], weights_s.at[slot], bar)
        plgpu.copy_gmem_to_smem(factors_ref.at[b, h, i], factors_s.at[slot], bar)

    plgpu.copy_gmem_to_smem(state_ref.at[b, h, :, values], state_s, state_bar)
    for i in range(min(stages, n)):
        pl.when(i < used)(functools.partial(fetch, i, i))
    plgpu.barrier_wait(state_bar)

    def chunk(i: Any, m: Any) -> Any:
        slot = jax.lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(bars.at[slot])
        k, q, v = k_s.at[slot], q_s.at[slot], v_s.at[slot]
        recall, write, read = (_load(factors_s.at[slot, j], _BY_COLUMN) for j in range(3))
        keep = factors_s[slot, 3, CHUNK - 1]
        half = m.astype(bf16)

        def from_state(recalled: Any, output: Any) -> tuple[Any, Any, Any]:
            plgpu.wgmma(recalled, half, k.T)
            plgpu.wgmma(output, half, q.T)
            value = _load_transposed(v).astype(f32)
            return recalled[...], output[...], value

        square = plgpu.ACC((_PART, CHUNK), f32)
        recalled, o, value = pl.run_scoped(from_state, square, square)
        new = (value - recalled * _columns(recall)).astype(bf16)
        fresh = _product((new, weights_s.at[slot, 0].T))

        def from_fresh(refs: Any) -> None:
            state, output = refs
            plgpu.wgmma(state, (fresh * _columns(write)).astype(bf16), k)
            plgpu.wgmma(output, fresh.astype(bf16), weights_s.at[slot, 1].T)

        m, o = pl.run_state(from_fresh)(
            (plgpu.ACC.init(m * keep), plgpu.ACC.init(o * _columns(read)))
        )

        @pl.when(i + stages < used)
        def _() -> None:
            fetch(i + stages, slot)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _store_transposed(o_s, o.astype(bf16))
        plgpu.copy_smem_to_gmem(o_s, o_ref.at[b, pl.ds(i * CHUNK, CHUNK), h, values])
        if after_ref is not None:
            _store_transposed(state_s, m)
            plgpu.copy_smem_to_gmem(state_s, after_ref.at[b, i, h, :, values])
        return m

    m = jax.lax.fori_loop(0, used, chunk, _load_transposed(state_s))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _store_transposed(state_s, m)
    plgpu.copy_smem_to_gmem(state_s, new_ref.at[b, h, :, values])

    # Outputs past the length mean nothing, but must be finite: they travel on through the model.
    o_s[...] = jnp.zeros(_SQUARE, bf16)
    plgpu.commit_smem()

    def nothing(i: Any, carry: Any) -> Any:
        plgpu.copy_smem_to_gmem(o_s, o_ref.at[b, pl.ds(i * CHUNK, CHUNK), h, values])
        if after_ref is not None:
            plgpu.copy_smem_to_gmem(state_s, after_ref.at[b, i, h, :, values])
        return carry

    jax.lax.fori_loop(used, n, nothing, 0)
    plgpu.wait_smem_to_gmem(0)


def _gates_by_chunk(g: Array, beta: Array, lengths: Array, n: int) -> Array:
    """Log decays and write strengths as [B, n, nv, 2, C]: zeros past the length."""
    B, T, nv = g.shape
    valid = (jnp.arange(T, dtype=lengths.dtype)[None, :] < lengths[:, None])[..., None]
    gates = jnp.stack([jnp.where(valid, x.astype(jnp.float32), 0.0) for x in (g, beta)], axis=-1)
    gates = jnp.pad(gates, ((0, 0), (0, n * CHUNK - T), (0, 0), (0, 0)))
    return gates.reshape(B, n, CHUNK, nv, 2).transpose(0, 1, 3, 4, 2)


def within_chunks(
    lengths: Array,
    q: Array,
    k: Array,
    gates: Array,
    *,
    nk: int,
    first: tuple[int, int],
    share: int = 1,
) -> list[Array]:
    """The first kernel; see `_within_chunks`. `first`: where the queries' and keys' heads begin."""
    B, n, nv = gates.shape[:3]
    r = nv // nk
    f32, f16, bf16 = jnp.float32, jnp.float16, jnp.bfloat16
    return plgpu.kernel(
        functools.partial(_within_chunks, r=r, share=share, first=first),
        out_type=[
            jax.ShapeDtypeStruct((B, nv, n, 2, *_SQUARE), bf16),
            jax.ShapeDtypeStruct((B, nv, n, 4, CHUNK), f32),
        ],
        scratch_types=[
            _tiled((CHUNK, _D), bf16),
            _tiled((CHUNK, _D), bf16),
            plgpu.SMEM((2, share, 2, CHUNK), f32),
            plgpu.SMEM((share, 2, CHUNK), f32),
            plgpu.SMEM((CHUNK,), f32),
            _tiled((2, *_SQUARE), f16),
            _tiled(_SQUARE, f16),
            _tiled((2, *_SQUARE), bf16),
            plgpu.SMEM((4, CHUNK), f32),
            plgpu.Barrier(num_arrivals=4),
        ],
        grid=(B, n, nv // share),
        grid_names=("row", "chunk", "head"),
        compiler_params=_WARPGROUP,
    )(lengths, q, k, gates)


def across_chunks(
    lengths: Array,
    q: Array,
    k: Array,
    v: Array,
    weights: Array,
    factors: Array,
    state: Array,
    *,
    nk: int,
    first: tuple[int, int, int],
    boundaries: bool = False,
    stages: int = _STAGES,
) -> list[Array]:
    """The second kernel; see `_across_chunks`. `first`: where the heads of q, k and v begin."""
    B, nv, n = weights.shape[:3]
    f32, bf16 = jnp.float32, jnp.bfloat16
    out = [
        jax.ShapeDtypeStruct((B, n * CHUNK, nv, _D), bf16),
        jax.ShapeDtypeStruct(state.shape, f32),
    ]
    if boundaries:
        out.append(jax.ShapeDtypeStruct((B, n, nv, _D, _D), f32))
    return plgpu.kernel(
        functools.partial(
            _across_chunks, r=nv // nk, first=first, n=n, stages=stages, boundaries=boundaries
        ),
        out_type=out,
        scratch_types=[
            _tiled((stages, CHUNK, _D), bf16),
            _tiled((stages, CHUNK, _D), bf16),
            _tiled((stages, CHUNK, _PART), bf16),
            _tiled((stages, 2, *_SQUARE), bf16),
            plgpu.SMEM((stages, 4, CHUNK), f32),
            _tiled((CHUNK, _PART), bf16),
            _tiled((_D, _PART), f32),
            plgpu.Barrier(num_arrivals=5, num_barriers=stages),
            plgpu.Barrier(),
        ],
        grid=(B, nv, _D // _PART),
        grid_names=("row", "head", "part"),
        compiler_params=_WARPGROUP,
    )(lengths, q, k, v, weights, factors, state)


def chunked(
    q: Float[Array, "B T hq dk"],
    k: Float[Array, "B T hk dk"],
    v: Float[Array, "B T hv dv"],
    g: Float[Array, "B T nv"],
    beta: Float[Array, "B T nv"],
    state: Float[Array, "B nv dk dv"],
    lengths: Int[Array, " B"],
    *,
    nk: int,
    first: tuple[int, int, int] = (0, 0, 0),
    boundaries: bool = False,
) -> tuple[
    Float[Array, "B T nv dv"], Float[Array, "B nv dk dv"], Float[Array, "B n nv dk dv"] | None
]:
    """See `api.gated_delta_chunked`: bfloat16 outputs, final state, states after each 64 tokens if `boundaries`.

    Args:
      q, k, v: may have more heads than are used, and may be one array: `first` says where each begins.
      nk: key heads.
    """
    T = q.shape[1]
    n = -(-T // CHUNK)
    whole = q is k and k is v
    if T % CHUNK:
        q, k, v = (jnp.pad(x, ((0, 0), (0, n * CHUNK - T), (0, 0), (0, 0))) for x in (q, k, v))
        if whole:
            k = v = q
    lengths = lengths.astype(jnp.int32)
    gates = _gates_by_chunk(g, beta, lengths, n)
    weights, factors = within_chunks(lengths, q, k, gates, nk=nk, first=first[:2])
    out, state, *after = across_chunks(
        lengths, q, k, v, weights, factors, state, nk=nk, first=first, boundaries=boundaries
    )
    return out[:, :T], state, after[0] if after else None
