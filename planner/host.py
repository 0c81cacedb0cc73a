"""The Host arena: one byte budget, first-fit extents, and the preflight of a whole recipe (HOST).

An `Arena` keeps only its free extents, sorted by offset and never adjacent. Who owns the rest is
written where it is used (image, page, transaction), so a byte has one owner and `check` can prove
that free and owned extents tile the arena. Free bytes never prove that something fits (HOST-05).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from planner.errors import IllegalError, LayoutError, ShortageError


class Extent(NamedTuple):
    """Bytes [offset, offset + size) of the arena."""

    offset: int
    size: int


class Arena(NamedTuple):
    """``capacity`` bytes with ``free`` extents in offset order, merged (HOST-01, HOST-03)."""

    capacity: int
    free: tuple[Extent, ...]


class Action(NamedTuple):
    """One reclaim action on Host memory: the extents it alone frees, and whether it may be taken.

    Content with several holders belongs to the one action that releases all of them (HOST-06).
    """

    extents: tuple[Extent, ...]
    admissible: bool = True


def arena(capacity: int) -> Arena:
    """An empty arena of ``capacity`` bytes; 0 is a legal arena in which nothing fits."""
    if capacity < 0:
        raise LayoutError(f"Host capacity {capacity} is negative; give 0 or more bytes")
    return Arena(capacity, (Extent(0, capacity),) if capacity else ())


def free_bytes(a: Arena) -> int:
    """Sum of the free extents: an observation, no proof of fit."""
    return sum(e.size for e in a.free)


def used_bytes(a: Arena) -> int:
    """Bytes charged, counted from reservation (HOST-02)."""
    return a.capacity - free_bytes(a)


def first_fit(a: Arena, size: int) -> tuple[Arena, Extent] | None:
    """The lowest extent that holds ``size`` bytes, or None; a remainder stays free (HOST-03)."""
    if size <= 0:
        raise IllegalError(f"an allocation of {size} bytes; sizes are at least 1")
    for i, e in enumerate(a.free):
        if e.size >= size:
            rest = (Extent(e.offset + size, e.size - size),) if e.size > size else ()
            return Arena(a.capacity, a.free[:i] + rest + a.free[i + 1 :]), Extent(e.offset, size)
    return None


def allocate(a: Arena, size: int, what: str) -> tuple[Arena, Extent]:
    """`first_fit`, or a ShortageError that names the largest free extent."""
    found = first_fit(a, size)
    if found is None:
        largest = max((e.size for e in a.free), default=0)
        raise ShortageError(
            f"{what}: no free Host extent of {size} bytes (largest {largest}, free "
            f"{free_bytes(a)} of {a.capacity}); release Host copies or raise host_capacity_bytes",
            (("host", size),),
        )
    return found


def release(a: Arena, extent: Extent) -> Arena:
    """Give an extent back and merge it with its free neighbours; a double free raises."""
    lo, hi = extent.offset, extent.offset + extent.size
    if extent.size <= 0 or lo < 0 or hi > a.capacity:
        raise IllegalError(f"{extent} lies outside the arena of {a.capacity} bytes")
    i = bisect_left(a.free, extent)
    before = a.free[i - 1] if i else None
    after = a.free[i] if i < len(a.free) else None
    if (before and before.offset + before.size > lo) or (after and after.offset < hi):
        raise IllegalError(f"{extent} is freed twice")
    left, right = i, i
    if before and before.offset + before.size == lo:
        lo, left = before.offset, i - 1
    if after and after.offset == hi:
        hi, right = after.offset + after.size, i + 1
    return Arena(a.capacity, (*a.free[:left], Extent(lo, hi - lo), *a.free[right:]))


def release_all(a: Arena, extents: Sequence[Extent]) -> Arena:
    """`release` in order."""
    for e in extents:
        a = release(a, e)
    return a


def allocate_group(a: Arena, pages: int, page_bytes: int, what: str) -> tuple[Arena, list[Extent]]:
    """One extent for ``pages`` pages, halved while it does not fit, larger half first (HOST-09).

    Returns the packed place of each page in logical order: no hole inside a placed part (HOST-04).
    """
    found = first_fit(a, pages * page_bytes)
    if found is not None:
        a, e = found
        return a, [Extent(e.offset + i * page_bytes, page_bytes) for i in range(pages)]
    if pages == 1:
        a, e = allocate(a, page_bytes, what)  # raises
        return a, [e]
    larger = (pages + 1) // 2
    a, head = allocate_group(a, larger, page_bytes, what)
    a, tail = allocate_group(a, pages - larger, page_bytes, what)
    return a, head + tail


def fits(a: Arena, sizes: Sequence[int], releases: Sequence[Extent] = ()) -> bool:
    """Whether each size in turn first-fits once ``releases`` are gone (HOST-05)."""
    a = release_all(a, releases)
    for size in sizes:
        found = first_fit(a, size)
        if found is None:
            return False
        a = found[0]
    return True


def gain_cap(a: Arena, sizes: Sequence[int]) -> int:
    """The most a single action may count for: the byte gap, or the largest single allocation when
    the bytes already suffice (HOST-07)."""
    gap = sum(sizes) - free_bytes(a)
    return gap if gap > 0 else max(sizes, default=0)


def choose_victims(
    a: Arena, sizes: Sequence[int], actions: Sequence[Action]
) -> tuple[int, ...] | None:
    """Indices of the actions to take, in the order given, or None: then nothing is deleted.

    Actions are in reclaim order and own disjoint extents. One that makes the request fit beats one
    that only adds bytes; actions that proved unneeded are removed again (HOST-06..08).
    """
    chosen: list[int] = []
    left = [i for i, action in enumerate(actions) if action.admissible]

    def enough(indices: Sequence[int]) -> bool:
        return fits(a, sizes, [e for i in indices for e in actions[i].extents])

    while not enough(chosen):
        if not left:
            return None
        take = next((i for i in left if enough([*chosen, i])), left[0])
        chosen.append(take)
        left.remove(take)
    for i in tuple(chosen):
        rest = [j for j in chosen if j != i]
        if enough(rest):
            chosen = rest
    return tuple(sorted(chosen))
