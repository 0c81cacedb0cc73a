"""Where a request may start from: every complete point on its path, and root, by cost (SRC)."""

from __future__ import annotations

from typing import NamedTuple

from planner import kv, state_images
from planner.capacity import ceil_div
from planner.checkpoints import Checkpoint, Identity
from planner.physical import is_complete
from planner.world.records import session_owner
from planner.world.requests import Request
from planner.world.step import Step


class Source(NamedTuple):
    """A candidate: a checkpoint (0: root), what it costs, and the record it would be taken from.

    ``record`` is the private owner (0: a shared entry, or only waited for); ``take`` whether its
    history may be continued in place of being branched (CAT-17).
    """

    cost: float
    moved: int
    frontier: int
    session: bool
    private: bool
    order: int
    checkpoint: int
    record: int = 0
    take: bool = False

    @property
    def rank(self) -> tuple[float, int, int, bool, bool, int, int]:
        """Order of choice; all ties are broken (SRC-02)."""
        return (
            self.cost, self.moved, -self.frontier, not self.session, not self.private, -self.order,
            self.checkpoint,
        )  # fmt: skip


def restore(step: Step, ck: Checkpoint) -> tuple[float, int]:
    """(cost in ns, bytes) of bringing a point's missing replicas to the Device, tail copy included."""
    s, cost = step.physical, step.config.cost
    up, tails, size, tail_size = 0, 0, 0, 0
    if not state_images.image(s.states, ck.image).slot:
        up, size = 1, s.layout.image_bytes
    for pool, p in zip(s.pools, ck.prefixes, strict=True):
        for h, lo, hi in kv.segments(pool, p.history, ceil_div(p.frontier, pool.page_tokens)):
            if h.on_device == len(h.pages.values()):
                continue
            missing = sum(1 for page in h.pages.slice(lo, hi) if not page.device)
            up, size = up + missing, size + missing * pool.page_bytes
        if p.frontier % pool.page_tokens:
            tails, tail_size = tails + 1, tail_size + pool.page_bytes
    return cost.h2d.of(up, size) + cost.d2d.of(tails, tail_size), size + tail_size


def sources(step: Step, request: Request, prompt: Identity, limit: int) -> list[Source]:
    """All sources of ``prompt`` that leave at least one token to run, best first (SRC-01).

    Holders of one checkpoint from which it would be branched alike are one source (SRC-03).
    ``limit`` is the deepest allowed frontier. A record that another request runs on may still be
    branched at its published points.
    """
    cost = step.config.cost
    root = Source(cost.prefill_ns(0, limit), 0, 0, False, False, 0, 0)
    if not step.caches(request):
        return [root]
    named = session_owner(step.catalog, request.spec.session) if request.spec.session else 0
    found = [root]
    for ck in sorted(step.physical.checkpoints.on_path(prompt), key=lambda ck: ck.id):
        if not 0 < ck.frontier <= limit:
            continue
        cid = ck.id
        usable = [o for o in ck.holders if _public(step, o) or o in (request.waiter, request.owner)]
        if not usable or not ck.identity.prefix_of(prompt) or not is_complete(step.physical, cid):
            continue
        transfer, moved = restore(step, ck)
        total = transfer + cost.prefill_ns(ck.frontier, limit - ck.frontier)
        for owner in usable:
            record = step.record(owner)
            take = record is not None and may_take(step, request, cid, owner)
            order = record.order if record is not None else 0
            found.append(
                Source(
                    total, moved, ck.frontier, owner == named, record is not None, order, cid,
                    owner if record is not None else 0, take,
                )
            )  # fmt: skip
    merged: dict[tuple[int, int], Source] = {}
    for source in sorted(found, key=lambda s: s.rank):
        merged.setdefault((source.checkpoint, source.record if source.take else 0), source)
    return list(merged.values())


def _public(step: Step, owner: int) -> bool:
    return step.record(owner) is not None or step.catalog.entries.get(owner) is not None


def may_take(step: Step, request: Request, cid: int, owner: int) -> bool:
    """Whether binding from ``cid`` continues this record instead of branching from it (CAT-17).

    Continuing the endpoint is the ordinary next turn. An earlier point is taken over only by the
    session that the record belongs to, which thereby rewrites its own history (CAT-18); anybody
    else branches, and the parent stays.
    """
    record = step.record(owner)
    assert record is not None
    if request.owner:
        return owner == request.owner
    if not request.spec.endpoint:
        return False  # it would be used up for nothing
    if record.request or record.order > request.id:
        return False
    if any(r.wait in record.points for r in step.requests.values() if r.id != request.id):
        return False
    if record.session and record.session != request.spec.session:
        return False
    same_session = bool(record.session) and record.session == request.spec.session
    return same_session or record.endpoint == cid
