"""Small results of a step, on the host as soon as they exist."""

from __future__ import annotations

import ctypes
import functools

import jax
import numpy as np


def read(array: jax.Array) -> np.ndarray:
    """What `np.asarray` gives of an array on one device, whole bytes in rows, without its way through three threads.

    That way takes 0.2 to 0.4 ms beside an H200, as long as half a step of a small model, and CUDA's own copy 0.06. It
    waits for nothing that is launched behind `array`.

    Raises:
      jax.errors.JaxRuntimeError: what computes the array failed.
    """
    array.block_until_ready()
    context = _context(next(iter(array.devices())))
    if context is None:
        return np.asarray(array)
    driver, handle = context
    result = np.empty(array.shape, array.dtype)
    source = ctypes.c_uint64(array.unsafe_buffer_pointer())
    # A context is a thread's own, and a caller may come from any and have another.
    failed = driver.cuCtxPushCurrent_v2(handle)
    if not failed:
        target = result.ctypes.data_as(ctypes.c_void_p)
        failed = driver.cuMemcpyDtoH_v2(target, source, ctypes.c_size_t(result.nbytes))
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return np.asarray(array) if failed else result


@functools.cache
def _context(device: jax.Device) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """CUDA's driver and the context of a device that XLA also uses; None where it is no device of CUDA's."""
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, ordinal = ctypes.c_void_p(), ctypes.c_int()
    failed = driver.cuDeviceGet(
        ctypes.byref(ordinal), device.local_hardware_id
    ) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(handle), ordinal)
    return None if failed else (driver, handle)
