"""What a kept measurement was made with."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str | None:
    """The commit measured; "-dirty" where tracked files other than results have changed. None: no repository."""

    def git(*command: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", ":!benchmarks")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def measured_with() -> dict[str, Any]:
    """Device, versions and commit, as results of anything that runs on a device name them."""
    return {
        "device": f"{jax.devices()[0].device_kind} ({platform.machine()})",
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy")},
        "python": platform.python_version(),
        "commit": commit(),
    }
