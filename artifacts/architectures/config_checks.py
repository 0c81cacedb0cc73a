"""Checks that every config value shares: each failure is one ArtifactError naming the key."""

from __future__ import annotations

from artifacts.errors import ArtifactError

MAX_SIZE = 2**31 - 1
MAX_COUNTS = {
    "num_hidden_layers": 4096,
    "mtp_num_hidden_layers": 64,
    "num_experts": 65536,
    "depth": 4096,
}
"""Bounds of what tables are built from: a damaged config must fail, not fill the memory."""


def require(holds: bool, key: str, message: str) -> None:
    """ArtifactError naming the config's key unless `holds`."""
    if not holds:
        raise ArtifactError(f"config: {key} {message}")


def check_limit(name: str, value: int, path: str = "") -> None:
    """ArtifactError for a count above what tables may be built from."""
    limit = MAX_COUNTS.get(name, MAX_SIZE)
    require(value <= limit, path + name, f"is {value}; at most {limit} is possible")
