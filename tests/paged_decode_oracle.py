"""Attention of a decode step in float64 numpy, token by token, straight from model_math section 3.1."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def exact(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def history(pages: Any, layer: int, table: np.ndarray, length: int) -> np.ndarray:
    """[length, K, D] of one row."""
    plane = exact(pages[layer, np.asarray(table)])
    tokens = np.moveaxis(plane, 1, 2).reshape(-1, plane.shape[1], plane.shape[3])
    return tokens[:length]


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, scale: float) -> np.ndarray:
    """q [T, N, D], the first at position `start`; k, v [start + T, K, D]."""
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            seen = start + t + 1
            scores = scale * k[:seen, h // group] @ q[t, h]
            weight = np.exp(scores - scores.max())
            out[t, h] = weight / weight.sum() @ v[:seen, h // group]
    return out


def paged_attention(values: dict[str, Any], scale: float) -> list[np.ndarray]:
    """Per row the output of its valid queries, [length, N, D]."""
    rows = []
    starts, lengths = np.asarray(values["starts"]), np.asarray(values["lengths"])
    for b, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        k, v = (
            history(values[name], int(values["layer"]), values["block_tables"][b], start + n)
            for name in ("k_pages", "v_pages")
        )
        q = exact(values["q"][b, :n])
        rows.append(attend(q, k, v, start, scale) if n else np.zeros_like(q))
    return rows


def attention_decode(
    values: dict[str, Any], scale: float, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output [B, N * D] and the new key and value of each row [B, K, D]; nothing is rounded in between."""
    B, M = values["qkv"].shape
    K, D = values["k_pages"].shape[2], values["k_pages"].shape[4]
    N = (M // D - 2 * K) // 2
    layer = int(values["layer"])
    qkv = exact(values["qkv"])
    q_gate, k, v = np.split(qkv, [2 * N * D, (2 * N + K) * D], axis=-1)
    q, gate = np.split(q_gate.reshape(B, N, 2 * D), 2, axis=-1)
    cos, sin = (exact(values[n])[:, None] for n in ("cos", "sin"))
    half = cos.shape[-1]

    def prepare(x: np.ndarray, weight: Any) -> np.ndarray:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + exact(weight[layer]))
        a, b = x[..., :half], x[..., half : 2 * half]
        turned = [a * cos - b * sin, b * cos + a * sin]
        return np.concatenate([*turned, x[..., 2 * half :]], axis=-1)

    q = prepare(q, values["q_norm"])
    k = prepare(k.reshape(B, K, D), values["k_norm"])
    v = v.reshape(B, K, D)
    out = np.zeros((B, N * D))
    starts, lengths = np.asarray(values["starts"]), np.asarray(values["lengths"])
    for b, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        if n:
            old_k, old_v = (
                history(values[name], layer, values["block_tables"][b], start)
                for name in ("k_pages", "v_pages")
            )
            keys, vals = np.concatenate([old_k, k[b][None]]), np.concatenate([old_v, v[b][None]])
            row = attend(q[b][None], keys, vals, start, scale)[0]
            out[b] = (row / (1 + np.exp(-gate[b]))).reshape(-1)
    return out, k, v


def with_garbage(values: dict[str, Any], *, new_tokens: bool) -> dict[str, Any]:
    """The same, NaN in every column that belongs to no token (nor, without `new_tokens`, to the new ones)."""
    k, v = (np.array(exact(values[n])) for n in ("k_pages", "v_pages"))
    tables, P = np.asarray(values["block_tables"]), k.shape[3]
    used = np.asarray(values["starts"]) + (np.asarray(values["lengths"]) if new_tokens else 0)
    for b, table in enumerate(tables):
        for i, page in enumerate(table):
            first = max(0, int(used[b]) - i * P)
            k[:, page, :, first:] = np.nan
            v[:, page, :, first:] = np.nan
    return values | {
        "k_pages": jnp.asarray(k, jnp.bfloat16),
        "v_pages": jnp.asarray(v, jnp.bfloat16),
    }


def error(got: Any, want: np.ndarray) -> float:
    """Relative, by norm; NaN never passes a comparison."""
    return float(np.linalg.norm(exact(got) - want) / np.linalg.norm(want))
