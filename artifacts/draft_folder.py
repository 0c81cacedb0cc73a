"""A block draft's Hugging Face folder, put beside an opened model as its component "dflash"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from artifacts.architectures.dflash import DFlashConfig, bind_draft_tensors, parse_draft_config
from artifacts.architectures.qwen3_5 import Qwen3_5Config
from artifacts.architectures.qwen3_5.config import config_to_json
from artifacts.bindings import Binding, Part
from artifacts.errors import ArtifactError
from artifacts.licences import Licence
from artifacts.manifest import DFLASH, Manifest
from artifacts.manifest_checks import check_manifest
from artifacts.object_source import ObjectSource
from artifacts.safetensors_file import TensorEntry
from artifacts.safetensors_folder import (
    CONFIG_FILE,
    SafetensorsSource,
    folder_files,
    read_weight_table,
    stored_object,
)
from artifacts.shards import INDEX_FILE, read_json_object

_UNDER = f"{DFLASH}/"
"""Stands before the names of the draft's files: both folders have a config.json."""


@dataclass(frozen=True)
class DraftedSource:
    """Reads the draft's objects from its folder and all others from the model's."""

    model: ObjectSource
    draft: SafetensorsSource

    def read_into(self, name: str, plane: str, start: int, out: np.ndarray) -> None:
        """Fills the 1-D `out` with elements from `start` of one plane of an object."""
        source: ObjectSource = self.draft if name in self.draft.table else self.model
        source.read_into(name, plane, start, out)


def attach_draft(
    manifest: Manifest, config: Qwen3_5Config, source: ObjectSource, folder: Path
) -> tuple[Manifest, Qwen3_5Config, DraftedSource]:
    """An opened model with the draft of `folder` as one more component; the digest goes.

    Raises ArtifactError when the folder is missing, is no draft, is damaged, does not fit the
    model, or when the model has a draft already; NotYetError for a draft not implemented yet.
    """
    if config.dflash is not None:
        raise ArtifactError(f"{folder}: cannot be added, the model has a draft already")
    draft, table, tensors, dropped = _open_draft(folder)
    try:
        config = replace(config, dflash=draft)
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: does not fit this model: {error}") from None
    # Objects take the parameters' names, which no object of the model can have.
    table = {parameter: table[tensor] for parameter, tensor in tensors.items()}
    bindings = {n: Binding(e.shape, (Part(n, 0, e.shape[0]),)) for n, e in table.items()}
    provenance = manifest.provenance
    drafted = manifest.model_copy(
        update={
            "config": config_to_json(config),
            "components": (*manifest.components, DFLASH),
            "objects": manifest.objects
            | {name: stored_object(entry, DFLASH, _UNDER) for name, entry in table.items()},
            "bindings": manifest.bindings | bindings,
            "uses": manifest.uses | dict.fromkeys(bindings, Licence.A16Only),
            "files": manifest.files
            + folder_files(
                folder, {entry.file for entry in table.values()} | {CONFIG_FILE, INDEX_FILE}, _UNDER
            ),
            "provenance": provenance.model_copy(
                update={
                    "source": f"{provenance.source} + {folder.resolve().name}",
                    "dropped": provenance.dropped + tuple(_UNDER + name for name in dropped),
                }
            ),
            "digest": None,
        }
    )
    check_manifest(drafted, str(folder))
    return drafted, config, DraftedSource(source, SafetensorsSource(folder, table))


def _open_draft(
    folder: Path,
) -> tuple[DFlashConfig, dict[str, TensorEntry], dict[str, str], tuple[str, ...]]:
    """Config, tensor table, parameter -> tensor, and the tensors left out."""
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder")
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ArtifactError(f"{folder}: not a draft: it has no {CONFIG_FILE}")
    config = parse_draft_config(read_json_object(path), str(path))
    table = read_weight_table(folder)
    try:
        tensors, dropped = bind_draft_tensors(config, {n: e.shape for n, e in table.items()})
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: {error}") from None
    return config, table, tensors, dropped
