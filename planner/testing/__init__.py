"""Test kit: a device model that remembers contents, moves, an explorer, strategies."""

from planner.testing.drive import Driver, populated
from planner.testing.explorer import CounterexampleError, Exploration, explore
from planner.testing.machine import PlannerMachine, rehearse
from planner.testing.moves import moves, targets
from planner.testing.shadow import ContentError, Shadow, token
from planner.testing.strategies import Reached, assessed, states, worlds
from planner.testing.worlds import ATOMIC, TINY, TWO_POOLS, World, tiny_layout

__all__ = [
    "ATOMIC",
    "TINY",
    "TWO_POOLS",
    "ContentError",
    "CounterexampleError",
    "Driver",
    "Exploration",
    "PlannerMachine",
    "Reached",
    "Shadow",
    "World",
    "assessed",
    "explore",
    "moves",
    "populated",
    "rehearse",
    "states",
    "targets",
    "tiny_layout",
    "token",
    "worlds",
]
