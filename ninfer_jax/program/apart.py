"""Prefill apart from the state, for small models on CPU: chunks of several prompts run beside each other.

The products of one chunk are too small to keep two processors busy, and units that change the same pools can only run
in turn. So a chunk runs on a scratch: a state of one sequence, with a page for each block and one slot. What it
continues from is taken into the scratch before, and what it made is placed in the pools after; a first chunk takes
nothing and so waits for no other unit. JAX runs one after the other what one thread launches on CPU, so two threads
launch them in turn.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.config import PAGE_TOKENS, Limits
from ninfer_jax.models.qwen3_5.params import TextParameters
from ninfer_jax.models.qwen3_5.state import DeviceState, KVPool, StateImages, new_device_state
from ninfer_jax.program.executables import Unit
from ninfer_jax.program.plans import PrefillPlan

THREADS = 2
SCRATCHES = 4
"""Two that are computed on, and as many that wait for their turn meanwhile."""

MOST_BYTES = 256 << 20
"""Of all scratches; with more, which long contexts need, chunks run on the pools."""

_Call = tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]


def fits(limits: Limits) -> bool:
    """Whether the scratches stay within `MOST_BYTES`."""
    layout = limits.layout
    one = (limits.blocks + 1) * sum(p.page_bytes for p in layout.pools) + 2 * layout.image_bytes
    return SCRATCHES * one <= MOST_BYTES


class Apart:
    """Scratches, and the threads that launch chunks on them."""

    def __init__(self, config: Qwen3_5Config, limits: Limits) -> None:
        dtype = jnp.dtype(limits.dtype)
        self._free = deque(
            new_device_state(config, pages=limits.blocks, slots=1, dtype=dtype)
            for _ in range(SCRATCHES)
        )
        self._table = 1 + np.arange(limits.blocks, dtype=np.int32)
        self._launchers = Launchers(THREADS)

    @property
    def scratch(self) -> DeviceState:
        """What prefill units are compiled for."""
        return self._free[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all scratches."""
        return SCRATCHES * sum(x.nbytes for x in jax.tree.leaves(self.scratch))

    def units(self, state: DeviceState) -> dict[str, Unit]:
        """What has to be compiled beside the prefill units."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        table = jax.ShapeDtypeStruct(self._table.shape, jnp.int32)
        at = (state, self.scratch, table, number, number)
        return {
            "take": Unit(jax.jit(take, donate_argnums=1), at),
            "place": Unit(jax.jit(place, donate_argnums=(0, 1)), (*at, number)),
        }

    def prefill(
        self,
        units: Mapping[str, Callable[..., Any]],
        params: TextParameters,
        state: DeviceState,
        plan: PrefillPlan,
    ) -> tuple[DeviceState, jax.Array]:
        """`units.prefill` by way of a scratch; the state is donated."""
        scratch = self._free.popleft()
        if plan.start:
            scratch = units["take"](state, scratch, plan.block_table, plan.read_slot, plan.start)
        slot = np.int32(1)
        inside = replace(plan, block_table=self._table, read_slot=slot, write_slot=slot)
        unit = units[f"prefill/{len(plan.tokens)}"]
        scratch, hidden = self._launchers.launch(unit, params, scratch, inside)
        end = plan.start + plan.length
        where = (plan.block_table, plan.write_slot, plan.start, end)
        state, scratch = units["place"](state, scratch, *where)
        self._free.append(scratch)
        return state, hidden

    def close(self) -> None:
        """End the threads and give the memory back."""
        self._launchers.close()
        self._free.clear()


def take(
    state: DeviceState,
    scratch: DeviceState,
    table: Int[Array, " L"],
    slot: Int[Array, ""],
    end: Int[Array, ""],
) -> DeviceState:
    """The scratch with the image of a slot and the pages of positions 0..end-1."""
    start = jnp.int32(0)
    return DeviceState(
        kv=_copied_pages(state.kv, scratch.kv, table, _own(table), start, end),
        images=_copied_image(state.images, scratch.images, slot, jnp.int32(1)),
    )


def place(
    state: DeviceState,
    scratch: DeviceState,
    table: Int[Array, " L"],
    slot: Int[Array, ""],
    start: Int[Array, ""],
    end: Int[Array, ""],
) -> tuple[DeviceState, DeviceState]:
    """The state with the scratch's image and its pages of positions start..end-1; and the scratch, for the next."""
    placed = DeviceState(
        kv=_copied_pages(scratch.kv, state.kv, _own(table), table, start, end),
        images=_copied_image(scratch.images, state.images, jnp.int32(1), slot),
    )
    return placed, scratch


def _own(table: Int[Array, " L"]) -> Int[Array, " L"]:
    return 1 + jnp.arange(len(table), dtype=table.dtype)


def _copied_pages(
    source: KVPool,
    target: KVPool,
    there: Int[Array, " L"],
    here: Int[Array, " L"],
    start: Int[Array, ""],
    end: Int[Array, ""],
) -> KVPool:
    """`target` with `source`'s pages of the blocks that hold positions start..end-1."""

    def copy(block: Array, target: KVPool) -> KVPool:
        def put(new: Array, pool: Array) -> Array:
            page = jax.lax.dynamic_index_in_dim(new, there[block], axis=1)
            return jax.lax.dynamic_update_index_in_dim(pool, page, here[block], axis=1)

        return jax.tree.map(put, source, target)

    last = (end + PAGE_TOKENS - 1) // PAGE_TOKENS
    return jax.lax.fori_loop(start // PAGE_TOKENS, last, copy, target)


def _copied_image(
    source: StateImages, target: StateImages, there: Int[Array, ""], here: Int[Array, ""]
) -> StateImages:
    def put(new: Array, pool: Array) -> Array:
        image = jax.lax.dynamic_index_in_dim(new, there, axis=0)
        return jax.lax.dynamic_update_index_in_dim(pool, image, here, axis=0)

    return jax.tree.map(put, source, target)


class Launchers:
    """Threads that take turns. No executor of Python's: those take no work while the interpreter ends, when engines
    still run to their close."""

    def __init__(self, count: int) -> None:
        self._queues: list[SimpleQueue[_Call | None]] = [SimpleQueue() for _ in range(count)]
        self._turns = itertools.cycle(self._queues)
        self._threads = [
            threading.Thread(target=_serve, args=(queue,), name="ninfer-launch", daemon=True)
            for queue in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, unit: Callable[..., Any], *args: Any) -> Any:
        """Call a unit in the next thread; waits for the launch, not for the results. What it raises is raised here."""
        done: Future[Any] = Future()
        next(self._turns).put((unit, args, done))
        return done.result()

    def close(self) -> None:
        """End the threads."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()


def _serve(queue: SimpleQueue[_Call | None]) -> None:
    while (call := queue.get()) is not None:
        unit, args, done = call
        try:
            done.set_result(unit(*args))
        except BaseException as error:
            done.set_exception(error)
        del call, unit, args, done  # a result kept here would keep its memory
