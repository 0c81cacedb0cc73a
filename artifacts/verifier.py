"""Checks a checkpoint through and through: what opening checks, every hash, every value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from artifacts.checkpoint import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class NonFinite:
    """Elements of one parameter that are no finite number."""

    nan: int
    inf: int


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` looked at. Damage raises; values that are not finite are reported.

    `files_hashed` is 0 for a Hugging Face folder, which carries no hashes.
    """

    path: Path
    kind: str
    architecture: str
    components: tuple[str, ...]
    parameters: int
    objects: int
    nbytes: int
    files: int
    files_hashed: int
    nonfinite: dict[str, NonFinite] = field(default_factory=dict)
    """Logical parameter -> counts, only where there are any."""

    @property
    def ok(self) -> bool:
        """No value is NaN or infinite."""
        return not self.nonfinite


def verify(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Verifies an artifact or a Hugging Face folder: hashes, shapes, coverage, values.

    Every expected parameter is bound exactly once and every stored row used exactly once. Streams;
    `progress` is called with bytes done and bytes in all. Raises ArtifactError naming the file,
    tensor or field that is wrong.
    """
    checkpoint = open_checkpoint(path, verify=True)
    names = checkpoint.parameters()
    total, done = sum(checkpoint.nbytes(name) for name in names), 0
    nonfinite: dict[str, NonFinite] = {}
    for name in names:
        counts = _count_nonfinite(checkpoint, name)
        if counts.nan or counts.inf:
            nonfinite[name] = counts
        done += checkpoint.nbytes(name)
        if progress:
            progress(done, total)
    manifest = checkpoint.manifest
    return VerifyReport(
        path=checkpoint.path,
        kind=checkpoint.kind,
        architecture=checkpoint.architecture,
        components=checkpoint.components,
        parameters=len(names),
        objects=len(manifest.objects),
        nbytes=total,
        files=len(manifest.files),
        files_hashed=sum(entry.sha256 is not None for entry in manifest.files),
        nonfinite=nonfinite,
    )


def _count_nonfinite(checkpoint: Checkpoint, name: str) -> NonFinite:
    if np.issubdtype(checkpoint.dtype(name), np.integer):
        return NonFinite(0, 0)
    nan = inf = 0
    for _, values in checkpoint.blocks(name):
        nan += int(np.count_nonzero(np.isnan(values)))
        inf += int(np.count_nonzero(np.isinf(values)))
    return NonFinite(nan, inf)
