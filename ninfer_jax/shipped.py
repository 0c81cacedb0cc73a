"""Models that come with the package."""

from __future__ import annotations

from pathlib import Path

import artifacts

_SHIPPED = {"demo": "demo"}


def shipped_model(name: str) -> Path:
    """The folder of a shipped model, or `name` as a path if it is none.

    A folder in the working directory that has a shipped model's name is reached as "./demo".
    """
    if name in _SHIPPED:
        return Path(artifacts.__file__).parent / _SHIPPED[name]
    return Path(name)
