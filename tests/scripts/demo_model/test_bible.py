"""The Bible's archive, packed here by a slow obvious `compress`."""

import random
import struct

import pytest
from debian_package import deb

from scripts.demo_model import bible, lzw


def compress(data, max_width=16):
    """LZW as `compress` writes it, without its magic: groups of eight codes, never a clear."""
    table = {bytes([byte]): byte for byte in range(256)}
    following, width, bits, codes, word = 257, 9, [], 0, b""

    def put(code):
        nonlocal codes
        bits.extend(code >> i & 1 for i in range(width))
        codes += 1

    for byte in data:
        longer = word + bytes([byte])
        if longer in table:
            word = longer
            continue
        put(table[word])
        if following < 1 << max_width:
            table[longer] = following
            following += 1
            # the reader's table lags one behind
            if following - 1 > (1 << width) - 1 and width < max_width:
                while codes % 8:
                    put(0)
                width, codes = width + 1, 0
        word = bytes([byte])
    put(table[word])
    bits += [0] * (-len(bits) % 8)
    return bytes(
        sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)
    )


@pytest.mark.parametrize("size", [1, 300, 5000])
def test_lzw_inverts(size):
    words = random.Random(size).choices(
        [b"and ", b"it ", b"came ", b"to ", b"pass ", b"\n"], k=size
    )
    data = b"".join(words)
    assert lzw.decompress(compress(data), len(data)) == data
    assert lzw.decompress(compress(data), 3) == data[:3]


def test_lzw_refuses_a_code_of_no_table():
    with pytest.raises(ValueError, match="LZW code 511"):
        lzw.decompress(b"\xff\xff", 8)


def archive(text, window):
    parts = [compress(text[at : at + window]) for at in range(0, len(text), window)]
    start = bible.HEADER + 8 + 4 * (len(parts) + 1)
    edges = [start + sum(map(len, parts[:i])) for i in range(len(parts) + 1)]
    header = bible.MAGIC.ljust(bible.HEADER, b"\0")
    return header + struct.pack(f">{2 + len(edges)}I", window, len(parts), *edges) + b"".join(parts)


def test_chapters(tmp_path, monkeypatch):
    text = b"Holy Bible.\nGe1:1 In the beginning.\nGe1:2 And the earth.\nGe2:1 Thus.\n1Sm1:1 Now.\n"
    path = tmp_path / "a.deb"
    path.write_bytes(deb({bible.FILE: archive(text, 32)}))
    monkeypatch.setattr(bible.debian, "fetch", lambda package, cache: path)
    found = list(bible.documents(tmp_path))
    assert [document.name for document in found] == [
        "Genesis, chapter 1",
        "Genesis, chapter 2",
        "1 Samuel, chapter 1",
    ]
    assert found[0].text == "Genesis, chapter 1\n\n1 In the beginning.\n2 And the earth."


def test_another_file():
    with pytest.raises(ValueError, match="Bible Retrieval System"):
        bible.decompress(b"\x1f\x9d\x90")
