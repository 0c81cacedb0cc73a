"""`manifest.json`, version 3: what an artifact holds (ART-01). Types and text form; meaning is in
manifest_checks.py.

Unknown fields are errors at every level, so an old reader never half-understands a new artifact.

| field | holds |
| --- | --- |
| `architecture`, `config` | entry name (OWN-13) and normalised geometry (OWN-12), a draft's included |
| `components` | "text", and any of "mtp", "vision", "dflash", "dflash2" |
| `objects` | stored weights: shape, value dtype, numeric format, layout, component, planes |
| `bindings`, `uses` | logical parameter -> parts of objects, and -> activation licence |
| `files` | every other file of the folder with its size in bytes and SHA-256 |
| `metadata`, `provenance` | the public name; where the weights came from |
| `digest` | SHA-256 of the manifest's own canonical text without this field |
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.bindings import Binding, Shape
from artifacts.errors import ArtifactError
from artifacts.formats import dtype_of
from artifacts.licences import Licence

SCHEMA_VERSION = 3
MANIFEST_FILE = "manifest.json"
DFLASH = "dflash"
DFLASH2 = "dflash2"
COMPONENTS = ("text", "mtp", "vision", DFLASH, DFLASH2)
ROW_MAJOR = "row_major"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Segment(_Entry):
    """Rows `start <= row < stop` of a plane, stored under `key` in `file`, a relative path."""

    file: str
    key: str
    start: int
    stop: int


class Plane(_Entry):
    """One array of an object, cut along axis 0 into segments that follow each other."""

    shape: Shape
    dtype: str
    segments: tuple[Segment, ...]

    def nbytes(self) -> int:
        """Bytes of the plane's elements."""
        return math.prod(self.shape) * dtype_of(self.dtype, MANIFEST_FILE).itemsize


class StoredObject(_Entry):
    """A stored weight: `shape` and `dtype` of its values, `planes` for its bits in `format`."""

    shape: Shape
    dtype: str
    format: str
    layout: str
    component: str
    planes: dict[str, Plane]

    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes() for plane in self.planes.values())


class FileEntry(_Entry):
    """A file of the folder: relative path, size in bytes, SHA-256 in hex (null: not hashed)."""

    path: str
    size: int
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class Metadata(_Entry):
    """`name` is the public model name (ART-04)."""

    name: str


class Provenance(_Entry):
    """Where the weights came from. `dropped` names source tensors left out on purpose."""

    source: str
    source_format: str
    converter: str
    converter_version: str
    dropped: tuple[str, ...] = ()


class Manifest(_Entry):
    """The whole file. See the module's table."""

    schema_version: Literal[3]
    architecture: str
    config: dict[str, Any]
    components: tuple[str, ...]
    objects: dict[str, StoredObject]
    bindings: dict[str, Binding]
    uses: dict[str, Licence]
    files: tuple[FileEntry, ...]
    metadata: Metadata
    provenance: Provenance
    digest: str | None = None

    def shapes(self) -> dict[str, Shape]:
        """Object name -> logical shape."""
        return {name: stored.shape for name, stored in self.objects.items()}


def manifest_digest(manifest: Manifest) -> str:
    """SHA-256, in hex, of the canonical text of everything but `digest`."""
    values = manifest.model_dump(mode="json", exclude={"digest"})
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def manifest_to_text(manifest: Manifest) -> str:
    """The JSON text of a manifest, with its digest filled in."""
    sealed = manifest.model_copy(update={"digest": manifest_digest(manifest)})
    return json.dumps(sealed.model_dump(mode="json"), indent=1) + "\n"


def manifest_from_text(text: str, where: str = MANIFEST_FILE) -> Manifest:
    """Parses a manifest. ArtifactError naming `where` and the first offending field."""
    try:
        raw = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ArtifactError(f"{where}: must be a JSON object")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ArtifactError(
            f"{where}: schema_version is {version!r}; this version reads {SCHEMA_VERSION}"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(step) for step in first["loc"])
        raise ArtifactError(f"{where}: {field}: {first['msg']}") from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact folder, only parsed. ArtifactError naming the file."""
    path = folder / MANIFEST_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read: {error}") from None
    return manifest_from_text(text, str(path))


class _RepeatedKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _RepeatedKeyError(f"key {twice!r} stands twice")
    return values
