"""Whole workloads through `advance`, against a device that knows what every byte stands for.

Each of them holds: exactly one terminal a request (ENG-10), the tokens of a solo run whatever is
shared, evicted, paused or failing (INV-06, INV-18), no stall (INV-16, SCH-16), and an empty engine at the
end (INV-20). Together they are 1,500, the same in every run; `make test-all` runs 3,000.
"""

import os
from collections.abc import Callable

from hypothesis import HealthCheck, given, note, settings
from hypothesis.strategies import SearchStrategy

from planner.testing import Workload, WorldDriver, run_workload, workloads

Test = Callable[[Workload], None]
EFFORT = int(os.environ.get("TEST_EFFORT", "1"))
"""Factor of the number of examples."""


def every(examples: int, strategy: SearchStrategy[Workload]) -> Callable[[Test], Test]:
    profile = settings(
        max_examples=examples * EFFORT,
        deadline=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: profile(given(strategy)(test))


def run(workload: Workload, *, check: bool = False) -> WorldDriver:
    for move in workload.script:
        note(str(move))
    return run_workload(workload, check=check)


@every(175, workloads())
def test_invariants_and_contents_after_every_event(workload: Workload) -> None:
    """INV-01..16: `check`, `check_world`, and every valid replica on Device and Host."""
    run(workload, check=True)


@every(125, workloads(tight=True))
def test_invariants_under_pressure(workload: Workload) -> None:
    """The same where requests pause one another."""
    run(workload, check=True)


@every(100, workloads())
def test_replays_bit_for_bit(workload: Workload) -> None:
    """OWN-07: a new world gives the same commands for the same events."""
    run(workload).replay()


@every(400, workloads())
def test_any_engine(workload: Workload) -> None:
    """Contents are verified by every unit that reads them."""
    run(workload)


@every(350, workloads(tight=True, host=(0,)))
def test_no_host_memory(workload: Workload) -> None:
    """Everything that is given up is lost, every pause is a Replay."""
    run(workload)


@every(350, workloads(tight=True, host=(6, 12, 30)))
def test_with_host_memory(workload: Workload) -> None:
    """Demotions, snapshots and restores; transfers that fail or complete late."""
    run(workload)
