"""What a well-formed manifest must also satisfy: known formats, whole planes, complete bindings,
safe paths.

Everything here is pure: no file is opened. Each failure is one ArtifactError naming the file and
the entry.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from artifacts.architectures.qwen3_5 import Qwen3_5Config, parameter_shapes
from artifacts.architectures.qwen3_5.config import config_from_json
from artifacts.architectures.registry import KNOWN_ARCHITECTURES, normalise_architecture
from artifacts.bindings import check_bindings
from artifacts.errors import ArtifactError, NotYetError
from artifacts.formats import dtype_of, implemented_format, known_format
from artifacts.manifest import (
    COMPONENTS,
    DFLASH,
    DFLASH2,
    ROW_MAJOR,
    Manifest,
    Plane,
    StoredObject,
)


def check_manifest(manifest: Manifest, where: str) -> Qwen3_5Config:
    """Runs every check and returns the parsed config (ART-09).

    Raises ArtifactError, or NotYetError for an architecture or numeric format that is known but not
    implemented.
    """
    config = checked_config(manifest, where)
    check_formats(manifest, where)
    _check_components(manifest, config, where)
    _check_files(manifest, where)
    for name, stored in manifest.objects.items():
        _check_object(name, stored, where)
    _check_leaves(manifest, where)
    check_bindings(manifest.bindings, manifest.shapes(), where)
    _check_dtypes(manifest, where)
    _check_uses(manifest, where)
    check_coverage(manifest, config, where)
    return config


def checked_config(manifest: Manifest, where: str) -> Qwen3_5Config:
    """The config, once the architecture is one that stands in manifests (OWN-13)."""
    entry = normalise_architecture(manifest.architecture, where)
    if entry != manifest.architecture:
        known = ", ".join(sorted(set(KNOWN_ARCHITECTURES.values())))
        raise ArtifactError(
            f"{where}: unknown architecture entry {manifest.architecture!r}; known: {known}"
        )
    return config_from_json(manifest.config, where)


def check_formats(manifest: Manifest, where: str) -> None:
    """Every object's format is known (ArtifactError) and implemented (NotYetError)."""
    for name, stored in manifest.objects.items():
        implemented_format(stored.format, f"{where}: object {name}")


def check_coverage(manifest: Manifest, config: Qwen3_5Config, where: str) -> None:
    """Bound are exactly the parameters that config and components call for, each with its shape."""
    expected = parameter_shapes(config, manifest.components)
    for name, shape in expected.items():
        if name not in manifest.bindings:
            raise ArtifactError(f"{where}: parameter {name} {list(shape)} is missing")
        bound = manifest.bindings[name].shape
        if bound != shape:
            raise ArtifactError(
                f"{where}: parameter {name} has shape {list(bound)}, the config needs {list(shape)}"
            )
    for name in manifest.bindings:
        if name not in expected:
            raise ArtifactError(f"{where}: parameter {name} is not part of this model")


