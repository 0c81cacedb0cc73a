"""The geometry of a DFlash block draft (OWN-12): one hashable, checked value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar

from pydantic import ConfigDict

from artifacts.architectures.config_checks import check_limit, require

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
LAYER_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION)
MIN_BLOCK_SIZE = 2
_PATH = "dflash."


def _require(holds: bool, key: str, message: str) -> None:
    require(holds, _PATH + key, message)


@dataclass(frozen=True)
class DFlashConfig:
    """Geometry of a DFlash draft (model_math.md section 8); embedding and head are its model's.

    Fields carry Hugging Face's names where one exists. Sizes are counts of elements. Impossible
    values raise ArtifactError naming the key; `Qwen3_5Config` checks that the draft fits the model.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    """Per layer, "full_attention" or "sliding_attention"."""
    sliding_window: int | None
    """Of the sliding layers, in tokens; None exactly when there is none."""
    causal: tuple[bool, ...]
    """Per layer, whether a row of the block sees only rows up to its own."""
    block_size: int
    """Rows of one pass: the anchor and `block_size - 1` masks."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """The model's layers whose raw outputs are the context features, ascending."""
    num_target_layers: int
    """Layers of the model that this draft was made for."""
    input_embedding_scale: float = 1.0
    """Factor of the block's embeddings."""

    @property
    def context_size(self) -> int:
        """Width of the context features before `fc`."""
        return len(self.target_layer_ids) * self.hidden_size

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_layers()
        self._check_target_layers()

    def _check_numbers(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, int) and name != "mask_token_id":
                _require(value > 0, name, f"must be positive, not {value}")
            if isinstance(value, int):
                check_limit(name, value, _PATH)
            if isinstance(value, float):
                positive = math.isfinite(value) and value > 0
                _require(positive, name, f"must be positive, not {value}")
        mask, block = self.mask_token_id, self.block_size
        _require(mask >= 0, "mask_token_id", f"must not be negative, but is {mask}")
        _require(
            block >= MIN_BLOCK_SIZE,
            "block_size",
            f"is {block}; an anchor and one mask need {MIN_BLOCK_SIZE}",
        )
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"{self.num_key_value_heads} does not divide "
            f"num_attention_heads {self.num_attention_heads}",
        )
        _require(
            self.head_dim % 2 == 0, "head_dim", f"is {self.head_dim}; rotation needs an even number"
        )

    def _check_layers(self) -> None:
        for name in ("layer_types", "causal"):
            count = len(getattr(self, name))
            _require(
                count == self.num_hidden_layers,
                name,
                f"has {count} entries for num_hidden_layers {self.num_hidden_layers}",
            )
        for kind in self.layer_types:
            known = ", ".join(LAYER_TYPES)
            _require(kind in LAYER_TYPES, "layer_types", f"holds {kind!r}; known: {known}")
        sliding = SLIDING_ATTENTION in self.layer_types
        _require(
            sliding == (self.sliding_window is not None),
            "sliding_window",
            "is missing, but there are sliding layers"
            if sliding
            else f"is {self.sliding_window}, but no layer is sliding",
        )

    def _check_target_layers(self) -> None:
        ids = self.target_layer_ids
        _require(bool(ids), "target_layer_ids", "is empty")
        _require(
            all(a < b for a, b in pairwise(ids)),
            "target_layer_ids",
            f"{list(ids)} does not ascend",
        )
        _require(
            ids[0] >= 0 and ids[-1] < self.num_target_layers,
            "target_layer_ids",
            f"{list(ids)} is not within num_target_layers {self.num_target_layers}",
        )
