"""Debian packages as sources of text: pinned by hash, fetched once, read without installing."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

POOL = "http://deb.debian.org/debian/pool/main/"
"""Where a package is while a release has that version."""
SNAPSHOT = "https://snapshot.debian.org/file/"
"""Where every file that Debian ever published is, by its SHA-1."""
TIMEOUT_S = 60.0
AR_MAGIC = b"!<arch>\n"
AR_HEADER = 60


class PackageError(RuntimeError):
    """A package that cannot be had, or is not what it should be."""


@dataclass(frozen=True)
class Package:
    """One version of one package, and under what terms its text may be used."""

    name: str
    version: str
    pool: str
    """Path below `POOL`."""
    size: int
    """Bytes."""
    sha256: str
    sha1: str
    """Only the address at `SNAPSHOT`; what proves the content is the SHA-256."""
    licence: str
    upstream: str

    @property
    def urls(self) -> tuple[str, str]:
        """The addresses to try, in this order."""
        return POOL + self.pool, SNAPSHOT + self.sha1


JANE_AUSTEN = Package(
    name="r-cran-janeaustenr",
    version="1.0.0-1",
    pool="r/r-cran-janeaustenr/r-cran-janeaustenr_1.0.0-1_all.deb",
    size=1626392,
    sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    sha1="0526a5841219e475fbbf6e2d3bcd96e6fb0f479d",
    licence="public domain (published 1811-1818); the collection: MIT, (c) Julia Silge",
    upstream="https://cran.r-project.org/package=janeaustenr",
)
BIBLE = Package(
    name="bible-kjv-text",
    version="4.38",
    pool="b/bible-kjv/bible-kjv-text_4.38_all.deb",
    size=2445000,
    sha256="d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a",
    sha1="1666fa8517505735afa6b63c149d7879c42fb1a2",
    licence="public domain (King James Version, 1611)",
    upstream="https://tracker.debian.org/pkg/bible-kjv",
)
DEVIL = Package(
    name="dict-devil",
    version="1.0-13.1",
    pool="d/dict-devil/dict-devil_1.0-13.1_all.deb",
    size=179760,
    sha256="6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
    sha1="a8a9c37db98ef3407757afa53d95135c615af934",
    licence="public domain (Ambrose Bierce, 1911)",
    upstream="http://wiretap.area.com/Gopher/Library/Classic/devils.txt",
)
JARGON = Package(
    name="jargon-text",
    version="4.4.7-4.1",
    pool="j/jargon-text/jargon-text_4.4.7-4.1_all.deb",
    size=654244,
    sha256="17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
    sha1="e4bab7464448b63fcd7207e41f601a11ca0880de",
    licence="public domain (Jargon File 4.4.7, 29 Dec 2003)",
    upstream="http://www.catb.org/~esr/jargon/",
)
WORDNET = Package(
    name="wordnet-base",
    version="1:3.0-37",
    pool="w/wordnet/wordnet-base_3.0-37_all.deb",
    size=6467132,
    sha256="61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
    sha1="78cc404951819f319f979e9b5d08db8304ce49b9",
    licence="WordNet 3.0 licence (permissive; notice below)",
    upstream="https://wordnet.princeton.edu/",
)
PYTHON_DOCS = Package(
    name="python3.11-doc",
    version="3.11.2-6+deb12u8",
    pool="p/python3.11/python3.11-doc_3.11.2-6+deb12u8_all.deb",
    size=12642400,
    sha256="50eb63e7f636c4281e9ce1b8f10386f1def42159eddce34fc1f41c46261df71b",
    sha1="d4a9ab01ca393dc30872e1ea65f14be24cfcfe73",
    licence="PSF License Version 2; code examples also 0BSD",
    upstream="https://docs.python.org/3.11/",
)


def fetch(package: Package, cache: Path) -> Path:
    """The package's file, from the cache or else from the network into the cache.

    Raises:
        PackageError: no address gives a file of the right hash.
    """
    path = cache / package.pool.rsplit("/", 1)[-1]
    if path.exists() and _is(package, path.read_bytes()):
        return path
    cache.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in package.urls:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                data = answer.read()
        except (OSError, urllib.error.URLError) as error:
            failures.append(f"{url}: {error}")
            continue
        if not _is(package, data):
            failures.append(f"{url}: {len(data)} bytes of another content")
            continue
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(data)
        part.replace(path)
        return path
    raise PackageError(
        f"cannot fetch {package.name} {package.version}: {'; '.join(failures)}. "
        f"Put the file of SHA-256 {package.sha256} at {path}, or pin a newer version."
    )


def _is(package: Package, data: bytes) -> bool:
    return len(data) == package.size and hashlib.sha256(data).hexdigest() == package.sha256


def files(deb: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The regular files of a .deb whose path, such as "usr/share/doc/x/copyright", is wanted, in
    the order of the archive.

    Raises:
        PackageError: the file is no Debian package, or compressed in a way unknown here.
    """
    with tarfile.open(fileobj=io.BytesIO(_data_tar(deb)), mode="r:*") as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if member.isfile() and wanted(name) and (file := tar.extractfile(member)):
                yield name, file.read()


def read(deb: Path, name: str) -> bytes:
    """One file of a .deb. Raises PackageError if it has none of that name."""
    for _, data in files(deb, lambda path: path == name):
        return data
    raise PackageError(f"{deb.name} has no file {name}")


def _data_tar(deb: Path) -> bytes:
    for name, data in ar_members(deb.read_bytes()):
        if name.startswith("data.tar"):
            if not name.endswith(".zst"):
                return data
            try:  # tarfile of Python 3.11 reads no zstd
                run = subprocess.run(
                    ["dpkg-deb", "--fsys-tarfile", str(deb)], capture_output=True, check=True
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise PackageError(f"{deb.name}: {name} needs dpkg-deb: {error}") from error
            return run.stdout
    raise PackageError(f"{deb.name}: no data.tar in it")


def ar_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an `ar` archive. Raises PackageError if it is none."""
    if not data.startswith(AR_MAGIC):
        raise PackageError("not an ar archive")
    at = len(AR_MAGIC)
    while at + AR_HEADER <= len(data):
        header = data[at : at + AR_HEADER]
        if header[58:] != b"`\n":
            raise PackageError(f"a broken ar header at byte {at}")
        size = int(header[48:58])
        at += AR_HEADER
        yield header[:16].decode("ascii").rstrip(" /"), data[at : at + size]
        at += size + size % 2
