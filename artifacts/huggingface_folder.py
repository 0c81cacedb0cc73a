"""A Hugging Face checkpoint folder seen as an artifact: an in-memory manifest over the folder's own
tensors.

Nothing is copied. Opening reads `config.json`, the index and the shard headers; weights are read
only to compare a tied head with the embedding.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from artifacts.architectures.qwen3_5 import (
    Qwen3_5Config,
    bind_tensors,
    parse_huggingface_config,
)
from artifacts.architectures.qwen3_5.config import config_to_json
from artifacts.architectures.qwen3_5.huggingface import EMBEDDING, LM_HEAD, canonical_names
from artifacts.errors import ArtifactError
from artifacts.frontend import RESOURCE_FILES
from artifacts.licences import Licence
from artifacts.manifest import Manifest, Metadata, Provenance
from artifacts.manifest_checks import check_manifest
from artifacts.safetensors_file import TensorEntry, read_into
from artifacts.safetensors_folder import (
    CONFIG_FILE,
    SafetensorsSource,
    folder_files,
    read_weight_table,
    stored_object,
)
from artifacts.shards import INDEX_FILE, read_json_object
from artifacts.version import CONVERTER, converter_version

_COMPARE_BYTES = 4 << 20


def open_huggingface(
    folder: Path, verify: bool = True
) -> tuple[Manifest, Qwen3_5Config, SafetensorsSource]:
    """Checks the folder and describes it as a manifest, with a source for its weights.

    `verify` also compares a tied head with the embedding, which reads both. Each failure is one
    ArtifactError naming the file or tensor. A checkpoint that claims an untied head but has none is
    tied, with a UserWarning.
    """
    architecture, config = parse_huggingface_config(
        read_json_object(folder / CONFIG_FILE), str(folder / CONFIG_FILE)
    )
    table = read_weight_table(folder)
    try:
        names = canonical_names(table)
        config = _settle_head(config, LM_HEAD in names, folder)
        bound = bind_tensors(config, {name: entry.shape for name, entry in table.items()})
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: {error}") from None
    if verify and config.tie_word_embeddings and LM_HEAD in names:
        _check_tied_head(folder, table[names[EMBEDDING]], table[names[LM_HEAD]])
    manifest = Manifest(
        schema_version=3,
        architecture=architecture,
        config=config_to_json(config),
        components=bound.components,
        objects={n: stored_object(table[n], part) for n, part in bound.component_of.items()},
        bindings=bound.bindings,
        uses=dict.fromkeys(bound.bindings, Licence.A16Only),
        files=folder_files(
            folder,
            {entry.file for entry in table.values()} | {CONFIG_FILE, INDEX_FILE, *RESOURCE_FILES},
        ),
        metadata=Metadata(name=architecture),
        provenance=Provenance(
            source=folder.resolve().name,
            source_format="huggingface",
            converter=CONVERTER,
            converter_version=converter_version(),
            dropped=bound.dropped,
        ),
    )
    check_manifest(manifest, str(folder))
    return manifest, config, SafetensorsSource(folder, table)


def _settle_head(config: Qwen3_5Config, has_head: bool, folder: Path) -> Qwen3_5Config:
    if has_head or config.tie_word_embeddings:
        return config
    warnings.warn(
        f"{folder}: tie_word_embeddings is false but there is no {LM_HEAD}; "
        "the head is tied to the embedding",
        UserWarning,
        stacklevel=5,
    )
    return replace(config, tie_word_embeddings=True)


def _check_tied_head(folder: Path, embedding: TensorEntry, head: TensorEntry) -> None:
    """A head beside a tied embedding must equal it bit for bit; compared in bounded pieces."""
    problem = (
        f"{folder / head.file}: tie_word_embeddings is true, "
        f"but tensor {head.name} differs from {embedding.name}"
    )
    if (embedding.dtype, embedding.shape) != (head.dtype, head.shape):
        raise ArtifactError(
            f"{problem}: {head.dtype} {list(head.shape)}, "
            f"not {embedding.dtype} {list(embedding.shape)}"
        )
    piece = max(1, min(_COMPARE_BYTES, embedding.nbytes // 16))
    ours, theirs = np.empty(piece, np.uint8), np.empty(piece, np.uint8)
    for at in range(0, embedding.nbytes, piece):
        count = min(piece, embedding.nbytes - at)
        read_into(folder / embedding.file, embedding.offset + at, ours[:count])
        read_into(folder / head.file, head.offset + at, theirs[:count])
        if not np.array_equal(ours[:count], theirs[:count]):
            raise ArtifactError(problem)
