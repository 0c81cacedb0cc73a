"""What a kept measurement was made with."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
