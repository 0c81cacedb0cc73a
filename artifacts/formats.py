"""Numeric formats of stored weights (numeric_formats.md): which exist, which planes they have,
which run today.

A format is what the bits mean; shape and memory location are independent of it (DEV-02). A direct
format has one plane, `value`; a coded one has named planes such as `codes` and `scales`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from artifacts.errors import ArtifactError, NotYetError

VALUE = "value"
"""The only plane of a direct format."""

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""Names of array element types in a manifest. Little-endian, whatever the machine."""


@dataclass(frozen=True)
class NumericFormat:
    """One numeric format. `dtype` names the element type of a direct format, else None."""

    name: str
    planes: tuple[str, ...]
    dtype: str | None = None
    implemented: bool = False


_DIRECT = (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("int32", "int32"))
_CODED = (
    ("q4_g64", ("codes", "scales")),
    ("q5_g64", ("codes", "scales")),
    ("q6_g64", ("codes", "scales")),
    ("q8_g32", ("codes", "scales")),
    ("fp8_row", ("codes", "scales")),
    ("nvfp4", ("codes", "scales", "divisor")),
)

FORMATS: dict[str, NumericFormat] = {
    **{name: NumericFormat(name, (VALUE,), dtype, implemented=True) for name, dtype in _DIRECT},
    **{name: NumericFormat(name, planes) for name, planes in _CODED},
}
"""Every format of the contract by name."""

FORMAT_OF_DTYPE: dict[str, str] = {dtype: name for name, dtype in _DIRECT}
"""Direct format of an element type name."""


def known_format(name: str, where: str) -> NumericFormat:
    """The format of that name. ArtifactError, naming `where`, when there is none."""
    if name not in FORMATS:
        raise ArtifactError(
            f"{where}: unknown numeric format {name!r}; known: {', '.join(FORMATS)}"
        )
    return FORMATS[name]


def implemented_format(name: str, where: str) -> NumericFormat:
    """As `known_format`; NotYetError naming the format when this version cannot read it."""
    fmt = known_format(name, where)
    if not fmt.implemented:
        raise NotYetError(f"{where}: numeric format {name!r} is not implemented yet")
    return fmt


def dtype_of(name: str, where: str) -> np.dtype[Any]:
    """The numpy element type of a dtype name. ArtifactError, naming `where`, when unknown."""
    if name not in DTYPES:
        raise ArtifactError(f"{where}: unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]
