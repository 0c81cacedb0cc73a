"""Turns a Hugging Face folder into an artifact (ART-02): one stored object a logical parameter,
values unchanged.

The mapping of names, the fusion of experts and the regrouping of heads happen here once, so an
artifact's objects are the logical parameters themselves, and a loader reads each as one run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from artifacts.bindings import Binding, Part, row_size
from artifacts.checkpoint import Checkpoint, open_checkpoint
from artifacts.errors import ArtifactError
from artifacts.file_checks import describe_files, list_files
from artifacts.formats import DTYPES, FORMAT_OF_DTYPE, VALUE
from artifacts.frontend import copy_frontend
from artifacts.manifest import (
    MANIFEST_FILE,
    ROW_MAJOR,
    Manifest,
    Metadata,
    Plane,
    StoredObject,
    manifest_to_text,
)
from artifacts.orbax_store import OrbaxWriter, segment_bytes

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def convert(
    hf_dir: str | Path,
    out: str | Path,
    name: str | None = None,
    *,
    draft: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes the artifact of a Hugging Face folder to `out` and returns that path.

    Every component present is kept, and `draft`, the folder of a block draft made for this model,
    becomes one more. `name` becomes metadata.name, by default the architecture's
    (ART-04). Weights stream: host memory stays under a few segments (orbax_store.py). The folder
    appears under its name only when it is complete; a killed run leaves at most a
    `.<name>.partial-*` folder beside it.

    Raises ArtifactError when the source is damaged, is no Hugging Face folder, or `out` exists and
    is not empty.
    """
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ArtifactError(f"{target}: exists and is not an empty folder")
    checkpoint = open_checkpoint(hf_dir, draft=draft)
    if checkpoint.kind != "huggingface":
        raise ArtifactError(f"{hf_dir}: is an artifact already")
    if name is not None and not name.strip():
        raise ArtifactError("metadata.name must not be empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        partial.chmod(0o755)
        _write(checkpoint, partial, name or checkpoint.architecture, progress)
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _write(checkpoint: Checkpoint, folder: Path, name: str, progress: Progress | None) -> None:
    objects = _write_objects(checkpoint, folder, progress)
    copy_frontend(checkpoint.path, folder)
    source = checkpoint.manifest
    manifest = Manifest(
        schema_version=source.schema_version,
        architecture=source.architecture,
        config=source.config,
        components=source.components,
        objects=objects,
        bindings={
            n: Binding(stored.shape, (Part(n, 0, stored.shape[0]),))
            for n, stored in objects.items()
        },
        uses=source.uses,
        files=describe_files(folder, list_files(folder)),
        metadata=Metadata(name=name),
        provenance=source.provenance,
    )
    (folder / MANIFEST_FILE).write_text(manifest_to_text(manifest), encoding="utf-8")


def _write_objects(
    checkpoint: Checkpoint, folder: Path, progress: Progress | None
) -> dict[str, StoredObject]:
    names = checkpoint.parameters()
    total, done = sum(checkpoint.nbytes(name) for name in names), 0
    writer = OrbaxWriter(folder, segment_bytes(checkpoint.largest_nbytes))
    objects: dict[str, StoredObject] = {}
    for name in names:
        shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        segments = []
        for start, stop in writer.cuts(shape, dtype.itemsize):
            rows = np.empty((stop - start, *shape[1:]), dtype)
            checkpoint.read_range(name, start * row_size(shape), rows.reshape(-1))
            segments.append(writer.put(f"{name}.{VALUE}", start, rows))
            done += rows.nbytes
            if progress:
                progress(done, total)
        dtype_name = _DTYPE_NAMES[dtype]
        objects[name] = StoredObject(
            shape=shape,
            dtype=dtype_name,
            format=FORMAT_OF_DTYPE[dtype_name],
            layout=ROW_MAJOR,
            component=name.split(".", 1)[0],
            planes={VALUE: Plane(shape=shape, dtype=dtype_name, segments=tuple(segments))},
        )
    writer.close()
    return objects
