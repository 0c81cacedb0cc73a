"""Debian packages made by hand."""

import io
import tarfile


def ar(members):
    """An `ar` archive of names and contents."""
    data = b"!<arch>\n"
    for name, content in members.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode("ascii")
        data += header + content + b"\n" * (len(content) % 2)
    return data


def deb(files, compression="xz"):
    """A .deb of paths and contents."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=f"w:{compression}") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return ar(
        {"debian-binary": b"2.0\n", "x": b"odd", f"data.tar.{compression}": packed.getvalue()}
    )
