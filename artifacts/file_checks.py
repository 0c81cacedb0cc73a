"""Sizes and SHA-256 of an artifact's files, streamed, several files at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from artifacts.errors import ArtifactError
from artifacts.manifest import FileEntry

_THREADS = min(8, os.cpu_count() or 1)


def list_files(folder: Path, skip: Iterable[str] = ()) -> list[str]:
    """Every file below a folder but `skip`: sorted relative paths with forward slashes."""
    unwanted = set(skip)
    paths = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(path for path in paths if path not in unwanted)


def sha256(path: Path) -> str:
    """SHA-256 of a file in hex. ArtifactError naming the file when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None


def describe_files(folder: Path, paths: Iterable[str]) -> tuple[FileEntry, ...]:
    """Sizes and hashes of files, in the order given."""
    names = list(paths)
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(lambda name: sha256(folder / name), names))
    return tuple(
        FileEntry(path=name, size=(folder / name).stat().st_size, sha256=digest)
        for name, digest in zip(names, hashes, strict=True)
    )


def check_sizes(folder: Path, files: Iterable[FileEntry]) -> None:
    """Every listed file exists with its size. ArtifactError naming the first that does not."""
    for entry in files:
        path = folder / entry.path
        if not path.is_file():
            raise ArtifactError(f"{path}: named in the manifest but missing")
        size = path.stat().st_size
        if size != entry.size:
            raise ArtifactError(f"{path}: has {size} bytes, the manifest says {entry.size}")


def check_hashes(folder: Path, files: Iterable[FileEntry]) -> None:
    """Every listed file has its SHA-256. ArtifactError naming the first that does not."""
    entries = list(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(lambda entry: sha256(folder / entry.path), entries)
        for entry, found in zip(entries, hashes, strict=True):
            if entry.sha256 is None:
                raise ArtifactError(f"{folder / entry.path}: the manifest holds no SHA-256 for it")
            if found != entry.sha256:
                raise ArtifactError(
                    f"{folder / entry.path}: damaged: its SHA-256 is not the manifest's"
                )
