"""How Hugging Face drafts store the logical parameters: one tensor each, without a prefix."""

from __future__ import annotations

from collections.abc import Mapping

from artifacts.architectures.dflash.config import DFlashConfig
from artifacts.architectures.dflash.parameters import dflash_parameter_shapes
from artifacts.bindings import Shape
from artifacts.errors import ArtifactError

_BUFFER = "rotary_emb.inv_freq"
"""Recomputed from the config; some exports saved it by accident: dropped, not bound."""

_RENAMED = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}


def bind_draft_tensors(
    config: DFlashConfig, shapes: Mapping[str, Shape]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Parameter -> tensor, for a draft's tensors by name and shape; and the tensors left out.

    Raises ArtifactError naming the tensor that is missing, has a wrong shape, or belongs nowhere.
    """
    tensors: dict[str, str] = {}
    for parameter, shape in dflash_parameter_shapes(config).items():
        tensor = draft_tensor_name(parameter)
        if tensor not in shapes:
            raise ArtifactError(f"tensor {tensor} is missing (parameter {parameter})")
        if shapes[tensor] != shape:
            raise ArtifactError(
                f"tensor {tensor} has shape {list(shapes[tensor])}, the config needs {list(shape)}"
            )
        tensors[parameter] = tensor
    bound = set(tensors.values())
    dropped = tuple(name for name in shapes if name not in bound)
    for name in dropped:
        if not name.endswith(_BUFFER):
            raise ArtifactError(f"tensor {name} does not belong to this draft")
    return tensors, dropped


def draft_tensor_name(parameter: str) -> str:
    """The tensor that holds a logical parameter."""
    *path, last = parameter.removeprefix("dflash.").split(".")
    return ".".join((*path, _RENAMED.get(last, last), "weight"))
