"""A DFlash draft beside a model: its config, its folder, and the artifact that holds both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact_cases import Tensors, config_of, drop, edit_json, same, tensors_of, write

import artifacts
from artifacts import ArtifactError, DFlashConfig, NotYetError
from artifacts.architectures.dflash import dflash_parameter_shapes, parse_draft_config
from artifacts.architectures.qwen3_5.config import config_from_json, config_to_json
from artifacts.manifest import (
    MANIFEST_FILE,
    manifest_digest,
    manifest_to_text,
    read_manifest,
)

DRAFTS = ["tiny-dflash-full", "tiny-dflash-swa"]
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def full(goldens: Path) -> Path:
    return goldens / "tiny-dflash-full"


@pytest.fixture
def swa(goldens: Path) -> Path:
    return goldens / "tiny-dflash-swa"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    goldens = Path(__file__).parents[1] / "goldens"
    return artifacts.convert(
        goldens / "tiny-qwen3.5-dense",
        tmp_path_factory.mktemp("draft") / "out",
        draft=goldens / "tiny-dflash-swa",
    )


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """A copy of an artifact, to damage."""
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def parse(folder: Path, change: Change = lambda c: None) -> DFlashConfig:
    raw = config_of(folder)
    change(raw)
    return parse_draft_config(raw)


def changed(
    source: Path,
    folder: Path,
    *,
    config: Change = lambda c: None,
    tensors: Callable[[Tensors], Any] = lambda t: None,
    shards: int = 0,
) -> Path:
    """A copy of a draft folder, changed in place by `config` and `tensors`."""
    raw, loaded = config_of(source), tensors_of(source)
    config(raw)
    tensors(loaded)
    return write(folder, raw, loaded, shards)


def wanted(folder: Path) -> Tensors:
    """Every parameter of a draft, named by hand."""
    names = {
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "post_attention_norm",
    }
    found = {}
    for tensor, value in tensors_of(folder).items():
        path = tensor.removesuffix(".weight").split(".")
        found["dflash." + ".".join([*path[:-1], names.get(path[-1], path[-1])])] = value
    return found


def test_config_full(full: Path) -> None:
    assert parse(full) == DFlashConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=4096,
        layer_types=("full_attention", "full_attention"),
        sliding_window=None,
        causal=(False, False),
        block_size=8,
        mask_token_id=1017,
        target_layer_ids=(1, 3, 5),
        num_target_layers=8,
        input_embedding_scale=1.0,
    )
    assert parse(full).context_size == 3 * 128


def test_config_sliding(full: Path, swa: Path) -> None:
    config = parse(swa)
    assert config.layer_types == ("sliding_attention", "full_attention")
    assert (config.sliding_window, config.causal) == (32, (True, False))
    assert parse(swa, drop("use_sliding_window")) == config
    by_rule = parse(swa, lambda c: (c.pop("layer_types"), c.update(max_window_layers=1)))
    assert by_rule.layer_types == ("full_attention", "sliding_attention")
    assert parse(full, drop("layer_types")) == parse(full)
    assert parse(full, lambda c: c.update(sliding_window=64)) == parse(full)


@pytest.mark.parametrize(
    ("top", "own", "causal"),
    [
        (None, None, (True, False)),
        (False, None, (False, False)),
        (True, None, (True, True)),
        (None, False, (False, False)),
        (None, True, (True, True)),
        (False, True, (False, False)),
        (True, False, (True, True)),
    ],
)
def test_which_layers_are_causal(
    swa: Path, top: bool | None, own: bool | None, causal: tuple[bool, ...]
) -> None:
    """The top-level switch, then that of dflash_config, else the sliding layers."""

    def switch(c: dict) -> None:
        c["is_causal"] = top
        c["dflash_config"]["causal"] = own

    assert parse(swa, switch).causal == causal


def test_fall_backs(full: Path) -> None:
    def own(**values: Any) -> Change:
        return lambda c: c["dflash_config"].update(values)

    assert parse(full, own(target_layer_ids=None)).target_layer_ids == (1, 5)
    one = lambda c: c.update(num_hidden_layers=1, layer_types=["full_attention"])  # noqa: E731
    assert parse(full, lambda c: (one(c), own(target_layer_ids=None)(c))).target_layer_ids == (4,)
    assert parse(full, own(input_embedding_scale=2)).input_embedding_scale == 2.0
    inner = parse(full, lambda c: (c.pop("block_size"), own(block_size=4)(c)))
    assert inner.block_size == 4
    assert parse(full, drop("rope_theta")).rope_theta == 10000.0
    nested = parse(full, lambda c: c.update(rope_parameters={"rope_theta": 5000}))
    assert nested.rope_theta == 5000.0


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "block_size",
        "num_target_layers", "architectures",
    ],
)  # fmt: skip
def test_missing_and_impossible_values(full: Path, key: str) -> None:
    with pytest.raises(ArtifactError, match=rf"^config\.json: {key} is missing$"):
        parse(full, drop(key))
    for value in (None, "x", [], True, -1, 0, {}, 1 << 70):
        if key == "rms_norm_eps" and value == 1 << 70:
            continue
        with pytest.raises(ArtifactError, match=rf"^config\.json: .*{key}"):
            parse(full, lambda c, v=value: c.update({key: v}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"head_dim": 31}, "head_dim is 31; rotation needs an even number"),
        ({"block_size": 1}, "block_size is 1; an anchor and one mask need 2"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 2"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types holds 'linear_attention'"),
        ({"sliding_window": None}, "sliding_window is missing, but there are sliding layers"),
        ({"use_sliding_window": False}, "sliding_window is missing, but there are sliding layers"),
        ({"sliding_window": 0}, "sliding_window must be positive, not 0"),
        ({"is_causal": 1}, "is_causal must be bool"),
        ({"rope_theta": float("inf")}, "rope_theta must be positive"),
        ({"dflash_config": None}, r"dflash_config\.mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id must not be negative"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "'Qwen3ForCausalLM' is not a draft; known"),
    ],
)
def test_inconsistent_values(swa: Path, change: dict, message: str) -> None:
    with pytest.raises(ArtifactError, match=rf"^config\.json: .*{message}") as caught:
        parse(swa, lambda c: c.update(change))
    assert not isinstance(caught.value, NotYetError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"target_layer_ids": [3, 1]}, r"target_layer_ids \[3, 1\] does not ascend"),
        ({"target_layer_ids": [1, 1]}, r"target_layer_ids \[1, 1\] does not ascend"),
        ({"target_layer_ids": [1, 8]}, r"\[1, 8\] is not within num_target_layers 8"),
        ({"target_layer_ids": [-1, 3]}, r"\[-1, 3\] is not within num_target_layers 8"),
        ({"target_layer_ids": ["1"]}, "target_layer_ids must be a list of integers"),
        ({"input_embedding_scale": 0}, "input_embedding_scale must be positive"),
        ({"input_embedding_scale": float("nan")}, "input_embedding_scale must be positive"),
        ({"causal": "no"}, r"dflash_config\.causal must be bool"),
    ],
)
def test_inconsistent_values_of_dflash_config(full: Path, change: dict, message: str) -> None:
    with pytest.raises(ArtifactError, match=rf"^config\.json: .*{message}"):
        parse(full, lambda c: c["dflash_config"].update(change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "draft 'DFlash2DraftModel'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type = 'linear'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor = 2.0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\)"),
        ({"dflash_config": {"use_swa": True}}, r"dflash_config\.use_swa = True"),
        ({"dflash_config": {"projector_type": "dspark"}}, "projector_type = 'dspark'"),
        ({"dflash_config": {"output_multiplier": 0.5}}, "output_multiplier = 0.5"),
        ({"dflash_config": {"final_logit_softcapping": 30}}, "final_logit_softcapping = 30"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias = True"),
    ],
)
def test_features_that_would_change_the_maths(full: Path, change: dict, message: str) -> None:
    with pytest.raises(NotYetError, match=rf"^config\.json: .*{message}.*not implemented yet"):
        parse(full, lambda c: c.update(change))
    neutral = {"rope_scaling": {"rope_type": "default", "factor": 1.0}}
    assert parse(full, lambda c: c.update(neutral)) == parse(full)


@pytest.mark.parametrize("name", DRAFTS)
def test_config_round_trip(goldens: Path, dense: Path, name: str) -> None:
    config = artifacts.open_checkpoint(dense, draft=goldens / name).config
    assert config.dflash == parse(goldens / name)
    again = config_from_json(json.loads(json.dumps(config_to_json(config))))
    assert again == config
    assert len({again, config}) == 1
    assert config != artifacts.open_checkpoint(dense).config


@pytest.mark.parametrize("name", DRAFTS)
def test_convert_and_reopen_gives_equal_bytes(
    goldens: Path, dense: Path, tmp_path: Path, name: str
) -> None:
    """ART-01..03: what opening both folders shows is what the artifact holds, bit for bit."""
    source = artifacts.open_checkpoint(dense, draft=str(goldens / name))
    made = artifacts.open_checkpoint(
        artifacts.convert(dense, tmp_path / "out", draft=goldens / name)
    )
    tensors = wanted(goldens / name)
    assert (source.kind, made.kind) == ("huggingface", "artifact")
    for checkpoint in (source, made):
        assert checkpoint.components == ("text", "mtp", "dflash")
        assert set(checkpoint.parameters("dflash")) == set(tensors)
        for parameter, value in tensors.items():
            assert same(checkpoint.read(parameter), value), parameter
    assert made.config == source.config
    assert made.parameters() == source.parameters()
    for parameter in source.parameters("text"):
        assert same(made.read(parameter), source.read(parameter)), parameter


def test_the_parameter_table_is_the_coverage(dense: Path, full: Path) -> None:
    checkpoint = artifacts.open_checkpoint(dense, draft=full)
    assert checkpoint.config.dflash is not None
    table = dflash_parameter_shapes(checkpoint.config.dflash)
    assert table["dflash.fc"] == (128, 3 * 128)
    assert {n: checkpoint.shape(n) for n in checkpoint.parameters("dflash")} == table
    assert len(table) == 3 + 2 * 11


def test_shards_of_a_draft(dense: Path, full: Path, tmp_path: Path) -> None:
    folder = changed(full, tmp_path / "sharded", shards=3)
    checkpoint = artifacts.open_checkpoint(dense, draft=folder)
    for parameter, value in wanted(full).items():
        assert same(checkpoint.read(parameter), value), parameter
    next(iter(folder.glob("*.safetensors"))).unlink()
    with pytest.raises(ArtifactError, match=r"named in model\.safetensors\.index\.json but miss"):
        artifacts.open_checkpoint(dense, draft=folder)


def test_describe_and_verify(converted: Path, dense: Path, swa: Path) -> None:
    tensors = tensors_of(swa).values()
    shown = artifacts.describe(converted)
    assert shown.components["dflash"] == artifacts.ComponentSummary(
        parameters=len(tensors),
        elements=sum(v.size for v in tensors),
        nbytes=sum(v.nbytes for v in tensors),
        nbytes_by_format={"bf16": sum(v.nbytes for v in tensors)},
    )
    assert shown.config["dflash"]["target_layer_ids"] == [1, 3, 5]
    assert shown.provenance["source"] == "tiny-qwen3.5-dense + tiny-dflash-swa"
    report = artifacts.verify(converted)
    assert report.ok
    assert report.components == ("text", "mtp", "dflash")
    assert report.nbytes == sum(v.nbytes for v in (*tensors, *tensors_of(dense).values()))
    manifest = read_manifest(converted)
    assert manifest.digest == manifest_digest(manifest)


def test_verify_counts_values_of_a_draft(dense: Path, full: Path, tmp_path: Path) -> None:
    def spoil(t: Tensors) -> None:
        t["hidden_norm.weight"][3:5] = np.nan

    folder = changed(full, tmp_path / "x", tensors=spoil)
    report = artifacts.verify(artifacts.convert(dense, tmp_path / "out", draft=folder))
    assert report.nonfinite == {"dflash.hidden_norm": artifacts.NonFinite(nan=2, inf=0)}


def test_a_draft_beside_an_artifact(dense: Path, full: Path, tmp_path: Path) -> None:
    """An artifact without a draft takes one when opened; one that has a draft does not."""
    out = artifacts.convert(dense, tmp_path / "out")
    checkpoint = artifacts.open_checkpoint(out, draft=full)
    assert checkpoint.components == ("text", "mtp", "dflash")
    assert same(checkpoint.read("dflash.norm"), tensors_of(full)["norm.weight"])
    assert same(checkpoint.read("text.norm"), tensors_of(dense)["model.norm.weight"])
    with pytest.raises(ArtifactError, match="is an artifact already"):
        artifacts.convert(out, tmp_path / "again", draft=full)


def test_one_draft_only(converted: Path, full: Path) -> None:
    with pytest.raises(ArtifactError, match=r"dflash-full: .*the model has a draft already"):
        artifacts.open_checkpoint(converted, draft=full)


def test_folders_that_are_no_draft(dense: Path, full: Path, tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path / "gone", "gone: no such folder"),
        (tmp_path, r"not a draft: it has no config\.json"),
        (dense, r"config\.json: architecture 'Qwen3_5ForCausalLM' is not a draft"),
    ):
        with pytest.raises(ArtifactError, match=message):
            artifacts.convert(dense, tmp_path / "out", draft=folder)
    dflash2 = changed(
        full, tmp_path / "2", config=lambda c: c.update(architectures=["DFlash2DraftModel"])
    )
    with pytest.raises(NotYetError, match=r"2/config\.json: draft 'DFlash2DraftModel' is not impl"):
        artifacts.open_checkpoint(dense, draft=dflash2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2"]


def test_a_draft_is_no_model(full: Path, tmp_path: Path) -> None:
    for call in (artifacts.open_checkpoint, artifacts.describe, artifacts.verify):
        with pytest.raises(ArtifactError, match=r"is a draft, .*ninfer convert .* --draft"):
            call(full)
    with pytest.raises(ArtifactError, match=r"config\.json: DFlashDraftModel is a draft"):
        artifacts.convert(full, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_target_layers": 9}, "num_target_layers is 9, but num_hidden_layers of the model is"),
        ({"dflash_config": {"mask_token_id": 1024, "target_layer_ids": [1, 3, 5]}},
         "mask_token_id is 1024, but vocab_size of the model is 1024"),
    ],
)  # fmt: skip
def test_a_draft_of_another_model(
    dense: Path, full: Path, tmp_path: Path, change: dict, message: str
) -> None:
    folder = changed(full, tmp_path / "x", config=lambda c: c.update(change))
    with pytest.raises(ArtifactError, match=rf"x: does not fit this model: .*{message}"):
        artifacts.open_checkpoint(dense, draft=folder)


def test_a_draft_of_another_width(dense: Path, full: Path, tmp_path: Path) -> None:
    def half(t: Tensors) -> None:
        config = replace(parse(full), hidden_size=64)
        shapes = dflash_parameter_shapes(config)
        ours = dict(zip(wanted(full), list(t), strict=True))
        for parameter, shape in shapes.items():
            t[ours[parameter]] = np.zeros(shape, t[ours[parameter]].dtype)

    folder = changed(full, tmp_path / "x", config=lambda c: c.update(hidden_size=64), tensors=half)
    with pytest.raises(ArtifactError, match=r"dflash\.hidden_size is 64, but hidden_size .* 128"):
        artifacts.open_checkpoint(dense, draft=folder)
    lying = changed(full, tmp_path / "y", config=lambda c: c.update(hidden_size=64))
    with pytest.raises(ArtifactError, match=r"fc\.weight has shape \[128, 384\], the config needs"):
        artifacts.open_checkpoint(dense, draft=lying)


def test_tensors_of_a_draft(dense: Path, full: Path, tmp_path: Path) -> None:
    """Every parameter once, nothing else; recomputed buffers are dropped."""
    missing = changed(full, tmp_path / "a", tensors=drop("layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ArtifactError,
        match=r"a: tensor layers\.1\.mlp\.up_proj\.weight is missing "
        r"\(parameter dflash\.layers\.1\.mlp\.up_proj\)",
    ):
        artifacts.open_checkpoint(dense, draft=missing)
    extra = changed(
        full, tmp_path / "b", tensors=lambda t: t.update({"lm_head.weight": t["norm.weight"]})
    )
    with pytest.raises(ArtifactError, match=r"b: tensor lm_head\.weight does not belong to this"):
        artifacts.open_checkpoint(dense, draft=extra)
    typed = changed(
        full, tmp_path / "c", tensors=lambda t: t.update({"norm.weight": np.zeros(128, np.int8)})
    )
    with pytest.raises(NotYetError, match=r"tensor norm\.weight of dtype I8"):
        artifacts.open_checkpoint(dense, draft=typed)
    buffer = changed(
        full,
        tmp_path / "d",
        tensors=lambda t: t.update({"rotary_emb.inv_freq": np.ones(16, np.float32)}),
    )
    checkpoint = artifacts.open_checkpoint(dense, draft=buffer)
    assert checkpoint.manifest.provenance.dropped == ("dflash/rotary_emb.inv_freq",)


def drop_norm(m: dict[str, Any]) -> None:
    for table in ("objects", "bindings", "uses"):
        del m[table]["dflash.norm"]


def without_component(m: dict[str, Any]) -> None:
    m["components"].remove("dflash")
    for table in ("objects", "bindings", "uses"):
        m[table] = {n: v for n, v in m[table].items() if not n.startswith("dflash.")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_norm, r"parameter dflash\.norm \[128\] is missing"),
        (without_component, "its component dflash is missing"),
        (lambda m: m["config"].update(dflash=None), "its config dflash is missing"),
        (lambda m: m["config"].pop("dflash"), "its config dflash is missing"),
        (lambda m: m["config"]["dflash"].pop("block_size"), r"config\.dflash\.block_size: "),
        (lambda m: m["config"]["dflash"].update(surprise=1), r"config\.dflash\.surprise: "),
        (lambda m: m["config"]["dflash"].update(causal=[1, 0]), r"config\.dflash\.causal\.0: "),
        (lambda m: m["config"]["dflash"].update(causal=[True]), "dflash.causal has 1 entries"),
        (lambda m: m["config"]["dflash"].update(sliding_window=None), "sliding_window is missing"),
        (lambda m: m["config"]["dflash"].update(hidden_size=64), "dflash.hidden_size is 64, but"),
        (lambda m: m["components"].append("dflash2"), "'dflash2' is not implemented yet"),
    ],
)
def test_what_must_hold(copy: Path, change: Change, message: str) -> None:
    edit_json(copy / "manifest.json", change)
    with pytest.raises(ArtifactError, match=rf"manifest\.json: .*{message}"):
        artifacts.open_checkpoint(copy, verify=False)


def test_a_window_without_sliding_layers(swa: Path) -> None:
    with pytest.raises(ArtifactError, match="sliding_window is 32, but no layer is sliding"):
        replace(parse(swa), layer_types=("full_attention",) * 2)


def test_old_manifests_still_open(goldens: Path, tmp_path: Path) -> None:
    """Those from before drafts have no `config.dflash`."""
    folder = artifacts.convert(goldens / "tiny-qwen3.5-dense", tmp_path / "out")
    manifest = read_manifest(folder)
    config = {k: v for k, v in manifest.config.items() if k != "dflash"}
    old = manifest.model_copy(update={"config": config})
    (folder / MANIFEST_FILE).write_text(manifest_to_text(old))
    assert "dflash" not in read_manifest(folder).config
    assert artifacts.open_checkpoint(folder).config.dflash is None
