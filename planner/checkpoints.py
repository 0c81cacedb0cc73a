"""Exact identity and checkpoints: positions that can be restored, and who holds them (CK).

`Identity` is everything two inputs must share to be the same prefix. A digest of it only narrows
the candidates; `prefix_of` decides. A `Checkpoint` is a ContextSnapshot: one state image, one exact
prefix in every pool, the identity, and what the model needs to continue.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import IdentityError
from planner.persistent import IntMap, with_item, without_item


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


def common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the common prefix of two int32 byte strings."""
    n = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, "<i4", n) != np.frombuffer(b, "<i4", n)
    return int(differ.argmax()) if differ.any() else n


_Place = tuple[str, bytes, int]
"""Mode and tokens of a checkpoint, and its id: one that begins another comes before it."""
_LAST = 1 << 62
"""Above every id."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """All checkpoints by id, and who is where: a value, like the maps that it is made of.

    What asks for those of an owner, those that are read, or those on the path of a prompt does not go through all of
    them. One that is new or goes copies a list of all, and compares a few of their prompts.
    """

    by_id: IntMap[Checkpoint] = field(default_factory=IntMap)
    read: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Ids of those with reader leases, ascending."""
    _owned: IntMap[tuple[int, ...]] = field(default_factory=IntMap, compare=False, repr=False)
    _imaged: IntMap[tuple[int, ...]] = field(default_factory=IntMap, compare=False, repr=False)
    _places: tuple[_Place, ...] = field(default=(), compare=False, repr=False)

    def get(self, cid: int) -> Checkpoint | None:
        """The checkpoint, or None."""
        return self.by_id.get(cid)

    def items(self) -> list[tuple[int, Checkpoint]]:
        """Pairs of id and checkpoint, ascending."""
        return self.by_id.items()

    def values(self) -> list[Checkpoint]:
        """Every checkpoint, ascending by id."""
        return self.by_id.values()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def indexes(self) -> tuple[object, ...]:
        """All that follows from the checkpoints, to be compared."""
        return self.read, self._owned, self._imaged, self._places

    def owned(self, owner: int) -> tuple[int, ...]:
        """Ids of those that an owner holds, ascending."""
        return self._owned.get(owner) or ()

    def with_image(self, image: int) -> tuple[int, ...]:
        """Ids of those whose state is this image, ascending."""
        return self._imaged.get(image) or ()

    def put(self, ck: Checkpoint) -> Checkpoints:
        """With this checkpoint, new or in place of the one with its id."""
        return self._changed(self.by_id.get(ck.id), ck, self.by_id.set(ck.id, ck))

    def delete(self, cid: int) -> Checkpoints:
        """Without this checkpoint; KeyError where there is none."""
        return self._changed(self.by_id.get(cid), None, self.by_id.delete(cid))

    def _changed(
        self, old: Checkpoint | None, new: Checkpoint | None, by_id: IntMap[Checkpoint]
    ) -> Checkpoints:
        ck = new or old
        assert ck is not None
        places, before, after = self._places, old and _place(old), new and _place(new)
        if before != after:
            places = without_item(places, before) if before else places
            places = with_item(places, after) if after else places
        read = without_item(self.read, ck.id)
        return Checkpoints(
            by_id,
            with_item(read, ck.id) if new and new.readers else read,
            _listed(self._owned, ck.id, old.holders if old else (), new.holders if new else ()),
            _listed(self._imaged, ck.id, (old.image,) if old else (), (new.image,) if new else ()),
            places,
        )

    def on_path(self, prompt: Identity) -> Iterator[Checkpoint]:
        """Those whose tokens begin ``prompt``, itself included, in its mode; deepest first, of equal ones the youngest.

        Whether the rest of their identity does too is for `Identity.prefix_of` to say (CK-05).
        """
        tokens: bytes | None = prompt.tokens
        while tokens is not None:
            last = bisect_right(self._places, (prompt.mode, tokens, _LAST)) - 1
            if last < 0 or self._places[last][0] != prompt.mode:
                break
            _, found, _ = self._places[last]
            if not tokens.startswith(found):
                # What begins the prompt and stands before this one begins this one as well.
                tokens = tokens[: 4 * common_tokens(tokens, found)]
                continue
            first = bisect_left(self._places, (prompt.mode, found, 0))
            for _, _, cid in reversed(self._places[first : last + 1]):
                ck = self.by_id.get(cid)
                assert ck is not None
                yield ck
            tokens = found[:-4] if found else None

    def shared(self, prompt: Identity) -> int:
        """Length in tokens of the longest prefix that ``prompt`` and any of them in its mode have in common."""
        at = bisect_left(self._places, (prompt.mode, prompt.tokens, 0))
        beside = (p for p in self._places[max(0, at - 1) : at + 1] if p[0] == prompt.mode)
        return max((common_tokens(prompt.tokens, tokens) for _, tokens, _ in beside), default=0)


def _listed(
    index: IntMap[tuple[int, ...]], cid: int, before: tuple[int, ...], after: tuple[int, ...]
) -> IntMap[tuple[int, ...]]:
    """An index in which a checkpoint moves from some keys to others."""
    for key in {*before} ^ {*after}:
        ids = index.get(key) or ()
        ids = with_item(ids, cid) if key in after else without_item(ids, cid)
        index = index.set(key, ids) if ids else index.delete(key)
    return index


def _place(ck: Checkpoint) -> _Place:
    return ck.identity.mode, ck.identity.tokens, ck.id
