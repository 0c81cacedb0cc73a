"""config.json of Hugging Face, flat and nested, with the fall-backs of model_math.md section 10."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_cases import config_of, drop

from artifacts import ArtifactError, NotYetError, Qwen3_5Config
from artifacts.architectures.qwen3_5 import parse_huggingface_config
from artifacts.architectures.qwen3_5.config import config_from_json, config_to_json

Change = Callable[[dict[str, Any]], Any]


def parse(folder: Path, change: Change = lambda c: None) -> tuple[str, Qwen3_5Config]:
    raw = config_of(folder)
    change(raw)
    return parse_huggingface_config(raw, "config.json")


def test_flat_dense(dense: Path) -> None:
    name, config = parse(dense)
    assert name == "Qwen3_5ForCausalLM"
    assert config.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2
    assert config.ffn_types == ("dense",) * 8
    assert (config.rope_theta, config.rotary_dim, config.mrope_section) == (1e7, 16, (3, 3, 2))
    assert (config.num_experts, config.intermediate_size) == (0, 144)
    assert (config.linear_key_size, config.linear_value_size, config.linear_conv_size) == (
        64, 128, 256,
    )  # fmt: skip
    assert config.eos_token_ids == (998,)
    assert not config.tie_word_embeddings
    assert config.vision is None
    assert config.mtp_num_hidden_layers == 1


def test_moe_and_next(moe: Path, qwen3_next: Path) -> None:
    name, config = parse(moe, lambda c: c.update(norm_topk_prob=False))
    assert name == "Qwen3_5MoeForCausalLM"
    assert config.norm_topk_prob, "Qwen3.5 always renormalises"
    assert config.ffn_types == ("moe",) * 8
    name, config = parse(qwen3_next)
    assert name == "Qwen3_5MoeForCausalLM"
    assert config.mrope_section == (8, 0, 0), "plain rope"
    assert config.rope_theta == 1e7
    assert config.norm_topk_prob
    assert not parse(qwen3_next, lambda c: c.update(norm_topk_prob=False))[1].norm_topk_prob
    sparse = parse(qwen3_next, lambda c: c.update(mlp_only_layers=[1], decoder_sparse_step=2))[1]
    assert sparse.ffn_types == ("dense", "dense", "dense", "moe")
    assert sparse.intermediate_size == 96


def test_nested(vl: Path) -> None:
    name, config = parse(vl)
    assert name == "Qwen3_5ForCausalLM"
    assert config.vision is not None
    assert config.vision.depth == 3
    assert (config.image_token_id, config.video_token_id) == (1010, 1011)
    assert (config.vision_start_token_id, config.vision_end_token_id) == (1007, 1008)
    for top, inner, wanted in ((True, False, True), (False, True, False), (None, True, True)):

        def flags(c: dict, top: bool | None = top, inner: bool = inner) -> None:
            c["tie_word_embeddings"] = top
            c["text_config"]["tie_word_embeddings"] = inner

        assert parse(vl, flags)[1].tie_word_embeddings is wanted


@pytest.mark.parametrize(
    "name",
    ["Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"],
)
def test_moe_architectures(moe: Path, name: str) -> None:
    assert parse(moe, lambda c: c.update(architectures=[name]))[0] == "Qwen3_5MoeForCausalLM"


def test_fall_backs(dense: Path, qwen3_next: Path) -> None:
    def bare(c: dict) -> None:
        drop("rope_parameters", "partial_rotary_factor", "layer_types", "full_attention_interval",
             "tie_word_embeddings", "attention_bias", "hidden_act")(c)  # fmt: skip

    config = parse(dense, bare)[1]
    assert config.rope_theta == 10000.0
    assert config.rotary_dim == 16
    assert config.mrope_section == (11, 11, 10)
    assert config.layer_types == parse(dense)[1].layer_types
    top = parse(dense, lambda c: (bare(c), c.update(rope_theta=5000, partial_rotary_factor=0.5)))[1]
    assert (top.rope_theta, top.rotary_dim) == (5000.0, 32)
    both = parse(dense, lambda c: c.update(rope_theta=5000, partial_rotary_factor=0.5))[1]
    assert (both.rope_theta, both.rotary_dim) == (1e7, 16), "rope_parameters come first"
    every_2 = parse(qwen3_next, lambda c: c.update(full_attention_interval=2))[1]
    assert every_2.layer_types == ("linear_attention", "full_attention") * 2
    assert parse(dense, lambda c: c.update(eos_token_id=[5, 6]))[1].eos_token_ids == (5, 6)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps",
        "linear_num_key_heads", "linear_num_value_heads",
        "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts",
        "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        "max_position_embeddings", "architectures",
    ],
)  # fmt: skip
def test_missing_and_impossible_values(moe: Path, key: str) -> None:
    with pytest.raises(ArtifactError, match=rf"^config\.json: {key} is missing$"):
        parse(moe, drop(key))
    for value in (None, "x", [], True, -1, 0, {}):
        with pytest.raises(ArtifactError, match=rf"^config\.json: .*{key}"):
            parse(moe, lambda c, v=value: c.update({key: v}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads 3 does not divide"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types holds 'sliding_attention'"),
        ({"full_attention_interval": 0, "layer_types": None}, "full_attention_interval must be"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor must lie"),
        ({"rope_parameters": {"partial_rotary_factor": 0.02}}, "partial_rotary_factor gives 1"),
        ({"rope_parameters": {"mrope_section": [1, 2, 3]}}, r"mrope_section \[1, 2, 3\] does not"),
        ({"rope_parameters": {"mrope_section": [4, 4]}}, "mrope_section must be three"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be positive"),
        ({"rope_parameters": 3}, "rope_parameters must be dict"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be bool"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok 17 exceeds"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be positive"),
        ({"mlp_only_layers": [1]}, "intermediate_size is missing"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers must be a list of integers"),
        ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers must not be negative"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; at most 4096"),
        ({"num_experts": 10**12}, "num_experts is 1000000000000; at most 65536"),
        ({"mtp_num_hidden_layers": 65}, "mtp_num_hidden_layers is 65; at most 64"),
        ({"vocab_size": 1 << 31}, "vocab_size is 2147483648; at most 2147483647"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is too large"),
        ({"vocab_size": 10.5}, "vocab_size must be int"),
        ({"architectures": [3]}, "architectures must name one class"),
    ],
)
def test_inconsistent_values(moe: Path, change: dict, message: str) -> None:
    with pytest.raises(ArtifactError, match=rf"^config\.json: .*{message}") as caught:
        parse(moe, lambda c: c.update(change))
    assert not isinstance(caught.value, NotYetError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ({"layer_scale": True}, "layer_scale = True"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type = 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved = False"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\)"),
        ({"architectures": ["Qwen4ExpForCausalLM"]}, "architecture 'Qwen4ExpForCausalLM'"),
        ({"architectures": ["DFlash2DraftModel"]}, "architecture 'DFlash2DraftModel'"),
    ],
)
def test_features_that_would_change_the_maths(dense: Path, change: dict, message: str) -> None:
    with pytest.raises(NotYetError, match=rf"^config\.json: .*{message}.*not implemented yet"):
        parse(dense, lambda c: c.update(change))


def test_harmless_spellings(dense: Path) -> None:
    spelled = {"output_gate_type": "swish", "rope_scaling": None, "layer_scale": False}
    assert parse(dense, lambda c: c.update(spelled)) == parse(dense)


def test_deepstack_vision(vl: Path) -> None:
    with pytest.raises(NotYetError, match=r"vision_config\.deepstack_visual_indexes"):
        parse(vl, lambda c: c["vision_config"].update(deepstack_visual_indexes=[5]))
    with pytest.raises(ArtifactError, match=r"config\.json: vision_config\.depth is missing"):
        parse(vl, lambda c: c["vision_config"].pop("depth"))


def test_unknown_architecture(dense: Path) -> None:
    """The message lists the known ones."""
    with pytest.raises(
        ArtifactError, match=r"unknown architecture 'LlamaForCausalLM'; known: "
    ) as e:
        parse(dense, lambda c: c.update(architectures=["LlamaForCausalLM"]))
    assert "Qwen3NextForCausalLM" in str(e.value)
    assert not isinstance(e.value, NotYetError)


def test_json_round_trip(vl: Path, moe: Path) -> None:
    for folder in (vl, moe):
        _, config = parse(folder)
        again = config_from_json(config_to_json(config))
        assert again == config
        assert len({again, config}) == 1
