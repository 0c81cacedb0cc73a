"""Shapes of real models that kernels are lowered for."""

from collections.abc import Collection, Iterable

import pytest


def shapes(names: Iterable, often: Collection) -> list:
    """Parameters of a test: all shapes, those that are not in `often` only by `make test-all`.

    What one model needs most others need as well, and whole steps of two models are lowered elsewhere.
    """
    names = list(names)
    assert set(often) <= set(names)
    return [n if n in often else pytest.param(n, marks=pytest.mark.slow) for n in names]
