"""Whatever stands in a JSON file: it is understood, or refused with one ArtifactError."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import artifacts
from artifacts.architectures.dflash import parse_draft_config
from artifacts.architectures.qwen3_5 import parse_huggingface_config
from artifacts.manifest import manifest_from_text
from artifacts.manifest_checks import check_manifest
from artifacts.safetensors_file import read_header

GOLDENS = Path(__file__).parents[1] / "goldens"

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 70)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["full_attention", "bf16", "bfloat16", "text", "A16Only", "../x"])
)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=2)
)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every path below a JSON value, at most three entries of each container."""
    items = list(value.items()) if isinstance(value, dict) else []
    items = list(enumerate(value)) if isinstance(value, list) else items
    for key, item in items if not path else items[:3]:
        yield (*path, key)
        yield from places(item, (*path, key))


def replaced(text: str, path: tuple, value: Any) -> Any:
    raw = json.loads(text)
    target = raw
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return raw


def refusal(call: Callable[[], Any]) -> str | None:
    """What the one allowed kind of error says, or None."""
    try:
        call()
    except artifacts.ArtifactError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "name",
    [
        "tiny-qwen3.5-vl",
        "tiny-qwen3.5-moe",
        "tiny-qwen3-next",
        "tiny-dflash-full",
        "tiny-dflash-swa",
    ],
)
def test_config(name: str) -> None:
    text = (GOLDENS / name / "config.json").read_text()
    paths = sorted(places(json.loads(text)), key=str)
    parse = parse_draft_config if "dflash" in name else parse_huggingface_config

    @settings(max_examples=150, deadline=None)
    @given(st.sampled_from(paths), values)
    def check(path: tuple, value: Any) -> None:
        said = refusal(lambda: parse(replaced(text, path, value)))
        assert said is None or said.startswith("config.json: ")

    check()


def test_manifest(tmp_path: Path) -> None:
    out = artifacts.convert(GOLDENS / "tiny-qwen3.5-vl", tmp_path / "out")
    text = (out / "manifest.json").read_text()
    paths = sorted(places(json.loads(text)), key=str)

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(paths), values)
    def check(path: tuple, value: Any) -> None:
        changed = json.dumps(replaced(text, path, value))
        said = refusal(lambda: check_manifest(manifest_from_text(changed, "m.json"), "m.json"))
        assert said is None or said.startswith("m.json: ")

    check()


def test_header(tmp_path: Path) -> None:
    raw = (GOLDENS / "tiny-qwen3.5-dense" / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    text = raw[8:end].decode()
    paths = sorted(places(json.loads(text)), key=str)
    path = tmp_path / "model.safetensors"

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(paths), values)
    def check(place: tuple, value: Any) -> None:
        header = json.dumps(replaced(text, place, value)).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
        said = refusal(lambda: read_header(path))
        assert said is None or said.startswith(str(path))

    check()


@given(st.binary(max_size=300))
def test_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "config.json").write_bytes((GOLDENS / "tiny-qwen3.5-vl/config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(content)
    with warnings.catch_warnings(), pytest.raises(artifacts.ArtifactError):
        artifacts.open_checkpoint(folder)
