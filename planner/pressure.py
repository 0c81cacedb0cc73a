"""The pressure stage: release edges, drop replicas, move content from Device to Host (TX, HOST).

Three functions of a `Draft`, one a phase. A Device replica goes only where a complete Host copy
stands or the copy was verified; nothing that a sequence executes on may move.
"""

from __future__ import annotations

from planner import host, kv, state_images
from planner.capacity import ceil_div
from planner.checkpoints import Checkpoint
from planner.errors import BusyError, HandleError, IllegalError
from planner.host import Extent
from planner.kv import NO_HOST, Page
from planner.physical import Draft, Sequence
from planner.plans import Bind, Copy, ImageRef, PageRange, Pause, Target, Work


def _writers(d: Draft, pool: int, pausing: Sequence | None) -> list[int]:
    return [q.histories[pool] for q in d.sequences if pausing is None or q.id != pausing.id]


def _readers(d: Draft, target: Target) -> list[Checkpoint]:
    """Checkpoints whose replicas must stay where they are: leased ones and the source."""
    source = target.action.source if isinstance(target.action, Bind) else 0
    found = (d.checkpoints.get(cid) for cid in sorted({*d.checkpoints.read, source}))
    return [ck for ck in found if ck is not None]


def _require_unread(d: Draft, target: Target, item: ImageRef | PageRange) -> None:
    if isinstance(item, PageRange) and not 0 <= item.pool < len(d.pools):
        raise HandleError(f"{item}: there are {len(d.pools)} pools")
    for ck in _readers(d, target):
        if isinstance(item, ImageRef):
            read = item.image == ck.image
        else:
            pool, p = d.pools[item.pool], ck.prefixes[item.pool]
            blocks = ceil_div(p.frontier, pool.page_tokens)
            spans = kv.segments(pool, p.history, blocks)
            read = any(h.id == item.history and item.lo < hi for h, _, hi in spans)
        if read:
            raise BusyError(f"{item} is being read through checkpoint {ck.id}; wait for its end")


def _pages(d: Draft, r: PageRange, pausing: Sequence | None) -> list[tuple[int, Page, int]]:
    """(block, page, columns that stand for content) of a range that may change placement."""
    pool = d.pools[r.pool]
    h = kv.history(pool, r.history)
    if not h.base <= r.lo < r.hi <= h.blocks:
        raise IllegalError(
            f"pool {pool.name}: history {h.id} owns blocks {h.base}..{h.blocks}, not {r.lo}..{r.hi}"
        )
    active = kv.active_blocks(pool, _writers(d, r.pool, pausing)).get(r.history, 0)
    if r.lo < active:
        raise BusyError(
            f"pool {pool.name}: blocks below {active} of history {h.id} are being executed on; "
            "pause or finish their sequences first"
        )
    committed = pausing.frontiers[r.pool] if pausing and h.sequence == pausing.id else 0
    pages = h.pages.slice(r.lo, r.hi)
    return [
        (b, page, kv.needed_columns(pool, h, b, committed))
        for b, page in enumerate(pages, start=r.lo)
    ]


def _require_idle(d: Draft, iid: int, pausing: Sequence | None) -> state_images.StateImage:
    im = state_images.image(d.states, iid)
    if not (pausing and im.writer == pausing.id and not im.pins):
        state_images.require_idle(im, "placement change")
    return im


def release_phase(d: Draft, target: Target) -> None:
    """HostReleases: edges go, redundant replicas go; takes no capacity, and stays done."""
    for owner, cid in target.release:
        d.drop_edge(owner, cid)
    for item in (*target.drop_host, *target.demote, *target.backup):
        _require_unread(d, target, item)
    for item in target.drop_host:
        if isinstance(item, ImageRef):
            _drop_host_image(d, item.image)
        else:
            _drop_host_pages(d, item)
    for item in target.demote:
        if isinstance(item, ImageRef):
            im = _require_idle(d, item.image, None)
            if im.host:
                d.states = state_images.drop_device(d.states, item.image)
        else:
            _free_covered(d, item, None)


def _drop_host_image(d: Draft, iid: int) -> None:
    im = _require_idle(d, iid, None)
    if not (im.slot and im.ready) or im.host is None:
        raise IllegalError(f"image {iid}: its Host copy is not redundant; it would lose the state")
    d.states = state_images.put(d.states, im._replace(host=None))
    d.free([im.host])


def _drop_host_pages(d: Draft, r: PageRange) -> None:
    pool = d.pools[r.pool]
    h = kv.history(pool, r.history)
    committed = next((q.frontiers[r.pool] for q in d.sequences if q.id == h.sequence), 0)
    end = ceil_div(max(kv.protected_tokens(pool, h), committed), pool.page_tokens)
    if not h.base <= r.lo < r.hi <= end or h.pins:  # what lies beyond, a writer may truncate
        raise IllegalError(
            f"pool {pool.name}: history {h.id} has no settled blocks {r.lo}..{r.hi} "
            f"(own content: {h.base}..{end})"
        )
    pages = h.pages.slice(r.lo, r.hi)
    for b, page in enumerate(pages, start=r.lo):
        if not page.device:
            raise IllegalError(f"pool {pool.name}: block {b} of history {h.id} lives only on Host")
    d.free([Extent(p.host, pool.page_bytes) for p in pages if p.host != NO_HOST])
    d.pools[r.pool] = kv.set_pages(
        pool, h.id, r.lo, [p._replace(host=NO_HOST, host_columns=0) for p in pages]
    )


