"""What to give up for a real gap: demotions to Host, deletions, and in which order (RC, HOST-05..09).

`relieve` names edges and replicas; it changes nothing. Whether the whole change is possible is decided
by `planner.assess` on the complete outcome, so a proposal may be too small or too optimistic, but a
started plan never is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, islice
from math import inf
from typing import NamedTuple

from planner import host, kv, state_images
from planner.capacity import ceil_div
from planner.checkpoints import Checkpoint
from planner.host import Arena
from planner.operations import apply
from planner.physical import PhysicalState
from planner.plans import Edge, ImageRef, PageRange
from planner.reclaim import Reclaim, reclaim
from planner.retention import Release
from planner.world.records import Demand, Record
from planner.world.step import Step

Gaps = dict[str, int]
"""Missing page groups by pool name, "slots", and Host bytes as "host"."""


@dataclass(frozen=True, slots=True)
class Rights:
    """What a request for space may take (RC-12, RC-14, SRC-14, SCH-10).

    ``reused_before``: reused content with older demand than this (0: none). ``waiters`` and
    ``snapshots``: those of tickets above this one may be revoked (None: none). ``budget``: tokens of
    coverage that deletions may cost (None: any). ``protect``: checkpoints that must stay as they are.
    """

    reused_before: int = 0
    waiters: int | None = None
    snapshots: int | None = None
    budget: int | None = None
    demote: bool = True
    protect: frozenset[int] = frozenset()


FOREVER = 1 << 62


class Relief(NamedTuple):
    """What to let go and what to move to Host."""

    release: tuple[Edge, ...] = ()
    demote: tuple[ImageRef | PageRange, ...] = ()
    drop_host: tuple[ImageRef | PageRange, ...] = ()


class Point(NamedTuple):
    """A checkpoint that could go: all its holders, the request it is held for, its place in the order."""

    checkpoint: Checkpoint
    edges: tuple[Edge, ...]
    heat: int
    """Latest real demand that protects it; 0: ordinary (RC-04)."""
    published: int
    waiter: int
    """Oldest ticket that waits for it or is paused on it; 0: none."""
    snapshot: bool


def protects_proven(record: Record, ck: Checkpoint, step: Step) -> bool:
    """Whether a hot record's protection extends to this point (RC-04).

    It does not where an earlier point, at or past the proven position, would survive it.
    """
    for cid in record.points:
        other = step.checkpoint(cid)
        if other is not None and cid != ck.id:
            between = record.demand.proven <= other.frontier < ck.frontier
            if between and other.identity.prefix_of(ck.identity):
                return False
    return True


def points(step: Step, rights: Rights) -> list[Point]:
    """Every checkpoint that the rights allow to go, in no order yet."""
    waiters = {r.waiter: r.id for r in step.requests.values() if r.wait}
    holders = {r.holder: r.id for r in step.requests.values() if r.snapshot}
    out: list[Point] = []
    for cid, ck in step.physical.checkpoints.items():
        if cid in rights.protect or ck.readers:
            continue
        heat = published = waiter = 0
        allowed, snapshot = True, False
        for owner in ck.holders:
            record, entry = step.record(owner), step.catalog.entries.get(owner)
            demand = Demand()
            if record is not None:
                demand, published = record.demand, max(published, record.published)
                if demand.time and not protects_proven(record, ck, step):
                    demand = Demand()
            elif entry is not None:
                demand, published = entry.demand, max(published, entry.published)
            else:
                ticket = waiters.get(owner) or holders.get(owner, 0)
                limit = rights.waiters if owner in waiters else rights.snapshots
                snapshot = snapshot or owner in holders
                waiter = min(waiter or ticket, ticket)
                allowed = allowed and limit is not None and ticket > limit
            heat = max(heat, demand.time)
        if allowed and heat < max(rights.reused_before, 1):
            edges = tuple(Edge(owner, cid) for owner in ck.holders)
            out.append(Point(ck, edges, heat, published, waiter, snapshot))
    return out


def lost_tokens(step: Step, gone: Collection[int]) -> int:
    """Tokens that nothing restores once these points are gone together (RC-07).

    Each falls back to the deepest point of its path that survives. What lies before a shallower
    one that goes too, or before an alias of it, is counted there.
    """
    return _lost(_by_depth(step), gone)


def _by_depth(step: Step) -> list[Checkpoint]:
    """Every checkpoint, deepest first."""
    return sorted(step.physical.checkpoints.values(), key=lambda ck: -ck.frontier)


def _lost(by_depth: list[Checkpoint], gone: Collection[int]) -> int:
    lost = 0
    for place, ck in enumerate(by_depth):
        if ck.id not in gone:
            continue
        first = place
        while first and by_depth[first - 1].frontier == ck.frontier:
            first -= 1  # its aliases stand beside it
        best = 0
        for other in islice(by_depth, first, None):
            counted = other.id not in gone or (other.frontier, other.id) < (ck.frontier, ck.id)
            if counted and other.identity.prefix_of(ck.identity):
                best = other.frontier
                break
        lost += ck.frontier - best
    return lost


def losses(checkpoints: Iterable[Checkpoint]) -> dict[int, int]:
    """`lost_tokens` of each of all checkpoints alone, by id.

    In the order of their tokens a point comes after all that begin it, which stand in one path from the root.
    """
    out: dict[int, int] = {}
    path: list[Checkpoint] = []

    def tokens_of(ck: Checkpoint) -> bytes:
        return ck.identity.tokens

    for tokens, group in groupby(sorted(checkpoints, key=tokens_of), key=tokens_of):
        alike = list(group)
        while path and not tokens.startswith(tokens_of(path[-1])):
            path.pop()
        for ck in alike:
            begins = (
                other.frontier
                for other in chain(alike, reversed(path))
                if other.id != ck.id and other.identity.prefix_of(ck.identity)
            )
            out[ck.id] = ck.frontier - next(begins, 0)
        path += alike
    return out


def _freed(s: PhysicalState, got: Reclaim) -> Gaps:
    out: Gaps = {p.name: n for p, n in zip(s.pools, got.pages, strict=True)}
    return {**out, "slots": got.slots}


class _Survey:
    """What a search asks of one world again and again: the points that may go, what each frees and what it costs."""

    def __init__(self, step: Step, rights: Rights) -> None:
        self.found = points(step, rights)
        self._physical = step.physical
        self._by_depth = _by_depth(step)
        self._frees: dict[int, Reclaim] = {}
        self._losses: dict[int, int] | None = None
        self._by_age: (
            tuple[list[tuple[int, int]], list[tuple[Point, host.Action]], list[float]] | None
        ) = None

    def frees(self, p: Point) -> Reclaim:
        """What the end of this point alone gives back."""
        cid = p.checkpoint.id
        if cid not in self._frees:
            self._frees[cid] = reclaim(self._physical, p.edges)
        return self._frees[cid]

    def loss(self, p: Point) -> int:
        """Tokens that are lost with this point alone."""
        if self._losses is None:
            self._losses = losses(self._by_depth)
        return self._losses[p.checkpoint.id]

    def lost(self, gone: Collection[int]) -> int:
        """See `lost_tokens`. Never less than the loss of any of them alone."""
        return _lost(self._by_depth, gone)

    def colder(self, point: Point) -> tuple[list[tuple[Point, host.Action]], float]:
        """Points that nobody waits for and that are colder, coldest first, with what each frees on Host; and the tokens
        that are lost at least where any of them goes."""
        if self._by_age is None:
            order = [p for p in self.found if not p.waiter]
            order.sort(key=lambda p: (p.heat, p.published, p.checkpoint.id))
            freed = [(p, host.Action(self.frees(p).extents)) for p in order]
            least = list(accumulate(map(self.loss, order), min, initial=inf))
            self._by_age = [(p.heat, p.published) for p in order], freed, least
        ages, freed, least = self._by_age
        count = bisect_left(ages, (point.heat, point.published))
        return freed[:count], least[count]


@dataclass
class _Search:
    """A relief under construction."""

    step: Step
    gaps: Gaps
    rights: Rights
    arena: Arena
    survey: _Survey
    chosen: list[Point] = field(default_factory=list)
    moved: dict[int, list[ImageRef | PageRange]] = field(default_factory=dict)
    """Demotions by the checkpoint for whose sake they are."""
    gain: Gaps = field(default_factory=dict)
    """Device units that the demotions free."""
    victims: list[Edge] = field(default_factory=list)
    """Points that make room on Host for demotions."""
    _counted: tuple[tuple[tuple[int, ...], int], Gaps] = (((), 0), {})
    """What was last counted as freed, and for which deletions."""

    def missing(self) -> Gaps:
        """What is still short; Host bytes are decided by the arena, not here."""
        key = (tuple(p.checkpoint.id for p in self.chosen), len(self.victims))
        if self._counted[0] != key:
            edges = [e for p in self.chosen for e in p.edges] + self.victims
            s = self.step.physical
            self._counted = key, _freed(s, reclaim(s, list(dict.fromkeys(edges))))
        freed: Gaps = self._counted[1]
        out: Gaps = {}
        for name, n in self.gaps.items():
            left = n - freed.get(name, 0) - self.gain.get(name, 0)
            if name != "host" and left > 0:
                out[name] = left
        return out

    def unread(self) -> tuple[list[dict[int, int]], set[int]]:
        """Per pool: blocks of each history that must stay on the Device; and images likewise."""
        s = self.step.physical
        keep = [
            kv.active_blocks(pool, [q.histories[k] for q in s.sequences])
            for k, pool in enumerate(s.pools)
        ]
        images = set()
        for cid, ck in s.checkpoints.items():
            if not ck.readers and cid not in self.rights.protect:
                continue
            images.add(ck.image)
            for k, (pool, p) in enumerate(zip(s.pools, ck.prefixes, strict=True)):
                blocks = ceil_div(p.frontier, pool.page_tokens)
                for h, _, hi in kv.segments(pool, p.history, blocks):
                    keep[k][h.id] = max(keep[k].get(h.id, 0), hi)
        return keep, images

    def demote(self, order: list[Point]) -> None:
        """Move content of these points to Host, first ones first, while the gap lasts (RC-09)."""
        if not self.rights.demote or not self.arena.capacity:
            return
        keep, images = self.unread()
        for point in order:
            missing = self.missing()
            if not missing:
                return
            if "slots" in missing:
                self._demote_image(point, images)
            for k, pool in enumerate(self.step.physical.pools):
                if pool.name in missing:
                    self._demote_pages(point, k, missing[pool.name], keep[k])

    def _room(self, size: int, point: Point) -> bool:
        found = host.first_fit(self.arena, size)
        if found is None and self._make_host_room([size], point):
            found = host.first_fit(self.arena, size)
        if found is None:
            return False
        self.arena = found[0]
        return True

    def _make_host_room(self, sizes: list[int], point: Point) -> bool:
        """Fix Host victims for a demotion: colder points that live on Host (RC-08, RC-17)."""
        worth = inf if point.heat else self.survey.loss(point)
        colder, least = self.survey.colder(point)
        if least >= worth:
            return False  # deleting the point itself costs no more
        stay = {e.checkpoint for e in self.victims} | {p.checkpoint.id for p in self.chosen}
        stay |= {*self.moved, point.checkpoint.id}
        colder = [(p, action) for p, action in colder if p.checkpoint.id not in stay]
        chosen = host.choose_victims(self.arena, sizes, [action for _, action in colder])
        if chosen is None:
            return False
        gone = {colder[i][0].checkpoint.id for i in chosen}
        if self.survey.lost(gone) >= worth or not self._affordable(gone):
            return False
        for i in chosen:
            victim, action = colder[i]
            self.victims += victim.edges
            self.arena = host.release_all(self.arena, action.extents)
        return True

    def _affordable(self, more: set[int]) -> bool:
        """Whether the budget covers these deletions beside all that were chosen (RC-15)."""
        budget = self.rights.budget
        if budget is None:
            return True
        gone = {e.checkpoint for e in self.victims} | {p.checkpoint.id for p in self.chosen}
        return self.survey.lost(gone | more) < budget

    def _demote_image(self, point: Point, images: set[int]) -> None:
        im = state_images.image(self.step.physical.states, point.checkpoint.image)
        if im.id in images or not im.slot or not im.ready or im.writer or im.pins:
            return
        ref = ImageRef(im.id)
        if any(ref in items for items in self.moved.values()):
            return
        if im.host is not None or self._room(self.step.physical.layout.image_bytes, point):
            self.moved.setdefault(point.checkpoint.id, []).append(ref)
            self.gain["slots"] = self.gain.get("slots", 0) + 1

    def _demote_pages(self, point: Point, k: int, wanted: int, keep: dict[int, int]) -> None:
        pool, p = self.step.physical.pools[k], point.checkpoint.prefixes[k]
        if not p.history:
            return
        h = kv.history(pool, p.history)
        if h.pins or h.sequence or not h.on_device:
            return
        lo = max(h.base, keep.get(h.id, 0))
        hi = min(h.blocks, ceil_div(kv.protected_tokens(pool, h), pool.page_tokens))
        for item in (i for items in self.moved.values() for i in items):
            if isinstance(item, PageRange) and (item.pool, item.history) == (k, h.id):
                hi = min(hi, item.lo)
        start, gain = hi, 0
        for block in range(hi - 1, lo - 1, -1):
            page = h.pages.get(block)
            if page is None or gain >= wanted:
                break
            if page.device:
                covered = kv.host_covers(page, kv.needed_columns(pool, h, block, 0))
                if not covered and not self._room(pool.page_bytes, point):
                    break
                gain += 1
            start = block
        if gain:
            item = PageRange(k, h.id, start, hi)
            self.moved.setdefault(point.checkpoint.id, []).append(item)
            self.gain[pool.name] = self.gain.get(pool.name, 0) + gain

    def delete_ordinary(self, points: list[Point]) -> None:
        """State first, then one pool after the other, each by its own order (RC-05)."""
        for name in ("slots", *(pool.name for pool in self.step.physical.pools)):
            if wanted := self.missing().get(name):
                left = [p for p in points if p not in self.chosen]
                self.delete(self._by_loss(name, wanted, left), name)

    def _by_loss(self, name: str, wanted: int, found: list[Point]) -> list[Point]:
        """Ordinary points by lost tokens per useful unit for this gap (RC-06)."""

        def key(p: Point) -> tuple[float, int, int]:
            useful = min(wanted, _freed(self.step.physical, self.survey.frees(p)).get(name, 0))
            lost = self.survey.loss(p)
            return (lost / useful if useful else float("inf"), p.published, p.checkpoint.id)

        return sorted(found, key=key)

    def delete(self, order: list[Point], name: str = "") -> None:
        """Let points go, first ones first, while the gap lasts and the budget allows."""
        for point in order:
            missing = self.missing()
            if not missing or (name and name not in missing):
                return
            if not self._affordable({point.checkpoint.id}):
                return
            self._drop_demotions(point)
            self.chosen.append(point)

    def _moves(self, point: Point) -> Gaps:
        """Device units that the demotions for its sake free."""
        out: Gaps = {}
        for item in self.moved.get(point.checkpoint.id, []):
            name, count = "slots", 1
            if isinstance(item, PageRange):
                pool = self.step.physical.pools[item.pool]
                pages = kv.history(pool, item.history).pages.slice(item.lo, item.hi)
                name, count = pool.name, len(kv.leases(pages))
            out[name] = out.get(name, 0) + count
        return out

    def _drop_demotions(self, point: Point) -> None:
        """A point that goes needs no move."""
        for name, count in self._moves(point).items():
            self.gain[name] -= count
        self.moved.pop(point.checkpoint.id, None)

    def prune(self) -> None:
        """Take back deletions that proved unneeded, the most precious first."""
        for point in reversed(tuple(self.chosen)):
            self.chosen.remove(point)
            if self.missing():
                self.chosen.append(point)

    def relief(self) -> Relief | None:
        """What was found, if it closes the gap."""
        if self.missing():
            return None
        edges = dict.fromkeys([*self.victims, *(e for p in self.chosen for e in p.edges)])
        return Relief(tuple(edges), self._standing(tuple(edges)))

    def _standing(self, edges: tuple[Edge, ...]) -> tuple[ImageRef | PageRange, ...]:
        """The demotions of what is still there once ``edges`` are gone, which `assess` does first."""
        moves = tuple(i for items in self.moved.values() for i in items)
        if not edges or not moves:
            return moves
        after = apply(self.step.physical, Release(edges))
        out: list[ImageRef | PageRange] = []
        for item in moves:
            if isinstance(item, ImageRef):
                if after.states.images.get(item.image) is not None:
                    out.append(item)
                continue
            h = after.pools[item.pool].histories.get(item.history)
            if h is not None and item.lo < h.blocks:
                out.append(item._replace(hi=min(item.hi, h.blocks)))
        return tuple(out)


def _claim(p: Point) -> tuple[bool, bool, int]:
    """What nobody waits for goes first, then waiting references, then snapshots, younger first."""
    return bool(p.waiter), p.snapshot, -p.waiter


def relieve(step: Step, gaps: Gaps, rights: Rights) -> Relief | None:
    """Close the gap within the rights, or None: then nothing should be given up (HOST-08).

    Demotions come first because they lose nothing, then ordinary content by marginal loss, then reused
    content by oldest demand, and last what others wait for or are paused on, youngest first (RC-06).
    """
    if "rows" in gaps:
        return None
    if set(gaps) == {"host"}:
        return _host_relief(step, gaps["host"], rights)
    survey = _Survey(step, rights)
    found = survey.found
    free = [p for p in found if not p.waiter]
    ordinary = [p for p in free if not p.heat]
    reused = sorted((p for p in free if p.heat), key=lambda p: (p.heat, p.checkpoint.id))
    held = sorted((p for p in found if p.waiter), key=lambda p: (*_claim(p), p.checkpoint.id))
    search = _Search(step, gaps, rights, step.physical.arena, survey)
    search.demote(sorted(ordinary, key=lambda p: (p.published, p.checkpoint.id)))
    if search.missing():
        search.delete_ordinary(ordinary)
    if search.missing():
        search.demote(reused)
    if search.missing():
        search.delete(reused)
    if search.missing():
        search.delete(held)
    search.prune()
    return search.relief()


def _host_relief(step: Step, size: int, rights: Rights) -> Relief | None:
    """Room for one allocation on Host: redundant copies first, then points (HOST-06, HOST-07)."""
    s = step.physical
    drops: list[ImageRef | PageRange] = []
    arena = s.arena
    busy = {ck.image for cid, ck in s.checkpoints.items() if ck.readers or cid in rights.protect}
    for iid, im in s.states.images.items():
        if im.host and im.slot and im.ready and not im.writer and not im.pins and iid not in busy:
            drops.append(ImageRef(iid))
            arena = host.release(arena, im.host)
    if drops and host.fits(arena, [size]):
        return Relief((), (), tuple(drops))
    survey = _Survey(step, rights)
    found = sorted(survey.found, key=lambda p: (*_claim(p), p.heat, p.published))
    actions = [host.Action(survey.frees(p).extents) for p in found]
    chosen = host.choose_victims(s.arena, [size], actions)
    if chosen is None:
        return None
    lost = survey.lost({found[i].checkpoint.id for i in chosen})
    if rights.budget is not None and lost >= rights.budget:
        return None
    return Relief(tuple(e for i in chosen for e in found[i].edges))
