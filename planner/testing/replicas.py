"""Every replica that a physical state calls valid: where it lies and what it must hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from planner import kv
from planner.capacity import ceil_div
from planner.checkpoints import Checkpoint
from planner.physical import PhysicalState


class Replica(NamedTuple):
    """Tokens [lo, hi) of a checkpoint's identity, in a slot, a page, or at a Host offset.

    An image stands for the whole prefix, a page for the columns of its block.
    """

    checkpoint: int
    kind: Literal["image", "page"]
    host: bool
    pool: int
    place: int
    lo: int
    hi: int

    def __str__(self) -> str:
        where = f"Host offset {self.place}" if self.host else f"{self.kind} {self.place}"
        return f"checkpoint {self.checkpoint}, pool {self.pool}, tokens {self.lo}.., {where}"


def replicas(s: PhysicalState, ck: Checkpoint) -> Iterator[Replica]:
    """The image and each page of one checkpoint, on Device and on Host."""
    im = s.states.images.get(ck.image)
    assert im is not None
    if im.slot and im.ready:
        yield Replica(ck.id, "image", False, -1, im.slot, 0, ck.frontier)
    if im.host:
        yield Replica(ck.id, "image", True, -1, im.host.offset, 0, ck.frontier)
    P = s.layout.page_tokens
    for k, p in enumerate(ck.prefixes):
        pages = kv.prefix_pages(s.pools[k], p.history, ceil_div(p.frontier, P))
        for lo, page in zip(range(0, p.frontier, P), pages, strict=True):
            hi = min(p.frontier, lo + P)
            if page.device:
                yield Replica(ck.id, "page", False, k, page.device, lo, hi)
            if page.host >= 0 and page.host_epoch == page.epoch:
                hi = min(hi, lo + page.host_columns)
                yield Replica(ck.id, "page", True, k, page.host, lo, hi)
