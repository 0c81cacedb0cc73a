"""Small worlds: a few owners, pages of two tokens, a Host arena of a few extents."""

from __future__ import annotations

from dataclasses import dataclass

from planner.capacity import Layout, PoolLayout, PoolName


def tiny_layout(
    *,
    pages: int = 4,
    blocks: int = 3,
    rows: int = 2,
    slots: int = 3,
    host: int = 6,
    image: int = 2,
    backend: int = 0,
    page_tokens: int = 2,
) -> Layout:
    """A layout in small units: a Host page is 1 byte, an image ``image`` bytes.

    ``backend`` > 0 adds an mtp pool of that many pages.
    """
    names: list[tuple[PoolName, int]] = [("main", pages)]
    if backend:
        names.append(("mtp", backend))
    pools = tuple(PoolLayout(name, n, 1) for name, n in names)
    return Layout(blocks * page_tokens, rows, page_tokens, pools, slots, image, host)


@dataclass(frozen=True, slots=True)
class World:
    """A layout and how much the move generator may vary.

    ``owners`` may hold checkpoints; ``points`` bounds the checkpoints alive, ``lag`` lets the
    second pool trail the first by up to that many tokens. In an ``atomic`` world
    nothing else happens while a unit or a transaction runs, so a search gets deeper.
    """

    layout: Layout
    owners: int = 2
    points: int = 2
    lag: int = 0
    readers: bool = True
    atomic: bool = False


TINY = World(tiny_layout())
ATOMIC = World(tiny_layout(pages=5, slots=2, host=5), points=3, readers=False, atomic=True)
TWO_POOLS = World(
    tiny_layout(pages=4, backend=4, slots=2, host=5), points=2, lag=1, readers=False, atomic=True
)
