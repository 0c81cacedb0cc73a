"""What to give up for a real gap: demotions to Host, deletions, and in which order (RC, HOST-05..09).

`relieve` names edges and replicas; it changes nothing. Whether the whole change is possible is decided
by `planner.assess` on the complete outcome, so a proposal may be too small or too optimistic, but a
started plan never is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
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


def points(step: Step, rights: Rights, among: Iterable[int] | None = None) -> list[Point]:
    """Every checkpoint, or each of those, that the rights allow to go, in no order yet."""
    waiters = {r.waiter: r.id for r in step.requests.values() if r.wait}
    holders = {r.holder: r.id for r in step.requests.values() if r.snapshot}
    every = step.physical.checkpoints
    out: list[Point] = []
    for ck in every.values() if among is None else map(every.get, among):
        if ck is None or ck.id in rights.protect or ck.readers:
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
            edges = tuple(Edge(owner, ck.id) for owner in ck.holders)
            out.append(Point(ck, edges, heat, published, waiter, snapshot))
    return out


def lost_tokens(step: Step, gone: Collection[int]) -> int:
    """Tokens that nothing restores once these points are gone together (RC-07).

    Each falls back to the deepest point of its path that survives. What lies before a shallower
    one that goes too, or before an alias of it, is counted there. Never less than the loss of any of them alone.
    """
    every = step.physical.checkpoints
    lost = 0
    for ck in map(every.get, gone):
        if ck is None:
            continue
        rests = (
            other.frontier
            for other in every.on_path(ck.identity)
            if (other.id not in gone or (other.frontier, other.id) < (ck.frontier, ck.id))
            and other.identity.prefix_of(ck.identity)
        )
        lost += ck.frontier - next(rests, 0)
    return lost


def _freed(s: PhysicalState, got: Reclaim) -> Gaps:
    out: Gaps = {p.name: n for p, n in zip(s.pools, got.pages, strict=True)}
    return {**out, "slots": got.slots}


class _Survey:
    """What a search asks of one world again and again: the points that may go, what each frees and what it costs."""

    def __init__(self, step: Step, rights: Rights, among: Iterable[int] | None = None) -> None:
        self.found = points(step, rights, among)
        self._step, self._rights = step, rights
        self._frees: dict[int, Reclaim] = {}
        self._losses: dict[int, int] = {}
        self._cold: list[Point] | None = None

    def frees(self, p: Point) -> Reclaim:
        """What the end of this point alone gives back."""
        cid = p.checkpoint.id
        if cid not in self._frees:
            self._frees[cid] = reclaim(self._step.physical, p.edges)
        return self._frees[cid]

    def loss(self, p: Point) -> int:
        """Tokens that are lost with this point alone."""
        cid = p.checkpoint.id
        if cid not in self._losses:
            self._losses[cid] = lost_tokens(self._step, (cid,))
        return self._losses[cid]

    def cold(self) -> list[Point]:
        """Points anywhere that nobody waits for, coldest first."""
        if self._cold is None:
            found = points(self._step, self._rights)
            self._cold = sorted(
                (p for p in found if not p.waiter),
                key=lambda p: (p.heat, p.published, p.checkpoint.id),
            )
        return self._cold

    def one_victim(self, arena: Arena, size: int, order: Iterable[Point]) -> Point | None:
        """The first of these points whose end alone makes room for one allocation on Host."""
        for p in order:
            extents = self.frees(p).extents
            if extents and host.fits(arena, [size], extents):
                return p
        return None

    def victims(self, arena: Arena, size: int, order: list[Point]) -> list[Point] | None:
        """Those of these points, first ones first, whose end makes room for one allocation on Host (HOST-06..08)."""
        one = self.one_victim(arena, size, order)
        return self.several_victims(arena, size, order) if one is None else [one]

    def several_victims(self, arena: Arena, size: int, order: list[Point]) -> list[Point] | None:
        """`victims` where none is enough alone."""
        order = [p for p in order if self.frees(p).extents]
        actions = [host.Action(self.frees(p).extents) for p in order]
        chosen = host.choose_victims(arena, [size], actions)
        return None if chosen is None else [order[i] for i in chosen]


class Fixed(NamedTuple):
    """What must stay on the Device: blocks of each history by pool, and images."""

    blocks: tuple[dict[int, int], ...]
    images: frozenset[int]

    def end(self, k: int, h: kv.History) -> int:
        """The first own block of a history of pool ``k`` that need not stay."""
        return max(h.base, self.blocks[k].get(h.id, 0))

    def first_movable(self, k: int, h: kv.History) -> int:
        """The first own block of a history whose page lies on the Device and may leave it; its end if there is none."""
        for block in range(self.end(k, h), h.blocks):
            page = h.pages.get(block)
            if page is not None and page.device:
                return block
        return h.blocks


def what_stays(s: PhysicalState, protect: Collection[int]) -> Fixed:
    """What sequences execute on, transactions read, or the rights protect."""
    blocks = tuple(
        kv.active_blocks(pool, [q.histories[k] for q in s.sequences])
        for k, pool in enumerate(s.pools)
    )
    images = set()
    for ck in map(s.checkpoints.get, {*s.checkpoints.read, *protect}):
        if ck is None:
            continue
        images.add(ck.image)
        for pool, p, kept in zip(s.pools, ck.prefixes, blocks, strict=True):
            end = ceil_div(p.frontier, pool.page_tokens)
            for h, _, hi in kv.segments(pool, p.history, end):
                kept[h.id] = max(kept.get(h.id, 0), hi)
    return Fixed(blocks, frozenset(images))


def movable(s: PhysicalState, gaps: Gaps, fixed: Fixed) -> set[int]:
    """Checkpoints whose end or demotion may free something of the missing kinds; others free nothing (RC-01).

    Those that reach something which may leave the Device, and those of a history with such a page: a demotion takes
    any page of the history, whoever reaches it.
    """
    found: set[int] = set()
    if "slots" in gaps:
        images = (i for i in s.states.slots if i and i not in fixed.images)
        found.update(cid for image in images for cid in s.checkpoints.with_image(image))
    for k, pool in enumerate(s.pools):
        if pool.name not in gaps:
            continue
        forks: set[int] = set()
        for hid in pool.resident:
            h = kv.history(pool, hid)
            block = fixed.first_movable(k, h)
            if block == h.blocks:
                continue
            found.update(cid for _, cid in h.refs)
            forks.update(child for base, child in h.children if base > block)
        todo = list(forks)
        for hid in todo:  # all that a fork of these holds reaches that block
            h = kv.history(pool, hid)
            found.update(cid for _, cid in h.refs)
            todo += [child for _, child in h.children if child not in forks]
    return found


def _colder(p: Point, than: Point) -> bool:
    return (p.heat, p.published) < (than.heat, than.published)


@dataclass
class _Search:
    """A relief under construction."""

    step: Step
    gaps: Gaps
    rights: Rights
    arena: Arena
    survey: _Survey
    fixed: Fixed
    chosen: list[Point] = field(default_factory=list)
    moved: dict[int, list[ImageRef | PageRange]] = field(default_factory=dict)
    """Demotions by the checkpoint for whose sake they are."""
    gain: Gaps = field(default_factory=dict)
    """Device units that the demotions free."""
    victims: list[Edge] = field(default_factory=list)
    """Points that make room on Host for demotions."""
    _one: tuple[tuple[int, Arena, frozenset[int]] | None, Point | None] = (None, None)
    """The coldest Host victim that is enough alone, and for what size and arena, and which points stay."""
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

    def demote(self, order: list[Point]) -> None:
        """Move content of these points to Host, first ones first, while the gap lasts (RC-09)."""
        if not self.rights.demote or not self.arena.capacity:
            return
        for point in order:
            missing = self.missing()
            if not missing:
                return
            if "slots" in missing:
                self._demote_image(point)
            for k, pool in enumerate(self.step.physical.pools):
                if pool.name in missing:
                    self._demote_pages(point, k, missing[pool.name])

    def _room(self, size: int, point: Point) -> bool:
        found = host.first_fit(self.arena, size)
        if found is None and self._make_host_room(size, point):
            found = host.first_fit(self.arena, size)
        if found is None:
            return False
        self.arena = found[0]
        return True

    def _make_host_room(self, size: int, point: Point) -> bool:
        """Fix Host victims for a demotion: colder points that live on Host (RC-08, RC-17)."""
        victims = self._host_victims(size, point)
        if victims is None:
            return False
        gone = {p.checkpoint.id for p in victims}
        worth = inf if point.heat else self.survey.loss(point)
        if lost_tokens(self.step, gone) >= worth or not self._affordable(gone):
            return False  # deleting the point itself costs no more, or all that may be spent
        for victim in victims:
            self.victims += victim.edges
            self.arena = host.release_all(self.arena, self.survey.frees(victim).extents)
        return True

    def _host_victims(self, size: int, point: Point) -> list[Point] | None:
        """The coldest one that makes room alone, which is the same for all points until something is taken; or else
        several. All have to be colder than the point."""
        stay = {e.checkpoint for e in self.victims} | {p.checkpoint.id for p in self.chosen}
        stay |= self.moved.keys()
        key = (size, self.arena, frozenset(stay))
        if self._one[0] != key:
            cold = (p for p in self.survey.cold() if p.checkpoint.id not in stay)
            self._one = key, self.survey.one_victim(self.arena, size, cold)
        one = self._one[1]
        if one is not None and _colder(one, point):
            return [one]
        colder = takewhile(lambda p: _colder(p, point), self.survey.cold())
        order = [p for p in colder if p.checkpoint.id not in stay]
        return self.survey.several_victims(self.arena, size, order)

    def _affordable(self, more: set[int]) -> bool:
        """Whether the budget covers these deletions beside all that were chosen (RC-15)."""
        budget = self.rights.budget
        if budget is None:
            return True
        gone = {e.checkpoint for e in self.victims} | {p.checkpoint.id for p in self.chosen}
        return lost_tokens(self.step, gone | more) < budget

    def _demote_image(self, point: Point) -> None:
        im = state_images.image(self.step.physical.states, point.checkpoint.image)
        if im.id in self.fixed.images or not im.slot or not im.ready or im.writer or im.pins:
            return
        ref = ImageRef(im.id)
        if any(ref in items for items in self.moved.values()):
            return
        if im.host is not None or self._room(self.step.physical.layout.image_bytes, point):
            self.moved.setdefault(point.checkpoint.id, []).append(ref)
            self.gain["slots"] = self.gain.get("slots", 0) + 1

    def _demote_pages(self, point: Point, k: int, wanted: int) -> None:
        pool, p = self.step.physical.pools[k], point.checkpoint.prefixes[k]
        if not p.history:
            return
        h = kv.history(pool, p.history)
        if h.pins or h.sequence or not h.on_device:
            return
        lo = self.fixed.end(k, h)
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
            cost = self.survey.loss(p) / useful if useful else inf
            return (cost, p.published, p.checkpoint.id)

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
        """The demotions of what is still there once ``edges`` are gone, which `assess` does first.

        The largest units come first: the others fill the holes that are left, pages in parts of any number.
        """
        s = self.step.physical

        def unit_bytes(item: ImageRef | PageRange) -> int:
            if isinstance(item, ImageRef):
                return s.layout.image_bytes
            return s.pools[item.pool].page_bytes

        found = (i for items in self.moved.values() for i in items)
        moves = tuple(sorted(found, key=unit_bytes, reverse=True))
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
    fixed = what_stays(step.physical, rights.protect)
    survey = _Survey(step, rights, sorted(movable(step.physical, gaps, fixed)))
    found = survey.found
    free = [p for p in found if not p.waiter]
    ordinary = [p for p in free if not p.heat]
    reused = sorted((p for p in free if p.heat), key=lambda p: (p.heat, p.checkpoint.id))
    held = sorted((p for p in found if p.waiter), key=lambda p: (*_claim(p), p.checkpoint.id))
    search = _Search(step, gaps, rights, step.physical.arena, survey, fixed)
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
    kept = map(s.checkpoints.get, {*s.checkpoints.read, *rights.protect})
    busy = {ck.image for ck in kept if ck is not None}
    for iid, im in s.states.images.items():
        if im.host and im.slot and im.ready and not im.writer and not im.pins and iid not in busy:
            drops.append(ImageRef(iid))
            arena = host.release(arena, im.host)
    if drops and host.fits(arena, [size]):
        return Relief((), (), tuple(drops))
    survey = _Survey(step, rights)
    found = sorted(survey.found, key=lambda p: (*_claim(p), p.heat, p.published))
    victims = survey.victims(s.arena, size, found)
    if victims is None:
        return None
    lost = lost_tokens(step, {p.checkpoint.id for p in victims})
    if rights.budget is not None and lost >= rights.budget:
        return None
    return Relief(tuple(e for p in victims for e in p.edges))
