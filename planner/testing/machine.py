"""A Hypothesis state machine over every operation, against the device model of `shadow`.

Parameters are drawn freely; an impossible operation must raise a PlannerError and changes nothing.
What may never fail: starting a plan that was just assessed, and every step, cancel and failure of
an open transaction. After each step the invariants and all contents are verified.
"""

from __future__ import annotations

from typing import Any

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planner.checks import check
from planner.errors import PlannerError
from planner.operations import Operation, apply
from planner.physical import MAX_FLIGHTS, PhysicalState, Sequence, initial, usage
from planner.plans import Bind, Capture, Edge, ImageRef, Infeasible, PageRange, Pause, Plan, Target
from planner.reclaim import reclaim
from planner.retention import Discard, EndReader, Finish, LeaseReader, Release, Retain
from planner.testing.shadow import Shadow
from planner.testing.worlds import World, tiny_layout
from planner.transactions import Advance, Cancel, Fail, Start, assess
from planner.units import (
    AbortUnit,
    Commit,
    EnsureMapped,
    Entitle,
    Launch,
    Reserve,
    RowCommit,
    RowTokens,
    Settle,
    Truncate,
)

ROOMY = World(
    tiny_layout(pages=9, blocks=5, rows=3, slots=5, host=16, image=3, backend=9), owners=3, lag=1
)

SMALL_STEPS = ["map", "truncate", "settle", "reserve", "launch", "entitle"]


def rehearse(state: PhysicalState, plan: Plan) -> None:
    """Run a plan on a copy: usage at every boundary must be what the plan says (TX-04..06)."""
    s = apply(state, Start(plan))
    for point in plan.points:
        assert s.transaction is not None
        tid = s.transaction.id
        s = apply(s, Advance(tid))
        used = usage(s)
        held = s.transaction.held if s.transaction else (0,) * len(s.pools)
        pages = tuple(u - h for u, h in zip(used.pages, held, strict=True))
        assert used._replace(pages=pages) == point.usage, (point, used)
    assert s.transaction is None
    assert s.revision == state.revision + 1


