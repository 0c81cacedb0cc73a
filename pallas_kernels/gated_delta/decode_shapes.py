"""Real shapes of the decode step, shared by tests and bench."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

KEY_HEADS = 16
HEAD_DIM = 128
TAPS = 4

VALUE_HEADS = {"0.8B": 16, "4B": 32, "9B": 32, "27B": 48, "35B-A3B": 32}
"""Value heads of the published models; everything else is the same in all of them."""


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Sizes of one call: B rows, S slots, G layers, heads of `d` channels."""

    B: int
    nv: int
    nk: int = KEY_HEADS
    S: int = 10
    G: int = 18
    d: int = HEAD_DIM

    @property
    def channels(self) -> int:
        return (2 * self.nk + self.nv) * self.d

    @property
    def bytes_moved(self) -> int:
        """What the step must read and write: state, window, projections, filters and output."""
        state = self.B * self.nv * self.d * self.d * 4
        window = self.B * (TAPS - 1) * self.channels * 2
        projected = self.B * (self.channels + self.nv * self.d + 2 * self.nv) * 2
        return 2 * (state + window) + projected + TAPS * self.channels * 2 + self.B * self.nv * 256

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of every array argument of `gated_delta_decode`, pools included."""
        bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
        C, d = self.channels, self.d
        return {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, (shape, dtype) in {
                "projected": ((self.B, C + self.nv * d + 2 * self.nv), bf16),
                "conv": ((self.G, C, TAPS), bf16),
                "dt_bias": ((self.G, self.nv), f32),
                "a_log": ((self.G, self.nv), f32),
                "norm": ((self.G, d), f32),
                "layer": ((), i32),
                "window": ((self.S, self.G, TAPS - 1, C), bf16),
                "recurrent": ((self.S, self.G, self.nv, d, d), f32),
                "read_slots": ((self.B,), i32),
                "write_slots": ((self.B,), i32),
                "continues": ((self.B,), jnp.bool_),
            }.items()
        }


SHAPES = {
    f"{name}/B{B}": DecodeShape(B=B, nv=nv) for name, nv in VALUE_HEADS.items() for B in (1, 8)
}


def random_arguments(shape: DecodeShape, key: jax.Array) -> dict[str, jax.Array]:
    """Values of realistic size; row b continues slot b + 1."""
    values = {}
    for name, a in shape.arguments().items():
        key, here = jax.random.split(key)
        if name in ("read_slots", "write_slots"):
            values[name] = jnp.arange(1, shape.B + 1, dtype=a.dtype)
        elif name == "continues":
            values[name] = jnp.ones(a.shape, a.dtype)
        elif name == "layer":
            values[name] = jnp.zeros((), a.dtype)
        elif name == "a_log":
            values[name] = jnp.log(jax.random.uniform(here, a.shape, a.dtype, 0.01, 16.0))
        elif name == "norm":
            values[name] = 1.0 + 0.1 * jax.random.normal(here, a.shape, a.dtype)
        else:
            scale = {"recurrent": 0.1, "conv": 0.5}.get(name, 1.0)
            values[name] = (scale * jax.random.normal(here, a.shape, jnp.float32)).astype(a.dtype)
    return values
