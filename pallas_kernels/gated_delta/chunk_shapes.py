"""Real shapes of the chunked gated delta rule, shared by tests and bench."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

KEY_HEADS = 16
HEAD_DIM = 128
CHUNK = 64
VALUE_HEADS = {"0.8B": 16, "4B": 32, "9B": 32, "27B": 48, "35B-A3B": 32}
"""Value heads of the published models; everything else is the same in all of them."""


@dataclasses.dataclass(frozen=True)
class ChunkShape:
    """Sizes of one call: B rows of T tokens, nk key and nv value heads of 128 channels."""

    B: int
    T: int
    nv: int
    nk: int = KEY_HEADS
    d: int = HEAD_DIM

    @property
    def channels(self) -> int:
        return (2 * self.nk + self.nv) * self.d

    @property
    def flops(self) -> int:
        """What the chunked form needs with whole triangles: k k, q k, k M, q M, T v', weights v', k^T v'.

        The inverse is left out, as each way to it takes another number of operations.
        """
        chunks = self.B * -(-self.T // CHUNK)
        by_key_head = 2 * 2 * CHUNK**2 * self.d
        by_value_head = 3 * 2 * CHUNK * self.d**2 + 2 * 2 * CHUNK**2 * self.d
        return chunks * (self.nk * by_key_head + self.nv * by_value_head)

    @property
    def bytes_moved(self) -> int:
        """q, k, v and the bfloat16 output once, the gates once, the state in and out."""
        tokens = self.B * self.T
        return (
            tokens * (self.channels + self.nv * self.d) * 2
            + tokens * self.nv * 8
            + 2 * self.B * self.nv * self.d**2 * 4
        )

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arguments of `gated_delta_chunked_fused`."""
        B, T, nv, d = self.B, self.T, self.nv, self.d
        f32 = jnp.float32
        return {
            "qkv": jax.ShapeDtypeStruct((B, T, self.channels), jnp.bfloat16),
            "g": jax.ShapeDtypeStruct((B, T, nv), f32),
            "beta": jax.ShapeDtypeStruct((B, T, nv), f32),
            "state": jax.ShapeDtypeStruct((B, nv, d, d), f32),
            "lengths": jax.ShapeDtypeStruct((B,), jnp.int32),
        }


SHAPES = {f"{name}/B1/T2048": ChunkShape(B=1, T=2048, nv=nv) for name, nv in VALUE_HEADS.items()}
SHAPES |= {"27B/B4/T2048": ChunkShape(B=4, T=2048, nv=48), "27B/B1/T4096": ChunkShape(1, 4096, 48)}


def random_arguments(shape: ChunkShape, seed: int = 0) -> dict[str, np.ndarray]:
    """Values of realistic size: keys that resemble each other, decays of 1e-3 to 1; every token valid."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, a in shape.arguments().items():
        x = rng.standard_normal(a.shape, np.float32)
        if name == "qkv":
            x += 0.5 * rng.standard_normal(a.shape[-1:], np.float32)
        elif name == "g":
            x = -np.exp(1.5 * x - 3)
        elif name == "beta":
            x = 1 / (1 + np.exp(-2 * x))
        elif name == "state":
            x *= 0.1
        else:
            x = np.full(a.shape, shape.T)
        values[name] = x.astype(a.dtype)
    return values
