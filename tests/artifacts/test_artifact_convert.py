"""Converting, reopening, verifying and describing artifacts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from artifact_cases import Tensors, drop, edit_json, same, tensors_of, variant, write

import artifacts
from artifacts import orbax_store
from artifacts.manifest import manifest_from_text, manifest_to_text

CHECKPOINTS = ["tiny-qwen3.5-dense", "tiny-qwen3.5-moe", "tiny-qwen3.5-vl", "tiny-qwen3-next"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several groups of weights, as a larger model has."""
    source = Path(__file__).parents[1] / "goldens" / "tiny-qwen3.5-vl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax_store, "MIN_SEGMENT_BYTES", 1 << 20)
        return artifacts.convert(source, tmp_path_factory.mktemp("convert") / "vl")


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """A copy of an artifact, to damage."""
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def assert_same_parameters(a: artifacts.Checkpoint, b: artifacts.Checkpoint) -> None:
    assert a.parameters() == b.parameters()
    for name in a.parameters():
        assert same(a.read(name), b.read(name)), name


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_convert_and_reopen_gives_equal_bytes(goldens: Path, tmp_path: Path, name: str) -> None:
    """ART-01..03."""
    out = artifacts.convert(goldens / name, tmp_path / "deep" / "out")
    assert out == tmp_path / "deep" / "out"
    source, made = artifacts.open_checkpoint(goldens / name), artifacts.open_checkpoint(out)
    assert made.kind == "artifact"
    assert made.config == source.config
    assert hash(made.config) == hash(source.config)
    assert made.architecture == source.architecture
    assert made.components == source.components
    assert made.name == source.architecture
    assert_same_parameters(source, made)
    for parameter in made.parameters():
        assert same(
            np.concatenate([b for _, b in made.blocks(parameter, 5000)]),
            source.read(parameter).reshape(-1),
        )
    assert os.listdir(tmp_path / "deep") == ["out"]


def test_resources_travel(converted: Path, vl: Path) -> None:
    ours, theirs = (artifacts.open_checkpoint(p).frontend for p in (converted, vl))
    assert ours.tokenizer_json.read_bytes() == theirs.tokenizer_json.read_bytes()
    assert ours.tokenizer_config == theirs.tokenizer_config
    assert ours.generation_config == theirs.generation_config
    assert ours.preprocessor_config == theirs.preprocessor_config
    assert ours.video_preprocessor_config == theirs.video_preprocessor_config
    assert not (converted / "golden.npz").exists()


def test_weights_are_plain_orbax(converted: Path, vl: Path) -> None:
    """Any orbax program can restore a group without this package."""
    wanted = tensors_of(vl)["model.visual.patch_embed.proj.weight"]
    found = {}
    for group in sorted((converted / "weights").iterdir()):
        with ocp.PyTreeCheckpointer() as checkpointer:
            keys = checkpointer.metadata(group).item_metadata.tree.keys()
            restore = {k: ocp.RestoreArgs(restore_type=np.ndarray) for k in keys}
            found |= checkpointer.restore(group, args=ocp.args.PyTreeRestore(restore_args=restore))
    assert same(found["vision.patch_embed.proj.weight.value.0"], wanted)


