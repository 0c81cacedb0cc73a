"""HOST rules: extents, first fit, preflight. The oracle is a plain array of bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import checkpoint, host, kv
from planner.errors import IllegalError, LayoutError, ShortageError
from planner.host import Action, Arena, Extent
from planner.plans import ImageRef, PageRange, Target
from planner.testing import Driver, tiny_layout

X08 = Arena(100, (Extent(10, 20), Extent(40, 25)))
X, Y, Z = (Action((Extent(0, 10),)), Action((Extent(30, 10),)), Action((Extent(65, 35),)))


def test_x08_one_image() -> None:
    """X-08, HOST-05..07: Y alone makes 50 units fit; X and Z stay."""
    assert host.free_bytes(X08) == 45
    assert host.gain_cap(X08, [50]) == 5
    assert not host.fits(X08, [50])
    assert not host.fits(X08, [50], X.extents)
    assert host.choose_victims(X08, [50], [X, Y, Z]) == (1,)
    merged = host.release(X08, Extent(30, 10))
    assert merged.free == (Extent(10, 55),)
    assert host.allocate(merged, 50, "image")[1] == Extent(10, 50)


def test_x08_nothing_admissible() -> None:
    """X-08, HOST-08: Y and Z not replaceable: nothing is deleted."""
    actions = [X, Y._replace(admissible=False), Z._replace(admissible=False)]
    assert host.choose_victims(X08, [50], actions) is None


def test_x08_pages() -> None:
    """X-08, HOST-05, HOST-09: three pages fit one by one; as a group 36 halves to 24 and 12."""
    assert host.choose_victims(X08, [12, 12, 12], [X, Y, Z]) == ()
    assert host.first_fit(X08, 36) is None
    after, places = host.allocate_group(X08, 3, 12, "pages")
    assert places == [Extent(40, 12), Extent(52, 12), Extent(10, 12)]
    assert host.free_bytes(after) == 9


def test_x09_gain_cap() -> None:
    """X-09, HOST-07: the byte gap, or the largest allocation when bytes suffice."""
    assert host.gain_cap(Arena(100, (Extent(0, 30), Extent(50, 30))), [50]) == 50
    assert host.gain_cap(Arena(100, (Extent(0, 15), Extent(50, 30))), [50]) == 5
    assert host.gain_cap(Arena(100, (Extent(0, 60),)), [20, 30]) == 30


def test_unneeded_victims_are_removed() -> None:
    """HOST-07: an early action that proved unneeded is not executed."""
    a = Arena(60, (Extent(20, 10),))
    first, second = Action((Extent(0, 10),)), Action((Extent(10, 10),))
    last = Action((Extent(30, 30),))
    assert host.choose_victims(a, [40], [first, second, last]) == (2,)
    assert host.choose_victims(a, [30], [first, second]) == (0, 1)


def test_group_shortage_is_exact() -> None:
    """HOST-09: a page that fits nowhere fails the group; the caller keeps its arena."""
    a = Arena(10, (Extent(0, 3), Extent(5, 3)))
    with pytest.raises(ShortageError) as caught:
        host.allocate_group(a, 3, 2, "pages")
    assert caught.value.gaps == (("host", 2),)
    assert host.free_bytes(a) == 6


def test_bad_arguments() -> None:
    """HOST-03: double frees, foreign extents and empty sizes raise."""
    with pytest.raises(IllegalError, match="twice"):
        host.release(X08, Extent(12, 3))
    with pytest.raises(IllegalError, match="twice"):
        host.release(X08, Extent(5, 10))
    with pytest.raises(IllegalError, match="outside"):
        host.release(X08, Extent(95, 10))
    with pytest.raises(IllegalError, match="at least 1"):
        host.first_fit(X08, 0)
    with pytest.raises(LayoutError):
        host.arena(-1)
    assert host.arena(0).free == ()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_against_bytes(ops: list[tuple[bool, int]]) -> None:
    """HOST-01, HOST-03: first fit, split and merge agree with a byte array that is scanned."""
    size = 32
    a, used, live = host.arena(size), np.zeros(size, bool), []
    for is_alloc, n in ops:
        if is_alloc:
            runs = [i for i in range(size - n + 1) if not used[i : i + n].any()]
            got = host.first_fit(a, n)
            assert (got is None) == (not runs)
            if got is not None:
                a, e = got
                assert e == Extent(runs[0], n)
                used[e.offset : e.offset + n] = True
                live.append(e)
        elif live:
            e = live.pop(n % len(live))
            a = host.release(a, e)
            used[e.offset : e.offset + e.size] = False
        assert host.free_bytes(a) == int((~used).sum())
        edges = np.flatnonzero(np.diff(np.concatenate([[True], used, [True]]).astype(int)))
        assert [(e.offset, e.offset + e.size) for e in a.free] == [
            tuple(pair) for pair in edges.reshape(-1, 2)
        ]


def test_one_arena_for_everything() -> None:
    """HOST-01, HOST-02, HOST-04, HOST-10: images and pages of both pools share one budget, are
    charged from reservation, and change no Device capacity."""
    d = Driver(tiny_layout(pages=6, backend=6, host=6, image=3, slots=4))
    cid = d.cached(1, 4)
    ck = checkpoint(d.state, cid)
    capacity = [p.capacity for p in d.state.pools]
    d.start(
        Target(
            demote=(
                ImageRef(ck.image),
                PageRange(0, ck.prefixes[0].history, 0, 2),
                PageRange(1, ck.prefixes[1].history, 0, 1),
            )
        )
    )
    d.advance(2)
    assert host.used_bytes(d.state.arena) == 6  # in flight already counts
    d.advance(2)
    assert host.used_bytes(d.state.arena) == 6
    assert [p.capacity for p in d.state.pools] == capacity
    history = kv.history(d.state.pools[0], ck.prefixes[0].history)
    places = [p.host for p in history.pages.values()]
    assert places == [3, 4]  # packed, in logical order
