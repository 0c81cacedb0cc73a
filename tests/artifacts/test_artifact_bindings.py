"""The binding rule against numpy: concatenate the row ranges, flatten, cut."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ArtifactError
from artifacts.bindings import Binding, FlatView, Part, check_bindings

Arrays = dict[str, np.ndarray]


@st.composite
def bound_parameters(draw: st.DrawFn) -> tuple[Arrays, Binding]:
    """Random objects of any rank, and a parameter made of random row ranges of them."""
    shapes = draw(
        st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4)
    )
    arrays: Arrays = {}
    at = 0
    for i, shape in enumerate(shapes):
        size = math.prod(shape)
        arrays[f"o{i}"] = np.arange(at, at + size, dtype=np.int32).reshape(shape)
        at += size
    parts = []
    for _ in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(arrays)))
        start = draw(st.integers(0, arrays[name].shape[0] - 1))
        stop = draw(st.integers(start + 1, arrays[name].shape[0]))
        parts.append(Part(name, start, stop))
    size = sum(arrays[p.object][p.start : p.stop].size for p in parts)
    return arrays, Binding((size,), tuple(parts))


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


@given(bound_parameters(), st.data())
def test_runs_are_the_flat_concatenation(case: tuple[Arrays, Binding], data: Any) -> None:
    """ART-08: stored row order over any number of parents."""
    arrays, binding = case
    wanted = np.concatenate([arrays[p.object][p.start : p.stop].reshape(-1) for p in binding.parts])
    view = FlatView(binding, shapes_of(arrays))
    assert view.size == wanted.size
    start = data.draw(st.integers(0, wanted.size))
    stop = data.draw(st.integers(start, wanted.size))
    out = np.full(stop - start, -1, np.int32)
    at = 0
    for run in view.runs(start, stop):
        assert run.target == at
        assert run.count > 0
        flat = arrays[run.object].reshape(-1)
        out[at : at + run.count] = flat[run.source : run.source + run.count]
        at += run.count
    assert at == out.size
    np.testing.assert_array_equal(out, wanted[start:stop])


@given(bound_parameters(), st.integers(1, 40))
def test_any_block_size_covers_everything_once(case: tuple[Arrays, Binding], block: int) -> None:
    arrays, binding = case
    view = FlatView(binding, shapes_of(arrays))
    counts = [
        sum(run.count for run in view.runs(start, min(start + block, view.size)))
        for start in range(0, view.size, block)
    ]
    assert sum(counts) == view.size
    assert all(count == block for count in counts[:-1])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.randoms())
def test_a_permuted_partition_covers_exactly_once(cuts: list[int], random: Any) -> None:
    """Any cut in any order is complete; one piece missing or repeated is not."""
    ends = np.cumsum(cuts).tolist()
    parts = [Part("o", e - c, e) for c, e in zip(cuts, ends, strict=True)]
    random.shuffle(parts)
    objects = {"o": (ends[-1], 3)}
    bindings = {f"p{i}": Binding((p.stop - p.start, 3), (p,)) for i, p in enumerate(parts)}
    check_bindings(bindings, objects, "m")
    with pytest.raises(ArtifactError, match="of object o are bound twice"):
        check_bindings(bindings | {"again": bindings["p0"]}, objects, "m")
    del bindings["p0"]
    with pytest.raises(ArtifactError, match=r"row \d+ of object o is bound to no parameter"):
        check_bindings(bindings, objects, "m")


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (Binding((4, 2), (Part("x", 0, 4),)), "parameter p is bound to a missing object x"),
        (Binding((4, 2), (Part("o", 0, 5),)), "takes rows 0:5 of o, which has 4"),
        (Binding((4, 2), (Part("o", -1, 3),)), "takes rows -1:3 of o"),
        (Binding((4, 2), (Part("o", 3, 3),)), "takes rows 3:3 of o"),
        (Binding((4, 3), (Part("o", 0, 4),)), r"of shape \[4, 3\] is bound to 8 elements"),
        (Binding((4, 2), ()), "parameter p is bound to nothing"),
        (Binding((3, 2), (Part("o", 1, 4),)), "row 0 of object o is bound to no parameter"),
    ],
)
def test_bad_bindings(binding: Binding, message: str) -> None:
    with pytest.raises(ArtifactError, match=f"m: .*{message}"):
        check_bindings({"p": binding}, {"o": (4, 2)}, "m")
