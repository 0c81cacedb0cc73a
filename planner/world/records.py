"""The catalog: who is remembered and why, as immutable records (CAT, EV).

It names checkpoints by id and keeps no copy of physical facts (OWN-05): where a point lies and who else
holds it is asked of the physical state. A `Record` is one private history; an `Entry` is public.
Both are named by their owner number in the physical state.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.checkpoints import Identity
from planner.persistent import IntMap


class Demand(NamedTuple):
    """Reuse evidence, stored as one pair (EV-01): the position that was really adopted, and when.

    ``time`` is 0 while nothing was ever reused: then the owner is of class ordinary.
    """

    time: int = 0
    proven: int = 0


class Record(NamedTuple):
    """A private record (CAT-01): the points of one history, by checkpoint id (0: none).

    ``anchors`` are in publication order, oldest first. ``request`` runs on the record or is paused
    on it (0: inactive). ``order`` is the publication order of its last result, ``published`` when.
    """

    owner: int
    session: str = ""
    order: int = 0
    endpoint: int = 0
    input: int = 0
    anchors: tuple[int, ...] = ()
    request: int = 0
    demand: Demand = Demand()
    published: int = 0

    @property
    def points(self) -> tuple[int, ...]:
        """All checkpoints that the record holds, each once."""
        return tuple(sorted({self.endpoint, self.input, *self.anchors} - {0}))


class Entry(NamedTuple):
    """A shared entry (CAT-11): one public checkpoint that many may fork."""

    owner: int
    checkpoint: int
    demand: Demand = Demand()
    published: int = 0


class Observation(NamedTuple):
    """A position in some input at which work was done or reused (EV-04).

    ``requests`` are the distinct requests that computed it (two prove repetition, so two are
    enough); ``repeated`` is when its repetition was last proven (0: never).
    """

    digest: bytes
    frontier: int
    requests: tuple[int, ...]
    repeated: int = 0


class Lost(NamedTuple):
    """A point that was given up, remembered for `explain` only."""

    identity: Identity
    why: str


class Catalog(NamedTuple):
    """Records and entries by owner, session names, demand evidence, and what `explain` remembers."""

    records: IntMap[Record] = IntMap()
    entries: IntMap[Entry] = IntMap()
    sessions: tuple[tuple[str, int, int], ...] = ()
    """(name, owner, publication order), sorted by name (CAT-20)."""
    observed: tuple[Observation, ...] = ()
    """The demand digest, oldest first."""
    recent: tuple[Identity, ...] = ()
    """Prompts of the latest requests, to find where a new one leaves them."""
    lost: tuple[Lost, ...] = ()


def session_owner(catalog: Catalog, session: str) -> int:
    """Owner of the record that a session names; 0: none."""
    return next((owner for name, owner, _ in catalog.sessions if name == session), 0)


def bind_session(catalog: Catalog, session: str, owner: int, order: int) -> Catalog:
    """Name a result; only a larger publication order replaces a binding (CAT-20, INV-17)."""
    rest = []
    for name, old, old_order in catalog.sessions:
        if name == session:
            if old_order > order:
                return catalog
            continue
        if old != owner:
            rest.append((name, old, old_order))
    return catalog._replace(sessions=tuple(sorted([*rest, (session, owner, order)])))


def unbind(catalog: Catalog, owner: int) -> Catalog:
    """Forget every name of an owner."""
    kept = tuple(s for s in catalog.sessions if s[1] != owner)
    return catalog if len(kept) == len(catalog.sessions) else catalog._replace(sessions=kept)


def observe(
    catalog: Catalog, point: Identity, request: int, now: int, limit: int, *, adopted: bool = False
) -> Catalog:
    """Record that a request computed, or adopted, exactly this position (EV-05).

    Counted once a request and position; a full digest forgets its oldest observation (EV-04).
    """
    digest = point.digest()
    old = next((o for o in catalog.observed if o.digest == digest), None)
    if old is None:
        new = Observation(digest, point.frontier, (request,), now if adopted else 0)
    else:
        requests = old.requests
        if request not in requests:
            requests = (*requests, request)[-2:]
        repeated = adopted or (len(requests) > 1 and requests != old.requests)
        new = old._replace(requests=requests, repeated=now if repeated else old.repeated)
    rest = tuple(o for o in catalog.observed if o.digest != digest)
    return catalog._replace(observed=(*rest, new)[-limit:])


def repeated_demand(catalog: Catalog, point: Identity) -> int:
    """When repeated demand for exactly this position was last proven; 0: never (RC-13)."""
    digest = point.digest()
    return next((o.repeated for o in catalog.observed if o.digest == digest), 0)
