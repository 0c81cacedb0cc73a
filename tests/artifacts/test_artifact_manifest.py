"""manifest.json: round trip, unknown fields, formats, licences, and what must hold inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from artifact_cases import edit_json

import artifacts
from artifacts import Activation, ArtifactError, Licence, NotYetError
from artifacts.bindings import Binding, Part
from artifacts.formats import FORMATS
from artifacts.manifest import (
    Manifest,
    Plane,
    Segment,
    StoredObject,
    manifest_digest,
    manifest_from_text,
    manifest_to_text,
)
from artifacts.manifest_checks import check_manifest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The manifest text of a converted checkpoint with all components."""
    source = Path(__file__).parents[1] / "goldens" / "tiny-qwen3.5-vl"
    out = artifacts.convert(source, tmp_path_factory.mktemp("manifest") / "out")
    return (out / "manifest.json").read_text()


def open_edited(text: str, folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Opens a folder that holds nothing but the changed manifest."""
    (folder / "manifest.json").write_text(text)
    edit_json(folder / "manifest.json", change)
    artifacts.open_checkpoint(folder)


def test_round_trip(text: str) -> None:
    manifest = manifest_from_text(text)
    assert manifest_to_text(manifest) == text
    assert manifest.digest == manifest_digest(manifest)
    assert manifest.schema_version == 3
    config = check_manifest(manifest, "m")
    assert hash(config) == hash(check_manifest(manifest_from_text(text), "m"))
    assert config.vision is not None
    assert config.image_token_id == 1010


def objects_in(value: Any, path: str = "") -> Iterator[tuple[str, dict]]:
    """One JSON object of each kind, with its path; maps keyed by free names are passed through."""
    free = {"/objects", "/bindings", "/uses"}
    if isinstance(value, dict):
        if path not in free and not path.endswith("/planes"):
            yield path, value
        items = list(value.items())
        if path in free or path.endswith("/planes"):
            items = items[:1]
        for key, item in items:
            yield from objects_in(item, f"{path}/{key}")
    elif isinstance(value, list):
        yield from objects_in(value[0] if value else None, f"{path}/0")


def test_unknown_and_missing_fields_at_every_level(text: str) -> None:
    """ART-01: every object of the file is closed, and the error names the file and the field."""
    paths = [path for path, _ in objects_in(json.loads(text))]
    kinds = {path.split("/")[1] for path in paths if path}
    assert kinds >= {"config", "objects", "bindings", "files", "metadata", "provenance"}
    assert any(path.endswith("segments/0") for path in paths)
    assert any(path.endswith("parts/0") for path in paths)
    assert "/config/vision" in paths
    for path in paths:
        for missing in (False, True):
            raw = json.loads(text)
            target = dict(objects_in(raw))[path]
            if missing:
                required = [k for k in target if k not in ("digest", "dropped", "sha256")]
                if "/config" in path:
                    required = [k for k in required if k in ("vocab_size", "depth")]
                field = required[0]
                del target[field]
            else:
                field = "surprise"
                target["surprise"] = 1
            with pytest.raises(ArtifactError, match=rf"^m\.json: .*{field}") as caught:
                check_manifest(manifest_from_text(json.dumps(raw), "m.json"), "m.json")
            assert "\n" not in str(caught.value), path


@pytest.mark.parametrize("version", [1, 2, 4, "3", None, True, 3.5])
def test_other_versions(text: str, tmp_path: Path, version: object) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json: schema_version is .*reads 3"):
        open_edited(text, tmp_path, lambda m: m.update(schema_version=version))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff\xff", "cannot be read"),
        (b'{"schema_version": 3, "schema_version": 3}', "'schema_version' stands twice"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"schema_version": ' + b"3" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_bad_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(
        ArtifactError, match=rf"manifest\.json: {message}|manifest\.json.*{message}"
    ):
        artifacts.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["q4_g64", "q5_g64", "q6_g64", "q8_g32", "fp8_row", "nvfp4"])
def test_coded_formats_are_not_yet(text: str, tmp_path: Path, name: str) -> None:
    with pytest.raises(NotYetError, match=rf"object text\.embed_tokens.*{name}.*not implemented"):
        open_edited(text, tmp_path, lambda m: m["objects"]["text.embed_tokens"].update(format=name))


def test_unknown_format(text: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="unknown numeric format 'q3_k'; known: bf16") as caught:
        open_edited(
            text, tmp_path, lambda m: m["objects"]["text.embed_tokens"].update(format="q3_k")
        )
    assert not isinstance(caught.value, NotYetError)


def test_the_schema_carries_coded_formats_and_split_projections(text: str) -> None:
    """ART-08: rows of one projection from a q4_g64 and a q5_g64 parent, in stored order."""
    manifest = manifest_from_text(text)

    def plane(key: str, rows: int, columns: int, dtype: str) -> Plane:
        segment = Segment(file="weights/00000", key=key, start=0, stop=rows)
        return Plane(shape=(rows, columns), dtype=dtype, segments=(segment,))

    def coded(fmt: str, rows: int, code_bytes: int) -> StoredObject:
        return StoredObject(
            shape=(rows, 128), dtype="float32", format=fmt, layout="row_major", component="text",
            planes={
                "codes": plane(f"{fmt}.codes", rows, code_bytes, "uint8"),
                "scales": plane(f"{fmt}.scales", rows, 2, "float16"),
            },
        )  # fmt: skip

    name = "text.layers.3.self_attn.q_proj"
    objects = {k: v for k, v in manifest.objects.items() if k != name}
    objects |= {"query": coded("q4_g64", 128, 64), "gate": coded("q5_g64", 128, 80)}
    parts = tuple(
        Part(parent, 64 * head, 64 * head + 64) for head in range(2) for parent in ("query", "gate")
    )
    split = manifest.model_copy(
        update={
            "objects": objects,
            "bindings": manifest.bindings | {name: Binding((256, 128), parts)},
            "uses": manifest.uses | {name: Licence.AllowA8},
        }
    )
    again = manifest_from_text(manifest_to_text(split))
    assert again.objects == objects
    assert again.uses[name] is Licence.AllowA8
    assert again.objects["query"].nbytes() == 128 * 64 + 128 * 2 * 2
    with pytest.raises(NotYetError, match="q4_g64"):
        check_manifest(again, "m")
    # All that is missing is the codec: with every format allowed, the manifest is well formed.
    from artifacts import manifest_checks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_checks, "check_formats", lambda manifest, where: None)
        check_manifest(again, "m")


def test_licences() -> None:
    """ART-07."""
    a16, a8, a4 = Activation.A16, Activation.A8, Activation.A4
    assert artifacts.permitted_activations(Licence.A16Only) == {a16}
    assert artifacts.permitted_activations(Licence.AllowA8) == {a16, a8}
    assert artifacts.permitted_activations(Licence.AllowA4) == {a16, a8, a4}
    assert artifacts.fused_activations([Licence.AllowA4, Licence.AllowA8]) == {a16, a8}
    assert artifacts.fused_activations(iter([Licence.AllowA4])) == {a16, a8, a4}
    assert artifacts.fused_activations([Licence.A16Only, Licence.AllowA4]) == {a16}
    with pytest.raises(ArtifactError):
        artifacts.fused_activations([])


def test_formats_of_the_contract() -> None:
    assert set(FORMATS) == {
        "bf16", "fp16", "fp32", "int32", "q4_g64", "q5_g64", "q6_g64", "q8_g32", "fp8_row", "nvfp4",
    }  # fmt: skip
    assert {f.name for f in FORMATS.values() if f.implemented} == {"bf16", "fp16", "fp32", "int32"}
    assert all(f.planes == ("value",) for f in FORMATS.values() if f.implemented)


def embed(m: dict[str, Any]) -> dict[str, Any]:
    return m["objects"]["text.embed_tokens"]


def first_segment(m: dict[str, Any]) -> dict[str, Any]:
    return embed(m)["planes"]["value"]["segments"][0]


def share_leaf(m: dict[str, Any]) -> None:
    first_segment(m).update(m["objects"]["mtp.fc"]["planes"]["value"]["segments"][0], stop=1024)


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda m: m.update(architecture="Gpt9"), "unknown architecture 'Gpt9'"),
    (lambda m: m.update(architecture="Qwen3NextForCausalLM"), "unknown architecture entry"),
    (lambda m: m["config"].update(vocab_size=0), "config: vocab_size must be positive"),
    (lambda m: m["config"].update(vocab_size="5"), "config.vocab_size: "),
    (lambda m: m["config"].update(vocab_size=1000), r"embed_tokens has shape \[1024, 128\]"),
    (lambda m: m["config"]["layer_types"].pop(), "layer_types has 3 entries"),
    (lambda m: m["config"]["vision"].update(num_heads=7), "vision_config.num_heads 7"),
    (lambda m: m["components"].remove("text"), "component text is missing"),
    (lambda m: m["components"].append("text"), "names one twice"),
    (lambda m: m["components"].append("audio"), "unknown component 'audio'"),
    (lambda m: m["components"].append("dflash2"), "'dflash2' is not implemented yet"),
    (lambda m: m["components"].remove("mtp"), "belongs to no component"),
    (lambda m: m["objects"].pop("text.norm"), "text.norm is bound to a missing object"),
    (lambda m: m["bindings"].pop("text.norm"), "row 0 of object text.norm is bound to no"),
    (lambda m: m["uses"].pop("text.norm"), "text.norm has no use"),
    (lambda m: m["uses"].update({"text.x": "A16Only"}), "use of a missing parameter text.x"),
    (lambda m: m["uses"].update({"text.norm": "AllowA2"}), "uses.text.norm"),
    (lambda m: embed(m).update(layout="tiled"), "unknown layout 'tiled'"),
    (lambda m: embed(m).update(dtype="float31"), "unknown dtype 'float31'"),
    (lambda m: embed(m).update(dtype="float16"), "differs from the object's shape or dtype"),
    (lambda m: embed(m).update(format="fp32"), "format fp32 stores float32, not bfloat16"),
    (lambda m: embed(m).update(component="mtp"), "belongs to component mtp"),
    (lambda m: embed(m).update(shape=[]), "has no rows"),
    (lambda m: embed(m)["planes"].update(extra=embed(m)["planes"]["value"]), "has planes"),
    (lambda m: first_segment(m).update(start=1), "does not continue at row 0"),
    (lambda m: first_segment(m).update(stop=9), "end at row 9"),
    (lambda m: share_leaf(m), "already belongs to another"),
    (lambda m: first_segment(m).update(file="../x"), "does not stay inside"),
    (lambda m: m["files"].append(m["files"][0]), "is listed twice"),
    (lambda m: m["files"][0].update(path="/etc/passwd"), "does not stay inside"),
    (lambda m: m["files"][0].update(path="a/../../b"), "does not stay inside"),
    (lambda m: m["files"][0].update(size=-1), "negative size"),
    (lambda m: m["files"][0].update(sha256="x"), "files.0.sha256"),
    (lambda m: m["metadata"].update(name="other"), "does not match its digest"),
    (lambda m: m.update(digest="0" * 64), "does not match its digest"),
    (lambda m: None, "named in the manifest but missing"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_must_hold(
    text: str, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        open_edited(text, tmp_path, change)
    assert "manifest.json" in str(caught.value) or "named in the manifest" in message


def test_a_parameter_bound_twice(text: str) -> None:
    raw = json.loads(text)
    raw["bindings"]["text.layers.0.input_norm"] = raw["bindings"]["text.norm"]
    del raw["objects"]["text.layers.0.input_norm"]
    with pytest.raises(ArtifactError, match=r"rows 0:128 of object text\.norm are bound twice"):
        check_manifest(Manifest.model_validate_json(json.dumps(raw)), "m")
