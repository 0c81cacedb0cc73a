"""Random operations against the device model: contents, invariants, exact predictions."""

from hypothesis import HealthCheck, settings

from planner.testing import PlannerMachine, World, tiny_layout


class TightMachine(PlannerMachine):
    """One pool, two rows and slots, little Host memory: shortage, Split and eviction everywhere."""

    world = World(tiny_layout(pages=6, blocks=4, rows=2, slots=2, host=6, image=2), owners=2)


def profile(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=16,
        deadline=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


TestRoomyMachine = PlannerMachine.TestCase
TestRoomyMachine.settings = profile(1200)
TestTightMachine = TightMachine.TestCase
TestTightMachine.settings = profile(800)
