"""Transfers: the copy batches of a transaction, between StateImage slots, pages and the Host arena (TX-02).

Device work is launched at once, in program order with the units around it: what leaves the device, then copies inside
it, then new images, then what arrives from Host. So every source is read before a destination of the same batch is
written; a batch in which order would matter beyond that is refused.

Leaving the device: a unit gathers payloads into Host staging (pinned where the platform has it), and a thread moves
them from there to their place in the arena. Arriving: arrays over the arena's bytes are handed to a unit that scatters
them; the planner keeps those bytes until the transfer has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ninfer_jax.errors import CapacityError, EngineFailure
from ninfer_jax.models.qwen3_5.state import DeviceState
from ninfer_jax.program import copies
from ninfer_jax.program.copies import Kind
from planner import Copy, Layout
from planner.world import RunTransfer

_ALIGNMENT = 64
_THREADS = 4
"""Threads that move staged payloads into the arena; one moves 6 GB/s."""


def new_arena(size: int) -> np.ndarray:
    """The Host arena: `size` bytes at an aligned address; the system provides memory as it is first touched."""
    try:
        raw = np.empty(size + _ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise CapacityError(
            f"the machine has no room for host_capacity_bytes={size}; lower it, 0 is legal"
        ) from error
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]


@dataclass
class Transfer:
    """A copy batch that was started."""

    transaction: int
    _landings: list[Future[None]] = field(default_factory=list)
    """Payloads on their way into the arena."""
    _consumed: list[tuple[Any, int]] = field(default_factory=list)
    """Counts of what scattering units wrote, and what they must be."""
    _backing: list[Any] = field(default_factory=list)
    """What arriving copies read; kept until they have (DEV-05)."""

    def ready(self) -> bool:
        """Whether `complete` would return at once. Copies inside the device are ordered by the data they produce, so
        a batch of those is ready when it is started (DEV-04)."""
        return all(f.done() for f in self._landings) and all(
            count.is_ready() for count, _ in self._consumed
        )

    def complete(self) -> None:
        """Wait for all copies and verify them.

        Raises:
          EngineFailure: a copy failed. None of the batch is under way any more.
        """
        wait(self._landings)
        try:
            written = [(int(np.asarray(count)), wanted) for count, wanted in self._consumed]
            for landing in self._landings:
                landing.result()
        except Exception as error:
            raise EngineFailure(f"copies of transaction {self.transaction} failed") from error
        finally:
            self._backing.clear()
        for count, wanted in written:
            if count != wanted:
                raise EngineFailure(
                    f"transaction {self.transaction}: {count} payloads written, {wanted} ordered"
                )


class Transfers:
    """Runs copy batches on a device state and owns the Host arena (HOST-01).

    Args:
      layout: sizes of pools, slots and arena.
      state: the device state, or its shapes.
      device: where it lives.
    """

    def __init__(self, layout: Layout, state: DeviceState, device: jax.Device) -> None:
        (pool,) = layout.pools
        self.kinds = {
            "page": copies.page_kind(pool.pages, pool.page_bytes),
            "image": copies.image_kind(layout.slots, layout.image_bytes),
        }
        self.arena = new_arena(layout.host_bytes)
        self._payloads = {
            name: jax.eval_shape(
                lambda x, kind=kind: jax.tree.map(
                    lambda y: y[0], kind.gather(x, np.zeros(1, np.int32))
                ),
                getattr(state, kind.field),
            )
            for name, kind in self.kinds.items()
        }
        for name, kind in self.kinds.items():
            size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._payloads[name]))
            assert size == kind.size, f"layout says {kind.size} B a {name}, the arrays have {size}"
        self._device = device
        self._units: Mapping[str, Callable[..., Any]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "arena")

    def units(self, state: DeviceState) -> dict[str, jax.stages.Lowered]:
        """The closed set of executables, lowered: what `install` wants compiled."""
        pinned = any(m.kind == "pinned_host" for m in self._device.addressable_memories())
        staging = None
        if pinned and self._device.platform != "cpu":
            staging = jax.sharding.SingleDeviceSharding(self._device, memory_kind="pinned_host")
        lowered = {}
        for name, kind in self.kinds.items():
            arrays = getattr(state, kind.field)
            for n in kind.buckets:
                places = jax.ShapeDtypeStruct((n,), np.int32)
                gather = jax.jit(kind.gather, out_shardings=staging)
                lowered[f"gather_{name}/{n}"] = gather.lower(arrays, places)
                scatter = jax.jit(kind.scatter, donate_argnums=0)
                payloads = (self._payloads[name],) * n
                lowered[f"scatter_{name}/{n}"] = scatter.lower(arrays, payloads, places)
                copy = jax.jit(kind.copy, donate_argnums=0)
                lowered[f"copy_{name}/{n}"] = copy.lower(arrays, places, places)
        return lowered

    def install(self, units: Mapping[str, Callable[..., Any]], state: DeviceState) -> DeviceState:
        """Take the compiled units, and run each once on null places (CAP-21)."""
        self._units = units
        for name, kind in self.kinds.items():
            for n in kind.buckets:
                null = np.zeros(n, np.int32)
                arrays = units[f"copy_{name}/{n}"](getattr(state, kind.field), null, null)
                staged = jax.tree.map(np.asarray, units[f"gather_{name}/{n}"](arrays, null))
                payload = jax.tree.map(lambda x: jax.device_put(x[0], self._device), staged)
                arrays, _ = units[f"scatter_{name}/{n}"](arrays, (payload,) * n, null)
                state = replace(state, **{kind.field: arrays})
        return state

    def start(self, state: DeviceState, command: RunTransfer) -> tuple[DeviceState, Transfer]:
        """Launch a batch. `state` is donated.

        Raises:
          EngineFailure: the batch is malformed; nothing was launched.
        """
        self._check(command.copies)
        transfer = Transfer(command.transaction)
        for direction, launch in (
            ("d2h", self._leave),
            ("d2d", self._move),
            ("init", self._move),
            ("h2d", self._arrive),
        ):
            for name, kind in self.kinds.items():
                batch = [c for c in command.copies if (c.kind, c.direction) == (name, direction)]
                done = 0
                for count, bucket in copies.calls(len(batch), kind.buckets):
                    part = batch[done : done + count]
                    state = launch(state, kind, bucket, part, transfer)
                    done += count
        return state, transfer

    def close(self) -> None:
        """Wait for the threads; the arena goes with its last user."""
        self._threads.shutdown()

    def _leave(
        self, state: DeviceState, kind: Kind, n: int, batch: Sequence[Copy], transfer: Transfer
    ) -> DeviceState:
        places = _padded([c.source for c in batch], n)
        staged = self._units[f"gather_{kind.name}/{n}"](getattr(state, kind.field), places)
        offsets = [c.destination for c in batch]
        transfer._landings.append(self._threads.submit(self._land, staged, offsets))
        return state

    def _land(self, staged: Any, offsets: list[int]) -> None:
        """Move staged payloads to their places in the arena; runs on a thread."""
        fields = [np.asarray(x) for x in jax.tree.leaves(staged)]
        for i, offset in enumerate(offsets):
            for x in fields:
                size = x[i].nbytes
                self.arena[offset : offset + size] = x[i].reshape(-1).view(np.uint8)
                offset += size

    def _move(
        self, state: DeviceState, kind: Kind, n: int, batch: Sequence[Copy], transfer: Transfer
    ) -> DeviceState:
        sources = _padded([0 if c.direction == "init" else c.source for c in batch], n)
        targets = _padded([c.destination for c in batch], n)
        copy = self._units[f"copy_{kind.name}/{n}"]
        return replace(state, **{kind.field: copy(getattr(state, kind.field), sources, targets)})

    def _arrive(
        self, state: DeviceState, kind: Kind, n: int, batch: Sequence[Copy], transfer: Transfer
    ) -> DeviceState:
        payloads = [jax.device_put(self._payload(kind, c.source), self._device) for c in batch]
        transfer._backing += payloads
        payloads += payloads[:1] * (n - len(batch))
        places = _padded([c.destination for c in batch], n)
        scatter = self._units[f"scatter_{kind.name}/{n}"]
        arrays, count = scatter(getattr(state, kind.field), tuple(payloads), places)
        transfer._consumed.append((count, len(batch)))
        return replace(state, **{kind.field: arrays})

    def _payload(self, kind: Kind, offset: int) -> Any:
        """The payload at an offset of the arena, as typed views of its bytes."""
        leaves, tree = jax.tree.flatten(self._payloads[kind.name])
        views = []
        for leaf in leaves:
            size = leaf.size * leaf.dtype.itemsize
            piece = self.arena[offset : offset + size]
            views.append(piece.view(leaf.dtype).reshape(leaf.shape))
            offset += size
        return jax.tree.unflatten(tree, views)

    def _check(self, batch: tuple[Copy, ...]) -> None:
        """Ids in range, no place written twice, no order among copies of one direction that would matter.

        A wrong id would be silent corruption: gathers clamp and scatters drop.
        """
        written: set[tuple[str, int]] = set()
        extents: list[tuple[int, int, bool]] = []
        for c in batch:
            kind = self.kinds[c.kind]
            reads, writes = c.direction in ("d2h", "d2d"), c.direction != "d2h"
            places = [c.source] * reads + [c.destination] * writes
            if c.direction in ("d2h", "h2d"):
                offset = c.source if writes else c.destination
                extents.append((offset, offset + kind.size, reads))
            if (
                c.pool > 0
                or (c.kind, c.direction) == ("page", "init")
                or not all(1 <= p <= kind.places for p in places)
                or not all(a >= 0 and b <= len(self.arena) for a, b, _ in extents[-1:])
            ):
                raise EngineFailure(
                    f"{c}: {c.kind} ids are 1..{kind.places}, the arena has {len(self.arena)} B"
                )
            if writes and (c.kind, c.destination) in written:
                raise EngineFailure(f"{c}: another copy of the batch writes there too")
            if writes:
                written.add((c.kind, c.destination))
        inside = [c for c in batch if c.direction == "d2d"]
        if {(c.kind, c.source) for c in inside} & {(c.kind, c.destination) for c in inside}:
            raise EngineFailure(f"a chain of copies in one batch: {inside}")
        read_to = written_to = 0
        for begin, end, writes in sorted(extents):
            if begin < (max(read_to, written_to) if writes else written_to):
                raise EngineFailure(f"copies of one batch meet at byte {begin} of the Host arena")
            read_to, written_to = (
                (read_to, max(written_to, end)) if writes else (max(read_to, end), written_to)
            )


def _padded(places: list[int], n: int) -> np.ndarray:
    out = np.zeros(n, np.int32)
    out[: len(places)] = places
    return out
