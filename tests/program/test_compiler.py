"""Compiling with options that this XLA may not have."""

import logging

import jax
import jax.numpy as jnp
import pytest

from ninfer_jax.program import compiler


@pytest.fixture
def lowered(monkeypatch):
    monkeypatch.setattr(compiler, "_UNKNOWN", set())
    return jax.jit(lambda x: x + 1).lower(jnp.ones(3))


def test_options_that_xla_does_not_have_are_left_out(lowered, caplog):
    caplog.set_level(logging.INFO, "ninfer_jax")
    options = {"xla_gpu_of_the_past": True, "xla_cpu_of_the_future": "YES"}
    for _ in range(2):
        assert compiler.compiled(lowered, options)(jnp.ones(3)).tolist() == [2, 2, 2]
    assert [name for name in options if name in caplog.text] == list(options)
    assert len(caplog.records) == 2, "each is told once"


def test_options_that_it_has_are_given_to_it(lowered):
    options = {"xla_of_the_past": True, "xla_gpu_command_buffer_scheduling_mode": "SIDEWAYS"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="SIDEWAYS"):
        compiler.compiled(lowered, options)


@pytest.mark.parametrize("platform", compiler.OPTIONS)
def test_our_options_have_values_that_xla_takes(lowered, platform):
    """Those of a GPU too: XLA reads all of them wherever it compiles for."""
    compiler.compiled(lowered, compiler.OPTIONS[platform])
    assert "xla_gpu_command_buffer_scheduling_mode" not in compiler._UNKNOWN
