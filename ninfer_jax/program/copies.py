"""Device side of transfers: pages and images leave the device, arrive on it, and move within it.

Each kind of content has three units over a fixed number of places: `gather` reads payloads, `scatter` writes them,
`copy` moves them inside the device. Places are inputs; unused ones are null: nothing reads what is written there.
`arrays` is donated to `scatter` and `copy`, which makes them work in place.

A payload is the content of one place as the Host holds it. For a page it is all planes of the pool in the layout's
order: layer 0 keys, layer 0 values, layer 1 keys, ... (KV-05, KV-11); for an image, its fields in order (ST-02).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ninfer_jax.models.qwen3_5.state import KVPool, StateImages

_PAGES_PER_CALL = (1, 4, 16)
_CALL_BYTES = 64 << 20
"""Most payload bytes of one call that moves more than one page: enough for full speed, little enough to stage."""


def gather_pages(arrays: KVPool, places: Int[Array, " n"]) -> Float[Array, "n A two K P D"]:
    """Payloads of pages."""
    both = jnp.stack([arrays.k[:, places], arrays.v[:, places]], axis=2)
    return jnp.moveaxis(both, 1, 0)


def scatter_pages(
    arrays: KVPool, payloads: tuple[Float[Array, "A two K P D"], ...], places: Int[Array, " n"]
) -> tuple[KVPool, Int[Array, ""]]:
    """Write page payloads; also returns how many were real, which is known once they are consumed."""
    both = jnp.stack(payloads, axis=1)
    k, v = arrays.k.at[:, places].set(both[:, :, 0]), arrays.v.at[:, places].set(both[:, :, 1])
    return KVPool(k=k, v=v), _real(places)


def copy_pages(arrays: KVPool, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> KVPool:
    """Copy whole pages; all sources are read before a target is written."""
    return jax.tree.map(lambda x: x.at[:, targets].set(x[:, sources]), arrays)


def gather_images(arrays: StateImages, places: Int[Array, " n"]) -> StateImages:
    """Payloads of StateImages."""
    return jax.tree.map(lambda x: x[places], arrays)


def scatter_images(
    arrays: StateImages, payloads: tuple[StateImages, ...], places: Int[Array, " n"]
) -> tuple[StateImages, Int[Array, ""]]:
    """Write image payloads; the count as in `scatter_pages`."""
    written = jax.tree.map(lambda x, *new: x.at[places].set(jnp.stack(new)), arrays, *payloads)
    return written, _real(places)


def copy_images(
    arrays: StateImages, sources: Int[Array, " n"], targets: Int[Array, " n"]
) -> StateImages:
    """Copy whole images. The null slot reads as zeros, the state at position 0."""

    def copy(x: Array) -> Array:
        null = (sources == 0).reshape(-1, *(1,) * (x.ndim - 1))
        return x.at[targets].set(jnp.where(null, jnp.zeros_like(x[:1]), x[sources]))

    return jax.tree.map(copy, arrays)


def _real(places: Int[Array, " n"]) -> Int[Array, ""]:
    return jnp.sum(places > 0, dtype=jnp.int32)


class Kind(NamedTuple):
    """One kind of content that a transfer moves."""

    name: str
    gather: Callable[..., Any]
    scatter: Callable[..., Any]
    copy: Callable[..., Any]
    field: str
    """The field of `DeviceState` that holds it."""
    places: int
    """Usable places: ids are 1..places."""
    size: int
    """Bytes of a payload."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """Places of the compiled units, ascending. Images are large enough to go one by one."""
        sizes = _PAGES_PER_CALL if self.name == "page" else (1,)
        return tuple(n for n in sizes if n == 1 or n * self.size <= _CALL_BYTES)


def page_kind(pages: int, size: int) -> Kind:
    """Pages of the Main pool."""
    return Kind("page", gather_pages, scatter_pages, copy_pages, "kv", pages, size)


def image_kind(slots: int, size: int) -> Kind:
    """StateImages."""
    return Kind("image", gather_images, scatter_images, copy_images, "images", slots, size)


def calls(count: int, buckets: tuple[int, ...]) -> list[tuple[int, int]]:
    """Cut `count` places into calls: (places, bucket), at most half of a bucket unused."""
    out = []
    while count:
        bucket = next((b for b in buckets if count <= b < 2 * count), None)
        bucket = bucket or max(b for b in buckets if b <= count)
        taken = min(count, bucket)
        out.append((taken, bucket))
        count -= taken
    return out
