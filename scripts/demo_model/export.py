"""Writes trained parameters as Hugging Face folders, which `ninfer convert` and `transformers` read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from artifacts import Qwen3_5Config
from artifacts.architectures.dflash import DFlashConfig, dflash_parameter_shapes, draft_tensor_name
from artifacts.architectures.qwen3_5 import parameter_shapes
from artifacts.architectures.qwen3_5.huggingface import layouts
from ninfer_jax.models.dflash.params import DraftParameters, draft_layout
from ninfer_jax.models.loading import named_arrays
from ninfer_jax.models.qwen3_5.params import (
    MTPParameters,
    TextParameters,
    mtp_layout,
    parameter_layout,
)

SHARD_BYTES = 12 << 20
_FLOAT32 = ("A_log", "linear_attn.norm")
"""Parameters that Qwen3.5 releases keep in float32; everything else is bfloat16."""


def write_trunk(
    folder: Path,
    raw: Mapping[str, Any],
    config: Qwen3_5Config,
    text: TextParameters,
    mtp: MTPParameters | None = None,
) -> None:
    """Write the trunk, and its MTP head if it has one, with `raw` as config.json."""
    components = ("text",) if mtp is None else ("text", "mtp")
    shapes = parameter_shapes(config, components)
    arrays = named_arrays(parameter_layout(config, np.float32), text, shapes)
    if mtp is not None:
        arrays |= named_arrays(mtp_layout(config, np.float32), mtp, shapes)
    tensors: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        (rows,) = layouts(config, name, shapes[name])[0]
        wide = name.endswith(_FLOAT32)
        canonical = rows.tensor.replace("text.", "model.", 1)
        tensors[canonical] = _stored(array.reshape(rows.shape), wide)
    _write(folder, raw, tensors)


def write_draft(
    folder: Path, raw: Mapping[str, Any], config: DFlashConfig, draft: DraftParameters
) -> None:
    """Write a DFlash draft with `raw` as config.json."""
    shapes = dflash_parameter_shapes(config)
    arrays = named_arrays(draft_layout(config, np.float32), draft, shapes)
    _write(folder, raw, {draft_tensor_name(n): _stored(a, False) for n, a in arrays.items()})


def _stored(array: np.ndarray, wide: bool) -> np.ndarray:
    return np.ascontiguousarray(array.astype(np.float32 if wide else ml_dtypes.bfloat16))


def _write(folder: Path, raw: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, array in tensors.items():
        if shards[-1] and sum(a.nbytes for a in shards[-1].values()) + array.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = array
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(a.nbytes for a in tensors.values())},
        "weight_map": {n: f for f, shard in zip(files, shards, strict=True) for n in shard},
    }
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