def safe_path(path: str, where: str) -> str:
    """`path` itself, if it stays inside its folder: relative, forward slashes, no `..`."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path or str(pure) != path:
        raise ArtifactError(f"{where}: path {path!r} does not stay inside the folder")
    return path


def _check_components(manifest: Manifest, config: Qwen3_5Config, where: str) -> None:
    for component in manifest.components:
        if component not in COMPONENTS:
            raise ArtifactError(
                f"{where}: unknown component {component!r}; known: {', '.join(COMPONENTS)}"
            )
        if component == DFLASH2:
            raise NotYetError(f"{where}: component {component!r} is not implemented yet")
    if len(set(manifest.components)) != len(manifest.components):
        raise ArtifactError(f"{where}: components names one twice: {list(manifest.components)}")
    if "text" not in manifest.components:
        raise ArtifactError(f"{where}: component text is missing")
    if (DFLASH in manifest.components) != (config.dflash is not None):
        lacking = "config" if config.dflash is None else "component"
        raise ArtifactError(f"{where}: there is a draft, but its {lacking} dflash is missing")
    for name, stored in manifest.objects.items():
        if stored.component not in manifest.components:
            raise ArtifactError(f"{where}: object {name} belongs to no component of this artifact")


def _check_files(manifest: Manifest, where: str) -> None:
    seen: set[str] = set()
    for entry in manifest.files:
        safe_path(entry.path, where)
        if entry.path in seen:
            raise ArtifactError(f"{where}: file {entry.path} is listed twice")
        if entry.size < 0:
            raise ArtifactError(f"{where}: file {entry.path} has a negative size")
        seen.add(entry.path)


def _check_object(name: str, stored: StoredObject, where: str) -> None:
    here = f"{where}: object {name}"
    if stored.layout != ROW_MAJOR:
        raise ArtifactError(f"{here}: unknown layout {stored.layout!r}; known: {ROW_MAJOR}")
    if not stored.shape or any(n < 1 for n in stored.shape):
        raise ArtifactError(f"{here}: shape {list(stored.shape)} has no rows")
    dtype_of(stored.dtype, here)
    fmt = known_format(stored.format, here)
    if set(stored.planes) != set(fmt.planes):
        raise ArtifactError(
            f"{here}: format {fmt.name} has planes {list(fmt.planes)}, not {list(stored.planes)}"
        )
    for plane_name, plane in stored.planes.items():
        _check_plane(plane, f"{here}, plane {plane_name}")
        if fmt.dtype is not None and (plane.shape, plane.dtype) != (stored.shape, stored.dtype):
            raise ArtifactError(
                f"{here}: plane {plane_name} differs from the object's shape or dtype"
            )
    if fmt.dtype is not None and stored.dtype != fmt.dtype:
        raise ArtifactError(f"{here}: format {fmt.name} stores {fmt.dtype}, not {stored.dtype}")


def _check_plane(plane: Plane, here: str) -> None:
    dtype_of(plane.dtype, here)
    at = 0
    for segment in plane.segments:
        safe_path(segment.file, here)
        if segment.start != at or segment.stop <= at:
            raise ArtifactError(
                f"{here}: segment {segment.start}:{segment.stop} does not continue at row {at}"
            )
        at = segment.stop
    if not plane.shape or at != plane.shape[0]:
        raise ArtifactError(f"{here}: segments end at row {at} of shape {list(plane.shape)}")


def _check_leaves(manifest: Manifest, where: str) -> None:
    """Every stored leaf serves one segment: sharing is what bindings are for."""
    seen: set[tuple[str, str]] = set()
    for name, stored in manifest.objects.items():
        for plane in stored.planes.values():
            for segment in plane.segments:
                leaf = (segment.file, segment.key)
                if leaf in seen:
                    raise ArtifactError(
                        f"{where}: object {name} stores {segment.key} of {segment.file}, "
                        "which already belongs to another segment"
                    )
                seen.add(leaf)


def _check_dtypes(manifest: Manifest, where: str) -> None:
    for name, binding in manifest.bindings.items():
        stored = [manifest.objects[part.object] for part in binding.parts]
        first = stored[0]
        for other, part in zip(stored, binding.parts, strict=True):
            if other.dtype != first.dtype:
                raise ArtifactError(
                    f"{where}: parameter {name} mixes {first.dtype} "
                    f"and {other.dtype} ({part.object})"
                )
            # Names begin with their component, so kept-but-unused components can be left unread.
            if other.component != name.split(".", 1)[0]:
                raise ArtifactError(
                    f"{where}: parameter {name} takes rows of {part.object}, "
                    f"which belongs to component {other.component}"
                )


def _check_uses(manifest: Manifest, where: str) -> None:
    for name in manifest.bindings:
        if name not in manifest.uses:
            raise ArtifactError(f"{where}: parameter {name} has no use")
    for name in manifest.uses:
        if name not in manifest.bindings:
            raise ArtifactError(f"{where}: use of a missing parameter {name}")
