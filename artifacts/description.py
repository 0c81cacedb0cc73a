"""What an artifact or checkpoint folder holds, for people: the content of `ninfer inspect`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from artifacts.checkpoint import open_checkpoint
from artifacts.file_checks import check_sizes
from artifacts.manifest import MANIFEST_FILE, Manifest, read_manifest


@dataclass(frozen=True)
class ComponentSummary:
    """One component: its parameters, elements and bytes, and the bytes of each format."""

    parameters: int
    elements: int
    nbytes: int
    nbytes_by_format: dict[str, int]


@dataclass(frozen=True)
class Description:
    """Summary of a folder. `nbytes` counts weights, `files` all files with their sizes in bytes."""

    path: str
    kind: str
    name: str
    architecture: str
    config: dict[str, Any]
    components: dict[str, ComponentSummary]
    parameters: int
    elements: int
    nbytes: int
    uses: dict[str, int]
    files: dict[str, int]
    provenance: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def describe(path: str | Path) -> Description:
    """Describes an artifact or a Hugging Face folder without reading weights.

    An artifact in formats that this version cannot run is described all the same. Raises
    ArtifactError as `open_checkpoint` does, but for values, hashes and unimplemented formats.
    """
    folder = Path(path)
    if (folder / MANIFEST_FILE).is_file():
        manifest, kind = read_manifest(folder), "artifact"
        check_sizes(folder, manifest.files)
    else:
        manifest, kind = open_checkpoint(folder, verify=False).manifest, "huggingface"
    components = {name: _component(manifest, name) for name in manifest.components}
    return Description(
        path=str(folder),
        kind=kind,
        name=manifest.metadata.name,
        architecture=manifest.architecture,
        config=manifest.config,
        components=components,
        parameters=sum(c.parameters for c in components.values()),
        elements=sum(c.elements for c in components.values()),
        nbytes=sum(c.nbytes for c in components.values()),
        uses=dict(Counter(str(use) for use in manifest.uses.values())),
        files={entry.path: entry.size for entry in manifest.files},
        provenance=manifest.provenance.model_dump(mode="json"),
    )


def _component(manifest: Manifest, component: str) -> ComponentSummary:
    bindings = [b for name, b in manifest.bindings.items() if name.startswith(f"{component}.")]
    by_format: Counter[str] = Counter()
    for stored in manifest.objects.values():
        if stored.component == component:
            by_format[stored.format] += stored.nbytes()
    return ComponentSummary(
        parameters=len(bindings),
        elements=sum(math.prod(b.shape) for b in bindings),
        nbytes=sum(by_format.values()),
        nbytes_by_format=dict(by_format),
    )
