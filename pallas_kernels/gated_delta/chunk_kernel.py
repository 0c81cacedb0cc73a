"""The chunked gated delta rule on Hopper."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta import reference

CHUNK = 64
_L2_EPS = 1e-6
_HALF = 64  # values of a head that one block of the second kernel carries: the M of one wgmma
_WG = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)

_ROW = plgpu.Layout.WGMMA.reduce(1)
_COL = plgpu.Layout.WGMMA.reduce(0)


def _tiled(shape, dtype):
    minor = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, minor)), plgpu.SwizzleTransform(128))
    )


def _matmul(a, b):
    def body(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _down(x, shape):
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (0,)), plgpu.Layout.WGMMA)


def _across(x, shape):
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (1,)), plgpu.Layout.WGMMA)


def _within_chunks(q_ref, k_ref, v_in, tq_out, v_out, q_s, k_s, vec_s, rk_s, a_s, x_s, o_s, ov_s,
                   bar, *, r: int, scale: float):
    b, c, h = (jax.lax.axis_index(n) for n in ("row", "chunk", "head"))
    C = CHUNK
    sq = (C, C)
    plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds(c * C, C), h], q_s, bar)
    plgpu.copy_gmem_to_smem(k_ref.at[b, pl.ds(c * C, C), h], k_s, bar)
    # Twice, as compilers merge equal loads, and one load cannot have two layouts.
    plgpu.copy_gmem_to_smem(v_in.at[b, c, pl.ds(h * r, r)], vec_s.at[0], bar)
    plgpu.copy_gmem_to_smem(v_in.at[b, c, pl.ds(h * r, r)], vec_s.at[1], bar)
    plgpu.barrier_wait(bar)

    def inverse_norm(ref):
        x = plgpu.load(ref, (), layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        return jax.lax.rsqrt(jnp.sum(x * x, axis=1) + _L2_EPS)

    rk, rq = inverse_norm(k_s), inverse_norm(q_s) * scale
    rk_s[...] = rk
    plgpu.commit_smem()
    rk_col = plgpu.load(rk_s, (), layout=_COL)
    kk = _matmul(k_s, k_s.T) * _down(rk, sq) * _across(rk_col, sq)
    qk = _matmul(q_s, k_s.T) * _down(rq, sq) * _across(rk_col, sq)

    row = plgpu.broadcasted_iota(jnp.int32, sq, 0, layout=plgpu.Layout.WGMMA)
    col = plgpu.broadcasted_iota(jnp.int32, sq, 1, layout=plgpu.Layout.WGMMA)
    differ = jnp.where(row > col, row ^ col, 0)
    eye = jnp.where(row == col, 1.0, 0.0)

    for j in range(r):
        coarse, fine, beta = (plgpu.load(vec_s, (0, j, i), layout=_ROW) for i in range(3))
        coarse_c, fine_c, beta_c = (plgpu.load(vec_s, (1, j, i), layout=_COL) for i in range(3))
        between = (_down(coarse, sq) - _across(coarse_c, sq)) + (
            _down(fine, sq) - _across(fine_c, sq)
        )
        decay = jnp.where(row >= col, jnp.exp(jnp.minimum(between, 0.0)), 0.0)
        a = jnp.where(row > col, kk * decay * _down(beta, sq), 0.0)
        a_hi = a.astype(jnp.float16)
        a_s[0] = a_hi
        a_s[1] = (a - a_hi.astype(jnp.float32)).astype(jnp.float16)
        if j:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_s[1] = (qk * decay).astype(jnp.bfloat16)
        plgpu.commit_smem()
        x = eye - jnp.where(differ == 1, a, 0.0)
        for size in (2, 4, 8, 16, 32):
            half = x.astype(jnp.float16)
            x_s[...] = half
            plgpu.commit_smem()
            y = _matmul(half, a_s.at[0])
            y = jnp.where((differ >= size) & (differ < 2 * size), y, 0.0)
            x = x - _matmul(y.astype(jnp.float16), x_s)
        half = x.astype(jnp.float16)
        x_s[...] = half
        plgpu.commit_smem()

        def residual(acc):
            plgpu.wgmma(acc, half, a_s.at[0])
            plgpu.wgmma(acc, half, a_s.at[1])
            return acc[...]

        y = pl.run_scoped(residual, plgpu.ACC(sq, jnp.float32))
        x = half.astype(jnp.float32)
        y = eye - x - y
        x = x + _matmul(y.astype(jnp.float16), x_s)
        o_s[0] = (x * _across(beta_c, sq)).astype(jnp.bfloat16)
        decayed = jnp.exp(coarse + fine)
        last_coarse, last_fine = vec_s[0, j, 0, C - 1], vec_s[0, j, 1, C - 1]
        ov_s[0] = decayed * rk
        ov_s[1] = jnp.exp((last_coarse - coarse) + (last_fine - fine)) * rk
        ov_s[2] = decayed * rq
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s, tq_out.at[b, h * r + j, c])
        plgpu.copy_smem_to_gmem(ov_s, v_out.at[b, h * r + j, c])
    plgpu.wait_smem_to_gmem(0)


def _across_chunks(q_ref, k_ref, v_ref, tq_ref, vec_ref, keep_ref, state_ref, o_ref, new_ref,
                   q_s, k_s, v_s, tq_s, vec_s, o_s, st_s, bars, st_bar,
                   *, r: int, n: int, stages: int):
    b, h, d = (jax.lax.axis_index(n) for n in ("row", "head", "part"))
    C = CHUNK
    dv = pl.ds(d * _HALF, _HALF)

    def fetch(i, slot):
        t, bar = pl.ds(i * C, C), bars.at[slot]
        plgpu.copy_gmem_to_smem(k_ref.at[b, t, h // r], k_s.at[slot], bar)
        plgpu.copy_gmem_to_smem(q_ref.at[b, t, h // r], q_s.at[slot], bar)
        plgpu.copy_gmem_to_smem(v_ref.at[b, t, h, dv], v_s.at[slot], bar)
        plgpu.copy_gmem_to_smem(tq_ref.at[b, h, i], tq_s.at[slot], bar)
        plgpu.copy_gmem_to_smem(vec_ref.at[b, h, i], vec_s.at[slot], bar)

    plgpu.copy_gmem_to_smem(state_ref.at[b, h, :, dv], st_s, st_bar)
    for i in range(min(stages, n)):
        fetch(i, i)
    plgpu.barrier_wait(st_bar)
    m = plgpu.load(st_s.T, (), layout=plgpu.Layout.WGMMA_TRANSPOSED)
    m = plgpu.layout_cast(m, plgpu.Layout.WGMMA)

    def chunk(i, m):
        slot = jax.lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(bars.at[slot])
        k, q, v, tq = k_s.at[slot], q_s.at[slot], v_s.at[slot], tq_s.at[slot]
        recall, write, read = (plgpu.load(vec_s, (slot, j), layout=_COL) for j in range(3))
        keep = keep_ref[b, h, i]
        half = m.astype(jnp.bfloat16)
        sq = (_HALF, C)

        def from_state(x_acc, o_acc):
            plgpu.wgmma(x_acc, half, k.T)
            plgpu.wgmma(o_acc, half, q.T)
            return x_acc[...], o_acc[...]

        x, o = pl.run_scoped(
            from_state, plgpu.ACC(sq, jnp.float32), plgpu.ACC(sq, jnp.float32)
        )
        value = plgpu.load(v.T, (), layout=plgpu.Layout.WGMMA_TRANSPOSED)
        value = plgpu.layout_cast(value, plgpu.Layout.WGMMA).astype(jnp.float32)
        fresh = _matmul((value - x * _across(recall, sq)).astype(jnp.bfloat16), tq.at[0].T)
        fresh16 = fresh.astype(jnp.bfloat16)
        write16 = (fresh * _across(write, sq)).astype(jnp.bfloat16)

        def update(m_acc, o_acc):
            plgpu.wgmma(m_acc, write16, k)
            plgpu.wgmma(o_acc, fresh16, tq.at[1].T)

        m, o = pl.run_state(lambda refs: update(*refs))(
            (plgpu.ACC.init(m * keep), plgpu.ACC.init(o * _across(read, sq)))
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_s.T[...] = plgpu.layout_cast(o.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s, o_ref.at[b, pl.ds(i * C, C), h, dv])

        @pl.when(i + stages < n)
        def _():
            fetch(i + stages, slot)

        return m

    m = jax.lax.fori_loop(0, n, chunk, m)
    m = plgpu.layout_cast(m, plgpu.Layout.WGMMA_TRANSPOSED)
    st_s.T[...] = m
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(st_s, new_ref.at[b, h, :, dv])
    plgpu.wait_smem_to_gmem(0)


def prepare(g, beta, lengths):
    """Decay sums and write strengths by chunk: [B, n, nv, 3, C], and each chunk's whole decay."""
    B, T, nv = g.shape
    C = CHUNK
    n = -(-T // C)
    valid = (jnp.arange(T, dtype=lengths.dtype)[None, :] < lengths[:, None])[..., None]
    vec = jnp.stack([jnp.where(valid, g, 0.0), jnp.where(valid, beta, 0.0)], axis=-1)
    vec = jnp.pad(vec, ((0, 0), (0, n * C - T), (0, 0), (0, 0)))
    vec = vec.reshape(B, n, C, nv, 2).transpose(4, 0, 1, 3, 2)
    coarse, fine = reference._running_sums(vec[0])
    vec = jnp.stack([coarse, fine, vec[1]], axis=-2)  # [B, n, nv, 3, C]
    keep = jnp.exp(coarse[..., -1] + fine[..., -1]).transpose(0, 2, 1)  # [B, nv, n]
    return vec, keep


def within_chunks(q, k, vec):
    B, T, nk, dk = q.shape
    n, nv = vec.shape[1:3]
    r, C = nv // nk, CHUNK
    f32, bf16 = jnp.float32, jnp.bfloat16
    return plgpu.kernel(
        functools.partial(_within_chunks, r=r, scale=dk**-0.5),
        out_type=[
            jax.ShapeDtypeStruct((B, nv, n, 2, C, C), bf16),
            jax.ShapeDtypeStruct((B, nv, n, 3, C), f32),
        ],
        scratch_types=[
            _tiled((C, dk), bf16),
            _tiled((C, dk), bf16),
            plgpu.SMEM((2, r, 3, C), f32),
            plgpu.SMEM((C,), f32),
            _tiled((2, C, C), jnp.float16),
            _tiled((C, C), jnp.float16),
            _tiled((2, C, C), bf16),
            plgpu.SMEM((3, C), f32),
            plgpu.Barrier(num_arrivals=4),
        ],
        grid=(B, n, nk),
        grid_names=("row", "chunk", "head"),
        compiler_params=_WG,
    )(q, k, vec)


def across_chunks(q, k, v, tq, vec, keep, state, *, stages: int = 3):
    B, T, nk, dk = q.shape
    nv, dv = v.shape[2:]
    r, C, n = nv // nk, CHUNK, tq.shape[2]
    f32, bf16 = jnp.float32, jnp.bfloat16
    return plgpu.kernel(
        functools.partial(_across_chunks, r=r, n=n, stages=stages),
        out_type=[
            jax.ShapeDtypeStruct((B, T, nv, dv), bf16),
            jax.ShapeDtypeStruct((B, nv, dk, dv), f32),
        ],
        scratch_types=[
            _tiled((stages, C, dk), bf16),
            _tiled((stages, C, dk), bf16),
            _tiled((stages, C, _HALF), bf16),
            _tiled((stages, 2, C, C), bf16),
            plgpu.SMEM((stages, 3, C), f32),
            _tiled((C, _HALF), bf16),
            _tiled((dk, _HALF), f32),
            plgpu.Barrier(num_arrivals=5, num_barriers=stages),
            plgpu.Barrier(),
        ],
        grid=(B, nv, dv // _HALF),
        grid_names=("row", "head", "part"),
        compiler_params=_WG,
    )(q, k, v, tq, vec, keep, state)


def chunked(q, k, v, g, beta, state, lengths, *, stages: int = 3):
    vec, keep = prepare(g, beta, lengths)
    tq, vec = within_chunks(q, k, vec)
    return across_chunks(q, k, v, tq, vec, keep, state, stages=stages)
