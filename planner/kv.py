"""One paged KV pool as an immutable value: page groups, histories, references, rows (KV).

A `History` is the directory of one continuation in one pool: the only place where pages are
written, by at most one sequence. Pages have no reference counts. Who holds page b of a history is
exactly who holds a prefix that reaches b: a checkpoint (``refs``), a fork (``children``), the
writer (``sequence``). A fork therefore shares any number of full pages with one edge, and a page
is freed when the longest remaining prefix no longer reaches it.

Functions take a `Pool` and return a new one. Nothing here chooses a request, source or victim.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from planner.capacity import ceil_div
from planner.errors import BusyError, HandleError, IllegalError, ShortageError
from planner.host import Extent
from planner.persistent import IntMap, with_item, without_item

NO_HOST: Final = -1


class Page(NamedTuple):
    """A logical page. ``serial`` is its identity and generation: never used twice in a pool.

    ``epoch`` advances when committed columns are given up for rewriting. ``device`` is the leased
    page group (0: none); the Device copy always covers every committed column, because the writer
    works in it. ``host`` is the arena offset of the Host copy (NO_HOST: none), valid for the first
    ``host_columns`` columns of ``host_epoch`` (KV-13..15).
    """

    serial: int
    epoch: int
    device: int
    host: int = NO_HOST
    host_epoch: int = 0
    host_columns: int = 0


_DEVICE = itemgetter(Page._fields.index("device"))
_HOST = itemgetter(Page._fields.index("host"))


def leases(pages: Sequence[Page]) -> list[int]:
    """Page groups of those pages that have one, in order."""
    ids = list(map(_DEVICE, pages))
    return [g for g in ids if g] if 0 in ids else ids


def host_places(pages: Sequence[Page], page_bytes: int) -> list[Extent]:
    """Host extents of those pages that have one, in order."""
    places = list(map(_HOST, pages))
    if places.count(NO_HOST) == len(places):
        return []
    return [Extent(offset, page_bytes) for offset in places if offset != NO_HOST]


class History(NamedTuple):
    """Directory of one continuation: blocks [0, base) are the parent's, the rest its own.

    ``blocks`` is the membership (it may lead the committed frontier), ``pages`` the own pages by
    block, ``sequence`` the writer (0: inactive), ``refs`` the KVPrefixRefs of checkpoints as sorted
    (frontier, checkpoint), ``children`` the forks as sorted (blocks, history), ``pins`` the
    transactions that read it. ``on_device`` and ``on_host`` count the own pages that have a replica
    there, so that a quote need not walk them.
    """

    id: int
    parent: int
    base: int
    blocks: int
    pages: IntMap[Page]
    sequence: int
    refs: tuple[tuple[int, int], ...] = ()
    children: tuple[tuple[int, int], ...] = ()
    pins: int = 0
    on_device: int = 0
    on_host: int = 0


class Pool(NamedTuple):
    """A typed pool: ``allocated + reserved + available = capacity`` (KV-17).

    Free page groups are ``recycled[0..recycled_count)`` (a stack) and every id >= ``fresh``.
    ``rows`` names the sequence that leases each row of the block-table matrix (0: none), ``resident``
    the histories with own pages on the Device, ascending.
    """

    name: str
    capacity: int
    page_bytes: int
    page_tokens: int
    logical_pages: int
    rows: tuple[int, ...]
    fresh: int = 1
    recycled: IntMap[int] = IntMap()
    recycled_count: int = 0
    allocated: int = 0
    reserved: int = 0
    histories: IntMap[History] = IntMap()
    next_history: int = 1
    next_serial: int = 1
    resident: tuple[int, ...] = ()


def available(pool: Pool) -> int:
    """Page groups that anyone may still take."""
    return pool.capacity - pool.allocated - pool.reserved


def history(pool: Pool, hid: int) -> History:
    """The history with this id; ids are never reused, so a stale handle always fails."""
    found = pool.histories.get(hid)
    if found is None:
        raise HandleError(f"pool {pool.name}: history {hid} is gone; look the source up again")
    return found


def _put(pool: Pool, h: History) -> Pool:
    old = pool.histories.get(h.id)
    pool = pool._replace(histories=pool.histories.set(h.id, h))
    was, is_there = old is not None and old.on_device > 0, h.on_device > 0
    return pool if was == is_there else _resident(pool, h.id, is_there)


def _resident(pool: Pool, hid: int, there: bool) -> Pool:
    change = with_item if there else without_item
    return pool._replace(resident=change(pool.resident, hid))


# Capacity: reservation, lease, return


def reserve(pool: Pool, pages: int) -> Pool:
    """Withdraw ``pages`` from what others can take."""
    if pages > available(pool):
        raise ShortageError(
            f"pool {pool.name}: {pages} pages wanted, {available(pool)} of {pool.capacity} "
            "available; reclaim cache or pause a younger request",
            ((pool.name, pages - available(pool)),),
        )
    return pool._replace(reserved=pool.reserved + pages) if pages else pool


def unreserve(pool: Pool, pages: int) -> Pool:
    """Return a reservation that was not materialised."""
    if pages > pool.reserved:
        raise IllegalError(f"pool {pool.name}: returning {pages} of {pool.reserved} reserved pages")
    return pool._replace(reserved=pool.reserved - pages) if pages else pool


def materialize(pool: Pool, pages: int) -> tuple[Pool, list[int]]:
    """Turn reservation into leased page groups (ids): recycled ones first, then fresh (KV-12)."""
    if pages > pool.reserved:
        raise IllegalError(f"pool {pool.name}: {pages} pages asked of {pool.reserved} reserved")
    if not pages:
        return pool, []
    kept = max(0, pool.recycled_count - pages)
    ids = pool.recycled.slice(kept, pool.recycled_count)
    fresh = pages - len(ids)
    ids.extend(range(pool.fresh, pool.fresh + fresh))
    return pool._replace(
        fresh=pool.fresh + fresh,
        recycled_count=kept,
        allocated=pool.allocated + pages,
        reserved=pool.reserved - pages,
    ), ids


def _recycle(pool: Pool, ids: Sequence[int], to_reserved: bool) -> Pool:
    if not ids:
        return pool
    return pool._replace(
        recycled=pool.recycled.set_range(pool.recycled_count, ids),
        recycled_count=pool.recycled_count + len(ids),
        allocated=pool.allocated - len(ids),
        reserved=pool.reserved + (len(ids) if to_reserved else 0),
    )


def dematerialize(pool: Pool, ids: Sequence[int]) -> Pool:
    """Return leases to the reservation they came from; nobody else's view changes (KV-17)."""
    return _recycle(pool, ids, True)


