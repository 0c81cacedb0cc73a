"""Real chains of the published models, shared by tests and bench."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_chain.stages import ROWS, Experts, Norm, Product, Stage, stacks_of

EPS = 1e-6
VOCABULARY = 248_320


@dataclasses.dataclass(frozen=True)
class Shape:
    """One chain: its stages, and the channels H of the residual stream."""

    H: int
    stages: tuple[Stage, ...]
    rows: int = ROWS
    """Rows that choose experts."""

    @property
    def bytes_moved(self) -> int:
        """Weights; activations are a thousandth of them. Of experts those that random rows choose on average."""
        total = 0.0
        for stage in self.stages:
            if isinstance(stage, Product):
                total += 2 * stage.rows * stage.width
            elif isinstance(stage, Experts):
                missed = (1 - stage.top_k / stage.experts) ** self.rows
                each = 6 * stage.hidden * stage.width
                total += (
                    each * (1 + stage.experts * (1 - missed)) + 2 * stage.experts * stage.hidden
                )
        return int(total)

    def stacks(self, layers: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Shapes of each stage's stacks."""
        return tuple(
            tuple((layers, *shape) for shape in stacks_of(stage, self.H)) for stage in self.stages
        )

    def arguments(self, layers: int) -> tuple[Any, ...]:
        """Shapes and dtypes of `chain`'s arguments after the stages."""
        of, stacks = jax.ShapeDtypeStruct, self.stacks(layers)
        enters = self.stages[0]
        return (
            of((ROWS, enters.width), jnp.bfloat16) if isinstance(enters, Product) else None,
            of((self.H, ROWS), jnp.bfloat16),
            tuple(tuple(of(s, jnp.bfloat16) for s in own) for own in stacks),
            of((sum(map(len, stacks)),), jnp.int32),
            of((ROWS,), jnp.int32),
        )

    @property
    def running(self) -> jax.Array:
        """The first rows run."""
        return (jnp.arange(ROWS) < self.rows).astype(jnp.int32)

    def indices(self, layer: Any) -> jax.Array:
        """The same layer of every stack."""
        return jnp.full((sum(map(len, self.stacks(1))),), layer, jnp.int32)


def random_weights(shape: Shape, layers: int, seed: int = 0) -> Any:
    """Weights for which every stage keeps the size of its input; norm weights around 0, as they are stored."""
    keys = iter(jax.random.split(jax.random.key(seed), sum(map(len, shape.stacks(layers)))))

    def make(stack: tuple[int, ...], key: jax.Array) -> jax.Array:
        scale = 0.1 if len(stack) == 2 else stack[-1] ** -0.5

        def one(key: jax.Array) -> jax.Array:
            return (scale * jax.random.normal(key, stack[1:], jnp.float32)).astype(jnp.bfloat16)

        # One layer at a time, so that float32 draws of one are the most that is there beside the result.
        return jax.lax.map(one, jax.random.split(key, stack[0]))

    made = jax.jit(make, static_argnums=0)
    return tuple(tuple(made(s, next(keys)) for s in own) for own in shape.stacks(layers))


def random_inputs(shape: Shape, seed: int = 0) -> tuple[jax.Array | None, jax.Array]:
    """Input of the first stage, and the residual stream."""
    one, two = jax.random.split(jax.random.key(1000 + seed))
    first, residual, *_ = shape.arguments(1)
    of = lambda key, a: a and jax.random.normal(key, a.shape, jnp.float32).astype(a.dtype)  # noqa: E731
    return of(one, first), of(two, residual)


def _tail(H: int, mixed: int, width: int, after: Product) -> Shape:
    """From a mixer's result to the projection after the layer."""
    return Shape(
        H,
        (
            Product(H, mixed, "add", eps=EPS),
            Product(2 * width, H, "swiglu"),
            Product(H, width, "add", eps=EPS),
            after,
        ),
    )


def _sparse(mixed: int, rows: int, after: Product, experts: int = 256, top_k: int = 8) -> Shape:
    """The same with experts of width 512 beside a stream of 2,048, of which each of so many rows chooses some."""
    layer = Experts(experts, 2048, 512, top_k, True, EPS)
    return Shape(2048, (Product(2048, mixed, "add", eps=EPS), layer, after), rows)


def _enter(H: int, after: Product) -> Shape:
    return Shape(H, (Norm(EPS), after))


def _head(H: int) -> Product:
    return Product(VOCABULARY, H, "rows", jnp.float32)


def _linear(H: int, value_heads: int) -> Product:
    """q, k, v, z, b and a of a Gated DeltaNet layer with 16 key heads; heads have 128 channels."""
    return Product(2 * (16 + value_heads) * 128 + 2 * value_heads, H, "rows")


def _full(H: int, heads: int, kv_heads: int) -> Product:
    """Queries with gates, keys and values of an attention layer; heads have 256 channels."""
    return Product(2 * (heads + kv_heads) * 256, H, "rows")


SHAPES = {
    "0.8B/tail": _tail(1024, 2048, 3584, _linear(1024, 16)),
    "0.8B/tail to attention": _tail(1024, 2048, 3584, _full(1024, 8, 2)),
    "0.8B/tail to head": _tail(1024, 2048, 3584, _head(1024)),
    "0.8B/enter": _enter(1024, _linear(1024, 16)),
    "4B/tail": _tail(2560, 4096, 9216, _linear(2560, 32)),
    "4B/tail to head": _tail(2560, 4096, 9216, _head(2560)),
    "9B/tail": _tail(4096, 4096, 12288, _linear(4096, 32)),
    "27B/tail": _tail(5120, 6144, 17408, _linear(5120, 48)),
    "27B/tail to head": _tail(5120, 6144, 17408, _head(5120)),
    "35B-A3B/tail of 1 row": _sparse(4096, 1, _linear(2048, 32)),
    "35B-A3B/tail of 8 rows": _sparse(4096, 8, _linear(2048, 32)),
    "35B-A3B/tail to attention": _sparse(4096, 8, _full(2048, 16, 2)),
    "35B-A3B/tail to head": _sparse(4096, 3, _head(2048)),
    "35B-A3B/enter": _enter(2048, _linear(2048, 32)),
    "80B-A3B/tail": _sparse(4096, 5, _linear(2048, 32), experts=512, top_k=10),
}
