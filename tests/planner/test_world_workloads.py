"""Whole workloads through `advance`, against a device that knows what every byte stands for.

Each of them holds: exactly one terminal a request (ENG-10), the tokens of a solo run whatever is
shared, evicted, paused or failing (INV-06, INV-18), no stall (INV-16, SCH-16), sound invariants after every
event (INV-01..21), and an empty engine at the end (INV-20).
"""

from hypothesis import HealthCheck, note, settings
from hypothesis import given as hypothesis_given

from planner.testing import Workload, run_workload, workloads


def given(examples: int):
    """Deterministic examples; the same in every run."""
    profile = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: profile(hypothesis_given(workloads())(test))


def run(workload: Workload, check: bool) -> None:
    for move in workload.script:
        note(str(move))
    driver = run_workload(workload, check=check)
    driver.replay()


@given(800)
def test_workloads_checked_after_every_event(workload: Workload) -> None:
    """With all invariants and all contents verified after every event."""
    run(workload, check=True)


@given(2200)
def test_workloads(workload: Workload) -> None:
    """More of them: contents are still verified by every unit that reads them."""
    run(workload, check=False)
