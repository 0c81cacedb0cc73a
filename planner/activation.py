"""The activation stage of a bind (KV-22, KV-23, KV-34..37, ST-06).

Move, Fork, Split, Restore and COW are derived here from the post-state: which checkpoints survive
the target, who holds them, where replicas are. Nobody chooses them.
"""

from __future__ import annotations

from typing import NamedTuple

from planner import host, kv, pressure, state_images
from planner.capacity import ceil_div
from planner.checkpoints import Prefix
from planner.errors import BusyError, HandleError, IdentityError, IllegalError, ShortageError
from planner.host import Extent
from planner.kv import History, Page, Pool
from planner.physical import Draft, Sequence, is_complete
from planner.plans import Bind, Copy, PoolWork, Work
from planner.state_images import StateImage


def surviving_holders(d: Draft, retire: tuple[tuple[int, int], ...]) -> dict[int, tuple[int, ...]]:
    """Holders left of every checkpoint that ``retire`` touches."""
    left: dict[int, tuple[int, ...]] = {}
    for owner, cid in retire:
        holders = left.get(cid, d.checkpoint(cid).holders)
        if owner not in holders:
            raise HandleError(f"owner {owner} does not hold checkpoint {cid}; holders {holders}")
        left[cid] = tuple(o for o in holders if o != owner)
    return left


def require(d: Draft, pages: list[int], slots: int, rows: int) -> None:
    """Raise one ShortageError with every gap of a preparation."""
    gaps = [
        (p.name, n - kv.available(p))
        for p, n in zip(d.pools, pages, strict=True)
        if n > kv.available(p)
    ]
    free = state_images.free_slots(d.states)
    if slots > free:
        gaps.append(("slots", slots - free))
    lanes = d.layout.concurrency - len(d.sequences)
    if rows > lanes:
        gaps.append(("rows", rows - lanes))
    if gaps:
        have = [f"{p.name} {kv.available(p)}/{p.capacity}" for p in d.pools]
        missing = ", ".join(f"{n} more {name}" for name, n in gaps)
        raise ShortageError(
            f"needs {missing} (available: {', '.join(have)} pages, {free}/{len(d.states.slots)} "
            f"slots, {lanes}/{d.layout.concurrency} rows); release, demote or wait",
            tuple(gaps),
        )


def _state_form(d: Draft, im: StateImage, consumed: bool) -> str:
    """How a source image becomes active content; ``consumed``: nobody needs it afterwards."""
    on_device = bool(im.slot and im.ready)
    if consumed:
        return "move" if on_device else "restore"
    if not on_device:
        return "restore"
    if state_images.free_slots(d.states) or im.pins:
        return "fork"
    return "split" if im.host else "backup_split"


class _Needs(NamedTuple):
    """What a bind needs in one pool: Host-only pages to restore, a tail to copy, pages to take."""

    work: PoolWork
    restore: list[tuple[int, int, Page]]
    tail: Page | None
    take: int


def _moves(
    d: Draft, pool: Pool, h: History, frontier: int, owner: int, holders: dict[int, tuple[int, ...]]
) -> bool:
    """Whether the one writer may continue in ``h`` itself at ``frontier`` (KV-34, KV-37).

    It may not where another writer or reader is, where content beyond the frontier survives, or
    where someone else holds this very prefix or columns of the partial tail page. ``holders`` are
    the survivors of the checkpoints that the target retires.
    """
    full = frontier // pool.page_tokens
    if h.sequence or h.pins or any(blocks > full for blocks, _ in h.children):
        return False
    for f, cid in h.refs:
        left = holders[cid] if cid in holders else d.checkpoint(cid).holders
        beside = f > full * pool.page_tokens or f == frontier
        if left and beside and (f > frontier or left != (owner,)):
            return False
    return True


