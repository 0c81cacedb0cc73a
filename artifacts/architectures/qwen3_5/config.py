"""The geometry of a Qwen3.5 / Qwen3-Next model (OWN-12): one hashable, checked value."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from artifacts.architectures.config_checks import check_limit, require
from artifacts.architectures.dflash.config import DFlashConfig
from artifacts.errors import ArtifactError

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"
LAYER_TYPES = (LINEAR_ATTENTION, FULL_ATTENTION)
FFN_TYPES = ("dense", "moe")


@dataclass(frozen=True)
class Qwen3_5VisionConfig:  # noqa: N801 - the architecture's own spelling
    """Geometry of the vision tower (model_math.md section 4). Sizes are counts, never bytes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    out_hidden_size: int
    num_position_embeddings: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(value > 0, f"vision_config.{field.name}", f"must be positive, not {value}")
            check_limit(field.name, value, "vision_config.")
        require(
            self.hidden_size % self.num_heads == 0,
            "vision_config.num_heads",
            f"{self.num_heads} does not divide hidden_size {self.hidden_size}",
        )


@dataclass(frozen=True)
class Qwen3_5Config:  # noqa: N801 - the architecture's own spelling
    """Geometry of the text trunk, its MTP head and (optionally) its vision tower and its draft.

    Fields carry Hugging Face's names where one exists. Sizes are counts of elements. Impossible
    values raise ArtifactError naming the key. Fields of an absent feature are 0 (no experts) or
    empty.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    """Per layer, "linear_attention" or "full_attention"."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int
    """Rotated leading dims of a head: int(head_dim * partial_rotary_factor)."""
    mrope_section: tuple[int, ...]
    """Frequencies of time, height and width, interleaved; (rotary_dim // 2, 0, 0) is plain rope."""
    rms_norm_eps: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    ffn_types: tuple[str, ...]
    """Per layer, "dense" or "moe"."""
    intermediate_size: int
    """Of dense FFNs; 0 when there is none."""
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    mtp_num_hidden_layers: int
    vision: Qwen3_5VisionConfig | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids of the config file; a generation config, if any, comes first."""
    pad_token_id: int | None = None
    dflash: DFlashConfig | None = None
    """The block draft that goes with this model, if any."""

    @property
    def linear_key_size(self) -> int:
        """Width of all linear-attention keys (and of all queries)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        """Width of all linear-attention values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_size(self) -> int:
        """Channels of the causal convolution: queries, keys and values together."""
        return 2 * self.linear_key_size + self.linear_value_size

    @property
    def mtp_ffn_type(self) -> str:
        """FFN kind of the MTP layers: that of the architecture, whatever single trunk layers do."""
        return "moe" if self.num_experts else "dense"

    def __post_init__(self) -> None:
        self._check_positive()
        self._check_layers()
        self._check_attention()
        self._check_ffn()
        self._check_draft()

    def _check_positive(self) -> None:
        names = [
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
            "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
            "max_position_embeddings",
        ]  # fmt: skip
        if "dense" in self.ffn_types or not self.num_experts:
            names.append("intermediate_size")
        if self.num_experts:
            names += [
                "num_experts_per_tok",
                "moe_intermediate_size",
                "shared_expert_intermediate_size",
            ]
        for name in names:
            value = getattr(self, name)
            require(value > 0, name, f"must be positive, not {value}")
        for name in ("intermediate_size", "num_experts", "mtp_num_hidden_layers"):
            value = getattr(self, name)
            require(value >= 0, name, f"must not be negative, but is {value}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int):
                check_limit(field.name, value)
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, name, f"must be positive, not {value}")

    def _check_layers(self) -> None:
        for name, allowed in (("layer_types", LAYER_TYPES), ("ffn_types", FFN_TYPES)):
            kinds = getattr(self, name)
            require(
                len(kinds) == self.num_hidden_layers,
                name,
                f"has {len(kinds)} entries for num_hidden_layers {self.num_hidden_layers}",
            )
            for kind in kinds:
                require(kind in allowed, name, f"holds {kind!r}; known: {', '.join(allowed)}")

    def _check_attention(self) -> None:
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"{self.num_key_value_heads} does not divide "
            f"num_attention_heads {self.num_attention_heads}",
        )
        require(
            self.linear_num_value_heads % self.linear_num_key_heads == 0,
            "linear_num_key_heads",
            f"{self.linear_num_key_heads} does not divide "
            f"linear_num_value_heads {self.linear_num_value_heads}",
        )
        require(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            "partial_rotary_factor",
            f"gives {self.rotary_dim} rotated dims of head_dim {self.head_dim}; "
            "needs an even number of 2 or more",
        )
        require(
            len(self.mrope_section) == 3 and all(n >= 0 for n in self.mrope_section),
            "mrope_section",
            f"must be three counts, not {list(self.mrope_section)}",
        )

    def _check_ffn(self) -> None:
        require(
            "moe" not in self.ffn_types or self.num_experts > 0,
            "num_experts",
            "must be positive for a mixture of experts",
        )
        if self.num_experts:
            require(
                self.num_experts_per_tok <= self.num_experts,
                "num_experts_per_tok",
                f"{self.num_experts_per_tok} exceeds num_experts {self.num_experts}",
            )

    def _check_draft(self) -> None:
        """A draft borrows this model's embedding and head and reads its layers."""
        draft = self.dflash
        if draft is None:
            return
        for theirs, ours in (
            ("hidden_size", "hidden_size"),
            ("num_target_layers", "num_hidden_layers"),
        ):
            a, b = getattr(draft, theirs), getattr(self, ours)
            require(a == b, f"dflash.{theirs}", f"is {a}, but {ours} of the model is {b}")
        require(
            draft.mask_token_id < self.vocab_size,
            "dflash.mask_token_id",
            f"is {draft.mask_token_id}, but vocab_size of the model is {self.vocab_size}",
        )


_ADAPTER: TypeAdapter[Qwen3_5Config] = TypeAdapter(Qwen3_5Config)


def config_to_json(config: Qwen3_5Config) -> dict[str, Any]:
    """The config as plain JSON values; `config_from_json` gives back an equal config."""
    dumped: dict[str, Any] = _ADAPTER.dump_python(config, mode="json")
    return dumped


def config_from_json(values: dict[str, Any], where: str = "manifest.json") -> Qwen3_5Config:
    """Reads `config_to_json`'s output; ArtifactError names `where` and the offending field."""
    try:
        return _ADAPTER.validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(step) for step in ("config", *first["loc"]))
        raise ArtifactError(f"{where}: {field}: {first['msg']}") from None
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}") from None
