"""Start-up configuration of an engine: frozen, validated once, printable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ninfer_jax.errors import CapacityError, InputError

PAGE_TOKENS = 64
"""P: tokens in a KV page (KV-04)."""


@dataclass(frozen=True)
class EngineConfig:
    """What a caller may choose when loading a model.

    Every field is checked at construction; `resolve` adds what depends on the model.
    """

    max_context: int | None = None
    """S: most tokens of prompt plus output in one request. None: the model's own limit, at most 4,096."""
    max_concurrency: int = 8
    """C: requests that run at the same time, 1..8 (CAP-01)."""
    kv_capacity: int | None = None
    """Tokens of the Main KV pool, shared by all requests. None: enough for C requests of S tokens."""
    prefill_chunk: int = 256
    """Largest prefill unit, tokens; a multiple of 64."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights, activations and KV. "auto": bfloat16 on an accelerator, float32 on CPU."""
    seed: int = 0
    """Where the seeds of requests without one come from."""

    def __post_init__(self) -> None:
        def integer(name: str, low: int, high: int | None = None) -> None:
            value = getattr(self, name)
            if type(value) is not int or value < low or (high is not None and value > high):
                limit = f"at least {low}" if high is None else f"{low}..{high}"
                raise InputError(f"{name} must be an integer, {limit}; got {value!r}")

        integer("max_concurrency", 1, 8)
        integer("prefill_chunk", PAGE_TOKENS)
        integer("seed", 0)
        if self.prefill_chunk % PAGE_TOKENS:
            raise InputError(
                f"prefill_chunk must be a multiple of {PAGE_TOKENS}; got {self.prefill_chunk}"
            )
        for name in ("max_context", "kv_capacity"):
            if getattr(self, name) is not None:
                integer(name, 1)
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise InputError(f'dtype must be "auto", "float32" or "bfloat16"; got {self.dtype!r}')

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """A configuration from keyword arguments; an unknown name is an InputError."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"unknown engine option {name!r}; known are {', '.join(known)}")
        return cls(**values)

    def resolve(self, *, model_context: int, platform: str) -> Limits:
        """Fix everything that depends on the model and the device.

        Raises:
          InputError: max_context is over the model's limit.
          CapacityError: kv_capacity cannot hold one request of max_context tokens, or a page for each row (CAP-02,
            CAP-03).
        """
        context = min(model_context, 4096) if self.max_context is None else self.max_context
        if context > model_context:
            raise InputError(
                f"max_context={context} is over the model's limit of {model_context} tokens"
            )
        blocks = -(-context // PAGE_TOKENS)
        least, most = max(blocks, self.max_concurrency), blocks * self.max_concurrency
        if self.kv_capacity is None:
            pages = most
        else:
            pages = -(-self.kv_capacity // PAGE_TOKENS)
            if self.kv_capacity < context or not least <= pages <= most:
                raise CapacityError(
                    f"kv_capacity={self.kv_capacity} tokens is {pages} pages of {PAGE_TOKENS}; with max_context="
                    f"{context} and max_concurrency={self.max_concurrency} it must be {least}..{most} pages and at "
                    f"least {context} tokens"
                )
        dtype = self.dtype
        if dtype == "auto":
            dtype = "float32" if platform == "cpu" else "bfloat16"
        chunk = min(self.prefill_chunk, -(-context // PAGE_TOKENS) * PAGE_TOKENS)
        return Limits(
            max_context=context,
            max_concurrency=self.max_concurrency,
            blocks=blocks,
            pages=pages,
            chunk_buckets=tuple(sorted({PAGE_TOKENS, chunk})),
            dtype=dtype,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Limits:
    """A resolved `EngineConfig`."""

    max_context: int
    max_concurrency: int
    blocks: int
    """L: logical blocks of one request, ceil(S / P)."""
    pages: int
    """M: pages of the Main pool, the null page not counted."""
    chunk_buckets: tuple[int, ...]
    """Token counts of the compiled prefill units, ascending."""
    dtype: Literal["float32", "bfloat16"]
    seed: int
