"""Test kit: a device model that remembers contents, moves, an explorer, strategies."""

from planner.testing.drive import Driver, populated
from planner.testing.explorer import CounterexampleError, Exploration, explore
from planner.testing.fake_device import FakeDevice, next_token, solo
from planner.testing.machine import PlannerMachine, rehearse
from planner.testing.moves import moves, targets
from planner.testing.replicas import Replica, replicas
from planner.testing.shadow import ContentError, Shadow, token
from planner.testing.strategies import Reached, assessed, states, worlds
from planner.testing.workloads import Arrive, Move, Workload, run_workload, workloads
from planner.testing.world_driver import Ask, ProtocolError, WorldDriver
from planner.testing.worlds import ATOMIC, TINY, TWO_POOLS, World, tiny_layout

__all__ = [
    "ATOMIC",
    "TINY",
    "TWO_POOLS",
    "Arrive",
    "Ask",
    "ContentError",
    "CounterexampleError",
    "Driver",
    "Exploration",
    "FakeDevice",
    "Move",
    "PlannerMachine",
    "ProtocolError",
    "Reached",
    "Replica",
    "Shadow",
    "Workload",
    "World",
    "WorldDriver",
    "assessed",
    "explore",
    "moves",
    "next_token",
    "populated",
    "rehearse",
    "replicas",
    "run_workload",
    "solo",
    "states",
    "targets",
    "tiny_layout",
    "token",
    "workloads",
    "worlds",
]
