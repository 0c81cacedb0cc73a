"""R's serialisation, written here by hand."""

import gzip
import struct
import zlib

import pytest

from scripts.demo_model import rdata

VERSION_2 = b"X\n" + struct.pack(">3i", 2, 0x030000, 0x020300)
VERSION_3 = b"X\n" + struct.pack(">4i", 3, 0x040200, 0x030500, 5) + b"UTF-8"
END = struct.pack(">i", 0xFE)


def word(value):
    return struct.pack(">i", value)


def string(text):
    if text is None:
        return word(9) + word(-1)
    data = text.encode()
    return word(9) + word(len(data)) + data


def strings(*texts, flags=0):
    return word(16 | flags) + word(len(texts)) + b"".join(map(string, texts))


def integers(*values, kind=13):
    return word(kind) + struct.pack(f">{1 + len(values)}i", len(values), *values)


def named(names, *items, symbol=None):
    """A list with names; `symbol` is what says "names", once read before."""
    tag = symbol or word(1) + string("names")
    head = word(19 | 0x200) + word(len(items)) + b"".join(items)
    return head + word(0x402) + tag + strings(*names) + END


@pytest.mark.parametrize("header", [VERSION_2, VERSION_3])
def test_strings(header):
    value = rdata.loads(header + strings("CHAPTER I", "", "£5", None))
    assert value.values == ["CHAPTER I", "", "£5", None]


def test_numbers_null_and_names():
    reals = word(14) + word(1) + struct.pack(">d", 0.5)
    inner = named(["n"], integers(7), symbol=word(0x1FF))
    data = VERSION_3 + named(["i", "r", "none", "l"], integers(1, -2), reals, END, END)
    value = rdata.loads(data).named()
    assert value["i"].values == [1, -2]
    assert value["r"].values == [0.5]
    assert value["none"] is None
    twice = word(19) + word(2) + named(["a"], END) + inner
    assert rdata.loads(VERSION_3 + twice).values[1].named()["n"].values == [7]


def test_lazy_load_database():
    chunks = [VERSION_3 + strings("a", "b"), VERSION_3 + strings("c")]
    packed = [word(len(chunk)) + zlib.compress(chunk) for chunk in chunks]
    places = [integers(0, len(packed[0])), integers(len(packed[0]), len(packed[1]))]
    variables = named(["x", "y"], *places, symbol=None)
    index = named(["variables", "compressed"], variables, integers(1, kind=10), symbol=word(0x1FF))
    found = rdata.read_variables(gzip.compress(VERSION_3 + index), b"".join(packed))
    assert {name: value.values for name, value in found.items()} == {"x": ["a", "b"], "y": ["c"]}


def test_what_it_does_not_know():
    with pytest.raises(ValueError, match="not R's"):
        rdata.loads(b"A\n2")
    with pytest.raises(ValueError, match="R type 25"):
        rdata.loads(VERSION_2 + word(25) + word(0))
    with pytest.raises(ValueError, match="version 9"):
        rdata.loads(b"X\n" + struct.pack(">3i", 9, 0, 0))
