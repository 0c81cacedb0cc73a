"""Real shapes of attention in a decode or verification step, shared by tests and bench."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PAGE = 64
HEAD_DIM = 256
ROTARY = 64

HEADS = {"0.8B": (8, 2), "4B": (16, 4), "9B": (16, 4), "27B": (24, 4), "35B-A3B": (16, 2)}
"""Query and KV heads of the public models; everything else is the same in all of them."""


class DecodeShape(NamedTuple):
    """One call: B rows of `context` tokens, the T new ones among them; N query heads on K KV heads.

    Of the rows only the first `running` run, or all.
    """

    B: int
    T: int
    N: int
    K: int
    context: int
    running: int | None = None

    @property
    def bytes_moved(self) -> int:
        """Keys and values of the whole context of the rows that run, once."""
        return 2 * (self.running or self.B) * self.context * self.K * HEAD_DIM * 2

    def arguments(self, *, fused: bool, layers: int = 2) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of every array argument of `attention_decode` (`fused`) or `paged_attention`."""
        B, T, N, K = self.B, self.T, self.N, self.K
        L = -(-self.context // PAGE)
        plane = (layers, B * L + 1, K, PAGE, HEAD_DIM)
        bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
        shapes: dict[str, Any] = {"k_pages": (plane, bf16), "v_pages": (plane, bf16)}
        shapes |= {"layer": ((), i32), "block_tables": ((B, L), i32)}
        shapes |= {"starts": ((B,), i32), "lengths": ((B,), i32)}
        if fused:
            shapes |= {"qkv": ((B, 2 * (N + K) * HEAD_DIM), bf16)}
            shapes |= dict.fromkeys(("q_norm", "k_norm"), ((layers, HEAD_DIM), bf16))
            shapes |= dict.fromkeys(("cos", "sin"), ((B, ROTARY // 2), f32))
        else:
            shapes |= {"q": ((B, T, N, HEAD_DIM), bf16)}
        return {name: jax.ShapeDtypeStruct(*what) for name, what in shapes.items()}


SHAPES = (
    {
        f"{model}/B{B}/{context // 1024}k": DecodeShape(B, 1, *HEADS[model], context)
        for model in ("0.8B", "4B", "27B", "35B-A3B")
        for B, context in ((1, 2048), (8, 2048), (8, 32_768))
    }
    | {
        f"{model}/1of8/2k": DecodeShape(8, 1, *HEADS[model], 2048, running=1)
        for model in ("0.8B", "27B", "35B-A3B")
    }
    | {
        "27B/B1/32k": DecodeShape(1, 1, *HEADS["27B"], 32_768),
        "27B/B8/32k/T4": DecodeShape(8, 4, *HEADS["27B"], 32_768),
        "27B/B8/2k/T16": DecodeShape(8, 16, *HEADS["27B"], 2048),
        "35B-A3B/B1/2k/T6": DecodeShape(1, 6, *HEADS["35B-A3B"], 2048),
    }
)


def random_arguments(
    shape: DecodeShape, key: jax.Array, *, fused: bool, layers: int = 2
) -> dict[str, jax.Array]:
    """Values of realistic size: pages in random order, every row that runs full to its last token."""
    values: dict[str, jax.Array] = {}
    for name, a in shape.arguments(fused=fused, layers=layers).items():
        key, here = jax.random.split(key)
        if name == "layer":
            values[name] = jnp.zeros((), a.dtype)
        elif name == "block_tables":
            pages = jax.random.permutation(here, a.size).astype(a.dtype) + 1
            values[name] = pages.reshape(a.shape)
        elif name == "starts":
            values[name] = jnp.full(a.shape, shape.context - shape.T, a.dtype)
        elif name == "lengths":
            runs = jnp.arange(shape.B) < (shape.running or shape.B)
            values[name] = shape.T * runs.astype(a.dtype)
        elif name in ("cos", "sin"):
            angle = 100 * jax.random.uniform(jax.random.key(1), a.shape)
            values[name] = jnp.cos(angle) if name == "cos" else jnp.sin(angle)
        else:
            spread = 0.3 if name.endswith("norm") else 1.0
            values[name] = (spread * jax.random.normal(here, a.shape, a.dtype)).astype(a.dtype)
    return values
