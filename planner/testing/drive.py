"""A scripted driver: run operations by name, with invariants and contents verified after each."""

from __future__ import annotations

from planner.capacity import Layout
from planner.checkpoints import Identity
from planner.checks import check
from planner.errors import PlannerError
from planner.operations import Operation, apply
from planner.physical import PhysicalState, Sequence, initial, sequence
from planner.plans import Bind, Edge, ImageRef, Infeasible, PageRange, Plan, Target
from planner.retention import Finish
from planner.testing.shadow import Shadow
from planner.testing.worlds import World
from planner.transactions import Advance, Start, assess
from planner.units import Commit, Launch, Reserve, RowCommit, RowTokens


def populated(world: World) -> Driver:
    """A start for searches: owner 1 holds a point with an unaligned tail and Host copies, owner 2 a
    deeper fork of it."""
    d = Driver(world.layout)
    first = d.cached(1, 3)
    q = d.bind(2, 4, first)
    d.write(q.id, *([4, 3] if world.lag and len(d.state.pools) > 1 else [4]))
    d.finish(q.id, 2)
    ck = d.state.checkpoints.values()[0]
    pages = PageRange(0, ck.prefixes[0].history, 0, 1)
    d.complete(Target(backup=(ImageRef(ck.image), pages)))
    return d


class Driver:
    """Holds the newest state and the device model; every method moves both."""

    def __init__(self, layout: Layout) -> None:
        self.state = initial(layout)
        self.shadow = Shadow(len(layout.pools))

    def run(self, op: Operation) -> PhysicalState:
        """Apply one operation and verify everything."""
        before = self.state
        self.state = check(apply(before, op))
        self.shadow.step(before, op, self.state)
        self.shadow.verify(self.state)
        return self.state

    def plan(self, target: Target) -> Plan:
        """A feasible plan, or PlannerError with the reason."""
        verdict = assess(self.state, target)
        if isinstance(verdict, Infeasible):
            raise PlannerError(str(verdict))
        return verdict

    def start(self, target: Target) -> Plan:
        """Seal and start."""
        plan = self.plan(target)
        self.run(Start(plan))
        return plan

    def complete(self, target: Target) -> Plan:
        """Seal, start and run to the end."""
        plan = self.start(target)
        self.advance(len(plan.points))
        return plan

    def advance(self, phases: int = 1) -> None:
        """That many phases of the open transaction."""
        for _ in range(phases):
            assert self.state.transaction is not None
            self.run(Advance(self.state.transaction.id))

    def bind(
        self,
        owner: int,
        tokens: int,
        source: int = 0,
        *,
        consume: bool = False,
        retire: tuple[Edge, ...] = (),
        lease: bool = False,
        recovery: int = -1,
    ) -> Sequence:
        """A new active sequence entitled to ``tokens`` in every pool."""
        prompt = self.state.checkpoints.get(source)
        identity = prompt.identity if prompt else Bind(0, ()).prompt
        edges = (Edge(owner, source), *retire) if consume else retire
        many = (tokens,) * len(self.state.pools)
        self.complete(Target(Bind(owner, many, identity, source, edges, lease, recovery)))
        assert self.state.result is not None
        return sequence(self.state, self.state.result.sequence)

    def write(self, sid: int, *frontiers: int, settle: bool = True) -> Sequence:
        """One unit that moves the frontiers of every pool there (one number: the same in all)."""
        self.launch(sid, *frontiers)
        return self.commit(sid, *frontiers, settle=settle)

    def launch(self, sid: int, *tokens: int) -> int:
        """Reserve and launch a unit that writes up to ``tokens``; its id."""
        row = RowTokens(sid, self._many(tokens))
        self.run(Reserve((row,)))
        self.run(Launch((row,)))
        return sequence(self.state, sid).flights[-1].unit

    def commit(self, sid: int, *frontiers: int, settle: bool = True) -> Sequence:
        """Commit the oldest unit of one sequence; its state then stands at the first number."""
        row = RowCommit(sid, self._many(frontiers), frontiers[0])
        self.run(Commit(sequence(self.state, sid).unit, (row,), settle))
        return sequence(self.state, sid)

    def _many(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tokens if len(tokens) > 1 else tokens * len(self.state.pools)

    def identity(self, sid: int) -> Identity:
        """What the sequence may be published under now."""
        return self.shadow.identity(sequence(self.state, sid))

    def finish(self, sid: int, owner: int) -> int:
        """Publish the endpoint; the checkpoint's id."""
        self.run(Finish(sid, owner, self.identity(sid)))
        assert self.state.result is not None
        return self.state.result.published

    def cached(self, owner: int, tokens: int) -> int:
        """A checkpoint of ``owner`` at ``tokens``, computed from root."""
        q = self.bind(owner, tokens)
        self.write(q.id, tokens)
        return self.finish(q.id, owner)
