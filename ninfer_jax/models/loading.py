"""Parameter trees and the logical parameters of an artifact: which fill which leaf, and the way in and out.

A tree of `LeafLayout`s has the shape of a parameter tree. `load_tree` streams a checkpoint into it; `named_arrays`
takes a filled tree apart again, for whoever trains or exports one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

MAX_BLOCK_BYTES = 32 << 20
"""Largest piece of a parameter that is on the host at a time while loading."""

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class LeafLayout:
    """How one array of a tree is filled: logical parameters, in order, contiguous in C order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sources: tuple[str, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@runtime_checkable
class ParameterSource(Protocol):
    """What the loader needs of a checkpoint (`artifacts.open_checkpoint`)."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def blocks(self, name: str, max_bytes: int) -> Iterator[tuple[int, np.ndarray]]: ...


def map_leaves(function: Callable[[LeafLayout], Any], layout: Tree) -> Tree:
    """The tree with `function(leaf)` in the place of every `LeafLayout`."""
    mapped: Tree = jax.tree.map(function, layout, is_leaf=_is_leaf)
    return mapped


def load_tree(layout: Tree, source: ParameterSource, device: jax.Device) -> Tree:
    """Stream a checkpoint into device arrays.

    On an accelerator each leaf is allocated there once and filled block by block through a donated update; on CPU the
    leaf itself is the host buffer and is handed to JAX without a copy. Either way the host holds one block of at most
    `MAX_BLOCK_BYTES` beside the resident weights.
    """
    fill = _fill_in_place if device.platform == "cpu" else _fill_by_updates
    return map_leaves(lambda leaf: fill(leaf, _leaf_blocks(leaf, source), device), layout)


def cast_tree(layout: Tree, tree: Tree) -> Tree:
    """The arrays of `tree` in the dtypes that `layout` gives them; differentiable."""
    cast: Tree = jax.tree.map(
        lambda leaf, array: array.astype(leaf.dtype), layout, tree, is_leaf=_is_leaf
    )
    return cast


def named_arrays(
    layout: Tree, tree: Tree, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """The logical parameters that the leaves of a tree hold, on the host, in the leaves' own dtypes.

    Args:
      layout: says which parameters fill which leaf.
      tree: arrays.
      shapes: shape of each logical parameter (`artifacts`' parameter_shapes).
    """
    found: dict[str, np.ndarray] = {}
    leaves = jax.tree.leaves(layout, is_leaf=_is_leaf)
    for leaf, array in zip(leaves, jax.tree.leaves(tree), strict=True):
        flat, at = np.asarray(array).reshape(-1), 0
        for name in leaf.sources:
            size = math.prod(shapes[name])
            found[name] = flat[at : at + size].reshape(shapes[name])
            at += size
    return found


def _is_leaf(value: Any) -> bool:
    return isinstance(value, LeafLayout)


def _leaf_blocks(leaf: LeafLayout, source: ParameterSource) -> Iterator[tuple[int, np.ndarray]]:
    """Pieces of one leaf as (flat element offset, 1-D values)."""
    base = 0
    for name in leaf.sources:
        for offset, values in source.blocks(name, MAX_BLOCK_BYTES):
            yield base + offset, values
        base += math.prod(source.shape(name))
    if base != leaf.size:
        raise AssertionError(f"{leaf.sources[0]}...: {base} elements for a leaf of {leaf.size}")


def _fill_in_place(
    leaf: LeafLayout, blocks: Iterator[tuple[int, np.ndarray]], device: jax.Device
) -> jax.Array:
    # JAX adopts a host buffer without copying it only if it is aligned to 64 bytes.
    item = leaf.dtype.itemsize
    raw = np.empty(leaf.size * item + 64, np.uint8)
    start = -raw.ctypes.data % 64
    flat = raw[start : start + leaf.size * item].view(leaf.dtype)
    for offset, values in blocks:
        flat[offset : offset + values.size] = values
    return jax.device_put(flat.reshape(leaf.shape), device, may_alias=True)


def _fill_by_updates(
    leaf: LeafLayout, blocks: Iterator[tuple[int, np.ndarray]], device: jax.Device
) -> jax.Array:
    width = leaf.shape[-1]
    with jax.default_device(device):
        array = jnp.zeros(leaf.shape, leaf.dtype)
    for offset, values in blocks:
        array = _update_rows(array, values.reshape(-1, width), np.int32(offset // width))
    return array


def _put_rows(array: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    flat = array.reshape(-1, array.shape[-1])
    flat = jax.lax.dynamic_update_slice(
        flat, rows.astype(array.dtype), (start, jnp.zeros_like(start))
    )
    return flat.reshape(array.shape)


_update_rows = jax.jit(_put_rows, donate_argnums=0)
