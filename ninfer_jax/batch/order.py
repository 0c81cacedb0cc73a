"""The order in which rows run: those that share the beginning of their prompts beside each other.

Sorted prompts are leaves of a tree whose inner nodes are shared prefixes. The state at each of them is worth keeping,
since a row can start from a state only where one was saved. So every row is told the nodes on its way (as markers), and
which rows must wait until another has been there (`Placed.nodes`). Pure: no clock, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ninfer_jax.config import PAGE_TOKENS

MAX_MARKERS = 4
"""Most prefixes that a prompt may ask to be kept."""


@dataclass(frozen=True)
class Placed:
    """A row in its place."""

    index: int
    """Of the row as it was given."""
    markers: tuple[int, ...] = ()
    """Token counts of the prefixes it shares with its neighbours, ascending, multiples of the page; at most four."""
    nodes: tuple[int, ...] = ()
    """A name of each of these prefixes, unique within one `arrange`: rows with the same name share that prefix."""


def arrange(prompts: Sequence[Sequence[int]], work: Sequence[int]) -> list[Placed]:
    """The rows by shared prefix, and the longest first among equals, so that the end has no long tail.

    Prefixes are cut to whole pages: a state in the middle of a page serves no better, and prompts that part at page
    boundaries are computed in the same pieces with and without reuse.

    Args:
      prompts: token ids of each row.
      work: how long each row may run, in any unit.
    """
    if not prompts:
        return []
    # The bytes of big-endian ids sort as the ids do, and are compared much faster.
    arrays = [np.asarray(p, ">i4") for p in prompts]
    order = sorted(range(len(prompts)), key=lambda i: arrays[i].tobytes())
    shared = [_shared_tokens(arrays[a], arrays[b]) for a, b in pairwise(order)]
    return _walk(order, np.asarray(shared, np.int64), work)


def reusable_tokens(placed: Sequence[Placed]) -> int:
    """Prompt tokens that need not be computed if each shared prefix is computed once."""
    seen: set[int] = set()
    total = 0
    for row in placed:
        known = [m for m, n in zip(row.markers, row.nodes, strict=True) if n in seen]
        total += max(known, default=0)
        seen.update(row.nodes)
    return total


def _walk(order: list[int], shared: np.ndarray, work: Sequence[int]) -> list[Placed]:
    """Down the tree without recursion: conversations that grow turn by turn make it deep."""
    placed: list[Placed] = []
    names = 0
    # Sorted rows [low, high), and the prefixes above them with their names.
    stack: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [(0, len(order), (), ())]
    while stack:
        low, high, depths, nodes = stack.pop()
        if high - low == 1:
            placed.append(Placed(order[low], depths[-MAX_MARKERS:], nodes[-MAX_MARKERS:]))
            continue
        depth = int(shared[low : high - 1].min())
        if depth > (depths[-1] if depths else 0):
            depths, nodes = (*depths, depth), (*nodes, names)
            names += 1
        cuts = [low, *(low + 1 + np.flatnonzero(shared[low : high - 1] == depth)).tolist(), high]
        parts = list(pairwise(cuts))
        parts.sort(key=lambda part: max(work[order[i]] for i in range(*part)))  # popped backwards
        stack.extend((a, b, depths, nodes) for a, b in parts)
    return placed


def _shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Whole pages of common beginning that leave both a token to compute."""
    count = min(len(first), len(second))
    differ = first[:count] != second[:count]
    common = int(differ.argmax()) if differ.any() else count
    return min(common, count - 1) // PAGE_TOKENS * PAGE_TOKENS