def _kv_needs(d: Draft, k: int, p: Prefix, b: Bind, holders: dict[int, tuple[int, ...]]) -> _Needs:
    pool = d.pools[k]
    P = pool.page_tokens
    want = ceil_div(b.entitlement[k], P)
    if want > pool.logical_pages:
        raise IllegalError(
            f"entitlement {b.entitlement[k]} exceeds max_context {d.layout.max_context}"
        )
    blocks = ceil_div(p.frontier, P)
    growth = max(0, want - blocks)
    if not p.history:
        return _Needs(PoolWork("root", growth=growth), [], None, growth)
    h = kv.history(pool, p.history)
    moves = _moves(d, pool, h, p.frontier, b.owner, holders)
    restore = [
        (seg.id, block, page)
        for seg, lo, hi in kv.segments(pool, p.history, blocks if moves else p.frontier // P)
        for block, page in enumerate(seg.pages.slice(lo, hi), start=lo)
        if not page.device
    ]
    if moves:
        spare = sum(1 for page in h.pages.slice(blocks, h.blocks) if page.device)
        reuse = min(growth, spare)
        work = PoolWork("move", growth=growth - reuse, reuse=reuse)
        return _Needs(work, restore, None, len(restore) + growth - reuse)
    tail = h.pages.slice(blocks - 1, blocks)[0] if p.frontier % P else None
    take = len(restore) + growth + (tail is not None)
    return _Needs(PoolWork("fork", growth=growth), restore, tail, take)


def prepare_bind(d: Draft, b: Bind, readers: int) -> Work:
    """Claim every destination of a bind, or raise with all gaps; ``readers`` are our own leases."""
    if len(b.entitlement) != len(d.pools):
        raise IllegalError(f"{len(b.entitlement)} entitlements for {len(d.pools)} pools")
    holders = surviving_holders(d, b.retire)
    prefixes, im, form, consumed = (Prefix(0, 0),) * len(d.pools), None, "root", False
    for cid, left in holders.items():
        if not left and d.checkpoint(cid).readers > (readers if cid == b.source else 0):
            raise BusyError(f"checkpoint {cid} is leased to a reader and cannot retire now")
    if b.source:
        ck = d.checkpoint(b.source)
        if not ck.identity.prefix_of(b.prompt):
            raise IdentityError(
                f"checkpoint {b.source} at {ck.frontier} is no exact prefix of the prompt (CK-05)"
            )
        if not is_complete(d, b.source):
            raise IllegalError(f"checkpoint {b.source} has no complete replica (CK-12)")
        prefixes = ck.prefixes
        im = state_images.image(d.states, ck.image)
        gone = [cid for cid, left in holders.items() if not left]
        consumed = not im.pins and im.refs == sum(d.checkpoint(c).image == im.id for c in gone)
        form = _state_form(d, im, consumed)
    needs = [_kv_needs(d, k, p, b, holders) for k, p in enumerate(prefixes)]
    require(d, [n.take for n in needs], int(form in ("root", "fork", "restore")), 1)
    copies: list[Copy] = []
    pinned: list[tuple[int, int]] = []
    works = [_take_pages(d, k, prefixes[k], n, copies, pinned) for k, n in enumerate(needs)]
    iid, extents = _prepare_image(d, im, form, consumed, copies)
    for k, hid in pinned:
        d.pools[k] = kv.pin(d.pools[k], hid, +1)
    if im is not None:
        d.states = state_images.pin(d.states, im.id, +1)
    images = (im.id,) if im is not None else ()
    return Work(tuple(copies), form, iid, tuple(works), extents, images, tuple(pinned))


def _take_pages(
    d: Draft, k: int, p: Prefix, n: _Needs, copies: list[Copy], pinned: list[tuple[int, int]]
) -> PoolWork:
    """Reserve growth, lease restore and tail destinations, and order their copies."""
    pool = d.pools[k]
    pool, ids = kv.materialize(kv.reserve(pool, n.take), n.take - n.work.growth)
    d.pools[k] = pool
    for (hid, block, page), g in zip(n.restore, ids, strict=False):
        columns = page.host_columns
        copies.append(
            Copy("page", "h2d", k, page.host, g, hid, block, page.serial, page.epoch, columns)
        )
    blocks = ceil_div(p.frontier, pool.page_tokens)
    pinned += [(k, seg.id) for seg, _, _ in kv.segments(pool, p.history, blocks)]
    if n.tail is None:
        return n.work
    columns = p.frontier % pool.page_tokens
    if n.tail.device:
        copies.append(Copy("page", "d2d", k, n.tail.device, ids[-1], 0, blocks - 1, 0, 0, columns))
    else:
        copies.append(Copy("page", "h2d", k, n.tail.host, ids[-1], 0, blocks - 1, 0, 0, columns))
    return n.work._replace(tail=ids[-1])


def _prepare_image(
    d: Draft, im: StateImage | None, form: str, consumed: bool, copies: list[Copy]
) -> tuple[int, tuple[Extent, ...]]:
    """Destination image of a bind and its copy; a Fork copies nothing here (ST-08)."""
    if form == "move":
        assert im is not None
        return im.id, ()
    if form == "restore" and consumed:
        assert im is not None
        assert im.host is not None
        d.states = state_images.lease_slot(d.states, im.id)
        slot = state_images.image(d.states, im.id).slot
        copies.append(Copy("image", "h2d", -1, im.host.offset, slot, im.id))
        return im.id, ()
    d.states, iid = state_images.reserve_image(d.states, form in ("root", "fork", "restore"))
    slot = state_images.image(d.states, iid).slot
    if form == "root":
        copies.append(Copy("image", "init", -1, 0, slot, iid))
    elif form == "restore":
        assert im is not None
        assert im.host is not None
        copies.append(Copy("image", "h2d", -1, im.host.offset, slot, iid))
    elif form == "backup_split":
        assert im is not None
        d.arena, e = host.allocate(d.arena, d.layout.image_bytes, f"backup of image {im.id}")
        copies.append(Copy("image", "d2h", -1, im.slot, e.offset, im.id))
        return iid, (e,)
    return iid, ()


def publish_bind(d: Draft, b: Bind, work: Work) -> int:
    """Adopt: restored pages, histories, image, edges, rows, and last the sequence itself."""
    pressure.unpin(d, work)
    sid = d.new_id()
    prefixes = d.checkpoint(b.source).prefixes if b.source else (Prefix(0, 0),) * len(d.pools)
    position = d.checkpoint(b.source).frontier if b.source else 0
    source = d.checkpoint(b.source).image if b.source else 0
    for c in work.copies:
        if c.kind == "page" and c.subject:
            pool = d.pools[c.pool]
            page = kv.history(pool, c.subject).pages.get(c.block)
            if page is None or (page.serial, page.epoch, page.device) != (c.serial, c.epoch, 0):
                raise IllegalError(f"pool {pool.name}: block {c.block} changed under its copy")
            d.pools[c.pool] = kv.set_pages(
                pool, c.subject, c.block, [page._replace(device=c.destination)]
            )
    histories = tuple(
        _adopt_history(d, k, p, w, sid)
        for k, (p, w) in enumerate(zip(prefixes, work.pools, strict=True))
    )
    _adopt_image(d, work, source, sid)
    for owner, cid in b.retire:
        d.drop_edge(owner, cid)
    reserved: list[int] = []
    rows: list[int] = []
    for k, (p, w) in enumerate(zip(prefixes, work.pools, strict=True)):
        if w.form == "move":
            pool, ids, extents = kv.rewind(d.pools[k], histories[k], p.frontier)
            pool = kv.dematerialize(pool, ids[: w.reuse])
            d.pools[k] = kv.free_pages(pool, ids[w.reuse :])
            d.free(extents)
        reserved.append(w.growth + w.reuse)
        row = d.pools[k].rows.index(0)
        d.pools[k] = kv.lease_row(d.pools[k], row, sid)
        rows.append(row)
    lease = tuple(ceil_div(t, d.layout.page_tokens) if b.lease else 0 for t in b.entitlement)
    d.sequences = (
        *d.sequences,
        Sequence(
            sid, b.owner, work.image, source if work.form == "fork" else 0, histories, tuple(rows),
            lease, tuple(p.frontier for p in prefixes), position, tuple(reserved),
            permit=True, recovery=b.recovery,
        ),
    )  # fmt: skip
    return sid


def _adopt_history(d: Draft, k: int, p: Prefix, w: PoolWork, sid: int) -> int:
    pool = d.pools[k]
    if w.form == "move":
        d.pools[k] = kv.take_writer(pool, p.history, sid)
        return p.history
    full = p.frontier // pool.page_tokens
    pool, hid = kv.start_history(pool, kv.anchor(pool, p.history, full), full, sid)
    d.pools[k] = kv.append(pool, hid, [w.tail]) if w.tail else pool
    return hid


def _adopt_image(d: Draft, work: Work, source: int, sid: int) -> None:
    for e in work.extents:  # backup_split: the old identity keeps this Host copy
        old = state_images.image(d.states, source)
        d.states = state_images.put(d.states, old._replace(host=e))
    if work.form in ("split", "backup_split"):
        d.states = state_images.hand_over_slot(d.states, source, work.image)
    im = state_images.image(d.states, work.image)
    ready = work.form != "fork"
    in_place = work.image == source
    if in_place and im.host is not None:
        d.free([im.host])
    d.states = state_images.put(
        d.states,
        im._replace(
            position=state_images.WRITING, ready=ready, host=None, writer=sid,
            pins=im.pins if in_place else im.pins - 1,
        ),
    )  # fmt: skip
    if work.form == "fork":
        d.states = state_images.pin(d.states, source, +1)