class PlannerMachine(RuleBasedStateMachine):
    """See the module; subclass and set ``world`` for another layout."""

    world = ROOMY

    def __init__(self) -> None:
        super().__init__()
        self.state = initial(self.world.layout)
        self.shadow = Shadow(len(self.state.pools))

    # Helpers

    def run(self, op: Operation, *, certain: bool = False) -> bool:
        """Apply, mirror on the device model; refusals are fine unless ``certain``."""
        before = self.state
        try:
            after = apply(before, op)
        except PlannerError as e:
            if certain:
                raise
            event(f"refused {type(op).__name__}: {type(e).__name__}")
            return False
        event(f"applied {type(op).__name__}")
        self.shadow.step(before, op, after)
        self.state = after
        return True

    def start(self, data: Any, target: Target) -> bool:
        """Assess; rehearse and start what is feasible; mostly run it to its end."""
        if self.state.transaction is not None:
            self.run(Advance(self.state.transaction.id), certain=True)
            return False
        try:
            verdict = assess(self.state, target)
        except PlannerError as e:
            event(f"refused target {target.kind}: {type(e).__name__}")
            return False
        if isinstance(verdict, Infeasible):
            event(f"infeasible {target.kind} at {verdict.stage}/{verdict.phase}")
            return False
        event(f"plan {target.kind} {verdict.form} {' '.join(verdict.kv_forms)}")
        rehearse(self.state, verdict)
        self.run(Start(verdict), certain=True)
        if data.draw(st.integers(0, 3)) == 0:
            return False
        while (t := self.state.transaction) is not None:
            self.run(Advance(t.id), certain=True)
        return True

    def pick(self, data: Any, options: list[Any]) -> Any:
        """One of the options, or None where there are none."""
        return data.draw(st.sampled_from(options)) if options else None

    def sequence(self, data: Any, in_unit: bool = False) -> Sequence | None:
        """A sequence with or without a unit in flight."""
        found: Sequence | None = self.pick(
            data, [q for q in self.state.sequences if bool(q.unit) is in_unit]
        )
        return found

    def edges(self) -> list[Edge]:
        """Every owner edge."""
        return [Edge(o, cid) for cid, ck in self.state.checkpoints.items() for o in ck.holders]

    def tokens(self, q: Sequence, data: Any, most: int = 4) -> tuple[int, ...]:
        """Coverage a unit may ask for: a few tokens on, the backend up to ``lag`` behind."""
        more = data.draw(st.sampled_from([1, *range(most + 1)]))
        main = min(q.end[0] + more, self.world.layout.max_context)
        lag = data.draw(st.integers(0, self.world.lag))
        return (main, *(max(f, main - lag) for f in q.end[1:]))

    def units(self, place: int) -> list[int]:
        """Units that stand at that place (0: oldest, -1: newest) of every row they have."""
        flying = {f.unit for q in self.state.sequences for f in q.flights}
        for q in self.state.sequences:
            flying -= {f.unit for f in q.flights} - {f.unit for f in q.flights[place:][:1]}
        return sorted(flying)

    def placements(self, data: Any) -> tuple[ImageRef | PageRange, ...]:
        """A few images or page ranges, sensible or not."""
        options: list[ImageRef | PageRange] = [
            ImageRef(iid) for iid, _ in self.state.states.images.items()
        ]
        for k, pool in enumerate(self.state.pools):
            for hid, h in pool.histories.items():
                if h.blocks > h.base:
                    lo = data.draw(st.integers(h.base, h.blocks - 1))
                    options.append(PageRange(k, hid, lo, h.blocks))
        if not options:
            return ()
        return tuple(data.draw(st.lists(st.sampled_from(options), max_size=2, unique=True)))

    # Units

    @precondition(lambda self: self.state.sequences)
    @rule(data=st.data())
    def work(self, data: Any) -> None:
        """The ordinary step of one or several rows: reserve, launch, perhaps commit.

        Without the commit the next step of a row overlaps this one.
        """
        rows = [q for q in self.state.sequences if len(q.flights) < MAX_FLIGHTS]
        if not rows:
            return
        chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique_by=lambda q: q.id))
        asked = tuple(RowTokens(q.id, self.tokens(q, data)) for q in chosen)
        if not self.run(Reserve(asked)) or not self.run(Launch(asked)):
            return
        event(f"launched behind {sum(bool(q.flights) for q in chosen)} unit(s)")
        if data.draw(st.booleans()):
            self.commit(data, self.units(0)[-1])

    @precondition(lambda self: any(q.flights for q in self.state.sequences))
    @rule(data=st.data())
    def finish_unit(self, data: Any) -> None:
        """End a unit in flight, with any legal acceptance or an abort."""
        if data.draw(st.integers(0, 4)) == 0:
            self.run(AbortUnit(data.draw(st.sampled_from(self.units(-1)))), certain=True)
        else:
            self.commit(data, data.draw(st.sampled_from(self.units(0))))

    @precondition(lambda self: any(q.flights for q in self.state.sequences))
    @rule(data=st.data(), commit=st.booleans())
    def end_out_of_order(self, data: Any, commit: bool) -> None:
        """A unit commits only as the oldest and is aborted only as the newest of all its rows."""
        flying = {f.unit for q in self.state.sequences for f in q.flights}
        wrong = sorted(flying - set(self.units(0 if commit else -1)))
        if not wrong:
            return
        unit = data.draw(st.sampled_from(wrong))
        rows = tuple(
            RowCommit(q.id, f.provisional, f.provisional[0])
            for q in self.state.sequences
            for f in q.flights
            if f.unit == unit
        )
        assert not self.run(Commit(unit, rows) if commit else AbortUnit(unit))

    def commit(self, data: Any, unit: int) -> None:
        """Commit a unit: whole under a newer one, else with any prefix (a cancelled row: nothing)."""
        rows = []
        legal = True
        for q in self.state.sequences:
            if q.unit != unit:
                continue
            ends = q.flights[0].provisional
            if len(q.flights) > 1:
                if q.source and ends[0] == q.position:
                    legal = False  # the newer unit reads a state that this one did not write
                rows.append(RowCommit(q.id, ends, ends[0]))
                continue
            end = ends[0]
            if data.draw(st.integers(0, 3)) == 0:
                end = data.draw(st.integers(q.frontiers[0], end))
            others = tuple(
                data.draw(st.integers(f, max(f, min(p, end))))
                for f, p in zip(q.frontiers[1:], ends[1:], strict=True)
            )
            rows.append(RowCommit(q.id, (end, *others), end))
        done = self.run(Commit(unit, tuple(rows), settle=data.draw(st.booleans())), certain=legal)
        assert done is legal

    @precondition(lambda self: self.state.sequences)
    @rule(data=st.data(), what=st.sampled_from(SMALL_STEPS))
    def small_step(self, data: Any, what: str) -> None:
        """One unit operation alone, at any time."""
        q = self.pick(data, list(self.state.sequences))
        row = RowTokens(q.id, self.tokens(q, data, 6))
        ops: dict[str, Operation] = {
            "map": EnsureMapped(row),
            "truncate": Truncate(row),
            "settle": Settle((q.id,)),
            "reserve": Reserve((row,)),
            "launch": Launch((row,)),
            "entitle": Entitle(row),
        }
        self.run(ops[what])

    # Zero-stage transitions

    @precondition(lambda self: self.state.sequences)
    @rule(data=st.data(), keep=st.booleans())
    def end_sequence(self, data: Any, keep: bool) -> None:
        """Finish or discard."""
        q = self.sequence(data)
        if q is None:
            return
        owner = data.draw(st.integers(1, self.world.owners))
        if keep:
            self.run(Finish(q.id, owner, self.shadow.identity(q)))
        else:
            self.run(Discard(q.id))

    @precondition(lambda self: len(self.state.checkpoints) > 0)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        """Release several edges; what they free together was predicted exactly (TX-06)."""
        edges = tuple(
            data.draw(st.lists(st.sampled_from(self.edges()), min_size=1, max_size=4, unique=True))
        )
        before = self.state
        if self.run(Release(edges)):
            freed, then, now = reclaim(before, edges), usage(before), usage(self.state)
            assert freed.pages == tuple(a - b for a, b in zip(then.pages, now.pages, strict=True))
            assert (freed.slots, freed.host) == (then.slots - now.slots, then.host - now.host)
            assert self.state.result is not None
            assert freed.checkpoints == tuple(sorted(self.state.result.retired))

    @precondition(lambda self: len(self.state.checkpoints) > 0)
    @rule(data=st.data(), what=st.sampled_from(["retain", "read", "end"]))
    def hold(self, data: Any, what: str) -> None:
        """One more owner, or a reader lease."""
        cid, _ = data.draw(st.sampled_from(self.state.checkpoints.items()))
        ops: dict[str, Operation] = {
            "retain": Retain(cid, data.draw(st.integers(1, self.world.owners))),
            "read": LeaseReader(cid),
            "end": EndReader(cid),
        }
        self.run(ops[what])

    # Transactions

    @rule(data=st.data())
    def bind(self, data: Any) -> None:
        """Root, Move, Fork, Restore, Split: with releases and demotions in the same target.

        When it came through, also the first unit, and sometimes the end: states with several
        checkpoints are the interesting ones.
        """
        sources = [0, *(cid for cid, _ in self.state.checkpoints.items())]
        source = sources[-1 - data.draw(st.integers(0, len(sources) - 1))]
        owner = data.draw(st.integers(1, self.world.owners))
        mine = [e for e in self.edges() if e.owner == owner]
        retire = tuple(e for e in mine if data.draw(st.booleans()))
        base = self.state.checkpoints.get(source)
        start = base.frontier if base else 0
        reach = min(start + data.draw(st.integers(1, 4)), self.world.layout.max_context)
        identity = base.identity if base else Bind(0, ()).prompt
        release = tuple(
            e for e in self.edges() if e not in retire and data.draw(st.integers(0, 7)) == 0
        )
        demote = self.placements(data) if data.draw(st.booleans()) else ()
        many = (reach,) * len(self.state.pools)
        bind = Bind(owner, many, identity, source, retire, lease=data.draw(st.booleans()))
        if self.start(data, Target(bind, release=release, demote=demote)):
            q = self.state.sequences[-1]
            row = RowTokens(q.id, self.tokens(q, data, 3))
            if self.run(Reserve((row,))) and self.run(Launch((row,))):
                self.commit(data, self.state.next_id - 1)
                if data.draw(st.booleans()):
                    self.run(Finish(q.id, owner, self.shadow.identity(self.state.sequences[-1])))

    @precondition(lambda self: any(not q.unit for q in self.state.sequences))
    @rule(data=st.data(), place=st.sampled_from(["device", "host"]))
    def capture(self, data: Any, place: Any) -> None:
        """Save an active position, for its own owner or for another."""
        q = self.sequence(data)
        assert q is not None
        owner = data.draw(st.integers(1, self.world.owners))
        self.start(data, Target(Capture(q.id, owner, self.shadow.identity(q), place)))

    @precondition(lambda self: any(not q.unit for q in self.state.sequences))
    @rule(data=st.data(), state=st.booleans(), pages=st.booleans())
    def pause(self, data: Any, state: bool, pages: bool) -> None:
        """Freeze to a checkpoint, with or without moving state and own pages to Host."""
        q = self.sequence(data)
        assert q is not None
        ranges = []
        for k, hid in enumerate(q.histories):
            h = self.state.pools[k].histories.get(hid)
            assert h is not None
            if pages and h.blocks > h.base:
                ranges.append(PageRange(k, hid, h.base, h.blocks))
        action = Pause(q.id, q.owner, self.shadow.identity(q), state, tuple(ranges))
        self.start(data, Target(action))

    @rule(data=st.data(), what=st.sampled_from(["demote", "backup", "drop_host"]))
    def move_content(self, data: Any, what: str) -> None:
        """Demote or back up content, or drop redundant Host copies."""
        items = self.placements(data)
        if items:
            self.start(data, Target(**{what: items}))  # type: ignore[arg-type]

    @precondition(lambda self: self.state.transaction is not None)
    @rule(end=st.sampled_from(["advance", "advance", "advance", "advance", "cancel", "fail"]))
    def transaction(self, end: str) -> None:
        """One event of the open transaction: none of them may fail."""
        t = self.state.transaction
        assert t is not None
        if end == "fail" and t.phase == "CopiesInFlight":
            self.run(Fail(t.id), certain=True)
        elif end == "cancel":
            self.run(Cancel(t.id), certain=True)
        else:
            self.run(Advance(t.id), certain=True)

    @invariant()
    def sound(self) -> None:
        """Every invariant holds and every valid replica holds exactly its tokens."""
        check(self.state)
        self.shadow.verify(self.state)

    def teardown(self) -> None:
        """When everything ended and the cache is cleared, nothing is used (INV-20)."""
        while (t := self.state.transaction) is not None:
            self.run(Advance(t.id), certain=True)
        while units := self.units(-1):
            self.run(AbortUnit(units[-1]), certain=True)
        for q in self.state.sequences:
            self.run(Discard(q.id), certain=True)
        for cid, ck in self.state.checkpoints.items():
            for _ in range(ck.readers):
                self.run(EndReader(cid), certain=True)
        self.run(Release(tuple(self.edges())), certain=True)
        check(self.state)
        assert usage(self.state) == usage(initial(self.world.layout))
