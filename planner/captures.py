"""Captures, pauses and endpoints: an active position becomes a checkpoint (KV-31, KV-38, CAPT).

A point of the sequence's own owner shares everything; a foreign owner gets an independent view: it
keeps the partial tail page and the writer goes on in a copy.
"""

from __future__ import annotations

from planner import host, kv, pressure, state_images
from planner.activation import require
from planner.capacity import ceil_div
from planner.checkpoints import Checkpoint, Identity, Prefix
from planner.errors import BusyError, IdentityError, IllegalError
from planner.host import Extent
from planner.kv import Pool
from planner.physical import Draft, Sequence, sequence
from planner.plans import Capture, Copy, Pause, PoolWork, Work


def require_settled(d: Draft, sid: int, identity: Identity) -> Sequence:
    """The sequence, where its state may be published under ``identity``."""
    q = sequence(d, sid)
    if q.unit:
        raise BusyError(f"sequence {sid}: unit {q.unit} is in flight; commit or abort it first")
    if q.source:
        raise IllegalError(
            f"sequence {sid} still reads its fork source: it has no state of its own"
        )
    if identity.frontier != q.position:
        raise IdentityError(
            f"sequence {sid} stands at {q.position}, the identity at {identity.frontier}; a state "
            "is published only at its own position"
        )
    return q


def prefixes_of(d: Draft, q: Sequence, frontiers: tuple[int, ...] | None) -> tuple[Prefix, ...]:
    """Anchored prefixes of an active sequence at ``frontiers`` (default: all that is committed)."""
    out: list[Prefix] = []
    wanted = q.frontiers if frontiers is None else frontiers
    for pool, hid, f, limit in zip(d.pools, q.histories, wanted, q.frontiers, strict=True):
        if not 0 <= f <= limit:
            raise IllegalError(f"pool {pool.name}: coverage {f} exceeds committed {limit} (KV-14)")
        out.append(Prefix(kv.anchor(pool, hid, ceil_div(f, pool.page_tokens)), f))
    return tuple(out)


def _tail_is_shared(pool: Pool, committed: int, frontier: int) -> bool:
    """Whether the writer would go on in the partial page that the checkpoint holds (KV-38)."""
    P = pool.page_tokens
    return bool(frontier % P) and committed // P == frontier // P


def prepare_capture(d: Draft, c: Capture) -> Work:
    """Claim the state destination, and one tail page per pool for an independent view."""
    q = require_settled(d, c.sequence, c.identity)
    prefixes = prefixes_of(d, q, c.frontiers)
    tails = [
        c.owner != q.owner and _tail_is_shared(pool, f, p.frontier)
        for pool, f, p in zip(d.pools, q.frontiers, prefixes, strict=True)
    ]
    on_device = c.place == "device"
    require(d, [int(t) for t in tails], int(on_device), 0)
    slot = state_images.image(d.states, q.image).slot
    d.states, iid = state_images.reserve_image(d.states, on_device)
    extents: tuple[Extent, ...] = ()
    if on_device:
        copies = [Copy("image", "d2d", -1, slot, state_images.image(d.states, iid).slot, iid)]
    else:
        d.arena, e = host.allocate(d.arena, d.layout.image_bytes, "captured state image")
        extents = (e,)
        copies = [Copy("image", "d2h", -1, slot, e.offset, iid)]
    works: list[PoolWork] = []
    for k, cow in enumerate(tails):
        if not cow:
            works.append(PoolWork("share"))
            continue
        pool, ids = kv.materialize(kv.reserve(d.pools[k], 1), 1)
        d.pools[k] = pool
        block, columns = divmod(q.frontiers[k], pool.page_tokens)
        page = kv.history(pool, q.histories[k]).pages.get(block)
        assert page is not None
        copies.append(Copy("page", "d2d", k, page.device, ids[0], 0, block, 0, 0, columns))
        works.append(PoolWork("cow", tail=ids[0]))
    return Work(tuple(copies), "snapshot", iid, tuple(works), extents)


def publish_capture(d: Draft, c: Capture, work: Work) -> int:
    """Publish the checkpoint; where its tail is independent the writer moves to the copy."""
    q = sequence(d, c.sequence)
    prefixes = prefixes_of(d, q, c.frontiers)
    im = state_images.image(d.states, work.image)
    d.states = state_images.put(
        d.states,
        im._replace(
            ready=bool(im.slot), host=work.extents[0] if work.extents else None, pins=im.pins - 1
        ),
    )
    d.states = state_images.publish(d.states, work.image, q.position)
    cid = d.new_id()
    d.publish(
        c.owner, Checkpoint(cid, c.identity, work.image, prefixes, (c.owner,), 0, c.next_input)
    )
    histories = list(q.histories)
    reserved = list(q.reserved)
    for k, w in enumerate(work.pools):
        if not w.tail:
            continue
        P = d.layout.page_tokens
        full = q.frontiers[k] // P
        pool, ids, extents = kv.cut(d.pools[k], histories[k], full + 1)
        pool = kv.dematerialize(pool, ids)
        reserved[k] += len(ids)
        pool, hid = kv.start_history(pool, kv.anchor(pool, histories[k], full), full, q.id)
        pool = kv.append(pool, hid, [w.tail])
        d.pools[k], more = kv.drop_writer(pool, histories[k])
        d.free(extents + more)
        histories[k] = hid
    d.put_sequence(q._replace(histories=tuple(histories), reserved=tuple(reserved)))
    return cid


def freeze_sequence(d: Draft, q: Sequence, owner: int, identity: Identity, next_input: int) -> int:
    """End execution and keep the sequence as one inactive checkpoint of ``owner`` (KV-31)."""
    d.states = state_images.publish(d.states, q.image, q.position)
    cid = d.new_id()
    prefixes = prefixes_of(d, q, None)
    d.publish(owner, Checkpoint(cid, identity, q.image, prefixes, (owner,), 0, next_input))
    leave(d, q)
    return cid


def leave(d: Draft, q: Sequence) -> None:
    """Rows, growth and writers of a sequence go; pages stay where a reference holds them."""
    d.sequences = tuple(other for other in d.sequences if other.id != q.id)
    for k, hid in enumerate(q.histories):
        pool = kv.lease_row(d.pools[k], q.rows[k], 0)
        pool, extents = kv.drop_writer(kv.unreserve(pool, q.reserved[k]), hid)
        d.pools[k] = pool
        d.free(extents)


def publish_pause(d: Draft, p: Pause, work: Work) -> int:
    """Freeze first, then let the copied content leave the Device."""
    pressure.unpin(d, work)
    q = sequence(d, p.sequence)
    cid = freeze_sequence(d, q, p.owner, p.identity, p.next_input)
    pressure.publish_copies(d, work)
    return cid
