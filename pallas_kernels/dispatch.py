"""How an op picks its implementation: None always works, a named one that cannot run says why."""

from __future__ import annotations

from typing import Literal

import jax

Implementation = Literal["reference", "pallas"] | None

NO_KERNEL_YET = "no GPU kernel has been written for this op yet; use None or 'reference'"


def not_hopper() -> str | None:
    """Why kernels for Hopper cannot run on the default device, or None."""
    if jax.default_backend() != "gpu":
        return f"it needs a GPU; the default backend is {jax.default_backend()}"
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        return f"it needs compute capability 9.0; {device.device_kind} has {capability}"
    return None


def multiprocessors() -> int:
    """Multiprocessors of the default device; those of an H200 where it is no GPU (to lower without one)."""
    device = jax.local_devices()[0]
    return int(device.core_count) if device.platform == "gpu" else 132


def takes_kernel(op: str, implementation: Implementation, unavailable: str | None) -> bool:
    """Whether an op runs its GPU kernel; the reference otherwise.

    Args:
      op: name of the op, or of one of its kernels.
      implementation: None (best available), "reference" or "pallas".
      unavailable: why the kernel cannot run here on these arguments, or None.

    Raises:
      NotImplementedError: "pallas" was asked for and cannot run.
      ValueError: the name is unknown.
    """
    if implementation is None:
        return unavailable is None
    if implementation == "reference":
        return False
    if implementation != "pallas":
        raise ValueError(
            f"{op}: implementation={implementation!r} is unknown; use None, 'reference' or 'pallas'"
        )
    if unavailable is not None:
        raise NotImplementedError(f"{op}: implementation='pallas' cannot run: {unavailable}")
    return True