def test_large_arrays_are_cut_into_segments(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of 200 embedding rows; groups above the whole-group size are read leaf by leaf."""
    monkeypatch.setattr(orbax_store, "MIN_SEGMENT_BYTES", 200 * 256)
    monkeypatch.setattr(orbax_store, "MAX_SEGMENT_BYTES", 200 * 256)
    monkeypatch.setattr(orbax_store, "WHOLE_GROUP_BYTES", 6000)

    def only_some(t: Tensors) -> None:
        for name in list(t):
            if name.startswith(("mtp.", "model.layers.")) and not name.startswith(
                "model.layers.0."
            ):
                del t[name]

    def one_layer(config: dict) -> None:
        config.update(num_hidden_layers=1, layer_types=["linear_attention"])

    source = variant(dense, tmp_path / "source", tensors=only_some, config=one_layer)
    out = artifacts.convert(source, tmp_path / "out")
    made = artifacts.open_checkpoint(out)
    segments = made.manifest.objects["text.embed_tokens"].planes["value"].segments
    assert [s.stop - s.start for s in segments] == [200] * 5 + [24]
    assert len({s.file for s in segments}) == 6
    assert_same_parameters(artifacts.open_checkpoint(source), made)
    at = np.empty(1000, ml_dtypes.bfloat16)
    made.read_range("text.embed_tokens", 200 * 128 - 500, at)
    assert same(at, tensors_of(dense)["model.embed_tokens.weight"].reshape(-1)[25100:26100])


def test_names(dense: Path, tmp_path: Path) -> None:
    """ART-04."""
    out = artifacts.convert(dense, tmp_path / "out", name="My model")
    assert artifacts.open_checkpoint(out).name == "My model"
    with pytest.raises(artifacts.ArtifactError, match="name must not be empty"):
        artifacts.convert(dense, tmp_path / "other", name=" ")


def test_out_must_be_empty(dense: Path, converted: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    artifacts.convert(dense, tmp_path / "out")
    with pytest.raises(artifacts.ArtifactError, match="out: exists and is not an empty folder"):
        artifacts.convert(dense, tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(artifacts.ArtifactError, match="file: exists and is not an empty folder"):
        artifacts.convert(dense, tmp_path / "file")
    with pytest.raises(artifacts.ArtifactError, match="is an artifact already"):
        artifacts.convert(converted, tmp_path / "again")


def test_a_failed_run_leaves_nothing(dense: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        artifacts.convert(dense, tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []
    broken = variant(dense, tmp_path / "broken", tensors=drop("model.norm.weight"))
    with pytest.raises(artifacts.ArtifactError, match=r"model\.norm\.weight is missing"):
        artifacts.convert(broken, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_a_killed_run_leaves_no_half_artifact(dense: Path, tmp_path: Path) -> None:
    code = (
        "import artifacts, os, sys\n"
        "stop = lambda done, total: os._exit(9) if done > total // 2 else None\n"
        "artifacts.convert(sys.argv[1], sys.argv[2], progress=stop)\n"
    )
    out = tmp_path / "out"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(dense), str(out)], cwd=root, check=False)
    assert done.returncode == 9
    assert not out.exists()
    assert all(p.name.startswith(".out.partial-") for p in tmp_path.iterdir())
    assert artifacts.verify(artifacts.convert(dense, out)).ok


def test_progress(dense: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    out = artifacts.convert(dense, tmp_path / "out", progress=lambda *s: steps.append(s))
    assert steps[-1][0] == steps[-1][1]
    assert steps == sorted(steps)
    again: list[tuple[int, int]] = []
    report = artifacts.verify(out, progress=lambda *s: again.append(s))
    assert again[-1] == steps[-1] == (report.nbytes, report.nbytes)


def test_every_flipped_or_cut_file_is_named(copy: Path) -> None:
    """SHA-256 of every file; sizes even without hashing. The manifest guards itself."""
    files = [p for p in copy.rglob("*") if p.is_file()]
    assert len(files) > 20
    for path in files:
        original = path.read_bytes()
        middle = len(original) // 2
        if original:
            flipped = bytearray(original)
            flipped[middle] ^= 4
            path.write_bytes(flipped)
            with pytest.raises(artifacts.ArtifactError, match=path.name):
                artifacts.open_checkpoint(copy)
        path.write_bytes(original[:-3] if original else b"x")
        with pytest.raises(artifacts.ArtifactError, match=path.name):
            artifacts.open_checkpoint(copy, verify=False)
        path.unlink()
        with pytest.raises(artifacts.ArtifactError):
            artifacts.open_checkpoint(copy, verify=False)
        path.write_bytes(original)
    artifacts.open_checkpoint(copy)


def test_flipped_manifest_bits(copy: Path) -> None:
    path = copy / "manifest.json"
    raw = path.read_bytes()
    for at in range(0, len(raw) - 1, max(1, len(raw) // 60)):
        flipped = bytearray(raw)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(artifacts.ArtifactError, match=r"manifest\.json|missing"):
            artifacts.open_checkpoint(copy, verify=False)


def test_damage_found_while_reading(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hashing, what orbax cannot restore is still one error naming the group."""
    monkeypatch.setattr(orbax_store, "WHOLE_GROUP_BYTES", 0)
    for path in (copy / "weights").rglob("manifest.ocdbt"):
        path.write_bytes(bytes(len(path.read_bytes())))
    checkpoint = artifacts.open_checkpoint(copy, verify=False)
    with pytest.raises(artifacts.ArtifactError, match=r"weights/0000\d: cannot be restored"):
        checkpoint.read("text.norm")


def test_stray_weights_and_missing_groups(copy: Path) -> None:
    (copy / "README.md").write_text("notes of a user are fine")
    artifacts.open_checkpoint(copy)
    (copy / "weights" / "x").write_text("x")
    with pytest.raises(artifacts.ArtifactError, match="weights/x: stray file"):
        artifacts.open_checkpoint(copy)
    (copy / "weights" / "x").unlink()
    manifest = manifest_from_text((copy / "manifest.json").read_text())
    files = tuple(f for f in manifest.files if not f.path.startswith("weights/00001"))
    shutil.rmtree(copy / "weights" / "00001")
    (copy / "manifest.json").write_text(
        manifest_to_text(manifest.model_copy(update={"files": files}))
    )
    with pytest.raises(
        artifacts.ArtifactError, match=r"weights/00001: named in the manifest but missing"
    ):
        artifacts.open_checkpoint(copy)


def test_segments_must_match_what_is_stored(copy: Path) -> None:
    """A manifest that lies about a leaf is caught when the leaf is read."""
    raw = json.loads((copy / "manifest.json").read_text())
    raw["digest"] = None
    norms = [raw["objects"][n]["planes"]["value"]["segments"][0] for n in ("text.norm", "mtp.fc")]
    (a, b) = ((segment["file"], segment["key"]) for segment in norms)
    norms[0].update(file=b[0], key=b[1])
    norms[1].update(file=a[0], key=a[1])
    (copy / "manifest.json").write_text(json.dumps(raw))
    checkpoint = artifacts.open_checkpoint(copy)
    with pytest.raises(artifacts.ArtifactError, match=r"mtp\.fc\.value\.0 has shape \[128, 256\]"):
        checkpoint.read("text.norm")


def test_weights_outside_their_folder(copy: Path) -> None:
    raw = json.loads((copy / "manifest.json").read_text())
    raw["digest"] = None
    for segment in raw["objects"]["text.norm"]["planes"]["value"]["segments"]:
        segment["file"] = "elsewhere/0"
    (copy / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(artifacts.ArtifactError, match=r"stand in elsewhere/0, outside of weights/"):
        artifacts.open_checkpoint(copy)


def test_verify_reports(converted: Path, vl: Path) -> None:
    report = artifacts.verify(converted)
    assert report.ok
    assert report.files == report.files_hashed > 5
    assert report.parameters == report.objects == len(artifacts.open_checkpoint(vl).parameters())
    assert report.nbytes == sum(v.nbytes for v in tensors_of(vl).values())
    source = artifacts.verify(vl)
    assert source.ok
    assert (source.kind, source.files_hashed) == ("huggingface", 0)


def test_verify_counts_values_that_are_not_finite(dense: Path, tmp_path: Path) -> None:
    def spoil(t: Tensors) -> None:
        t["model.norm.weight"][3:5] = np.nan
        t["model.norm.weight"][7] = -np.inf
        t["model.layers.0.linear_attn.A_log"][0] = np.inf

    folder = variant(dense, tmp_path / "x", tensors=spoil)
    wanted = {
        "text.norm": artifacts.NonFinite(nan=2, inf=1),
        "text.layers.0.linear_attn.A_log": artifacts.NonFinite(nan=0, inf=1),
    }
    out = artifacts.convert(folder, tmp_path / "out")
    for path in (folder, out):
        report = artifacts.verify(path)
        assert not report.ok
        assert report.nonfinite == wanted


def test_describe(converted: Path, vl: Path) -> None:
    made, source = artifacts.describe(converted), artifacts.describe(str(vl))
    assert (made.kind, source.kind) == ("artifact", "huggingface")
    assert made.components == source.components
    assert set(made.components) == {"text", "mtp", "vision"}
    tensors = tensors_of(vl)
    vision = [v for n, v in tensors.items() if n.startswith("model.visual.")]
    assert made.components["vision"] == artifacts.ComponentSummary(
        parameters=len(vision),
        elements=sum(v.size for v in vision),
        nbytes=sum(v.nbytes for v in vision),
        nbytes_by_format={"bf16": sum(v.nbytes for v in vision)},
    )
    assert made.components["text"].nbytes_by_format["fp32"] == 3 * (4 + 32) * 4
    assert made.nbytes == sum(v.nbytes for v in tensors.values())
    assert made.elements == sum(v.size for v in tensors.values())
    assert made.uses == {"A16Only": made.parameters}
    assert made.files["tokenizer.json"] == (vl / "tokenizer.json").stat().st_size
    assert made.provenance["source"] == "tiny-qwen3.5-vl"
    assert json.loads(json.dumps(made.to_json()))["config"]["vocab_size"] == 1024


def test_describe_also_shows_what_cannot_run_yet(copy: Path) -> None:
    edit_json(
        copy / "manifest.json",
        lambda m: m["objects"]["text.norm"].update(format="q8_g32"),
    )
    assert artifacts.describe(copy).components["text"].nbytes_by_format["q8_g32"] == 256


def test_one_shard_too_few_is_refused_before_writing(dense: Path, tmp_path: Path) -> None:
    config = json.loads((dense / "config.json").read_text())
    folder = write(tmp_path / "x", config, tensors_of(dense), shards=3)
    next(iter(folder.glob("*.safetensors"))).unlink()
    with pytest.raises(artifacts.ArtifactError, match=r"named in model\.safetensors\.index\.json"):
        artifacts.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
