"""What the planner raises: a violation is a bug of the caller or the planner, never a cache miss.

Every message names the thing, the limit and the cure. The tree has its own root because the planner
imports no other package; the engine translates it into its own errors.
"""

from __future__ import annotations


class PlannerError(Exception):
    """Root of everything the planner raises on purpose."""


class LayoutError(PlannerError):
    """A capacity or layout that cannot be built (CAP)."""


class HandleError(PlannerError):
    """A handle that names nothing alive, or an older generation of it (TX-11, ST-14, KV-16)."""


class BusyError(PlannerError):
    """The thing is frozen by a unit or a transaction, pinned, or leased to a reader (TX-18)."""


class IdentityError(PlannerError):
    """Tokens, types, positions, media or mode differ, or a state stands for another position."""


class IllegalError(PlannerError):
    """A transition the rules forbid in this state."""


class StalePlanError(PlannerError):
    """A sealed plan of an older resource revision; starting it has no effect (GP-40)."""


class ShortageError(PlannerError):
    """Capacity does not suffice; nothing changed.

    ``gaps`` holds one ``(resource, missing)`` pair for each short resource, in a fixed order;
    pages and slots are counted, Host memory is in bytes (UN-02 asks for the exact gap).
    """

    def __init__(self, message: str, gaps: tuple[tuple[str, int], ...]) -> None:
        super().__init__(message)
        self.gaps = gaps


class InvariantError(PlannerError):
    """`check` found a broken invariant; ``rule`` is its id in contracts.md."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
