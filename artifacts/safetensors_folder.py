"""What every Hugging Face folder shares, model or draft: its tensors as stored objects, its files,
and reading from them. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artifacts.errors import NotYetError
from artifacts.formats import FORMAT_OF_DTYPE, VALUE
from artifacts.manifest import ROW_MAJOR, FileEntry, Plane, Segment, StoredObject
from artifacts.safetensors_file import TensorEntry, read_into
from artifacts.shards import read_tensor_table

CONFIG_FILE = "config.json"
_WEIGHT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class SafetensorsSource:
    """Reads ranges of tensors; `table` is by object name. Holds no open file."""

    folder: Path
    table: dict[str, TensorEntry]

    def read_into(self, name: str, plane: str, start: int, out: np.ndarray) -> None:
        """Fills the 1-D `out` with elements from `start` of a tensor. `plane` is always "value"."""
        entry = self.table[name]
        read_into(self.folder / entry.file, entry.offset + start * out.itemsize, out)


def read_weight_table(folder: Path) -> dict[str, TensorEntry]:
    """`read_tensor_table`, whose tensors are all of an element type that weights can have.

    Raises ArtifactError as that does, and NotYetError for another element type.
    """
    table = read_tensor_table(folder)
    for entry in table.values():
        if entry.dtype not in _WEIGHT_DTYPES:
            raise NotYetError(
                f"{folder / entry.file}: tensor {entry.name} of dtype {entry.dtype} "
                "is not implemented yet"
            )
    return table


def stored_object(entry: TensorEntry, component: str, under: str = "") -> StoredObject:
    """A tensor as an object; `under` stands before the name of its file."""
    dtype = _WEIGHT_DTYPES[entry.dtype]
    segment = Segment(file=under + entry.file, key=entry.name, start=0, stop=entry.shape[0])
    return StoredObject(
        shape=entry.shape,
        dtype=dtype,
        format=FORMAT_OF_DTYPE[dtype],
        layout=ROW_MAJOR,
        component=component,
        planes={VALUE: Plane(shape=entry.shape, dtype=dtype, segments=(segment,))},
    )


def folder_files(folder: Path, names: Iterable[str], under: str = "") -> tuple[FileEntry, ...]:
    """Entries of those files that exist, sorted, not hashed; `under` stands before each name."""
    paths = [folder / name for name in sorted(set(names))]
    return tuple(
        FileEntry(path=under + p.name, size=p.stat().st_size) for p in paths if p.is_file()
    )