def free_pages(pool: Pool, ids: Sequence[int]) -> Pool:
    """Return leases to what anyone may take."""
    return _recycle(pool, ids, False)


def free_ids(pool: Pool) -> Iterator[int]:
    """Every free page group id (O(pages): for checks and drawings)."""
    yield from pool.recycled.slice(0, pool.recycled_count)
    yield from range(pool.fresh, pool.capacity + 1)


# Directory


def anchor(pool: Pool, hid: int, blocks: int) -> int:
    """The ancestor (or self) that owns block ``blocks - 1``; 0 for an empty prefix."""
    while hid and blocks <= (h := history(pool, hid)).base:
        hid = h.parent
    return hid if blocks else 0


def segments(pool: Pool, hid: int, blocks: int) -> list[tuple[History, int, int]]:
    """(history, lo, hi) from the root on: who owns which blocks of the prefix."""
    out: list[tuple[History, int, int]] = []
    while hid and blocks:
        h = history(pool, hid)
        if blocks > h.base:
            out.append((h, h.base, blocks))
            blocks = h.base
        hid = h.parent
    out.reverse()
    return out


def prefix_pages(pool: Pool, hid: int, blocks: int) -> list[Page]:
    """The logical pages of blocks [0, blocks) in order, shared ones included."""
    out: list[Page] = []
    for h, lo, hi in segments(pool, hid, blocks):
        out += h.pages.slice(lo, hi)
    return out


def protected_tokens(pool: Pool, h: History) -> int:
    """End of the columns that some checkpoint or fork holds: a writer never touches them."""
    refs = h.refs[-1][0] if h.refs else 0
    forks = h.children[-1][0] * pool.page_tokens if h.children else 0
    return max(refs, forks)


