"""Who wrote an artifact."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

CONVERTER = "ninfer-jax"


def converter_version() -> str:
    """Version of the installed distribution, or "unknown" when run from a source tree."""
    try:
        return version(CONVERTER)
    except PackageNotFoundError:
        return "unknown"
