"""Start-up: from a configuration, a model and a machine to a running program (CAP).

`resolve` is pure: facts in, `Limits` out. `start` measures the machine, allocates and compiles. The order is that of
CAP-16, with one difference: there is no calibration program. What executables need is bounded by the headroom R, and is
known exactly from the compiler afterwards (`Program.memory`); where the device refuses the layout all the same,
automatic capacity is lowered once (CAP-17).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.config import PAGE_TOKENS, EngineConfig, Limits
from ninfer_jax.errors import CapacityError, InputError
from ninfer_jax.models.model import Model
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program.program import Program
from ninfer_jax.program.sampler import new_sampler_state
from planner import (
    LayoutSpec,
    Plane,
    PoolSpec,
    automatic_pages,
    capacity_curve,
    device_reservation,
    explicit_pages,
    free_device_bytes,
    headroom,
    layout_for,
    page_limits,
    pool_specs,
)
from planner.errors import LayoutError

BUDGET_VARIABLE = "NINFER_VRAM_BUDGET_MIB"
"""Environment variable: most device memory to use, weights included, in MiB (CAP-08)."""


@dataclass(frozen=True)
class Machine:
    """The facts of a machine that start-up depends on."""

    platform: str
    free_bytes: int | None
    """F: device memory that is free and within the budget (CAP-08); None where nothing is known."""
    ram_bytes: int
    in_use: int | None = None
    """Device bytes in use, None where the device does not tell."""


def measure(device: jax.Device | None = None, weights: int = 0) -> Machine:
    """Look at a device (the first by default) and at the host.

    `weights` are device bytes that a platform without statistics cannot report as used.

    Raises:
      InputError: the budget in the environment is no number.
    """
    device = device or jax.devices()[0]
    stats = device.memory_stats() or {}
    in_use = stats.get("bytes_in_use")
    used = weights if in_use is None else in_use
    really_free = stats["bytes_limit"] - used if "bytes_limit" in stats else None
    text = os.environ.get(BUDGET_VARIABLE, "")
    if text and not text.isdecimal():
        raise InputError(f"{BUDGET_VARIABLE} must be a whole number of MiB; got {text!r}")
    left = (int(text) << 20) - used if text else None
    free = left if really_free is None else free_device_bytes(really_free, left)
    return Machine(device.platform, free, _ram_bytes(), in_use)


def _ram_bytes() -> int:
    """Memory of the machine, or of the container where that has less."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("memory.max", "memory/memory.limit_in_bytes"):
        file = Path("/sys/fs/cgroup") / path
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            ram = min(ram, int(text))
    return ram


