"""One safetensors file: its header, checked completely, and bounded reads of its data.

Files are read with seek and readinto, never mapped: mapped pages would count as resident memory of
the process.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.bindings import Shape
from artifacts.errors import ArtifactError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a flipped bit in the length must not make us allocate terabytes."""

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: `offset` counts bytes from the file's start, `nbytes` its size."""

    name: str
    file: str
    dtype: str
    shape: Shape
    offset: int
    nbytes: int


class _RepeatedNameError(ValueError):
    pass


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensor name -> entry of one file, after checking everything that the header and the file size
    can show.

    Raises ArtifactError naming the file (and tensor) for a truncated file, a header that is not
    valid, a name that stands twice, an unknown dtype, or data ranges that overlap, leave holes or
    end outside the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or (8 + length > size and length <= MAX_HEADER_BYTES):
                raise ArtifactError(f"{path}: truncated inside the header ({size} bytes)")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ArtifactError(f"{path}: not a safetensors file (header length {length})")
            raw = _read_fully(stream.fileno(), 8, length)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
    entries = [_entry(path, name, fields, 8 + length) for name, fields in _parse(path, raw).items()]
    _check_ranges(path, entries, 8 + length, size)
    return {entry.name: entry for entry in entries}


def read_into(path: Path, offset: int, out: np.ndarray) -> None:
    """Fills `out` (C-contiguous, any dtype) with the bytes at `offset` of a file.

    Raises ArtifactError naming the file when it ends early or cannot be read. Allocates nothing.
    """
    view = out.reshape(-1).view(np.uint8).data
    try:
        with path.open("rb", buffering=0) as stream:
            stream.seek(offset)
            done = 0
            while done < len(view):
                count = stream.readinto(view[done:])
                if not count:
                    raise ArtifactError(f"{path}: truncated at byte {offset + done}")
                done += count
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_fully(descriptor: int, offset: int, length: int) -> bytes:
    pieces = []
    while length:
        piece = os.pread(descriptor, length, offset)
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(pieces)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _RepeatedNameError(key)
        values[key] = value
    return values


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except _RepeatedNameError as error:
        raise ArtifactError(f"{path}: tensor {error} stands twice in the header") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ArtifactError(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ArtifactError(f"{path}: __metadata__ of the header is not an object")
    return header


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    here = f"{path}: tensor {name}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ArtifactError(
            f"{here}: the header entry must hold exactly dtype, shape and data_offsets"
        )
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ArtifactError(f"{here}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise ArtifactError(f"{here}: shape {shape!r} is not a list of counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise ArtifactError(f"{here}: data_offsets {offsets!r} is not a pair of positions")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ArtifactError(f"{here}: data_offsets {offsets} do not hold {dtype} of shape {shape}")
    return TensorEntry(name, path.name, dtype, tuple(shape), data_start + begin, end - begin)


def _check_ranges(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    last = max(entries, key=lambda e: e.offset + e.nbytes, default=None)
    if last and last.offset + last.nbytes > size:
        raise ArtifactError(
            f"{path}: truncated: tensor {last.name} ends at byte {last.offset + last.nbytes}, "
            f"the file at {size}"
        )
    at = data_start
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != at:
            problem = "overlaps another" if entry.offset < at else "leaves a hole before it"
            raise ArtifactError(f"{path}: tensor {entry.name} {problem}")
        at += entry.nbytes
    if at != size:
        raise ArtifactError(f"{path}: {size - at} bytes belong to no tensor")
