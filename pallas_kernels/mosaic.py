"""What kernels in Pallas Mosaic GPU share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

_WHOLE: Any = ((),) if jax.__version_info__ < (0, 11) else ()
"""`plgpu.load` wants an index before jax 0.11 and none after."""
_STORE: Any = getattr(plgpu, "store", None)
"""From jax 0.12 on, where an assignment refuses some values; before, there is none, and it takes all."""


def timeline(folder: str) -> dict[str, Any]:
    """Compiler parameters with which a kernel writes when each warpgroup is in which `jax.named_scope`.

    Args:
      folder: where each call leaves a trace for Perfetto; empty: none, at no cost. A warpgroup records 128 scopes, in
        16 bytes of shared memory each; later ones are dropped, which needs jax 0.11.
    """
    if not folder:
        return {}
    Path(folder).mkdir(parents=True, exist_ok=True)
    return {"profile_space": 128, "profile_dir": folder, "profile_bounds_check": True}


def lines(fields: Sequence[jax.Array]) -> jax.Array:
    """Integers of equal shape as int32 lines, what a kernel is told: `jnp.stack` in the last axis.

    As one select, which XLA makes one small kernel of with all that the fields share. A concatenation would have the
    threads of a warp go through the computation of one field after another.
    """
    shape = (*fields[0].shape, len(fields))
    field = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    stacked = jnp.zeros(shape, jnp.int32)
    for i, values in enumerate(fields):
        stacked = jnp.where(field == i, values[..., None].astype(jnp.int32), stacked)
    return stacked


def read(ref: Any, layout: Any) -> Any:
    """From memory to registers in a layout, one small access a thread where the layout asks for it."""
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)


def store(ref: Any, value: Any) -> None:
    """From registers to global memory, also where threads fill cache lines only in part, as a row's heads do."""
    if _STORE is None:
        ref[...] = value
    else:
        _STORE(ref, value, optimized=False)


def fence_copy_engine() -> None:
    """Order this thread's ordinary accesses to global memory with those of the copy engine, before and after."""

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [], "fence.proxy.async.global;", "", has_side_effects=True
        )

    fence()
