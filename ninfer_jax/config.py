"""Start-up configuration of an engine: frozen, validated once, printable.

`program.startup` turns an `EngineConfig` into `Limits` once model and machine are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ninfer_jax.errors import InputError
from planner import PAGE_TOKENS, Layout

__all__ = ["PAGE_TOKENS", "EngineConfig", "Limits"]


@dataclass(frozen=True)
class EngineConfig:
    """What a caller may choose when loading a model.

    Every field is checked at construction; `program.startup.resolve` adds what depends on the model and the machine.
    """

    max_context: int | None = None
    """S: most tokens of prompt plus output in one request. None: the model's own limit, at most 4,096."""
    max_concurrency: int = 8
    """C: requests that run at the same time, 1..8 (CAP-01)."""
    kv_capacity: int | Literal["auto"] | None = "auto"
    """Tokens of the Main KV pool, shared by all requests and the cache. "auto" (or None): what the device has room for,
    at most C requests of S tokens (CAP-05)."""
    device_state_slots: int | None = None
    """H: StateImage slots beside the C that running requests need (CAP-12). None: C."""
    host_capacity_bytes: int | None = None
    """Host memory for saved states and pages; 0 is legal. None: 8 GiB and 8 images (CAP-13), at most a quarter of the
    machine's memory. Memory is taken as it is used."""
    prefill_chunk: int | None = None
    """Largest prefill unit, tokens; a multiple of 64. None: 256 on CPU, 2,048 on an accelerator."""
    policy: Literal["incremental"] = "incremental"
    """Which sources are reused and what is saved and evicted."""
    cache: bool = True
    """False: nothing of a request is kept for later ones, and no memory is set aside for it (CAT-23)."""
    max_queue: int = 1024
    """Most requests that may wait."""
    record: str | None = None
    """Where to write a flight record."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights, activations and KV. "auto": bfloat16 on an accelerator, float32 on CPU."""
    seed: int = 0
    """Where the seeds of requests without one come from."""
    purpose: Literal["generation", "scoring"] = "generation"
    """"scoring" allocates and compiles only what `Engine.score` and `perplexity` need: no scheduler, no cache."""

    def __post_init__(self) -> None:
        def integer(name: str, low: int, high: int | None = None, other: str = "") -> None:
            value = getattr(self, name)
            if type(value) is not int or value < low or (high is not None and value > high):
                limit = f"at least {low}" if high is None else f"{low}..{high}"
                raise InputError(f"{name} must be an integer, {limit}{other}; got {value!r}")

        def one_of(name: str, *choices: Any) -> None:
            value = getattr(self, name)
            if not any(type(value) is type(c) and value == c for c in choices):
                listed = ", ".join(f'"{c}"' if isinstance(c, str) else repr(c) for c in choices)
                raise InputError(f"{name} must be one of {listed}; got {value!r}")

        integer("max_concurrency", 1, 8)
        integer("seed", 0)
        integer("max_queue", 1)
        if self.prefill_chunk is not None:
            integer("prefill_chunk", PAGE_TOKENS)
            if self.prefill_chunk % PAGE_TOKENS:
                raise InputError(
                    f"prefill_chunk must be a multiple of {PAGE_TOKENS}; got {self.prefill_chunk}"
                )
        if self.max_context is not None:
            integer("max_context", 1)
        if self.kv_capacity not in (None, "auto"):
            integer("kv_capacity", 1, other=', or "auto"')
        one_of("cache", True, False)
        for name in ("device_state_slots", "host_capacity_bytes"):
            if getattr(self, name) is not None:
                integer(name, 0)
            if not self.cache and getattr(self, name):
                raise InputError(
                    f"cache=False keeps nothing, so {name} must be 0; got {getattr(self, name)}. Leave it out"
                )
        one_of("policy", "incremental")
        one_of("purpose", "generation", "scoring")
        one_of("dtype", "auto", "float32", "bfloat16")
        if self.record is not None and not isinstance(self.record, str):
            raise InputError(f"record must be a path or None; got {self.record!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """A configuration from keyword arguments; an unknown name is an InputError."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"unknown engine option {name!r}; known are {', '.join(known)}")
        return cls(**values)


@dataclass(frozen=True)
class Limits:
    """A resolved `EngineConfig`: everything that is fixed for the life of an engine."""

    layout: Layout
    """The capacity vector: the planner works with it and the program allocates it (CAP-11)."""
    reservation_bytes: int
    """B(M): device bytes of all explicit backing (CAP-06)."""
    prefill_chunk: int
    """Largest prefill unit, tokens."""
    chunk_buckets: tuple[int, ...]
    """Token counts of the compiled prefill units, ascending."""
    policy: Literal["incremental"]
    cache: bool
    max_queue: int
    record: str | None
    dtype: Literal["float32", "bfloat16"]
    seed: int

    @property
    def max_context(self) -> int:
        """S: most tokens of one request."""
        return self.layout.max_context

    @property
    def max_concurrency(self) -> int:
        """C: lanes."""
        return self.layout.concurrency

    @property
    def blocks(self) -> int:
        """L: logical blocks of one request, ceil(S / P)."""
        return self.layout.logical_pages

    @property
    def pages(self) -> int:
        """M: pages of the Main pool, the null page not counted."""
        return self.layout.pools[0].pages

    @property
    def slots(self) -> int:
        """C + H: StateImage slots, the null slot not counted."""
        return self.layout.slots
