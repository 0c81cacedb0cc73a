"""Any damage to a Hugging Face folder is one clear error naming the file or tensor."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from artifact_cases import INDEX, Tensors, drop, edit_header, edit_json, same, tensors_of, variant
from safetensors.numpy import save_file

import artifacts

UP = "model.layers.1.mlp.up_proj.weight"
SHARD_1 = "model-00001-of-00003.safetensors"
SHARD_2 = "model-00002-of-00003.safetensors"


@pytest.fixture
def sharded(dense: Path, tmp_path: Path) -> Path:
    return variant(dense, tmp_path / "sharded", shards=3)


@pytest.fixture
def single(dense: Path, tmp_path: Path) -> Path:
    return variant(dense, tmp_path / "single")


def refused(folder: Path, *fragments: str, kind: type = artifacts.ArtifactError) -> None:
    """Opening raises once, without a chain of causes, and says all the fragments on one line."""
    with pytest.raises(kind) as caught:
        artifacts.open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.__cause__ is None
    for fragment in fragments:
        assert fragment in message, message


def where_is(folder: Path, name: str) -> Path:
    index = json.loads((folder / INDEX).read_text())
    return folder / index["weight_map"][name]


def test_shard_missing_on_disk(sharded: Path) -> None:
    (sharded / SHARD_2).unlink()
    refused(sharded, SHARD_2, "missing")


def test_tensor_missing_in_its_shard(sharded: Path) -> None:
    path = where_is(sharded, UP)
    kept = {
        n: v for n, v in tensors_of(sharded).items() if where_is(sharded, n) == path and n != UP
    }
    save_file(kept, path)
    refused(sharded, path.name, UP, "missing")


def test_tensor_in_two_shards(sharded: Path) -> None:
    path = where_is(sharded, UP)
    other = next(p for p in sharded.glob("*.safetensors") if p != path)
    held = {n: v for n, v in tensors_of(sharded).items() if where_is(sharded, n) == other}
    save_file(held | {UP: tensors_of(sharded)[UP]}, other)
    refused(sharded, UP, path.name, other.name, "two shards")


def test_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    actual = where_is(sharded, UP)
    other = next(p for p in sharded.glob("*.safetensors") if p != actual)
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({UP: other.name}))
    refused(sharded, UP, actual.name, other.name)


def test_tensor_not_in_the_index(sharded: Path) -> None:
    edit_json(sharded / INDEX, lambda index: drop(UP)(index["weight_map"]))
    refused(sharded, UP, "not named in", INDEX)


def test_stray_shard(sharded: Path) -> None:
    save_file({"x": np.ones(3, np.float32)}, sharded / "extra.safetensors")
    refused(sharded, "extra.safetensors", "stray")


def test_several_files_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    refused(sharded, INDEX, "3 *.safetensors files")


def test_no_weights_at_all(single: Path) -> None:
    (single / "model.safetensors").unlink()
    refused(single, str(single), "no *.safetensors")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": 3}}', "not a file name"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not a file name"),
    ],
)
def test_bad_index(sharded: Path, text: str, fragment: str) -> None:
    (sharded / INDEX).write_text(text)
    refused(sharded, INDEX, fragment)


def test_missing_parameter(dense: Path, vl: Path, tmp_path: Path) -> None:
    flat = variant(dense, tmp_path / "flat", tensors=drop(UP))
    refused(flat, UP, "text.layers.1.mlp.up_proj", "missing")
    nested_name = UP.replace("model.", "model.language_model.")
    nested = variant(vl, tmp_path / "nested", tensors=drop(nested_name))
    refused(nested, nested_name, "missing")


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",
        "model.visual.blocks.2.attn.qkv.bias",
        "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
        "model.language_model.layers.0.linear_attn.conv1d.weight",
    ],
)
def test_missing_in_any_component(vl: Path, tmp_path: Path, name: str) -> None:
    folder = variant(vl, tmp_path / "x", tensors=drop(name))
    refused(folder, name, "missing")


def test_missing_expert_and_missing_group(qwen3_next: Path, tmp_path: Path) -> None:
    for i, name in enumerate(
        (
            "model.layers.2.mlp.experts.11.up_proj.weight",
            "model.layers.2.mlp.experts.0.gate_proj.weight",
            "model.layers.3.mlp.experts.15.down_proj.weight",
        )
    ):
        folder = variant(qwen3_next, tmp_path / str(i), tensors=drop(name))
        refused(folder, name, "missing")
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    refused(
        variant(qwen3_next, tmp_path / "g", tensors=drop(name)),
        name,
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:-1],
        lambda a: np.concatenate([a, a[:1]]),
        lambda a: a.T,
        lambda a: a.reshape(-1),
        lambda a: a[None],
    ],
)
def test_wrong_shape(dense: Path, tmp_path: Path, change: Callable) -> None:
    def apply(t: Tensors) -> None:
        t[UP] = np.ascontiguousarray(change(t[UP]))

    folder = variant(dense, tmp_path / "x", tensors=apply)
    refused(folder, UP, str(list(tensors_of(folder)[UP].shape)), "[144, 128]")


def test_unknown_tensor(dense: Path, tmp_path: Path) -> None:
    def add(t: Tensors) -> None:
        t["model.layers.8.mlp.up_proj.weight"] = t[UP]

    refused(
        variant(dense, tmp_path / "x", tensors=add),
        "model.layers.8.mlp.up_proj.weight",
        "does not belong",
    )


def test_the_same_parameter_under_two_names(dense: Path, tmp_path: Path) -> None:
    twin = UP.replace("model.", "model.language_model.")

    def add(t: Tensors) -> None:
        t[twin] = t[UP]

    refused(variant(dense, tmp_path / "x", tensors=add), UP, twin, "same parameter")


def test_fused_and_per_expert_at_once(moe: Path, tmp_path: Path) -> None:
    extra = "model.layers.0.mlp.experts.3.down_proj.weight"

    def add(t: Tensors) -> None:
        t[extra] = t["model.layers.0.mlp.experts.down_proj"][3].copy()

    refused(variant(moe, tmp_path / "x", tensors=add), extra, "does not belong")


def test_parts_of_different_dtypes(qwen3_next: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.7.up_proj.weight"

    def cast(t: Tensors) -> None:
        t[name] = t[name].astype(np.float32)

    refused(variant(qwen3_next, tmp_path / "x", tensors=cast), name, "mixes bfloat16 and float32")


def test_vision_tensors_without_a_vision_config(vl: Path, tmp_path: Path) -> None:
    folder = variant(vl, tmp_path / "x", config=drop("vision_config"))
    refused(folder, "model.visual.", "vision_config")


def test_mtp_tensors_the_config_denies(dense: Path, tmp_path: Path) -> None:
    folder = variant(dense, tmp_path / "x", config=lambda c: c.update(mtp_num_hidden_layers=0))
    refused(folder, "mtp_num_hidden_layers")


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fn, np.int8, np.int32, np.float64, ml_dtypes.float8_e5m2]
)
def test_other_weight_dtypes_are_not_yet(dense: Path, tmp_path: Path, dtype: type) -> None:
    def cast(t: Tensors) -> None:
        t[UP] = t[UP].astype(dtype)

    folder = variant(dense, tmp_path / "x", tensors=cast)
    refused(folder, UP, "not implemented yet", kind=artifacts.NotYetError)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -100_000, -1])
def test_truncated_file(single: Path, keep: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(single, "model.safetensors", "truncated")


def test_file_cut_short_after_opening(single: Path) -> None:
    checkpoint = artifacts.open_checkpoint(single)
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(artifacts.ArtifactError, match=r"model\.safetensors: truncated at byte"):
        checkpoint.read("text.lm_head")
    path.unlink()
    with pytest.raises(artifacts.ArtifactError, match=r"model\.safetensors: cannot be read"):
        checkpoint.read("text.norm")


def test_trailing_bytes(single: Path) -> None:
    with (single / "model.safetensors").open("ab") as stream:
        stream.write(b"xyz")
    refused(single, "model.safetensors", "3 bytes belong to no tensor")


def test_absurd_header_length(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])
    refused(single, "model.safetensors", "not a safetensors file")


def set_field(name: str, key: str, value: object) -> Callable:
    return lambda header: header[name].update({key: value})


def twice(header: dict) -> str:
    text = json.dumps(header)
    return text[:-1] + f', "{UP}": {json.dumps(header[UP])}}}'


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (set_field(UP, "dtype", "BF17"), (UP, "unknown dtype 'BF17'")),
        (set_field(UP, "dtype", 7), (UP, "unknown dtype")),
        (set_field(UP, "dtype", "F32"), (UP, "do not hold F32")),
        (set_field(UP, "shape", [144, -128]), (UP, "not a list of counts")),
        (set_field(UP, "shape", "x"), (UP, "not a list of counts")),
        (set_field(UP, "shape", [145, 128]), (UP, "do not hold BF16")),
        (set_field(UP, "data_offsets", [5]), (UP, "not a pair")),
        (set_field(UP, "data_offsets", [0, 144 * 128 * 2]), ("model.safetensors", "overlaps")),
        (
            set_field(UP, "data_offsets", [1 << 40, (1 << 40) + 144 * 128 * 2]),
            (UP, "truncated"),
        ),
        (set_field(UP, "more", 1), (UP, "exactly dtype, shape and data_offsets")),
        (lambda h: drop("dtype")(h[UP]), (UP, "exactly dtype, shape and data_offsets")),
        (lambda h: h.update({UP: None}), (UP, "exactly dtype, shape and data_offsets")),
        (drop(UP), ("hole",)),
        (twice, (UP, "twice")),
        (lambda h: "{{", ("not valid JSON",)),
        (lambda h: "[1]", ("not a JSON object",)),
        (lambda h: json.dumps(h | {"__metadata__": 3}), ("__metadata__",)),
        (lambda h: "[" * 100_000, ("not valid JSON",)),
    ],
)
def test_bad_header(single: Path, change: Callable, fragments: tuple[str, ...]) -> None:
    edit_header(single / "model.safetensors", change)
    refused(single, "model.safetensors", *fragments)


def opened(folder: Path) -> tuple[artifacts.Checkpoint | None, Exception | None]:
    try:
        return artifacts.open_checkpoint(folder), None
    except artifacts.ArtifactError as error:
        return None, error


def test_any_flipped_header_bit_is_caught_or_harmless(dense: Path, tmp_path: Path) -> None:
    """A flip is refused with one ArtifactError, or changes no parameter (free-text metadata)."""
    folder = variant(dense, tmp_path / "x")
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(raw[:8], "little")
    wanted = artifacts.open_checkpoint(folder).read("text.layers.1.mlp.up_proj")
    rng = random.Random(0)
    harmless = 0
    for _ in range(150):
        at, bit = rng.randrange(end), 1 << rng.randrange(8)
        with path.open("r+b") as stream:
            stream.seek(at)
            stream.write(bytes([raw[at] ^ bit]))
        checkpoint, error = opened(folder)
        if checkpoint is None:
            assert str(folder) in str(error)
        else:
            harmless += 1
            assert same(checkpoint.read("text.layers.1.mlp.up_proj"), wanted)
        with path.open("r+b") as stream:
            stream.seek(at)
            stream.write(raw[at : at + 1])
    assert harmless <= 3


def test_no_config_no_folder_no_model(single: Path, tmp_path: Path) -> None:
    (single / "config.json").unlink()
    refused(single, "config.json", "missing")
    refused(tmp_path / "nowhere", "nowhere", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "neither an artifact (manifest.json) nor a Hugging Face folder")


def test_bad_config_file(single: Path) -> None:
    (single / "config.json").write_text('{"architectures": ')
    refused(single, "config.json", "not valid JSON")
    (single / "config.json").write_bytes(b"\xff\xfe{}")
    refused(single, "config.json", "not valid JSON")
    (single / "config.json").write_text("3")
    refused(single, "config.json", "JSON object")


def test_tokenizer_is_needed_only_for_the_front_end(dense: Path, tmp_path: Path) -> None:
    folder = variant(dense, tmp_path / "x")
    (folder / "tokenizer.json").unlink()
    checkpoint = artifacts.open_checkpoint(folder)
    with pytest.raises(artifacts.ArtifactError, match=r"tokenizer\.json: missing"):
        _ = checkpoint.frontend


def test_front_end_resources(vl: Path, tmp_path: Path) -> None:
    frontend = artifacts.open_checkpoint(vl).frontend
    assert frontend.tokenizer_json == vl / "tokenizer.json"
    assert frontend.generation_config == json.loads((vl / "generation_config.json").read_text())
    assert frontend.preprocessor_config is not None
    assert frontend.video_preprocessor_config is not None
    folder = tmp_path / "copy"
    shutil.copytree(vl, folder)
    (folder / "chat_template.jinja").write_text("from the file é", encoding="utf-8")
    assert artifacts.open_checkpoint(folder).frontend.chat_template == "from the file é"
    (folder / "chat_template.jinja").unlink()
    (folder / "preprocessor_config.json").unlink()
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    for template, wanted in (("inline", "inline"), (named, "b"), (None, None)):
        edit_json(folder / "tokenizer_config.json", lambda c, t=template: c.update(chat_template=t))
        assert artifacts.open_checkpoint(folder).frontend.chat_template == wanted
    assert artifacts.open_checkpoint(folder).frontend.preprocessor_config is None
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(chat_template=5))
    with pytest.raises(artifacts.ArtifactError, match="chat_template is not a text"):
        _ = artifacts.open_checkpoint(folder).frontend
    (folder / "generation_config.json").write_text("{")
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(chat_template="x"))
    with pytest.raises(artifacts.ArtifactError, match=r"generation_config\.json: not valid JSON"):
        _ = artifacts.open_checkpoint(folder).frontend
