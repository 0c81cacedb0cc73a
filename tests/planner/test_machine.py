"""Random operations against the device model: contents, invariants, exact predictions."""

from hypothesis import HealthCheck, settings

from planner.testing import PlannerMachine

TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(
    max_examples=2000,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
