"""`check(state)`: every INV rule that the physical core can hold, counted from the records up.

Nothing here trusts a total: leases, references, pins and reservations are recounted from the
objects that own them and compared. Cost is O(everything); it is for tests and idle moments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import reduce

from planner import kv, state_images
from planner.capacity import ceil_div
from planner.checkpoints import Checkpoints
from planner.errors import InvariantError, PlannerError
from planner.host import Extent
from planner.kv import NO_HOST, Pool
from planner.physical import MAX_FLIGHTS, PhysicalState, Sequence, is_complete, usage
from planner.plans import Work

Finding = tuple[str, str]


def check(s: PhysicalState) -> PhysicalState:
    """The state itself, or InvariantError for the first broken rule."""
    for rule, message in violations(s):
        raise InvariantError(rule, message)
    return s


def violations(s: PhysicalState) -> Iterator[Finding]:
    """(rule, what is wrong) for every finding, in a fixed order; a wrong shape stops the search."""
    work = s.transaction.work if s.transaction else Work()
    try:
        malformed = list(_shape(s))
        if malformed:
            yield from malformed
            return
        for k, pool in enumerate(s.pools):
            yield from _pool_counts(s, k, pool, work)
            yield from _histories(s, k, pool, work)
            yield from _rows(s, k, pool)
        yield from _host(s, work)
        yield from _images(s, work)
        yield from _sequences(s)
        yield from _checkpoints(s)
        yield from _transaction(s)
        yield from _idle(s)
    except PlannerError as e:
        yield "INV-13", f"a dangling identity: {e}"


def _shape(s: PhysicalState) -> Iterator[Finding]:
    n = len(s.pools)
    if len({p.page_tokens for p in s.pools} | {s.layout.page_tokens}) != 1:
        yield "INV-14", "pools disagree on page tokens"
    for q in s.sequences:
        if {len(t) for t in (q.histories, q.rows, q.frontiers, q.reserved, q.lease)} != {n}:
            yield "INV-14", f"sequence {q.id} does not have one entry per pool"
        if any(len(f.provisional) != n for f in q.flights):
            yield "INV-14", f"sequence {q.id} does not have one entry per pool"
    for cid, ck in s.checkpoints.items():
        if len(ck.prefixes) != n:
            yield "INV-14", f"checkpoint {cid} does not have one prefix per pool"


def _pool_counts(s: PhysicalState, k: int, pool: Pool, work: Work) -> Iterator[Finding]:
    if min(pool.allocated, pool.reserved, kv.available(pool)) < 0:
        yield "INV-01", f"pool {pool.name}: {pool.allocated}+{pool.reserved} of {pool.capacity}"
    leased = [p.device for h in pool.histories.values() for p in h.pages.values() if p.device]
    leased += [
        c.destination
        for c in work.copies
        if c.kind == "page" and c.pool == k and c.direction != "d2h"
    ]
    twice = [g for g, n in sorted(Counter(leased).items()) if n > 1]
    if twice:
        yield "INV-03", f"pool {pool.name}: page group {twice[0]} carries two logical pages"
    free = list(kv.free_ids(pool))
    if sorted(leased + free) != list(range(1, pool.capacity + 1)) and not twice:
        yield "INV-02", f"pool {pool.name}: leased and free page groups are not exactly the pool"
    if pool.allocated != len(leased):
        yield "INV-02", f"pool {pool.name}: {pool.allocated} allocated, {len(leased)} leases found"
    reserved = sum(q.reserved[k] for q in s.sequences)
    reserved += s.transaction.held[k] if s.transaction else 0
    reserved += work.pools[k].growth if work.pools else 0
    if pool.reserved != reserved:
        yield "INV-02", f"pool {pool.name}: {pool.reserved} reserved, {reserved} have an owner"


def _histories(s: PhysicalState, k: int, pool: Pool, work: Work) -> Iterator[Finding]:
    P = pool.page_tokens
    writers = {q.histories[k]: q for q in s.sequences}
    refs: dict[int, list[tuple[int, int]]] = {}
    for cid, ck in s.checkpoints.items():
        if ck.prefixes[k].history:
            refs.setdefault(ck.prefixes[k].history, []).append((ck.prefixes[k].frontier, cid))
    forks: dict[int, list[tuple[int, int]]] = {}
    for h in pool.histories.values():
        if h.parent:
            forks.setdefault(h.parent, []).append((h.base, h.id))
    if pool.resident != tuple(hid for hid, h in pool.histories.items() if h.on_device):
        yield "INV-02", f"pool {pool.name}: {pool.resident} are not the histories on the Device"
    serials: Counter[int] = Counter()
    for hid, h in pool.histories.items():
        where = f"pool {pool.name}, history {hid}"
        writer = writers.get(hid)
        if h.sequence != (writer.id if writer else 0):
            yield "INV-03", f"{where}: writer {h.sequence} is not the sequence that owns it"
        if list(h.refs) != sorted(refs.get(hid, ())):
            yield "INV-04", f"{where}: protected prefixes {h.refs} differ from the checkpoints"
        if list(h.children) != sorted(forks.get(hid, ())):
            yield "INV-04", f"{where}: forks {h.children} differ from the children's own record"
        if hid != h.id or hid >= pool.next_history or h.parent >= hid:
            yield "INV-13", f"{where}: id {h.id}, parent {h.parent}, next {pool.next_history}"
        if bool(h.parent) != bool(h.base) or not h.base <= h.blocks <= pool.logical_pages:
            yield "INV-14", f"{where}: blocks {h.base}..{h.blocks} of {pool.logical_pages}"
        if [b for b, _ in h.pages.items()] != list(range(h.base, h.blocks)):
            yield "INV-14", f"{where}: own pages are not blocks {h.base}..{h.blocks}"
        if h.pins != sum(pair == (k, hid) for pair in work.pinned):
            yield "INV-08", f"{where}: {h.pins} pins, the transaction holds other ones"
        counts = (len(kv.leases(h.pages.values())), len(kv.host_places(h.pages.values(), 1)))
        if (h.on_device, h.on_host) != counts:
            yield "INV-02", f"{where}: counts {h.on_device}, {h.on_host} replicas, has {counts}"
        protected = kv.protected_tokens(pool, h)
        if protected > h.blocks * P:
            yield "INV-04", f"{where}: {protected} protected tokens on {h.blocks} blocks"
        if writer is not None and protected > writer.frontiers[k]:
            yield "INV-04", f"{where}: writer at {writer.frontiers[k]} below protected {protected}"
        if writer is None and not h.pins and h.blocks != ceil_div(protected, P):
            yield "INV-12", f"{where}: inactive, yet {h.blocks} blocks for {protected} tokens"
        for b, page in h.pages.items():
            serials[page.serial] += 1
            needed = kv.needed_columns(pool, h, b, writer.frontiers[k] if writer else 0)
            if not page.device and not kv.host_covers(page, max(needed, 1)):
                yield "INV-07", f"{where}: block {b} has no valid replica of {needed} columns"
            if page.host == NO_HOST and page.host_columns:
                yield "INV-07", f"{where}: block {b} claims Host columns without a copy"
            if page.host != NO_HOST and (page.host_epoch, page.host_columns > P) != (
                page.epoch,
                False,
            ):
                yield "INV-07", f"{where}: block {b} keeps a Host copy of epoch {page.host_epoch}"
            if page.serial >= pool.next_serial:
                yield "INV-13", f"{where}: block {b} has an identity from the future"
    if serials and max(serials.values()) > 1:
        yield "INV-03", f"pool {pool.name}: one logical page appears in two places"
    for q in s.sequences:
        yield from _active_pages(k, pool, q)


def _active_pages(k: int, pool: Pool, q: Sequence) -> Iterator[Finding]:
    h = kv.history(pool, q.histories[k])
    if any(not p.device for p in kv.prefix_pages(pool, h.id, h.blocks)):
        yield "INV-09", f"sequence {q.id}, pool {pool.name}: a mapped block is not on the Device"
    if q.frontiers[k] > h.blocks * pool.page_tokens:
        yield "INV-14", f"sequence {q.id}, pool {pool.name}: frontier beyond its membership"


def _rows(s: PhysicalState, k: int, pool: Pool) -> Iterator[Finding]:
    expected = [0] * s.layout.concurrency
    for q in s.sequences:
        if not 0 <= q.rows[k] < len(expected) or expected[q.rows[k]]:
            yield "INV-12", f"pool {pool.name}: sequence {q.id} has no row of its own"
            return
        expected[q.rows[k]] = q.id
    if list(pool.rows) != expected:
        yield "INV-12", f"pool {pool.name}: rows {pool.rows}, active sequences need {expected}"


def _host(s: PhysicalState, work: Work) -> Iterator[Finding]:
    owned = [
        Extent(page.host, pool.page_bytes)
        for pool in s.pools
        for h in pool.histories.values()
        for page in h.pages.values()
        if page.host != NO_HOST
    ]
    owned += [im.host for im in s.states.images.values() if im.host]
    owned += work.extents
    end, previous_free = 0, False
    tiles = sorted([(e, False) for e in owned] + [(e, True) for e in s.arena.free])
    for e, is_free in tiles:
        if e.size <= 0 or e.offset != end:
            yield "INV-02", f"Host byte {min(end, e.offset)} has no owner or two owners"
            return
        if is_free and previous_free:
            yield "INV-02", f"free Host extents touch at {e.offset}: merge them (HOST-03)"
        end, previous_free = end + e.size, is_free
    if end != s.arena.capacity:
        yield "INV-01", f"Host extents end at {end}, the arena at {s.arena.capacity}"


def _images(s: PhysicalState, work: Work) -> Iterator[Finding]:
    store = s.states
    placed = {im.slot: iid for iid, im in store.images.items() if im.slot}
    if [placed.get(i + 1, 0) for i in range(len(store.slots))] != list(store.slots):
        yield "INV-02", f"slots {store.slots} are not what the images say"
    if len(placed) != sum(bool(im.slot) for im in store.images.values()):
        yield "INV-03", "two images share a slot"
    refs = Counter(ck.image for ck in s.checkpoints.values())
    pins = Counter(q.source for q in s.sequences if q.source)
    pins.update(work.pinned_images)
    destination = work.image if work.form != "move" else 0
    writers = {q.image: q.id for q in s.sequences}
    if len(writers) != len(s.sequences):
        yield "INV-03", "two sequences write one image"
    for iid, im in store.images.items():
        if im.id != iid or iid >= store.next_image:
            yield "INV-13", f"image {iid}: id {im.id}, next {store.next_image}"
        if im.writer != writers.get(iid, 0):
            yield "INV-03", f"image {iid}: writer {im.writer} is not the sequence that owns it"
        if im.refs != refs[iid]:
            yield "INV-05", f"image {iid}: {im.refs} references, {refs[iid]} checkpoints"
        held = pins[iid] + (iid == destination and not (refs[iid] or im.writer))
        if im.pins != held:
            yield "INV-08", f"image {iid}: {im.pins} pins, {held} have a living owner"
        unpublished = bool(im.writer) or (iid == destination and not refs[iid])
        if (im.position == state_images.WRITING) != unpublished or (im.refs and im.writer):
            yield "INV-05", f"image {iid}: position {im.position}, writer {im.writer}"
        if im.ready and not im.slot:
            yield "INV-07", f"image {iid}: ready without a slot"
        if im.writer and (im.host is not None or not im.slot):
            yield "INV-07", f"image {iid}: being written, so its only place is a slot"
        if not (im.refs or im.pins or im.writer):
            yield "INV-02", f"image {iid}: nobody holds it"


def _sequences(s: PhysicalState) -> Iterator[Finding]:
    if sum(q.recovery >= 0 for q in s.sequences) > 1:
        yield "INV-10", "two recovery permits"
    if [q.id for q in s.sequences] != sorted({q.id for q in s.sequences}):
        yield "INV-13", "sequence ids are not unique and ascending"
    for q in s.sequences:
        image = state_images.image(s.states, q.image)
        if not q.source and not image.ready:
            yield "INV-07", f"sequence {q.id}: its image is not complete"
        if q.source and image.ready:
            yield "INV-08", f"sequence {q.id}: settled, yet it pins image {q.source}"
        if q.recovery >= 0 and q.position > q.recovery:
            yield "INV-10", f"sequence {q.id}: recovery to {q.recovery} at {q.position} is wrong"
        if q.flights and s.transaction and (q.source or q.id in s.transaction.frozen):
            yield "INV-09", f"sequence {q.id}: unit {q.unit} runs inside a transaction"
        launched = [f.unit for f in q.flights]
        if len(launched) > MAX_FLIGHTS or launched != sorted(set(launched)):
            yield "INV-09", f"sequence {q.id}: units {launched} in flight, in this order"
        if q.id >= s.next_id or any(unit >= s.next_id for unit in launched):
            yield "INV-13", f"sequence {q.id} has an id from the future"
        for k, pool in enumerate(s.pools):
            blocks = kv.history(pool, q.histories[k]).blocks
            ends = [q.frontiers[k], *(f.provisional[k] for f in q.flights)]
            if q.flights and (ends != sorted(ends) or ends[-1] > blocks * pool.page_tokens):
                yield "INV-09", f"sequence {q.id}: writes {ends} on {blocks} blocks of {pool.name}"
            if q.reserved[k] < 0 or blocks + q.reserved[k] < q.lease[k]:
                yield "INV-11", f"sequence {q.id}: entitlement {q.lease[k]} of {pool.name} was lent"
            needed = ceil_div(q.frontiers[k], pool.page_tokens)
            if not (q.permit or any(q.lease)) and blocks != needed:
                yield "INV-11", f"sequence {q.id}: {blocks} blocks of {pool.name} without a permit"
            if not q.permit and q.reserved[k] > max(0, q.lease[k] - blocks):
                yield "INV-11", f"sequence {q.id}: {q.reserved[k]} pages kept after settlement"


def _checkpoints(s: PhysicalState) -> Iterator[Finding]:
    if (
        s.checkpoints.indexes
        != reduce(Checkpoints.put, s.checkpoints.values(), Checkpoints()).indexes
    ):
        yield "INV-08", f"what finds checkpoints differs from them: {s.checkpoints.indexes}"
    for cid, ck in s.checkpoints.items():
        im = state_images.image(s.states, ck.image)
        if ck.id != cid or cid >= s.next_id:
            yield "INV-13", f"checkpoint {cid}: id {ck.id}, next {s.next_id}"
        if im.position != ck.frontier:
            yield "INV-06", f"checkpoint {cid} at {ck.frontier} holds a state of {im.position}"
        if len(ck.identity.tokens) != 4 * ck.frontier or len(ck.identity.types) != ck.frontier:
            yield "INV-06", f"checkpoint {cid}: identity does not cover {ck.frontier} tokens"
        if not ck.holders or list(ck.holders) != sorted(set(ck.holders)) or ck.readers < 0:
            yield "INV-08", f"checkpoint {cid}: holders {ck.holders}, readers {ck.readers}"
        if not is_complete(s, cid):
            yield "INV-05", f"checkpoint {cid} has lost a replica it needs"


def _transaction(s: PhysicalState) -> Iterator[Finding]:
    t = s.transaction
    if t is None:
        return
    if not 0 <= t.cursor < len(t.plan.points) or t.id >= s.next_id:
        yield "INV-08", f"transaction {t.id} stands at point {t.cursor} of {len(t.plan.points)}"
        return
    active = {q.id for q in s.sequences}
    if any(sid not in active for sid in t.frozen):
        yield "INV-08", f"transaction {t.id} freezes a sequence that ended"
    action = t.plan.target.action
    source = getattr(action, "source", 0)
    if source and (found := s.checkpoints.get(source)) is not None and found.readers < 1:
        yield "INV-07", f"transaction {t.id}: its source checkpoint {source} is not leased"
    if source and s.checkpoints.get(source) is None:
        yield "INV-07", f"transaction {t.id}: its source checkpoint {source} is gone"
    if any(h < 0 for h in t.held):
        yield "INV-01", f"transaction {t.id} holds {t.held}"


def _idle(s: PhysicalState) -> Iterator[Finding]:
    if s.sequences or s.transaction or len(s.checkpoints):
        return
    used = usage(s)
    objects = [len(p.histories) for p in s.pools] + [len(s.states.images)]
    if any(used.pages) or used.slots or used.host or used.rows or any(objects):
        yield "INV-20", f"nothing is held, yet {used} is used and {objects} objects live"
