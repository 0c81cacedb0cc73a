"""Weights on disk: a row of small orbax checkpoints, written and read in bounded pieces.

Orbax saves and restores whole leaves, and the largest tensor of a model can be gigabytes. So an
array is cut along axis 0 into segments of a bounded size, each one leaf of a flat tree, and every
checkpoint (a group, `weights/00042`) holds about one segment's worth of leaves. Any orbax program
can restore a group; the manifest says what its leaves are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.bindings import Shape, row_size
from artifacts.errors import ArtifactError
from artifacts.formats import dtype_of
from artifacts.manifest import Manifest, Plane, Segment

WEIGHTS = "weights"
MIN_SEGMENT_BYTES = 8 << 20
MAX_SEGMENT_BYTES = 64 << 20
WHOLE_GROUP_BYTES = 8 << 20
"""Groups up to this size are restored at once: every call to orbax costs milliseconds."""


def segment_bytes(largest: int) -> int:
    """Segment size in bytes: a small part of the `largest` object's bytes."""
    return max(MIN_SEGMENT_BYTES, min(MAX_SEGMENT_BYTES, largest // 16))


def _checkpointer() -> Any:
    # Imported here: orbax takes a second to import, and a Hugging Face folder needs none of it.
    import orbax.checkpoint as ocp

    # Weights hardly compress, and decompression would cost more than reading.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False))


class OrbaxWriter:
    """Writes arrays as segments, group by group, into `folder`/weights.

    Usage: for each piece of `cuts(...)`, `put` the rows; at the end `close`. Holds under two
    segments at a time.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._checkpointer = _checkpointer()
        self._tree: dict[str, np.ndarray] = {}
        self._bytes = 0
        self._groups = 0

    def cuts(self, shape: Shape, itemsize: int) -> Iterator[tuple[int, int]]:
        """Row ranges of the segments of one array."""
        rows = max(1, self.limit // max(1, row_size(shape) * itemsize))
        for start in range(0, shape[0], rows):
            yield start, min(shape[0], start + rows)

    def put(self, key: str, start: int, rows: np.ndarray) -> Segment:
        """Stores rows from `start` of the array called `key`, and says where they will stand."""
        if self._tree and self._bytes + rows.nbytes > self.limit:
            self._flush()
        leaf = f"{key}.{start}"
        self._tree[leaf] = rows
        self._bytes += rows.nbytes
        return Segment(file=self._group(), key=leaf, start=start, stop=start + rows.shape[0])

    def close(self) -> None:
        """Writes what is left. The writer is done."""
        if self._tree:
            self._flush()
        self._checkpointer.close()

    def _group(self) -> str:
        return f"{WEIGHTS}/{self._groups:05d}"

    def _flush(self) -> None:
        import orbax.checkpoint as ocp

        path = (self.folder / self._group()).absolute()
        path.parent.mkdir(exist_ok=True)
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(self._tree))
        # Its text names the folder of this machine, and the artifact appears in one piece anyway.
        (path / "commit_success.txt").unlink(missing_ok=True)
        self._tree, self._bytes = {}, 0
        self._groups += 1


class OrbaxSource:
    """Reads ranges of stored planes; keeps the last segment or small group for the next read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder.absolute(), manifest
        self._cached: dict[tuple[str, str], np.ndarray] = {}

    def read_into(self, name: str, plane: str, start: int, out: np.ndarray) -> None:
        """Fills the 1-D `out` with elements from `start` of one plane of an object."""
        stored = self.manifest.objects[name].planes[plane]
        row = row_size(stored.shape)
        stop = start + out.size
        for segment in stored.segments:
            first, last = segment.start * row, segment.stop * row
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                # No name for the segment: it must be gone before the next one is read.
                out[begin - start : end - start] = self._segment(stored, segment)[
                    begin - first : end - first
                ]

    def _segment(self, plane: Plane, segment: Segment) -> np.ndarray:
        """The elements of a segment, flat."""
        where = (segment.file, segment.key)
        cached = self._cached
        if where not in cached:
            self._cached = {}  # let go before reading, so that there is never more than one
            cached = {}
            group = self._groups[segment.file]
            small = sum(nbytes for _, nbytes in group.values()) <= WHOLE_GROUP_BYTES
            keys = list(group) if small else [segment.key]
            restored = self._restore(segment.file, keys)
            for key in keys:
                array, (shape, _) = restored[key], group[key]
                if array.shape != shape:
                    raise ArtifactError(
                        f"{self.folder / segment.file}: {key} has shape {list(array.shape)}, "
                        f"the manifest says {list(shape)}"
                    )
                cached[segment.file, key] = array
            self._cached = cached
        values = cached[where]
        if values.dtype != dtype_of(plane.dtype, segment.file):
            raise ArtifactError(
                f"{self.folder / segment.file}: {segment.key} holds {values.dtype}, "
                f"not {plane.dtype}"
            )
        return values.reshape(-1)

    def _restore(self, file: str, keys: list[str]) -> dict[str, np.ndarray]:
        import orbax.checkpoint as ocp

        with _checkpointer() as checkpointer:
            try:
                restored: dict[str, np.ndarray] = checkpointer.restore(
                    self.folder / file,
                    args=ocp.args.PyTreeRestore(
                        item=dict.fromkeys(keys, 0),
                        restore_args={
                            key: ocp.RestoreArgs(restore_type=np.ndarray) for key in keys
                        },
                        partial_restore=True,
                    ),
                )
            except Exception as error:  # orbax and tensorstore raise many kinds for damaged files
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ArtifactError(f"{self.folder / file}: cannot be restored: {reason}") from None
        return restored

    @cached_property
    def _groups(self) -> dict[str, dict[str, tuple[Shape, int]]]:
        """Group -> leaf -> (shape, bytes)."""
        groups: dict[str, dict[str, tuple[Shape, int]]] = {}
        for stored in self.manifest.objects.values():
            for plane in stored.planes.values():
                itemsize = dtype_of(plane.dtype, "manifest").itemsize
                for segment in plane.segments:
                    shape = (segment.stop - segment.start, *plane.shape[1:])
                    leaf = (shape, math.prod(shape) * itemsize)
                    groups.setdefault(segment.file, {})[segment.key] = leaf
        return groups
