"""Exhaustive breadth-first exploration of a small world, up to renaming of identities.

Breadth first, so the first counterexample is a shortest one. Two states that differ only in the
absolute numbers of ids, serials and page places count as one: behaviour does not depend on them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from planner.checks import check
from planner.errors import PlannerError
from planner.operations import Operation, apply
from planner.physical import PhysicalState, initial
from planner.plans import Target, Transaction
from planner.render import render
from planner.testing.moves import moves
from planner.testing.shadow import ContentError, Shadow
from planner.testing.worlds import World
from planner.transactions import Advance, Cancel, Fail, Start


class CounterexampleError(AssertionError):
    """The shortest operations that break something, with the state before the last one."""

    def __init__(self, trace: list[Operation], state: PhysicalState, cause: Exception) -> None:
        steps = "\n".join(f"{i + 1:3d}. {brief(op)}" for i, op in enumerate(trace))
        why = f"{type(cause).__name__}: {cause}"
        super().__init__(f"{why}\n{steps}\nstate before the last step:\n{render(state)}")
        self.trace = trace


def brief(op: Operation) -> str:
    """One line for a trace: a plan by its target and derived forms."""
    if not isinstance(op, Start):
        return str(op)
    plan = op.plan
    return f"Start(revision {plan.revision}, {plan.form} {plan.kv_forms}, {plan.target})"


@dataclass
class Exploration:
    """What was covered: distinct states, edges tried, how deep, and which operations succeeded.

    ``overlapping`` counts the states in which a sequence has more than one unit in flight.
    """

    states: int = 1
    overlapping: int = 0
    edges: int = 0
    depth: int = 0
    complete: bool = False
    applied: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


MUST_SUCCEED = (Start, Advance, Cancel, Fail)


def explore(
    world: World,
    max_states: int,
    max_depth: int = 10**6,
    start: tuple[PhysicalState, Shadow] | None = None,
) -> Exploration:
    """Visit up to ``max_states`` distinct states; CounterexampleError at the first failure.

    ``start`` is a state with its contents (a `Driver` has both); default the empty state.
    """
    root, contents = start or (initial(world.layout), Shadow(len(world.layout.pools)))
    seen = {canonical(root)}
    parents: list[tuple[int, Operation | None]] = [(-1, None)]
    level: list[tuple[int, PhysicalState, Shadow]] = [(0, root, contents)]
    out = Exploration()
    while level and out.depth < max_depth:
        following: list[tuple[int, PhysicalState, Shadow]] = []
        for index, state, shadow in level:
            for op in moves(world, state, shadow):
                out.edges += 1
                name = type(op).__name__
                try:
                    after = apply(state, op)
                except PlannerError as e:
                    if isinstance(op, MUST_SUCCEED):
                        raise CounterexampleError(_trace(parents, index, op), state, e) from e
                    out.refused[name] += 1
                    continue
                out.applied[name] += 1
                key = canonical(after)
                if key in seen:
                    continue
                try:
                    check(after)
                    model = shadow.copy()
                    model.step(state, op, after)
                    model.verify(after)
                except (PlannerError, ContentError) as e:
                    raise CounterexampleError(_trace(parents, index, op), state, e) from e
                seen.add(key)
                parents.append((index, op))
                following.append((len(parents) - 1, after, model))
                out.states += 1
                out.overlapping += any(len(q.flights) > 1 for q in after.sequences)
                if out.states >= max_states:
                    out.depth += 1
                    return out
        out.depth += 1
        level = following
    out.complete = not level
    return out


def _trace(
    parents: list[tuple[int, Operation | None]], index: int, last: Operation
) -> list[Operation]:
    ops = [last]
    while index >= 0:
        index, op = parents[index]
        if op is not None:
            ops.append(op)
    return ops[::-1]


def canonical(s: PhysicalState) -> int:
    """A 64-bit key, equal for states that differ only in names of objects and places.

    Objects are named by their first appearance in a walk in id order.
    """
    ranks: dict[tuple[str, int], int] = {}

    def name(kind: str, i: int) -> int:
        return ranks.setdefault((kind, i), len(ranks) + 1) if i else 0

    parts: list[object] = []
    for k, pool in enumerate(s.pools):
        kind, page = f"h{k}", f"p{k}"
        for h in pool.histories.values():
            parts.append((
                name(kind, h.id), name(kind, h.parent), h.base, h.blocks, name("seq", h.sequence),
                h.pins, tuple([(f, name("ck", c)) for f, c in h.refs]),
                tuple([
                    (name(page, p.device), p.host, p.host_columns, p.host_epoch == p.epoch)
                    for p in h.pages.values()
                ]),
            ))  # fmt: skip
        parts.append((pool.allocated, pool.reserved))
    for im in s.states.images.values():
        parts.append((
            name("im", im.id), im.position, bool(im.slot), im.ready, im.host, im.refs, im.pins,
            name("seq", im.writer),
        ))  # fmt: skip
    for ck in s.checkpoints.values():
        parts.append((
            name("ck", ck.id), ck.frontier, name("im", ck.image), ck.holders, ck.readers,
            tuple([(name(f"h{k}", p.history), p.frontier) for k, p in enumerate(ck.prefixes)]),
        ))  # fmt: skip
    for q in s.sequences:
        parts.append((
            name("seq", q.id), q.owner, name("im", q.image), name("im", q.source),
            tuple([name(f"h{k}", h) for k, h in enumerate(q.histories)]), q.frontiers, q.position,
            q.reserved, q.lease, q.permit, tuple([f.provisional for f in q.flights]), q.recovery,
        ))  # fmt: skip
    parts.append(s.arena.free)
    if s.transaction is not None:
        parts.append(_transaction(s.transaction, name))
    return hash(tuple(parts))


def _transaction(t: Transaction, name: object) -> tuple[object, ...]:
    assert callable(name)
    target: Target = t.plan.target
    places = tuple(
        (c.kind, c.direction, c.pool, c.block, c.columns,
         c.destination if c.direction == "d2h" else 0)
        for c in t.work.copies
    )  # fmt: skip
    action = target.action
    return (
        t.cursor, t.held, t.cancelled, len(t.frozen), places, t.plan.form, t.plan.kv_forms,
        target.kind, getattr(action, "owner", 0), name("ck", getattr(action, "source", 0)),
        name("seq", getattr(action, "sequence", 0)), getattr(action, "place", ""),
        tuple((e.owner, name("ck", e.checkpoint)) for e in getattr(action, "retire", ())),
        len(target.release),
        tuple(_item(i, name) for i in (*target.demote, *target.backup, *target.drop_host)),
        len(target.demote), len(target.backup),
        tuple(_item(i, name) for i in getattr(action, "pages", ())), getattr(action, "state", None),
        tuple(w.form for w in t.work.pools), t.work.form, name("im", t.work.image),
    )  # fmt: skip


def _item(item: tuple[int, ...], name: object) -> tuple[int, ...]:
    assert callable(name)
    if len(item) == 1:
        return (name("im", item[0]),)
    return (item[0], name(f"h{item[0]}", item[1]), item[2], item[3])
