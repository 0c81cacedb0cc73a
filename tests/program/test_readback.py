"""Reading small results, with a driver that is played by the test."""

import ctypes

import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.program import readback

ARRAYS = [
    jnp.arange(16, dtype=jnp.int32).reshape(2, 8) - 5,
    jnp.linspace(0, 1, 7).astype(jnp.bfloat16),
    jnp.zeros((0, 3), jnp.float32),
    jnp.float32(2.5),
]


class Driver:
    """What `readback` uses of CUDA's, over memory of the host."""

    def __init__(self, *, fails=()):
        self.fails, self.calls = fails, []

    def _called(self, name):
        self.calls.append(name)
        return 201 if name in self.fails else 0

    def cuCtxPushCurrent_v2(self, _):  # noqa: N802
        return self._called("context")

    def cuCtxPopCurrent_v2(self, _):  # noqa: N802
        return self._called("back")

    def cuMemcpyDtoH_v2(self, target, source, count):  # noqa: N802
        ctypes.memmove(target, source.value, count.value)
        return self._called("copy")


@pytest.mark.parametrize("array", ARRAYS, ids=lambda x: f"{x.dtype}{x.shape}")
def test_what_is_read_is_what_the_array_holds(monkeypatch, array):
    driver = Driver()
    for context in (None, (driver, None)):
        monkeypatch.setattr(readback, "_context", lambda _, context=context: context)
        got = readback.read(array)
        assert (got.shape, got.dtype) == (array.shape, array.dtype)
        assert np.array_equal(got, np.asarray(array))
    assert driver.calls == ["context", "copy", "back"]


@pytest.mark.parametrize("fails", ["context", "copy"])
def test_a_driver_that_fails_is_done_without(monkeypatch, fails):
    driver = Driver(fails={fails})
    monkeypatch.setattr(readback, "_context", lambda _: (driver, None))
    for array in ARRAYS:
        assert np.array_equal(readback.read(array), np.asarray(array))
    assert driver.calls == (["context"] if fails == "context" else ["context", "copy", "back"]) * 4


def test_a_cpu_has_no_driver():
    assert readback._context(next(iter(ARRAYS[0].devices()))) is None
