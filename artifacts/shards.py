"""The weight files of a Hugging Face folder: which shards there are, and which tensor stands in
which.

With `model.safetensors.index.json` every shard it names must exist, hold what it says and nothing
more, and no other `*.safetensors` file may lie beside them. Without an index there must be exactly
one file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from artifacts.errors import ArtifactError
from artifacts.safetensors_file import TensorEntry, read_header

INDEX_FILE = "model.safetensors.index.json"


def read_tensor_table(folder: Path) -> dict[str, TensorEntry]:
    """Tensor name -> where it stands, over all shards. Reads headers only.

    Raises one ArtifactError naming the file or tensor for every inconsistency listed above.
    """
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / INDEX_FILE
    if not index.is_file():
        if not present:
            raise ArtifactError(f"{folder}: no *.safetensors file")
        if len(present) > 1:
            raise ArtifactError(f"{folder}: {len(present)} *.safetensors files but no {INDEX_FILE}")
        return read_header(folder / present[0])
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            raise ArtifactError(f"{folder / shard}: named in {INDEX_FILE} but missing")
    for name in present:
        if name not in shards:
            raise ArtifactError(f"{folder / name}: stray shard, not named in {INDEX_FILE}")
    return _merge(folder, weight_map, {shard: read_header(folder / shard) for shard in shards})


def _merge(
    folder: Path, weight_map: dict[str, str], headers: dict[str, dict[str, TensorEntry]]
) -> dict[str, TensorEntry]:
    table: dict[str, TensorEntry] = {}
    for shard, header in headers.items():
        for name, entry in header.items():
            if name in table:
                raise ArtifactError(
                    f"{folder}: tensor {name} stands in two shards, {table[name].file} and {shard}"
                )
            table[name] = entry
    for name, shard in weight_map.items():
        if name not in table:
            raise ArtifactError(
                f"{folder / shard}: tensor {name} is named in {INDEX_FILE} but missing"
            )
        if table[name].file != shard:
            raise ArtifactError(
                f"{folder / shard}: tensor {name} should be here, but is in {table[name].file}"
            )
    for name, entry in table.items():
        if name not in weight_map:
            raise ArtifactError(
                f"{folder / entry.file}: tensor {name} is not named in {INDEX_FILE}"
            )
    return table


def _read_index(path: Path) -> dict[str, str]:
    raw = read_json_object(path)
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError(f"{path}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ArtifactError(f"{path}: {name} names {shard!r}, which is not a file name")
    return weight_map


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file holding one object. ArtifactError naming the file otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: must hold a JSON object")
    return value
