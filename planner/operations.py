"""`apply(state, op) -> state'`: the one entry through which a physical state changes (OWN-06)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from planner import retention, transactions, units
from planner.errors import IllegalError
from planner.physical import PhysicalState

Operation = (
    units.Reserve
    | units.EnsureMapped
    | units.Launch
    | units.Commit
    | units.AbortUnit
    | units.Truncate
    | units.Settle
    | units.Entitle
    | retention.Finish
    | retention.Discard
    | retention.Release
    | retention.Retain
    | retention.LeaseReader
    | retention.EndReader
    | transactions.Start
    | transactions.Advance
    | transactions.Cancel
    | transactions.Fail
)

_TRANSITIONS: Final[dict[type, Callable[[PhysicalState, Any], PhysicalState]]] = {
    units.Reserve: units.reserve,
    units.EnsureMapped: units.ensure_mapped,
    units.Launch: units.launch,
    units.Commit: units.commit,
    units.AbortUnit: units.abort_unit,
    units.Truncate: units.truncate,
    units.Settle: units.settle,
    units.Entitle: units.entitle,
    retention.Finish: retention.finish,
    retention.Discard: retention.discard,
    retention.Release: retention.release,
    retention.Retain: retention.retain,
    retention.LeaseReader: retention.lease_reader,
    retention.EndReader: retention.end_reader,
    transactions.Start: transactions.start,
    transactions.Advance: transactions.advance,
    transactions.Cancel: transactions.cancel,
    transactions.Fail: transactions.fail,
}


def apply(state: PhysicalState, op: Operation) -> PhysicalState:
    """The state after ``op``. Raises a PlannerError, without any effect, where it is impossible."""
    transition = _TRANSITIONS.get(type(op))
    if transition is None:
        raise IllegalError(f"{type(op).__name__} is no operation; see planner.Operation")
    return transition(state, op)