def _free_covered(d: Draft, r: PageRange, pausing: Sequence | None) -> None:
    """Free the Device pages of a range whose Host copies are complete: no copy needed (RC-09)."""
    pages = _pages(d, r, pausing)
    gone = [p.device for _, p, n in pages if p.device and kv.host_covers(p, n)]
    left = [p._replace(device=0) if kv.host_covers(p, n) else p for _, p, n in pages]
    d.pools[r.pool] = kv.free_pages(kv.set_pages(d.pools[r.pool], r.history, r.lo, left), gone)


def _items(d: Draft, target: Target) -> tuple[list[ImageRef | PageRange], Sequence | None]:
    items = [*target.demote, *target.backup]
    pausing = None
    if isinstance(target.action, Pause):
        pausing = next(q for q in d.sequences if q.id == target.action.sequence)
        if target.action.state:
            items.append(ImageRef(pausing.image))
        items += target.action.pages
    return items, pausing


def prepare_phase(d: Draft, target: Target) -> Work:
    """CopyPreparation: reserve every Host destination, pin every source (HOST-02, TX-09)."""
    items, pausing = _items(d, target)
    if isinstance(target.action, Pause):
        for item in items:
            _require_unread(d, target, item)
    copies: list[Copy] = []
    extents: list[Extent] = []
    images: list[int] = []
    pinned: list[tuple[int, int]] = []
    if len(set(items)) != len(items):
        raise IllegalError(f"a target moves the same content twice: {items}")
    for i, item in enumerate(items):
        keep = len(target.demote) <= i < len(target.demote) + len(target.backup)
        if isinstance(item, ImageRef):
            im = _require_idle(d, item.image, pausing)
            if not im.slot or im.host:
                continue
            d.arena, e = host.allocate(d.arena, d.layout.image_bytes, f"state image {im.id}")
            copies.append(Copy("image", "d2h", -1, im.slot, e.offset, im.id, keep=keep))
            extents.append(e)
            images.append(im.id)
            continue
        pool = d.pools[item.pool]
        todo = [
            (b, p, n)
            for b, p, n in _pages(d, item, pausing)
            if p.device and n and not kv.host_covers(p, n)
        ]
        if not todo:
            continue
        what = f"{len(todo)} {pool.name} page(s) of history {item.history}"
        d.arena, places = host.allocate_group(d.arena, len(todo), pool.page_bytes, what)
        for (b, p, n), e in zip(todo, places, strict=True):
            work = Copy("page", "d2h", item.pool, p.device, e.offset, item.history, b, p.serial)
            copies.append(work._replace(epoch=p.epoch, columns=n, keep=keep))
        extents += places
        pinned.append((item.pool, item.history))
    for iid in images:
        d.states = state_images.pin(d.states, iid, +1)
    for k, hid in pinned:
        d.pools[k] = kv.pin(d.pools[k], hid, +1)
    return Work(tuple(copies), "demote", 0, (), tuple(extents), tuple(images), tuple(pinned))


def publish_copies(d: Draft, work: Work) -> None:
    """CopyPublication: verify, publish the Host copies, free Device ones not kept (TX-02)."""
    for c in work.copies:
        if c.kind == "image":
            im = state_images.image(d.states, c.subject)
            e = Extent(c.destination, d.layout.image_bytes)
            d.states = state_images.put(d.states, im._replace(host=e))
            if not c.keep:
                d.states = state_images.drop_device(d.states, c.subject)
            continue
        pool = d.pools[c.pool]
        page = kv.history(pool, c.subject).pages.get(c.block)
        if page is None or (page.serial, page.epoch, page.device) != (c.serial, c.epoch, c.source):
            raise IllegalError(f"pool {pool.name}: block {c.block} changed under its copy (TX-09)")
        if page.host != NO_HOST:
            d.free([Extent(page.host, pool.page_bytes)])
        device = page.device if c.keep else 0
        moved = Page(page.serial, page.epoch, device, c.destination, page.epoch, c.columns)
        pool = kv.set_pages(pool, c.subject, c.block, [moved])
        d.pools[c.pool] = pool if c.keep else kv.free_pages(pool, [page.device])


def unpin(d: Draft, work: Work) -> None:
    """Drop the stage's holds on its sources."""
    for iid in work.pinned_images:
        d.states = state_images.pin(d.states, iid, -1)
    for k, hid in work.pinned:
        d.pools[k] = kv.pin(d.pools[k], hid, -1)