def needed_columns(pool: Pool, h: History, block: int, committed: int) -> int:
    """Columns of ``block`` that stand for content; ``committed`` is the writer's frontier or 0."""
    tokens = max(protected_tokens(pool, h), committed)
    return max(0, min(pool.page_tokens, tokens - block * pool.page_tokens))


def host_covers(page: Page, columns: int) -> bool:
    """Whether the Host copy serves ``columns`` (KV-15)."""
    return page.host != NO_HOST and page.host_epoch == page.epoch and page.host_columns >= columns


def start_history(pool: Pool, parent: int, base: int, sequence: int) -> tuple[Pool, int]:
    """A new history sharing the first ``base`` full pages of ``parent`` (KV-35): one edge, no copy.

    ``parent`` must be the anchor of ``base`` blocks.
    """
    hid = pool.next_history
    pool = pool._replace(next_history=hid + 1)
    if base:
        p = history(pool, parent)
        if not p.base < base <= p.blocks:
            raise IllegalError(f"pool {pool.name}: history {parent} does not own block {base - 1}")
        children = list(p.children)
        insort(children, (base, hid))
        pool = _put(pool, p._replace(children=tuple(children)))
    return _put(pool, History(hid, parent if base else 0, base, base, IntMap(), sequence)), hid


def append(pool: Pool, hid: int, ids: Sequence[int]) -> Pool:
    """Add new logical pages on the leased ``ids`` behind the last block."""
    h = history(pool, hid)
    if h.blocks + len(ids) > pool.logical_pages:
        raise IllegalError(
            f"pool {pool.name}: history {hid} would have {h.blocks + len(ids)} blocks, a table has "
            f"{pool.logical_pages}; max_context is the limit"
        )
    serial = pool.next_serial
    pages = [Page(serial + i, 0, g) for i, g in enumerate(ids)]
    h = h._replace(
        blocks=h.blocks + len(ids),
        pages=h.pages.set_range(h.blocks, pages),
        on_device=h.on_device + len(ids),
    )
    return _put(pool, h)._replace(next_serial=serial + len(ids))


def cut(pool: Pool, hid: int, blocks: int) -> tuple[Pool, list[int], list[Extent]]:
    """Forget own blocks >= ``blocks``; returns the leases and Host extents to give back."""
    h = history(pool, hid)
    blocks = max(blocks, h.base)
    if blocks >= h.blocks:
        return pool, [], []
    if blocks * pool.page_tokens < protected_tokens(pool, h):
        raise IllegalError(f"pool {pool.name}: cutting history {hid} into protected columns")
    gone = h.pages.slice(blocks, h.blocks)
    ids, extents = leases(gone), host_places(gone, pool.page_bytes)
    h = h._replace(
        blocks=blocks,
        pages=h.pages.cut(blocks),
        on_device=h.on_device - len(ids),
        on_host=h.on_host - len(extents),
    )
    return _put(pool, h), ids, extents


def rewind(pool: Pool, hid: int, tokens: int) -> tuple[Pool, list[int], list[Extent]]:
    """Make ``tokens`` the end of content so that a writer may continue there (KV-34).

    Later blocks are cut; a partial tail page whose Host copy reaches further gets a new epoch and
    keeps the part of the copy that stays true.
    """
    pool, ids, extents = cut(pool, hid, ceil_div(tokens, pool.page_tokens))
    columns = tokens % pool.page_tokens
    h = history(pool, hid)
    if columns and h.blocks > h.base:
        page = h.pages.slice(h.blocks - 1, h.blocks)[0]
        if page.host != NO_HOST and page.host_columns > columns:
            page = page._replace(
                epoch=page.epoch + 1, host_epoch=page.epoch + 1, host_columns=columns
            )
            pool = _put(pool, h._replace(pages=h.pages.set(h.blocks - 1, page)))
    return pool, ids, extents


def set_pages(pool: Pool, hid: int, lo: int, pages: Sequence[Page]) -> Pool:
    """Replace the records of own blocks lo.. (placement changes, never identity)."""
    h = history(pool, hid)
    old = h.pages.slice(lo, lo + len(pages))
    return _put(
        pool,
        h._replace(
            pages=h.pages.set_range(lo, pages),
            on_device=h.on_device + len(leases(pages)) - len(leases(old)),
            on_host=h.on_host + len(host_places(pages, 1)) - len(host_places(old, 1)),
        ),
    )


