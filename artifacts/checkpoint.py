"""One way to read weights, whatever holds them: a Hugging Face folder or an artifact.

`open_checkpoint` checks everything that can be checked without weights; `Checkpoint.blocks` then
streams them in bounded pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from artifacts.bindings import Binding, FlatView, Shape
from artifacts.draft_folder import attach_draft
from artifacts.errors import ArtifactError
from artifacts.file_checks import check_hashes, check_sizes, list_files
from artifacts.formats import VALUE, dtype_of, implemented_format
from artifacts.frontend import read_frontend
from artifacts.huggingface_folder import open_huggingface
from artifacts.manifest import MANIFEST_FILE, Manifest, manifest_digest, read_manifest
from artifacts.manifest_checks import check_manifest
from artifacts.object_source import ObjectSource
from artifacts.orbax_store import WEIGHTS, OrbaxSource
from artifacts.resources import FrontendResources
from artifacts.safetensors_folder import CONFIG_FILE

MIN_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Holds descriptions only: no weights, no open files.

    Methods that take a parameter name raise ArtifactError when there is no such parameter.
    """

    path: Path
    kind: Literal["huggingface", "artifact"]
    """What the folder is."""
    manifest: Manifest
    config: Qwen3_5Config
    source: ObjectSource

    @property
    def architecture(self) -> str:
        """The architecture entry (OWN-13)."""
        return self.manifest.architecture

    @property
    def components(self) -> tuple[str, ...]:
        """Components with weights here, "text" first; binding the others is a choice (OWN-18)."""
        return self.manifest.components

    @property
    def name(self) -> str:
        """The public model name (ART-04)."""
        return self.manifest.metadata.name

    @cached_property
    def frontend(self) -> FrontendResources:
        """Tokenizer, template and defaults. ArtifactError when tokenizer.json is missing."""
        return read_frontend(self.path)

    def parameters(self, component: str | None = None) -> tuple[str, ...]:
        """Names of all logical parameters, or of one component's, in storage order."""
        names = self.manifest.bindings
        return tuple(n for n in names if component is None or n.startswith(f"{component}."))

    def shape(self, name: str) -> Shape:
        """Logical shape of a parameter."""
        return self._binding(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Element type of the stored values; all parts of a parameter share it."""
        stored = self.manifest.objects[self._binding(name).parts[0].object]
        return dtype_of(stored.dtype, name)

    def read(self, name: str) -> np.ndarray:
        """The whole parameter in its stored element type: for tests and small things."""
        out = np.empty(self.shape(name), self.dtype(name))
        self._fill(self._view(name), 0, out.reshape(-1))
        return out

    def blocks(self, name: str, max_bytes: int = 64 << 20) -> Iterator[tuple[int, np.ndarray]]:
        """Streams a parameter as `(offset, values)`: flat element offset, and a fresh 1-D
        contiguous array.

        Blocks follow each other without gaps. A block has at most `max_bytes` bytes and at most a
        sixteenth of the largest object (but 1 MiB is always allowed), so that two of them in flight
        stay far below one tensor. Blocks hold whole rows of the last axis where a row fits.
        """
        dtype, view = self.dtype(name), self._view(name)
        limit = min(max_bytes, max(MIN_BLOCK_BYTES, self.largest_nbytes // 16))
        if limit < dtype.itemsize:
            raise ArtifactError(f"max_bytes {max_bytes} holds no element of {name}")
        step, row = limit // dtype.itemsize, self.shape(name)[-1]
        if step > row:
            step -= step % row
        for start in range(0, view.size, step):
            yield start, self._fill(view, start, np.empty(min(step, view.size - start), dtype))

    def read_range(self, name: str, start: int, out: np.ndarray) -> None:
        """Fills `out`, 1-D and of the stored element type, with elements from `start`."""
        view = self._view(name)
        if out.dtype != self.dtype(name) or not 0 <= start <= view.size - out.size:
            raise ArtifactError(
                f"{name}: elements {start}:{start + out.size} as {out.dtype} "
                f"are not in its {view.size} of {self.dtype(name)}"
            )
        self._fill(view, start, out)

    @cached_property
    def largest_nbytes(self) -> int:
        """Bytes of the largest stored object."""
        return max(stored.nbytes() for stored in self.manifest.objects.values())

    def nbytes(self, name: str) -> int:
        """Bytes of a parameter's values in their stored element type."""
        return self._view(name).size * self.dtype(name).itemsize

    def _binding(self, name: str) -> Binding:
        try:
            return self.manifest.bindings[name]
        except KeyError:
            raise ArtifactError(f"{self.path}: no parameter {name!r}") from None

    def _view(self, name: str) -> FlatView:
        binding, objects = self._binding(name), self.manifest.objects
        return FlatView(
            binding, {part.object: objects[part.object].shape for part in binding.parts}
        )

    def _fill(self, view: FlatView, start: int, out: np.ndarray) -> np.ndarray:
        for run in view.runs(start, start + out.size):
            implemented_format(self.manifest.objects[run.object].format, run.object)
            target = out[run.target : run.target + run.count]
            self.source.read_into(run.object, VALUE, run.source, target)
        return out


def open_checkpoint(
    path: str | Path, verify: bool = True, *, draft: str | Path | None = None
) -> Checkpoint:
    """Opens a Hugging Face folder or an artifact folder, reading no weights.

    `draft` is the Hugging Face folder of a block draft made for this model, which becomes the
    component "dflash". `verify` also hashes every file of an artifact, and compares a tied head with the embedding of a
    Hugging Face folder. Raises ArtifactError (one, naming the file, tensor or field) for anything
    damaged, incomplete or unknown, and NotYetError for a known format or feature that this version
    does not implement.
    """
    model = _open_model(Path(path), verify)
    if draft is None:
        return model
    drafted = attach_draft(model.manifest, model.config, model.source, Path(draft))
    return Checkpoint(model.path, model.kind, *drafted)


def _open_model(folder: Path, verify: bool) -> Checkpoint:
    if (folder / MANIFEST_FILE).is_file():
        return _open_artifact(folder, verify)
    if (folder / CONFIG_FILE).is_file():
        manifest, config, source = open_huggingface(folder, verify)
        return Checkpoint(folder, "huggingface", manifest, config, source)
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder")
    if any(folder.glob("*.safetensors")):
        raise ArtifactError(f"{folder / CONFIG_FILE}: missing")
    raise ArtifactError(
        f"{folder}: neither an artifact ({MANIFEST_FILE}) nor a Hugging Face folder ({CONFIG_FILE})"
    )


def _open_artifact(folder: Path, verify: bool) -> Checkpoint:
    manifest = read_manifest(folder)
    where = str(folder / MANIFEST_FILE)
    config = check_manifest(manifest, where)
    if manifest.digest is not None and manifest.digest != manifest_digest(manifest):
        raise ArtifactError(f"{where}: damaged: its content does not match its digest")
    check_sizes(folder, manifest.files)
    listed = {entry.path for entry in manifest.files}
    for path in list_files(folder):
        if path.startswith(f"{WEIGHTS}/") and path not in listed:
            raise ArtifactError(f"{folder / path}: stray file, not named in the manifest")
    groups = {
        s.file for o in manifest.objects.values() for p in o.planes.values() for s in p.segments
    }
    for group in sorted(groups):
        # Outside of the weights folder no file would be listed and hashed.
        if not group.startswith(f"{WEIGHTS}/"):
            raise ArtifactError(f"{where}: weights stand in {group}, outside of {WEIGHTS}/")
        if not (folder / group).is_dir():
            raise ArtifactError(f"{folder / group}: named in the manifest but missing")
    if verify:
        check_hashes(folder, manifest.files)
    return Checkpoint(folder, "artifact", manifest, config, OrbaxSource(folder, manifest))
