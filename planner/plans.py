"""Targets, sealed plans and the one open transaction, as data (TX).

A `Target` says what shall be true afterwards: which owner edges go, which replicas go, which
content moves to Host, and one action (Bind, Capture, Pause). It never says Move, Fork or COW:
`transactions.assess` derives those from the complete post-state and seals a `Plan`, or returns an
`Infeasible` that says which stage lacks what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.checkpoints import EMPTY, Identity
from planner.host import Extent
from planner.physical import Usage

Phase = Literal["HostReleases", "CopyPreparation", "CopiesInFlight", "CopyPublication"]
Stage = Literal["pressure", "activation"]
PHASES: Final[tuple[Phase, ...]] = (
    "HostReleases",
    "CopyPreparation",
    "CopiesInFlight",
    "CopyPublication",
)


class Edge(NamedTuple):
    """An owner's hold of a checkpoint."""

    owner: int
    checkpoint: int


class ImageRef(NamedTuple):
    """A state image, as the subject of a placement change."""

    image: int


class PageRange(NamedTuple):
    """Own blocks lo..hi-1 of a history, as the subject of a placement change."""

    pool: int
    history: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Bind:
    """Make a request resident: from ``source``, or from root (0).

    ``prompt`` must start with the source's identity exactly. ``entitlement`` are the tokens per
    pool its membership must be able to reach: the first unit's need under inc, everything under gp
    (``lease``). ``retire`` edges go at adoption; with the source's own edge among them the source
    is consumed. ``recovery`` is the frontier a recovery permit has to pass.
    """

    owner: int
    entitlement: tuple[int, ...]
    prompt: Identity = EMPTY
    source: int = 0
    retire: tuple[Edge, ...] = ()
    lease: bool = False
    recovery: int = -1


@dataclass(frozen=True, slots=True)
class Capture:
    """Save an active sequence's present position as a checkpoint of ``owner``.

    ``place`` is where the state copy goes. A foreign owner gets an independent view of the tail.
    """

    sequence: int
    owner: int
    identity: Identity
    place: Literal["device", "host"] = "device"
    frontiers: tuple[int, ...] | None = None
    next_input: int = -1


@dataclass(frozen=True, slots=True)
class Pause:
    """Freeze an active sequence to a checkpoint of ``owner``; move the named content to Host."""

    sequence: int
    owner: int
    identity: Identity
    state: bool = True
    pages: tuple[PageRange, ...] = ()
    next_input: int = -1


@dataclass(frozen=True, slots=True)
class Target:
    """The complete outcome asked for. ``release`` and ``drop_host`` act first and stay done.

    ``demote`` moves content to Host; ``backup`` copies it there and keeps the Device replica.
    """

    action: Bind | Capture | Pause | None = None
    release: tuple[Edge, ...] = ()
    drop_host: tuple[ImageRef | PageRange, ...] = ()
    demote: tuple[ImageRef | PageRange, ...] = ()
    backup: tuple[ImageRef | PageRange, ...] = ()

    @property
    def kind(self) -> str:
        """bind, capture, pause or demote."""
        return "demote" if self.action is None else type(self.action).__name__.lower()


class Copy(NamedTuple):
    """One order of a copy batch. Places are slots or page ids on the Device, offsets on Host.

    ``subject`` is the image or history, ``block`` its page; ``serial`` and ``epoch`` are checked
    again before publication. ``columns`` is the coverage that the copy gives its destination;
    ``keep`` says that the source replica stays.
    """

    kind: Literal["image", "page"]
    direction: Literal["d2h", "h2d", "d2d", "init"]
    pool: int
    source: int
    destination: int
    subject: int
    block: int = 0
    serial: int = 0
    epoch: int = 0
    columns: int = 0
    keep: bool = False


class PoolWork(NamedTuple):
    """What a bind or capture holds in one pool between preparation and publication."""

    form: str
    tail: int = 0
    growth: int = 0
    reuse: int = 0


class Work(NamedTuple):
    """Destinations and readers of the current stage: all of it goes back on abort."""

    copies: tuple[Copy, ...] = ()
    form: str = ""
    image: int = 0
    pools: tuple[PoolWork, ...] = ()
    extents: tuple[Extent, ...] = ()
    pinned_images: tuple[int, ...] = ()
    pinned: tuple[tuple[int, int], ...] = ()


NO_WORK: Final = Work()


class StagePoint(NamedTuple):
    """One boundary of a plan: what is used right after the phase ran."""

    stage: Stage
    phase: Phase
    usage: Usage


@dataclass(frozen=True, slots=True)
class Plan:
    """A sealed, single-use plan: valid only at ``revision`` (GP-39).

    ``form`` is the derived state adoption, ``kv_forms`` the derived adoption per pool, ``points``
    the boundaries with their exact usage, ``hold`` the pages per pool that must stay withdrawn
    before each point (one entry per point), so that no other row can take what a later stage needs.
    ``moment`` is where the sequence of a capture or pause stood: it may move on within a revision.
    """

    target: Target
    revision: int
    form: str
    kv_forms: tuple[str, ...]
    points: tuple[StagePoint, ...]
    hold: tuple[tuple[int, ...], ...]
    copies: int
    bytes_moved: int
    retired: tuple[int, ...]
    moment: tuple[int, ...]

    @property
    def peak(self) -> Usage:
        """Largest usage of each axis over all boundaries (TX-04)."""
        return Usage(
            tuple(max(c) for c in zip(*(p.usage.pages for p in self.points), strict=True)),
            max(p.usage.slots for p in self.points),
            max(p.usage.host for p in self.points),
            max(p.usage.rows for p in self.points),
        )


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why a target cannot be reached now: the phase that fails, the exact gaps, and the words."""

    target: Target
    stage: Stage
    phase: Phase
    gaps: tuple[tuple[str, int], ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.target.kind} infeasible at {self.stage}/{self.phase}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Transaction:
    """The one open context transaction (TX-01).

    ``cursor`` indexes ``plan.points``: the phase that runs next. ``held`` pages are withdrawn for
    later stages, ``frozen`` sequences may not run, ``cancelled`` waits for the copies in flight.
    """

    id: int
    plan: Plan
    cursor: int
    held: tuple[int, ...]
    frozen: tuple[int, ...]
    work: Work = NO_WORK
    cancelled: bool = False
    bytes_moved: int = 0
    changed: bool = False
    retired: tuple[int, ...] = ()
    touched: tuple[int, ...] = ()

    @property
    def phase(self) -> Phase:
        """The phase that runs next."""
        return self.plan.points[self.cursor].phase

    @property
    def stage(self) -> Stage:
        """The stage that phase belongs to."""
        return self.plan.points[self.cursor].stage


def copy_arrays(copies: tuple[Copy, ...], kind: str, pool: int = -1) -> NDArray[np.int64]:
    """int64 [n, 4]: source, destination, columns, direction (0 d2h, 1 h2d, 2 d2d, 3 init)."""
    codes = {"d2h": 0, "h2d": 1, "d2d": 2, "init": 3}
    rows = [
        (c.source, c.destination, c.columns, codes[c.direction])
        for c in copies
        if c.kind == kind and (kind == "image" or c.pool == pool)
    ]
    return np.array(rows, np.int64).reshape(-1, 4)
