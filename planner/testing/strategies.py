"""Hypothesis strategies: worlds, reachable states with their contents, targets and sealed plans."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from planner.errors import BusyError, IllegalError, PlannerError
from planner.operations import apply
from planner.physical import PhysicalState, initial
from planner.plans import Infeasible, Plan, Target
from planner.testing.moves import moves, targets
from planner.testing.shadow import Shadow
from planner.testing.worlds import World, tiny_layout
from planner.transactions import assess


class Reached(NamedTuple):
    """A reachable state, the device contents that belong to it, and its world."""

    world: World
    state: PhysicalState
    shadow: Shadow


@st.composite
def worlds(draw: st.DrawFn, max_pages: int = 7) -> World:
    """A small layout with one or two pools, and limits for its moves."""
    backend = draw(st.sampled_from([0, 0, 4]))
    layout = tiny_layout(
        pages=draw(st.integers(3, max_pages)),
        blocks=draw(st.integers(2, 4)),
        rows=draw(st.integers(1, 3)),
        slots=draw(st.integers(2, 4)),
        host=draw(st.integers(0, 8)),
        image=draw(st.integers(1, 3)),
        backend=backend,
    )
    return World(layout, owners=draw(st.integers(1, 3)), points=3, lag=draw(st.integers(0, 1)))


@st.composite
def states(draw: st.DrawFn, max_steps: int = 40) -> Reached:
    """A state reached by legal operations of a drawn world."""
    world = draw(worlds())
    state, shadow = initial(world.layout), Shadow(len(world.layout.pools))
    for _ in range(draw(st.integers(0, max_steps))):
        options = list(moves(world, state, shadow))
        if not options:
            break
        op = options[draw(st.integers(0, len(options) - 1))]
        try:
            after = apply(state, op)
        except PlannerError:
            continue
        shadow.step(state, op, after)
        state = after
    return Reached(world, state, shadow)


@st.composite
def assessed(draw: st.DrawFn, max_steps: int = 30) -> tuple[Reached, Target, Plan | Infeasible]:
    """A state without open transaction, a legal target of it, and what `assess` says."""
    reached = draw(states(max_steps).filter(lambda r: r.state.transaction is None))
    legal: list[tuple[Target, Plan | Infeasible]] = []
    for target in targets(reached.world, reached.state, reached.shadow):
        try:
            legal.append((target, assess(reached.state, target)))
        except (BusyError, IllegalError):
            continue
    if not legal:
        return reached, Target(), assess(reached.state, Target())
    target, verdict = legal[draw(st.integers(0, len(legal) - 1))]
    return reached, target, verdict