def layout_spec(
    config: EngineConfig, model: Qwen3_5Config, context: int, dtype: str, ram_bytes: int
) -> LayoutSpec:
    """The planner's view of a model, read off the arrays that the program will allocate (CAP-04, CAP-06)."""
    state = jax.eval_shape(
        partial(new_device_state, model, pages=0, slots=0, dtype=jnp.dtype(dtype))
    )
    layers, _, heads, _, width = state.kv.k.shape
    planes = tuple(
        Plane(f"layer{layer}.{side}", width, heads, plane.dtype.itemsize)
        for layer in range(layers)
        for side, plane in (("k", state.kv.k), ("v", state.kv.v))
    )
    image = _bytes(state.images)
    pools: tuple[PoolSpec, ...] = pool_specs("none", planes)
    rows = config.max_concurrency
    sampler = jax.eval_shape(partial(new_sampler_state, rows, model.vocab_size))
    slots, host = config.device_state_slots, config.host_capacity_bytes
    if not config.cache:
        slots, host = 0, 0
    elif host is None:
        host = min((8 << 30) + 8 * image, ram_bytes // 4)
    # Logits, tokens and plan of the last step stay on the device, for the next one (the plan's tables count elsewhere).
    last_step = 4 * rows * (model.vocab_size + 2 + 6)
    return LayoutSpec(
        context, rows, pools, image, slots, host, fixed_bytes=_bytes(sampler) + last_step
    )


def resolve(
    config: EngineConfig, model: Qwen3_5Config, machine: Machine, *, reserve: int = 0
) -> Limits:
    """Fix everything that depends on the model and the machine.

    Args:
      config: the caller's choice.
      model: the model's configuration.
      machine: facts of the machine; measured with the weights loaded, the capacity is final.
      reserve: device bytes to leave free, at least 1 GiB (CAP-07).

    Raises:
      InputError: max_context is over the model's limit.
      CapacityError: kv_capacity cannot hold one request of max_context tokens or a page for each row (CAP-02, CAP-03),
        or the device has no room.
    """
    limit = model.max_position_embeddings
    context = min(limit, 4096) if config.max_context is None else config.max_context
    if context > limit:
        raise InputError(f"max_context={context} is over the model's limit of {limit} tokens")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if machine.platform == "cpu" else "bfloat16"
    spec = layout_spec(config, model, context, dtype, machine.ram_bytes)
    try:
        pages = _pages(config, spec, machine, headroom(reserve))
        layout = layout_for(spec, pages)
    except LayoutError as error:
        raise CapacityError(str(error)) from error
    cpu = machine.platform == "cpu"
    chunk = config.prefill_chunk or (256 if cpu else 2048)
    chunk = min(chunk, layout.logical_pages * PAGE_TOKENS)
    return Limits(
        layout=layout,
        reservation_bytes=device_reservation(spec, pages),
        prefill_chunk=chunk,
        chunk_buckets=_buckets(chunk, fine=cpu),
        policy=config.policy,
        cache=config.cache,
        max_queue=config.max_queue,
        record=config.record,
        dtype=dtype,
        seed=config.seed,
    )


def scoring_config(config: EngineConfig) -> EngineConfig:
    """The same for an engine that only scores, whose limits are those of one sequence (SC-02)."""
    return replace(
        config,
        max_concurrency=1,
        kv_capacity="auto",
        cache=False,
        device_state_slots=None,
        host_capacity_bytes=None,
    )


def _buckets(chunk: int, *, fine: bool) -> tuple[int, ...]:
    """Shapes of prefill units, each of which costs a compilation: the chunk, smaller ones, and a page.

    Time grows with a unit's tokens on CPU, so `fine` steps come just below the chunk. An accelerator reads the weights
    for few tokens as for many, so there each step halves.
    """
    parts = (chunk - (chunk >> k) if fine else chunk >> k for k in (1, 2, 3))
    fit = {size for size in parts if size >= PAGE_TOKENS and size % (PAGE_TOKENS // 2) == 0}
    return tuple(sorted({PAGE_TOKENS, chunk} | fit))


def _pages(config: EngineConfig, spec: LayoutSpec, machine: Machine, reserve: int) -> int:
    """M: explicit, or as many pages as there is room for (CAP-03, CAP-05)."""
    least, most = page_limits(spec.max_context, spec.concurrency)
    curve = capacity_curve(partial(device_reservation, spec), least, most)
    tokens = config.kv_capacity
    if isinstance(tokens, int):
        pages = -(-tokens // PAGE_TOKENS)
        if tokens < spec.max_context or not least <= pages <= most:
            raise CapacityError(
                f"kv_capacity={tokens} tokens is {pages} pages of {PAGE_TOKENS}; with max_context="
                f"{spec.max_context} and max_concurrency={spec.concurrency} it must be {least}..{most} pages and at "
                f"least {spec.max_context} tokens"
            )
        known = None if machine.free_bytes is None else curve
        return explicit_pages(
            tokens, spec.max_context, spec.concurrency, known, machine.free_bytes or 0, reserve
        )
    if machine.free_bytes is not None:
        return automatic_pages(curve, machine.free_bytes, reserve)
    # Nothing is known of the device, so it shares the host's memory: a quarter of that, or what is needed at least.
    return automatic_pages(curve, max(machine.ram_bytes // 4, curve.b_min), 0)


def start(model: Model, config: EngineConfig) -> Program:
    """Allocate and compile for a loaded model.

    Raises:
      InputError, CapacityError: see `resolve`; or the device refused the final allocation.
    """
    weights = _bytes(model.params)
    program = _allocate(model, config, measure(weights=weights), weights)
    left = measure(weights=weights).free_bytes
    if left is not None and left < 0:  # CAP-20
        program.close()
        raise CapacityError(
            f"the engine is ready, but {-left} B over {BUDGET_VARIABLE} or the device's memory; raise the budget, or "
            "lower kv_capacity, max_context or max_concurrency"
        )
    return program


def keep_executables() -> Path | None:
    """Keep executables on disk, so that a later start loads them; on accelerators, where they take long to make.

    JAX keeps what it compiles where JAX_COMPILATION_CACHE_DIR says, and in ~/.cache/ninfer-jax/executables else.

    Returns:
      The folder in there for units, which are found without lowering them; None: they are not kept, on CPU or where
      JAX's cache is turned off or remote.
    """
    if jax.default_backend() == "cpu":
        return None
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "ninfer-jax" / "executables"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    folder: str = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    used = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    return Path(folder) / "units" if used and "://" not in folder else None


def _allocate(model: Model, config: EngineConfig, machine: Machine, weights: int) -> Program:
    kept = keep_executables()
    limits = resolve(config, model.config, machine)
    least, _ = page_limits(limits.max_context, limits.max_concurrency)
    try:
        return Program(model, limits, kept)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        if isinstance(config.kv_capacity, int) or limits.pages == least:
            raise CapacityError(_refused(limits, weights)) from error
    # CAP-17: one corrective rebuild, of automatic capacity only. The failed program is gone by now.
    pages = limits.pages - max(1, (limits.pages - least) // 4)
    unknown = replace(machine, free_bytes=None)
    fewer = replace(config, kv_capacity=max(pages * PAGE_TOKENS, limits.max_context))
    smaller = resolve(fewer, model.config, unknown)
    try:
        return Program(model, smaller, kept)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise CapacityError(_refused(smaller, weights)) from error


def _refused(limits: Limits, weights: int) -> str:
    return (
        f"the device has no room for {limits.pages} KV pages ({limits.reservation_bytes} B of state in all) beside "
        f"{weights} B of weights; lower kv_capacity, max_context, max_concurrency or device_state_slots"
    )


def _bytes(tree: object) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