def add_ref(pool: Pool, hid: int, frontier: int, checkpoint: int) -> Pool:
    """A KVPrefixRef: ``checkpoint`` holds exactly ``frontier`` tokens; copies nothing (KV-21)."""
    if not hid:
        return pool
    h = history(pool, hid)
    if not h.base * pool.page_tokens < frontier <= h.blocks * pool.page_tokens:
        raise IllegalError(f"pool {pool.name}: history {hid} does not own token {frontier - 1}")
    refs = list(h.refs)
    insort(refs, (frontier, checkpoint))
    return _put(pool, h._replace(refs=tuple(refs)))


def drop_ref(pool: Pool, hid: int, frontier: int, checkpoint: int) -> tuple[Pool, list[Extent]]:
    """Remove a KVPrefixRef and free what nobody reaches any more."""
    if not hid:
        return pool, []
    h = history(pool, hid)
    if h.pins:
        raise BusyError(
            f"pool {pool.name}: history {hid} is being copied; retry at commit or abort"
        )
    refs = tuple(r for r in h.refs if r != (frontier, checkpoint))
    return settle(_put(pool, h._replace(refs=refs)), hid)


def take_writer(pool: Pool, hid: int, sid: int) -> Pool:
    """An inactive history becomes that of a sequence."""
    return _put(pool, history(pool, hid)._replace(sequence=sid))


def drop_writer(pool: Pool, hid: int) -> tuple[Pool, list[Extent]]:
    """The writer leaves: the history becomes inactive, unprotected blocks go (KV-31)."""
    return settle(_put(pool, history(pool, hid)._replace(sequence=0)), hid)


def settle(pool: Pool, hid: int) -> tuple[Pool, list[Extent]]:
    """Trim an inactive history to its longest held prefix; at zero reclaim it, then its parent."""
    freed: list[Extent] = []
    while hid:
        h = history(pool, hid)
        if h.sequence or h.pins:
            break
        if h.refs or h.children:
            blocks = ceil_div(protected_tokens(pool, h), pool.page_tokens)
            pool, ids, extents = cut(pool, hid, blocks)
            return free_pages(pool, ids), freed + extents
        gone = h.pages.slice(h.base, h.blocks)
        freed += host_places(gone, pool.page_bytes)
        histories = pool.histories.delete(hid)
        if h.parent:
            p = history(pool, h.parent)
            children = tuple([c for c in p.children if c != (h.base, hid)])
            histories = histories.set(p.id, p._replace(children=children))
        if h.on_device:
            pool = _resident(pool, hid, False)
        pool = free_pages(pool, leases(gone))._replace(histories=histories)
        hid = h.parent
    return pool, freed


def lease_row(pool: Pool, row: int, sid: int) -> Pool:
    """Give a row of the block-table matrix to a sequence, or free it (0). It owns nothing."""
    return pool._replace(rows=(*pool.rows[:row], sid, *pool.rows[row + 1 :]))


def pin(pool: Pool, hid: int, delta: int) -> Pool:
    """Add (+1) or remove (-1) a transaction's hold on a history."""
    h = history(pool, hid)
    return _put(pool, h._replace(pins=h.pins + delta))


def holders(pool: Pool, hid: int, block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(checkpoints, sequences) that reach own block ``block`` of a history, forks included."""
    checkpoints: list[int] = []
    sequences: list[int] = []
    todo = [hid]
    while todo:
        h = history(pool, todo.pop())
        checkpoints += [cid for f, cid in h.refs if f > block * pool.page_tokens]
        sequences += [h.sequence] if h.sequence else []
        todo += [child for base, child in h.children if base > block]
    return tuple(sorted(checkpoints)), tuple(sorted(sequences))


def active_blocks(pool: Pool, writers: Sequence[int]) -> dict[int, int]:
    """For each history that a sequence executes on: blocks that must stay on the Device."""
    out: dict[int, int] = {}
    for hid in writers:
        for h, _, hi in segments(pool, hid, history(pool, hid).blocks):
            out[h.id] = max(out.get(h.id, 0), hi)
    return out
