"""Device side of transfers: payloads of pages and images are read from the device and written to it.

Each kind of content has a unit that reads a fixed number of places, `gather`, and one that writes them, `scatter`. A
copy inside the device is one after the other. Places are inputs; unused ones are null: nothing reads what is written
there. `arrays` is donated to `scatter`, which works in place.

A payload is the content of one place as the Host holds it, bit for bit. For a page it is all planes of the pool in the
layout's order: layer 0 keys, layer 0 values, layer 1 keys, ... (KV-05, KV-11); for an image, its fields in order
(ST-02). Payloads are unsigned integers of the arrays' width: a platform may compute with a wider float type than it
stores, and change the bits of a NaN on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from ninfer_jax.models.qwen3_5.state import KVPool, StateImages

_PAGES_PER_CALL = (1, 4, 16)
_CALL_BYTES = 64 << 20
"""Most payload bytes of one call that moves more than one page: enough for full speed, little enough to stage."""

PagePayload = UInt[Array, "A two K P D"]


def gather_pages(arrays: KVPool, places: Int[Array, " n"]) -> tuple[PagePayload, ...]:
    """Payloads of pages."""
    k, v = _bits(arrays.k), _bits(arrays.v)
    return tuple(jnp.stack([_take(k, p, 1), _take(v, p, 1)], axis=1) for p in places)


def scatter_pages(
    arrays: KVPool, payloads: tuple[PagePayload, ...], places: Int[Array, " n"]
) -> tuple[KVPool, Int[Array, ""]]:
    """Write page payloads; also returns how many were real, which is known once they are consumed."""
    k, v = _bits(arrays.k), _bits(arrays.v)
    for payload, p in zip(payloads, places, strict=True):
        k, v = _put(k, payload[:, 0], p, 1), _put(v, payload[:, 1], p, 1)
    return _like(arrays, KVPool(k=k, v=v)), _real(places)


def gather_images(arrays: StateImages, places: Int[Array, " n"]) -> tuple[StateImages, ...]:
    """Payloads of StateImages: trees of unsigned integers."""
    bits = jax.tree.map(_bits, arrays)
    return tuple(jax.tree.map(lambda x, p=p: _take(x, p, 0), bits) for p in places)


def scatter_images(
    arrays: StateImages, payloads: tuple[StateImages, ...], places: Int[Array, " n"]
) -> tuple[StateImages, Int[Array, ""]]:
    """Write image payloads; the count as in `scatter_pages`."""
    bits = jax.tree.map(_bits, arrays)
    for payload, p in zip(payloads, places, strict=True):
        bits = jax.tree.map(lambda x, new, p=p: _put(x, new, p, 0), bits, payload)
    return _like(arrays, bits), _real(places)


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _like(arrays: Any, bits: Any) -> Any:
    return jax.tree.map(lambda x, b: jax.lax.bitcast_convert_type(b, x.dtype), arrays, bits)


def _take(bits: Array, place: Int[Array, ""], axis: int) -> Array:
    return jax.lax.dynamic_index_in_dim(bits, place, axis, keepdims=False)


def _put(bits: Array, new: Array, place: Int[Array, ""], axis: int) -> Array:
    """Always in place, unlike a scatter of several."""
    return jax.lax.dynamic_update_index_in_dim(bits, new, place, axis)


def _real(places: Int[Array, " n"]) -> Int[Array, ""]:
    return jnp.sum(places > 0, dtype=jnp.int32)


class Kind(NamedTuple):
    """One kind of content that a transfer moves."""

    name: str
    gather: Callable[..., Any]
    scatter: Callable[..., Any]
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
    return Kind("page", gather_pages, scatter_pages, "kv", pages, size)


def image_kind(slots: int, size: int) -> Kind:
    """StateImages."""
    return Kind("image", gather_images, scatter_images, "images", slots, size)


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
