"""What a set of releases frees together (TX-05..07): counted on the joint post-state, read-only.

An alias frees nothing, the last two holders together free once, and a fork keeps what its parent
let go. Nothing is summed over owners. The cost is a few steps per history, and a walk over the
freed pages where a history is only trimmed or has Host copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from planner import kv, state_images
from planner.capacity import ceil_div
from planner.errors import BusyError, HandleError
from planner.host import Extent
from planner.kv import Pool
from planner.physical import PhysicalState, checkpoint
from planner.plans import Edge


class Reclaim(NamedTuple):
    """Freed page groups per pool, Device slots and Host bytes, with what goes.

    ``extents`` are the Host places (free bytes alone prove no fit); ``checkpoints`` those deleted.
    """

    pages: tuple[int, ...]
    slots: int
    host: int
    checkpoints: tuple[int, ...]
    extents: tuple[Extent, ...]


def reclaim(s: PhysicalState, edges: Iterable[Edge]) -> Reclaim:
    """Used(S) - Used(PostState(S, edges)) without building the post-state."""
    lost: dict[int, list[int]] = {}
    for owner, cid in edges:
        lost.setdefault(cid, []).append(owner)
    gone = []
    for cid in sorted(lost):
        ck = checkpoint(s, cid)
        strangers = [o for o in lost[cid] if o not in ck.holders]
        if strangers:
            raise HandleError(f"owner {strangers[0]} does not hold checkpoint {cid}")
        if len(set(lost[cid])) == len(ck.holders):
            if ck.readers:
                raise BusyError(f"checkpoint {cid} has {ck.readers} reader lease(s)")
            gone.append(ck)
    extents: list[Extent] = []
    images: dict[int, int] = {}
    for ck in gone:
        images[ck.image] = images.get(ck.image, 0) + 1
    slots = 0
    for iid in sorted(images):
        im = state_images.image(s.states, iid)
        if im.refs == images[iid] and not im.pins and not im.writer:
            slots += bool(im.slot)
            if im.host:
                extents.append(im.host)
    pages = []
    for k, pool in enumerate(s.pools):
        refs: dict[int, list[tuple[int, int]]] = {}
        for ck in gone:
            p = ck.prefixes[k]
            if p.history:
                refs.setdefault(p.history, []).append((p.frontier, ck.id))
        pages.append(_freed_pages(pool, refs, extents))
    host = sum(e.size for e in extents)
    return Reclaim(tuple(pages), slots, host, tuple(ck.id for ck in gone), tuple(extents))


def marginal_loss(surviving: Iterable[int], deleted: Iterable[int]) -> int:
    """Tokens that can no longer be restored when ``deleted`` points of one exact path go (RC-07).

    Each point falls back to the deepest survivor at or before it (0 where there is none); the loss
    is the measure of the union of (fallback, point], so nothing counts twice.
    """
    left = sorted(surviving)
    loss, covered = 0, 0
    for x in sorted(deleted):
        fallback = max([p for p in left if p <= x], default=0)
        loss += x - max(min(covered, x), fallback)
        covered = max(covered, x)
    return loss


def _longest(held: Sequence[tuple[int, int]], gone: Sequence[tuple[int, int]]) -> int:
    """The longest prefix still held: both are (length, holder), ``held`` ascending."""
    if len(held) == len(gone):
        return 0
    left = set(gone)
    return next((entry[0] for entry in reversed(held) if entry not in left), 0)


def _freed_pages(pool: Pool, refs: dict[int, list[tuple[int, int]]], extents: list[Extent]) -> int:
    """Walk histories from the youngest to the oldest: a child is always younger than its parent."""
    children: dict[int, list[tuple[int, int]]] = {}
    queue = [-hid for hid in refs]
    heapify(queue)
    seen: set[int] = set()
    freed = 0
    while queue:
        hid = -heappop(queue)
        if hid in seen:
            continue
        seen.add(hid)
        h = kv.history(pool, hid)
        if h.sequence or h.pins:
            continue
        tokens = _longest(h.refs, refs.get(hid, ()))
        forks = _longest(h.children, children.get(hid, ()))
        blocks = max(ceil_div(tokens, pool.page_tokens), forks)
        if not blocks and not h.on_host:
            freed += h.on_device
        else:
            gone = h.pages.slice(max(blocks, h.base), h.blocks)
            freed += len(kv.leases(gone))
            extents += kv.host_places(gone, pool.page_bytes)
        if not blocks and h.parent:
            children.setdefault(h.parent, []).append((h.base, hid))
            heappush(queue, -h.parent)
    return freed
