"""Reads the Hugging Face `config.json` of a DFlash draft into a `DFlashConfig`.

Fall-backs are those of the public implementations (model_math.md section 8); every other key must
be there. A feature that would change the formulas without changing any shape is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifacts.architectures.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION, DFlashConfig
from artifacts.architectures.huggingface_keys import Keys, huggingface_architecture
from artifacts.architectures.registry import DRAFT_ARCHITECTURES, PLANNED_DRAFTS
from artifacts.errors import ArtifactError, NotYetError

DEFAULT_ROPE_THETA = 10000.0


def parse_draft_config(raw: Mapping[str, Any], where: str = "config.json") -> DFlashConfig:
    """The config of a parsed `config.json` of a draft.

    Raises ArtifactError naming the file and key for a missing or impossible value and for a folder
    that is no draft; NotYetError for a known feature or draft that is not implemented.
    """
    _check_architecture(raw, where)
    top = Keys(raw, where)
    own = top.section("dflash_config")
    _refuse_unsupported(top, own)
    layers = top.integer("num_hidden_layers")
    kinds, window = _attention(top, layers)
    target_layers = top.integer("num_target_layers")
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings",
    )  # fmt: skip
    try:
        return DFlashConfig(
            **{name: top.integer(name) for name in names},
            num_hidden_layers=layers,
            rms_norm_eps=top.number("rms_norm_eps"),
            rope_theta=_rope_theta(top),
            layer_types=kinds,
            sliding_window=window,
            causal=_causal(top, own, kinds),
            block_size=_either(top, own, "block_size"),
            mask_token_id=own.integer("mask_token_id"),
            target_layer_ids=_target_layer_ids(own, layers, target_layers),
            num_target_layers=target_layers,
            input_embedding_scale=own.number("input_embedding_scale", 1.0),
        )
    except ArtifactError as error:
        if str(error).startswith(where):
            raise
        raise ArtifactError(f"{where}: {error}") from None


def _check_architecture(raw: Mapping[str, Any], where: str) -> None:
    name = huggingface_architecture(raw, where)
    if name in DRAFT_ARCHITECTURES:
        return
    if name in PLANNED_DRAFTS:
        raise NotYetError(f"{where}: draft {name!r} is not implemented yet")
    known = ", ".join(DRAFT_ARCHITECTURES)
    raise ArtifactError(f"{where}: architecture {name!r} is not a draft; known drafts: {known}")


def _refuse_unsupported(top: Keys, own: Keys) -> None:
    top.refuse_quantization()
    top.only("attention_bias", (False,))
    top.only("hidden_act", ("silu", "swish"))
    own.only("use_swa", (False,))
    own.only("attention_sink_bias", (False,))
    own.only("output_multiplier", (1, 1.0))
    own.only("final_logit_softcapping", ())
    own.only("projector_type", ())
    for rope in (top.section("rope_scaling"), top.section("rope_parameters")):
        rope.only("rope_type", ("default",))
        rope.only("type", ("default",))
        rope.only("factor", (1, 1.0))
        rope.only("partial_rotary_factor", (1, 1.0))


def _attention(top: Keys, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Layer types, and the window of those that slide.

    Without `layer_types` the layers from `max_window_layers` on slide, where sliding is on at all.
    """
    given = top.get("layer_types", list, None)
    slides = top.get("use_sliding_window", bool, given is not None and SLIDING_ATTENTION in given)
    window: int | None = top.integer("sliding_window", None) if slides else None
    if given is not None:
        for kind in given:
            if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
                raise top.fail("layer_types", f"holds {kind!r}, which is not a known layer type")
        kinds = tuple(given)
    else:
        first = layers if window is None else top.integer("max_window_layers")
        kinds = tuple(FULL_ATTENTION if i < first else SLIDING_ATTENTION for i in range(layers))
    return kinds, window if SLIDING_ATTENTION in kinds else None


def _causal(top: Keys, own: Keys, kinds: tuple[str, ...]) -> tuple[bool, ...]:
    """One switch for all layers where there is one; else sliding layers are causal."""
    switch = top.get("is_causal", bool, own.get("causal", bool, None))
    return tuple(kind == SLIDING_ATTENTION if switch is None else switch for kind in kinds)


def _either(top: Keys, own: Keys, key: str) -> int:
    """A key that stands at the top or in `dflash_config`."""
    inner = own.integer(key, None)
    value: int = top.integer(key) if inner is None else top.integer(key, inner)
    return value


def _rope_theta(top: Keys) -> float:
    outer = top.number("rope_theta", DEFAULT_ROPE_THETA)
    return top.section("rope_parameters").number("rope_theta", outer)


def _target_layer_ids(own: Keys, layers: int, target_layers: int) -> tuple[int, ...]:
    """The default spreads one id a draft layer evenly, from layer 1 to the fourth from the end."""
    if own.values.get("target_layer_ids") is not None:
        return own.integers("target_layer_ids")
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))
