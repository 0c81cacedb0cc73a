"""Transfers: the copy batches of a transaction, between StateImage slots, pages and the Host arena (TX-02).

Device work is launched at once, in program order with the units around it. Within a batch every source on the device is
read before any destination is written, so the order of its copies does not matter.

Leaving the device: a unit gathers payloads into Host staging (pinned where the platform has it), and a thread moves
them from there to their place in the arena. Arriving: arrays over the arena's bytes are handed to a unit that scatters
them; the planner keeps those bytes until the transfer has finished.

The image of position 0 is not written at all: a row that starts there reads zeros, whatever its slot holds (ST-03).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ninfer_jax.errors import CapacityError, EngineFailure
from ninfer_jax.models.qwen3_5.state import DeviceState
from ninfer_jax.program import copies
from ninfer_jax.program.copies import Kind
from ninfer_jax.program.executables import Unit
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
            kind.name: jax.eval_shape(
                kind.gather, getattr(state, kind.field), np.zeros(1, np.int32)
            )[0]
            for kind in self.kinds.values()
        }
        for kind in self.kinds.values():
            size = sum(
                x.size * x.dtype.itemsize for x in jax.tree.leaves(self._payloads[kind.name])
            )
            assert size == kind.size, f"layout: {kind.size} B a {kind.name}; arrays: {size} B"
        self._device = device
        # Straight to pinned memory, the way off an accelerator is some 20 times faster than through a pageable copy.
        self._staging = None
        if device.platform != "cpu" and any(
            m.kind == "pinned_host" for m in device.addressable_memories()
        ):
            self._staging = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self._leave = "gather" if self._staging is None else "leave"
        self._units: Mapping[str, Callable[..., Any]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "arena")

    def units(self, state: DeviceState) -> dict[str, Unit]:
        """The closed set of executables: what `install` wants compiled."""
        out = {}
        for name, kind in self.kinds.items():
            arrays = getattr(state, kind.field)
            for n in kind.buckets:
                places = jax.ShapeDtypeStruct((n,), np.int32)
                payloads = (self._payloads[name],) * n
                out[f"gather_{name}/{n}"] = Unit(jax.jit(kind.gather), (arrays, places))
                if self._staging is not None:
                    leave = jax.jit(kind.gather, out_shardings=self._staging)
                    out[f"leave_{name}/{n}"] = Unit(leave, (arrays, places))
                scatter = jax.jit(kind.scatter, donate_argnums=0)
                out[f"scatter_{name}/{n}"] = Unit(scatter, (arrays, payloads, places))
        return out

    def install(self, units: Mapping[str, Callable[..., Any]], state: DeviceState) -> DeviceState:
        """Take the compiled units, and run each once on null places (CAP-21)."""
        self._units = units
        for name, kind in self.kinds.items():
            arrays = getattr(state, kind.field)
            for n in kind.buckets:
                null = np.zeros(n, np.int32)
                inside = units[f"gather_{name}/{n}"](arrays, null)
                outside = jax.tree.map(np.asarray, units[f"{self._leave}_{name}/{n}"](arrays, null))
                for payloads in (inside, jax.device_put(outside, self._device)):
                    arrays, _ = units[f"scatter_{name}/{n}"](arrays, payloads, null)
            state = replace(state, **{kind.field: arrays})
        return state

    def start(self, state: DeviceState, command: RunTransfer) -> tuple[DeviceState, Transfer]:
        """Launch a batch. `state` is donated.

        Raises:
          EngineFailure: the batch is malformed; nothing was launched.
        """
        self._check(command.copies)
        transfer = Transfer(command.transaction)
        for kind in self.kinds.values():
            arrays = getattr(state, kind.field)
            calls = {way: self._calls(command, kind, way) for way in ("d2h", "d2d", "h2d")}
            for part, n in calls["d2h"]:
                places = _padded([c.source for c in part], n)
                staged = self._units[f"{self._leave}_{kind.name}/{n}"](arrays, places)
                landing = self._threads.submit(self._land, staged, [c.destination for c in part])
                transfer._landings.append(landing)
            held = [
                self._units[f"gather_{kind.name}/{n}"](arrays, _padded([c.source for c in part], n))
                for part, n in calls["d2d"]
            ]
            for (part, n), payloads in zip(calls["d2d"], held, strict=True):
                arrays, _ = self._scatter(kind, arrays, payloads, part, n)
            for part, n in calls["h2d"]:
                payloads = [self._arrived(kind, c.source) for c in part]
                transfer._backing += payloads
                payloads += payloads[:1] * (n - len(part))
                arrays, count = self._scatter(kind, arrays, tuple(payloads), part, n)
                transfer._consumed.append((count, len(part)))
            state = replace(state, **{kind.field: arrays})
        return state, transfer

    def close(self) -> None:
        """Wait for the threads; the arena goes with its last user."""
        self._threads.shutdown()

    def _calls(
        self, command: RunTransfer, kind: Kind, direction: str
    ) -> list[tuple[list[Copy], int]]:
        """The copies of one kind and direction, cut into calls: (copies, bucket)."""
        batch = [c for c in command.copies if (c.kind, c.direction) == (kind.name, direction)]
        out = []
        for count, bucket in copies.calls(len(batch), kind.buckets):
            out.append((batch[:count], bucket))
            batch = batch[count:]
        return out

    def _scatter(
        self, kind: Kind, arrays: Any, payloads: tuple[Any, ...], part: list[Copy], n: int
    ) -> tuple[Any, jax.Array]:
        places = _padded([c.destination for c in part], n)
        return self._units[f"scatter_{kind.name}/{n}"](arrays, payloads, places)

    def _land(self, staged: Any, offsets: list[int]) -> None:
        """Move staged payloads to their places in the arena; runs on a thread."""
        for payload, offset in zip(staged, offsets, strict=False):
            for x in jax.tree.leaves(payload):
                raw = np.asarray(x).reshape(-1).view(np.uint8)
                self.arena[offset : offset + raw.size] = raw
                offset += raw.size

    def _arrived(self, kind: Kind, offset: int) -> Any:
        """A payload of the arena on its way to the device; it may share the arena's memory."""
        leaves, tree = jax.tree.flatten(self._payloads[kind.name])
        views = []
        for leaf in leaves:
            size = leaf.size * leaf.dtype.itemsize
            piece = self.arena[offset : offset + size]
            views.append(piece.view(leaf.dtype).reshape(leaf.shape))
            offset += size
        return jax.device_put(jax.tree.unflatten(tree, views), self._device)

    def _check(self, batch: tuple[Copy, ...]) -> None:
        """Ids in range, no place written twice, nothing in the arena written while it is read.

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
