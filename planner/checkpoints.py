"""Exact identity and checkpoints: positions that can be restored, and who holds them (CK).

`Identity` is everything two inputs must share to be the same prefix. A digest of it only narrows
the candidates; `prefix_of` decides. A `Checkpoint` is a ContextSnapshot: one state image, one exact
prefix in every pool, the identity, and what the model needs to continue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import IdentityError


class MediaSpan(NamedTuple):
    """Tokens [start, start + length) stand for media with this digest."""

    start: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True, repr=False)
class Identity:
    """Exact identity of a token prefix (CK-04). Build it with `identity`.

    ``tokens`` is int32, ``types`` uint8, ``positions`` int32 [T, axes], all as little-endian bytes,
    so that equality and slicing are exact and cheap. ``splits`` are rewrite_execution_frontiers.
    """

    frontier: int
    tokens: bytes
    types: bytes
    positions: bytes
    axes: int
    spans: tuple[MediaSpan, ...]
    rope_delta: int
    mode: str
    splits: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Identity({self.frontier} tokens, {self.digest().hex()[:8]})"

    def prefix(self, frontier: int) -> Identity:
        """Identity of the first ``frontier`` tokens; a cut through a media span raises."""
        if not 0 <= frontier <= self.frontier:
            raise IdentityError(f"prefix {frontier} of an identity of {self.frontier} tokens")
        for s in self.spans:
            if s.start < frontier < s.start + s.length:
                raise IdentityError(f"frontier {frontier} cuts the media span at {s.start}")
        width = 4 * self.axes
        return Identity(
            frontier,
            self.tokens[: 4 * frontier],
            self.types[:frontier],
            self.positions[: width * frontier],
            self.axes,
            tuple(s for s in self.spans if s.start + s.length <= frontier),
            self.rope_delta,
            self.mode,
            tuple(f for f in self.splits if f <= frontier),
        )

    def prefix_of(self, prompt: Identity) -> bool:
        """Whether ``prompt`` starts with exactly this: every field is compared (CK-05).

        ``rope_delta`` of a longer prompt describes its own end; positions carry it for the prefix.
        """
        if self.frontier > prompt.frontier or not prompt.tokens.startswith(self.tokens):
            return False  # most strangers end here, without a copy
        if any(s.start < self.frontier < s.start + s.length for s in prompt.spans):
            return False
        other = prompt.prefix(self.frontier)
        same = (
            self.tokens == other.tokens
            and self.types == other.types
            and self.positions == other.positions
            and (self.axes, self.spans, self.mode) == (other.axes, other.spans, other.mode)
            and self.splits == other.splits
        )
        return same and (self.frontier != prompt.frontier or self.rope_delta == prompt.rope_delta)

    def digest(self) -> bytes:
        """Shortlist key: equal identities agree; never proof of a hit."""
        h = hashlib.blake2b(digest_size=16)
        for part in (self.tokens, self.types, self.positions, self.mode.encode()):
            h.update(len(part).to_bytes(8, "little"))
            h.update(part)
        h.update(repr((self.axes, self.spans, self.rope_delta, self.splits)).encode())
        return h.digest()


def identity(
    tokens: Sequence[int] | NDArray[np.int32],
    *,
    types: Sequence[int] | None = None,
    positions: NDArray[np.int32] | None = None,
    spans: Sequence[MediaSpan] = (),
    rope_delta: int = 0,
    mode: str = "",
    splits: Sequence[int] = (),
) -> Identity:
    """Identity of a whole input. ``positions`` is int32 [T] or [T, axes]; default 0..T-1."""
    ids = np.asarray(tokens, dtype="<i4")
    n = len(ids)
    kinds = np.zeros(n, np.uint8) if types is None else np.asarray(types, np.uint8)
    where = np.arange(n, dtype="<i4") if positions is None else np.asarray(positions, "<i4")
    where = where.reshape(n, -1) if n else where.reshape(0, 1)
    if len(kinds) != n or len(where) != n:
        raise IdentityError(
            f"{n} tokens, {len(kinds)} types, {len(where)} positions; give equal counts"
        )
    return Identity(
        n, ids.tobytes(), kinds.tobytes(), where.tobytes(), where.shape[1],
        tuple(sorted(spans)), rope_delta, mode, tuple(sorted(splits)),
    )  # fmt: skip


EMPTY = identity([])


class Prefix(NamedTuple):
    """KVPrefixRef: the first ``frontier`` tokens of a pool, owned by ``history`` (0: empty)."""

    history: int
    frontier: int


class Checkpoint(NamedTuple):
    """An immutable exact restorable position (CK-01).

    ``holders`` are the owners that keep it (private record, shared entry, waiter), sorted; the
    last one to leave deletes it. ``readers`` are leases of transfers and saves: none is ever
    dropped by reclaim (CK-11). ``next_input`` is the committed token at the execution frontier that
    is not computed yet (CK-08), -1 where there is none. ``id`` is its generation: never reused.
    """

    id: int
    identity: Identity
    image: int
    prefixes: tuple[Prefix, ...]
    holders: tuple[int, ...]
    readers: int = 0
    next_input: int = -1

    @property
    def frontier(self) -> int:
        """Execution frontier: tokens computed."""
        return self.identity.frontier


def ledger_frontier(checkpoint: Checkpoint) -> int:
    """Tokens committed: one more than computed where the next input is known (CK-08)."""
    return checkpoint.frontier + (checkpoint.next_input >= 0)
