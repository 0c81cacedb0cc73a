"""Builds checkpoint folders for the tests: copies of the goldens, changed on purpose.

Files are read and written with safetensors' own numpy code, never with the code under test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]
INDEX = "model.safetensors.index.json"
EXTRAS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def tensors_of(folder: Path) -> Tensors:
    """All tensors of a folder by name."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    """The parsed config.json."""
    return json.loads((folder / "config.json").read_text())


def write(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 0) -> Path:
    """Writes a checkpoint: one file without index, or `shards` files with one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def variant(
    source: Path,
    folder: Path,
    *,
    shards: int = 0,
    tensors: Callable[[Tensors], Tensors | None] | None = None,
    config: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """A copy of a checkpoint, changed by `tensors` and `config` in place or by value."""
    loaded, parsed = tensors_of(source), config_of(source)
    if tensors:
        loaded = tensors(loaded) or loaded
    if config:
        config(parsed)
    write(folder, parsed, loaded, shards)
    for name in EXTRAS[1:]:
        shutil.copyfile(source / name, folder / name)
    return folder


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    """A change for `variant` or `edit_json` that takes names away."""

    def change(values: dict[str, Any]) -> None:
        for name in names:
            del values[name]

    return change


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites a JSON file after a change."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites the header of a safetensors file, leaving its data bytes alone.

    `change` alters the parsed header in place, or returns the text to write instead.
    """
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    encoded = (text if isinstance(text, str) else json.dumps(header)).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
