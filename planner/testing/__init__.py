"""Test kit: a device model that remembers contents, moves, an explorer, strategies."""

# from planner.testing.explorer import CounterexampleError, Exploration, explore
# from planner.testing.machine import PlannerMachine, machine
# from planner.testing.moves import moves
# from planner.testing.shadow import ContentError, Shadow, token
# from planner.testing.strategies import steps, traces, worlds
# from planner.testing.worlds import TINY, TWO_POOLS, World, tiny_layout
