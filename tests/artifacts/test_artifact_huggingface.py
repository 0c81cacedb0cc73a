"""Hugging Face folders against safetensors' own reader and hand-written regrouping."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from artifact_cases import INDEX, Tensors, drop, same, tensors_of, variant

import artifacts

LINEAR = {
    "linear_attn.in_proj_qkv": "linear_attn.in_proj_qkv.weight",
    "linear_attn.in_proj_z": "linear_attn.in_proj_z.weight",
    "linear_attn.in_proj_b": "linear_attn.in_proj_b.weight",
    "linear_attn.in_proj_a": "linear_attn.in_proj_a.weight",
    "linear_attn.dt_bias": "linear_attn.dt_bias",
    "linear_attn.A_log": "linear_attn.A_log",
    "linear_attn.norm": "linear_attn.norm.weight",
    "linear_attn.out_proj": "linear_attn.out_proj.weight",
}
FULL = {
    f"self_attn.{n}": f"self_attn.{n}.weight"
    for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
}
DENSE_FFN = {f"mlp.{n}": f"mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
SHARED_FFN = {
    "mlp.router": "mlp.gate.weight",
    "mlp.shared_expert.gate_proj": "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_expert.up_proj": "mlp.shared_expert.up_proj.weight",
    "mlp.shared_expert.down_proj": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_expert_gate": "mlp.shared_expert_gate.weight",
}
NORMS = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
}


def expected_layer(ours: str, theirs: str, full: bool, moe: bool, t: Tensors) -> Tensors:
    names = NORMS | (FULL if full else LINEAR) | (SHARED_FFN if moe else DENSE_FFN)
    if not full and f"{theirs}.linear_attn.in_proj_qkvz.weight" in t:
        names = {k: v for k, v in names.items() if "in_proj_" not in k}
    found = {f"{ours}.{k}": t[f"{theirs}.{v}"] for k, v in names.items()}
    if not full:
        found[f"{ours}.linear_attn.conv1d"] = t[f"{theirs}.linear_attn.conv1d.weight"][:, 0, :]
        found |= next_projections(ours, theirs, t)
    if moe:
        found |= experts(ours, theirs, t)
    return found


def next_projections(ours: str, theirs: str, t: Tensors) -> Tensors:
    """tiny-qwen3-next: 2 key heads of 16, 4 value heads of 32, so 2 value heads a key head."""
    qkvz = t.get(f"{theirs}.linear_attn.in_proj_qkvz.weight")
    if qkvz is None:
        return {}
    by_head = qkvz.reshape(2, 16 + 16 + 64 + 64, -1)
    q, k, v, z = np.split(by_head, [16, 32, 96], axis=1)
    ba = t[f"{theirs}.linear_attn.in_proj_ba.weight"].reshape(2, 4, -1)
    width = qkvz.shape[1]
    return {
        f"{ours}.linear_attn.in_proj_qkv": np.concatenate(
            [x.reshape(-1, width) for x in (q, k, v)]
        ),
        f"{ours}.linear_attn.in_proj_z": z.reshape(-1, width),
        f"{ours}.linear_attn.in_proj_b": ba[:, :2].reshape(-1, width),
        f"{ours}.linear_attn.in_proj_a": ba[:, 2:].reshape(-1, width),
    }


def experts(ours: str, theirs: str, t: Tensors) -> Tensors:
    fused = f"{theirs}.mlp.experts.gate_up_proj"
    if fused in t:
        gate_up, down = t[fused], t[f"{theirs}.mlp.experts.down_proj"]
    else:
        one = [
            [t[f"{theirs}.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")]
            for e in range(16)
        ]
        gate_up = np.stack([np.concatenate([gate, up]) for gate, up, _ in one])
        down = np.stack([down for _, _, down in one])
    return {
        f"{ours}.mlp.experts.gate_up_proj": gate_up,
        f"{ours}.mlp.experts.down_proj": down,
    }


def expected(t: Tensors, layers: int, moe: bool, tied: bool) -> Tensors:
    nested = any(name.startswith("model.language_model.") for name in t)
    text = "model.language_model" if nested else "model"
    found = {
        "text.embed_tokens": t[f"{text}.embed_tokens.weight"],
        "text.norm": t[f"{text}.norm.weight"],
    }
    if not tied:
        found["text.lm_head"] = t["lm_head.weight"]
    for i in range(layers):
        found |= expected_layer(f"text.layers.{i}", f"{text}.layers.{i}", i % 4 == 3, moe, t)
    for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        found[f"mtp.{name}"] = t[f"mtp.{name}.weight"]
    found |= expected_layer("mtp.layers.0", "mtp.layers.0", True, moe, t)
    for name, value in t.items():
        if name.startswith("model.visual."):
            found["vision." + name.removeprefix("model.visual.")] = value
    return found


def assert_reads(checkpoint: artifacts.Checkpoint, wanted: Tensors) -> None:
    assert set(checkpoint.parameters()) == set(wanted)
    for name, value in wanted.items():
        assert checkpoint.shape(name) == value.shape, name
        assert checkpoint.dtype(name) == value.dtype, name
        assert same(checkpoint.read(name), value), name


@pytest.mark.parametrize(
    ("folder", "entry", "layers", "moe", "tied"),
    [
        ("tiny-qwen3.5-dense", "Qwen3_5ForCausalLM", 8, False, False),
        ("tiny-qwen3.5-moe", "Qwen3_5MoeForCausalLM", 8, True, False),
        ("tiny-qwen3.5-vl", "Qwen3_5ForCausalLM", 4, False, True),
        ("tiny-qwen3-next", "Qwen3_5MoeForCausalLM", 4, True, False),
    ],
)
def test_every_parameter_is_what_the_file_holds(
    goldens: Path, folder: str, entry: str, layers: int, moe: bool, tied: bool
) -> None:
    """ART-03, OWN-13."""
    checkpoint = artifacts.open_checkpoint(str(goldens / folder))
    assert checkpoint.kind == "huggingface"
    assert checkpoint.architecture == checkpoint.name == entry
    assert_reads(checkpoint, expected(tensors_of(goldens / folder), layers, moe, tied))


def test_the_parameter_table_is_the_coverage(vl: Path) -> None:
    checkpoint = artifacts.open_checkpoint(vl)
    assert checkpoint.components == ("text", "mtp", "vision")
    table = artifacts.parameter_shapes(checkpoint.config, checkpoint.components)
    assert {n: checkpoint.shape(n) for n in checkpoint.parameters()} == table
    assert set(checkpoint.parameters("mtp")) == {n for n in table if n.startswith("mtp.")}


@pytest.mark.parametrize("name", ["tiny-qwen3.5-moe", "tiny-qwen3-next"])
@pytest.mark.parametrize("max_bytes", [6, 1000, 1 << 14, 64 << 20])
def test_blocks_are_the_parameter_in_bounded_pieces(
    goldens: Path, name: str, max_bytes: int
) -> None:
    checkpoint = artifacts.open_checkpoint(goldens / name)
    parameters = (
        checkpoint.parameters() if max_bytes > 1 << 13 else ("text.layers.0.linear_attn.in_proj_z",)
    )
    for parameter in parameters:
        blocks = list(checkpoint.blocks(parameter, max_bytes))
        assert all(
            b.ndim == 1 and b.flags.c_contiguous and b.nbytes <= max_bytes for _, b in blocks
        )
        sizes = [b.size for _, b in blocks]
        assert [at for at, _ in blocks] == [sum(sizes[:i]) for i in range(len(sizes))]
        whole = np.concatenate([b for _, b in blocks])
        assert same(whole.reshape(checkpoint.shape(parameter)), checkpoint.read(parameter))


def test_blocks_are_fresh_arrays(dense: Path) -> None:
    """A consumer may keep or alias a block while the next one is read."""
    checkpoint = artifacts.open_checkpoint(dense)
    blocks = [b for _, b in checkpoint.blocks("text.embed_tokens", 1 << 14)]
    assert not any(np.shares_memory(a, b) for a, b in pairwise(blocks))


def test_a_block_holds_at_least_one_element(dense: Path) -> None:
    checkpoint = artifacts.open_checkpoint(dense)
    with pytest.raises(
        artifacts.ArtifactError, match=r"max_bytes 1 holds no element of text\.norm"
    ):
        list(checkpoint.blocks("text.norm", 1))


def test_sharded_with_an_index(dense: Path, tmp_path: Path) -> None:
    folder = variant(dense, tmp_path / "sharded", shards=5)
    assert len(list(folder.glob("*.safetensors"))) == 5
    assert (folder / INDEX).is_file()
    assert_reads(artifacts.open_checkpoint(folder), expected(tensors_of(dense), 8, False, False))


def test_per_expert_names_in_qwen3_5_moe(moe: Path, tmp_path: Path) -> None:
    """One layer per expert, the others fused: each is recognised by what is there."""

    def split(t: Tensors) -> None:
        for layer in ("model.layers.2", "mtp.layers.0"):
            gate_up = t.pop(f"{layer}.mlp.experts.gate_up_proj")
            down = t.pop(f"{layer}.mlp.experts.down_proj")
            for e in range(16):
                t[f"{layer}.mlp.experts.{e}.gate_proj.weight"] = gate_up[e, :24].copy()
                t[f"{layer}.mlp.experts.{e}.up_proj.weight"] = gate_up[e, 24:].copy()
                t[f"{layer}.mlp.experts.{e}.down_proj.weight"] = down[e].copy()

    folder = variant(moe, tmp_path / "split", tensors=split)
    assert_reads(artifacts.open_checkpoint(folder), expected(tensors_of(moe), 8, True, False))


def test_both_prefixes_with_both_config_forms(dense: Path, vl: Path, tmp_path: Path) -> None:
    def nest(t: Tensors) -> Tensors:
        return {re.sub(r"^model\.", "model.language_model.", n): v for n, v in t.items()}

    def flatten(t: Tensors) -> Tensors:
        return {n.replace("model.language_model.", "model."): v for n, v in t.items()}

    for source, rename, layers, tied in ((dense, nest, 8, False), (vl, flatten, 4, True)):
        folder = variant(source, tmp_path / source.name, tensors=rename)
        assert_reads(
            artifacts.open_checkpoint(folder), expected(tensors_of(source), layers, False, tied)
        )


def test_a_log_and_norm_in_bf16_and_weights_in_other_floats(dense: Path, tmp_path: Path) -> None:
    def cast(t: Tensors) -> None:
        for name in list(t):
            if name.endswith(("A_log", "linear_attn.norm.weight")):
                t[name] = t[name].astype(ml_dtypes.bfloat16)
            elif "mlp.up_proj" in name:
                t[name] = t[name].astype(np.float16)
            elif "mlp.down_proj" in name:
                t[name] = t[name].astype(np.float32)

    folder = variant(dense, tmp_path / "cast", tensors=cast)
    checkpoint = artifacts.open_checkpoint(folder)
    assert_reads(checkpoint, expected(tensors_of(folder), 8, False, False))
    assert checkpoint.dtype("text.layers.0.linear_attn.A_log") == ml_dtypes.bfloat16
    assert artifacts.open_checkpoint(dense).dtype("text.layers.0.linear_attn.A_log") == np.float32
    formats = {o.format for o in checkpoint.manifest.objects.values()}
    assert formats == {"bf16", "fp16", "fp32"}


def test_without_mtp_and_vision(vl: Path, tmp_path: Path) -> None:
    def only_text(t: Tensors) -> Tensors:
        return {n: v for n, v in t.items() if not n.startswith(("mtp.", "model.visual."))}

    checkpoint = artifacts.open_checkpoint(variant(vl, tmp_path / "text", tensors=only_text))
    assert checkpoint.components == ("text",)
    assert all(n.startswith("text.") for n in checkpoint.parameters())


def test_rotary_tables_are_dropped_and_recorded(dense: Path, tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.rotary_emb.inv_freq"

    def add(t: Tensors) -> None:
        t[name] = np.ones(8, np.float32)

    checkpoint = artifacts.open_checkpoint(variant(dense, tmp_path / "inv", tensors=add))
    assert checkpoint.manifest.provenance.dropped == (name,)
    assert_reads(checkpoint, expected(tensors_of(dense), 8, False, False))


def test_tied_with_an_equal_head_drops_the_head(vl: Path, tmp_path: Path) -> None:
    def add(t: Tensors) -> None:
        t["lm_head.weight"] = t["model.language_model.embed_tokens.weight"].copy()

    checkpoint = artifacts.open_checkpoint(variant(vl, tmp_path / "tied", tensors=add))
    assert checkpoint.config.tie_word_embeddings
    assert "text.lm_head" not in checkpoint.parameters()
    assert checkpoint.manifest.provenance.dropped == ("lm_head.weight",)


def test_tied_with_another_head_is_refused(vl: Path, tmp_path: Path) -> None:
    def add(t: Tensors) -> None:
        head = t["model.language_model.embed_tokens.weight"].copy()
        head[-1, -1] += 1  # the very last element
        t["lm_head.weight"] = head

    folder = variant(vl, tmp_path / "tied", tensors=add)
    with pytest.raises(artifacts.ArtifactError, match=r"true, but tensor lm_head\.weight differs"):
        artifacts.open_checkpoint(folder)
    assert artifacts.open_checkpoint(folder, verify=False).config.tie_word_embeddings


def test_tied_with_a_head_of_another_dtype_is_refused(vl: Path, tmp_path: Path) -> None:
    def add(t: Tensors) -> None:
        t["lm_head.weight"] = t["model.language_model.embed_tokens.weight"].astype(np.float32)

    folder = variant(vl, tmp_path / "tied", tensors=add)
    with pytest.raises(artifacts.ArtifactError, match=r"lm_head\.weight differs.*F32"):
        artifacts.open_checkpoint(folder)


def test_untied_without_a_head_ties_with_a_warning(dense: Path, tmp_path: Path) -> None:
    folder = variant(dense, tmp_path / "headless", tensors=drop("lm_head.weight"))
    with pytest.warns(UserWarning, match=r"no lm_head\.weight; the head is tied"):
        checkpoint = artifacts.open_checkpoint(folder)
    assert checkpoint.config.tie_word_embeddings
    assert "text.lm_head" not in checkpoint.parameters()


def test_the_top_tie_flag_counts_in_the_nested_form(vl: Path, tmp_path: Path) -> None:
    def untie(config: dict) -> None:
        config["tie_word_embeddings"] = False

    def add(t: Tensors) -> None:
        t["lm_head.weight"] = t["model.language_model.embed_tokens.weight"] * 2

    folder = variant(vl, tmp_path / "untied", tensors=add, config=untie)
    checkpoint = artifacts.open_checkpoint(folder)
    assert same(checkpoint.read("text.lm_head"), tensors_of(folder)["lm_head.weight"])


def test_unknown_parameter_names(dense: Path) -> None:
    checkpoint = artifacts.open_checkpoint(dense)
    for call in (checkpoint.shape, checkpoint.dtype, checkpoint.read, checkpoint.nbytes):
        with pytest.raises(artifacts.ArtifactError, match=r"no parameter 'text\.layers\.99\.mlp'"):
            call("text.layers.99.mlp")
    with pytest.raises(artifacts.ArtifactError, match="are not in its 128 of bfloat16"):
        checkpoint.read_range("text.norm", 100, np.empty(40, ml_dtypes.bfloat16))
