"""Packages: what is fetched is what was pinned, and files come out of an archive made by hand."""

import dataclasses
import hashlib
import io
import urllib.error

import pytest
from debian_package import ar, deb

from scripts.demo_model import debian


@pytest.fixture
def package():
    data = deb({"usr/share/a": b"text"})
    pinned = dataclasses.replace(
        debian.DEVIL, size=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
    return pinned, data


@pytest.mark.parametrize("compression", ["xz", "gz"])
def test_files_of_an_archive(tmp_path, compression):
    path = tmp_path / "a.deb"
    path.write_bytes(deb({"usr/a": b"1", "usr/b": b"22"}, compression))
    assert list(debian.files(path, lambda name: name != "usr/a")) == [("usr/b", b"22")]
    assert debian.read(path, "usr/a") == b"1"
    with pytest.raises(debian.PackageError, match="no file usr/c"):
        debian.read(path, "usr/c")


def test_not_a_package(tmp_path):
    path = tmp_path / "a.deb"
    path.write_bytes(b"<html>")
    with pytest.raises(debian.PackageError, match="not an ar archive"):
        debian.read(path, "usr/a")
    path.write_bytes(ar({"debian-binary": b"2.0\n"}))
    with pytest.raises(debian.PackageError, match=r"no data\.tar"):
        debian.read(path, "usr/a")


def test_the_second_address_serves_when_the_first_does_not(tmp_path, monkeypatch, package):
    pinned, data = package
    asked = []

    def urlopen(url, timeout):
        asked.append(url)
        if url == pinned.urls[0]:
            raise urllib.error.URLError("gone")
        return io.BytesIO(data)

    monkeypatch.setattr(debian.urllib.request, "urlopen", urlopen)
    path = debian.fetch(pinned, tmp_path)
    assert path.read_bytes() == data
    assert debian.fetch(pinned, tmp_path) == path
    assert asked == list(pinned.urls), "the cache answers the second time"


def test_another_content_is_refused(tmp_path, monkeypatch, package):
    pinned, data = package
    monkeypatch.setattr(
        debian.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(data[:-1] + b"?")
    )
    with pytest.raises(debian.PackageError) as error:
        debian.fetch(pinned, tmp_path)
    for part in (pinned.name, pinned.version, *pinned.urls, pinned.sha256):
        assert part in str(error.value)
    assert list(tmp_path.iterdir()) == []
