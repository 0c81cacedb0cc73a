"""State images and the Device slots they live in, as an immutable value (ST).

A `StateImage` is the complete recurrent state at one token position. While a sequence writes it
the image stands for no fixed position (WRITING) and the sequence says where it is; a published
image never changes. Reserving a slot, completing its content, publishing and taking a Host copy
are four different steps (ST-03). Functions take a `StateStore` and return a new one.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from planner.errors import BusyError, HandleError, IdentityError, IllegalError, ShortageError
from planner.host import Extent
from planner.persistent import IntMap

WRITING: Final = -1

Adoption = Literal[
    "root", "move", "fork", "restore", "split", "backup_split", "in_place", "freeze", "snapshot"
]


class StateImage(NamedTuple):
    """One image: ``refs`` checkpoints hold it, ``pins`` readers and reservations need it.

    ``slot`` is its Device place (0: none); its content counts only when ``ready``. ``host`` is a
    complete Host copy. ``writer`` is the one sequence that advances it (ST-04, ST-13).
    """

    id: int
    position: int
    slot: int = 0
    ready: bool = False
    host: Extent | None = None
    refs: int = 0
    pins: int = 0
    writer: int = 0


class SlotLease(NamedTuple):
    """A slot at one generation: fails once the slot was freed, even if reused (ST-14)."""

    slot: int
    generation: int


class StateStore(NamedTuple):
    """``slots[i]`` is the image in slot i + 1 (0: free), with a generation per slot."""

    slots: tuple[int, ...]
    generations: tuple[int, ...]
    images: IntMap[StateImage] = IntMap()
    next_image: int = 1


def state_store(slots: int) -> StateStore:
    """An empty store of ``slots`` Device slots (ids 1..slots; slot 0 is null)."""
    return StateStore((0,) * slots, (0,) * slots)


def image(store: StateStore, iid: int) -> StateImage:
    """The image with this id; ids are never reused."""
    found = store.images.get(iid)
    if found is None:
        raise HandleError(f"state image {iid} is gone; look the checkpoint up again")
    return found


def put(store: StateStore, im: StateImage) -> StateStore:
    """Replace the record of an image."""
    return store._replace(images=store.images.set(im.id, im))


def free_slots(store: StateStore) -> int:
    """Number of free Device slots."""
    return store.slots.count(0)


def _set_slot(store: StateStore, slot: int, iid: int, bump: int = 0) -> StateStore:
    i = slot - 1
    slots = (*store.slots[:i], iid, *store.slots[i + 1 :])
    if not bump:
        return store._replace(slots=slots)
    g = store.generations
    return store._replace(slots=slots, generations=(*g[:i], g[i] + 1, *g[i + 1 :]))


def slot_lease(store: StateStore, slot: int) -> SlotLease:
    """The present generation of a slot."""
    return SlotLease(slot, store.generations[slot - 1])


def check_slot(store: StateStore, lease: SlotLease) -> int:
    """The image in a leased slot; HandleError for a stale lease."""
    i = lease.slot - 1
    if not 0 <= i < len(store.slots) or store.generations[i] != lease.generation:
        raise HandleError(f"slot {lease.slot} generation {lease.generation} was freed since")
    if not store.slots[i]:
        raise HandleError(f"slot {lease.slot} is empty")
    return store.slots[i]


def reserve_image(store: StateStore, on_device: bool) -> tuple[StateStore, int]:
    """A destination: an image without content, pinned by its reservation until adopted (ST-06)."""
    iid = store.next_image
    slot = 0
    if on_device:
        if 0 not in store.slots:
            raise ShortageError(
                f"no free Device state slot of {len(store.slots)}; release a checkpoint's Device "
                "image or raise device_state_slots",
                (("slots", 1),),
            )
        slot = store.slots.index(0) + 1
        store = _set_slot(store, slot, iid)
    store = store._replace(next_image=iid + 1)
    return put(store, StateImage(iid, WRITING, slot, pins=1)), iid


def lease_slot(store: StateStore, iid: int) -> StateStore:
    """Give an image without Device place a free slot, not ready yet (restore in place)."""
    im = image(store, iid)
    if im.slot or 0 not in store.slots:
        raise ShortageError(f"no free Device state slot for image {iid}", (("slots", 1),))
    slot = store.slots.index(0) + 1
    return put(_set_slot(store, slot, iid), im._replace(slot=slot, ready=False))


def drop_device(store: StateStore, iid: int) -> StateStore:
    """Free the Device slot of an image; its generation advances."""
    im = image(store, iid)
    if not im.slot:
        return store
    return put(_set_slot(store, im.slot, 0, bump=1), im._replace(slot=0, ready=False))


def hand_over_slot(store: StateStore, source: int, destination: int) -> StateStore:
    """Split: the destination takes the slot and its content, the source keeps its Host copy."""
    src = image(store, source)
    if not src.host or not src.ready:
        raise IllegalError(f"image {source} needs a complete Host copy before it gives up its slot")
    slot = src.slot
    store = put(_set_slot(store, slot, destination, bump=1), src._replace(slot=0, ready=False))
    dst = image(store, destination)
    return put(store, dst._replace(slot=slot, ready=True))


def publish(store: StateStore, iid: int, position: int) -> StateStore:
    """Freeze: the image becomes immutable at ``position``."""
    im = image(store, iid)
    if im.position not in (WRITING, position):
        raise IdentityError(
            f"image {iid} stands for position {im.position}, not {position}; states are never "
            "relabelled"
        )
    if not im.ready and im.host is None:
        raise IllegalError(f"image {iid} has no complete copy to publish")
    return put(store, im._replace(position=position, writer=0))


def pin(store: StateStore, iid: int, delta: int) -> StateStore:
    """Add or remove a reader or reservation."""
    im = image(store, iid)
    return put(store, im._replace(pins=im.pins + delta))


def hold(store: StateStore, iid: int) -> StateStore:
    """One more checkpoint holds the image."""
    im = image(store, iid)
    return put(store, im._replace(refs=im.refs + 1))


def unhold(store: StateStore, iid: int) -> tuple[StateStore, list[Extent]]:
    """One checkpoint less; frees the image at zero references."""
    im = image(store, iid)
    return settle(put(store, im._replace(refs=im.refs - 1)), iid)


def settle(store: StateStore, iid: int) -> tuple[StateStore, list[Extent]]:
    """Reclaim an image that nobody holds, pins or writes."""
    im = image(store, iid)
    if im.refs or im.pins or im.writer:
        return store, []
    store = drop_device(store, iid)
    return store._replace(images=store.images.delete(iid)), [im.host] if im.host else []


def require_idle(im: StateImage, what: str) -> None:
    """Raise where an image may not change placement."""
    if im.writer or im.pins:
        who = f"sequence {im.writer}" if im.writer else f"{im.pins} reader(s)"
        raise BusyError(f"{what}: image {im.id} is in use by {who}; retry when that ended")
