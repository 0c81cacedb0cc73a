"""Capacity: what pools, slots and Host arena hold, and how many pages fit (CAP, KV-01..11).

The runtime describes its model as a `LayoutSpec`; `layout_for(spec, pages)` is the one builder of
the final `Layout`, and the reservation curve B(M) is measured on the same builder. C is
max_concurrency, S max_context, P page tokens, L = ceil(S / P) logical pages, M Main page groups,
H extra Device state slots. Page 0 and slot 0 are null on the device: ids start at 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from planner.errors import LayoutError

PAGE_TOKENS: Final = 64
MIN_HEADROOM: Final = 1 << 30
ALIGNMENT: Final = 256
_I32_MAX: Final = 2**31 - 1
_I64_MAX: Final = 2**63 - 1

PoolName = Literal["main", "mtp", "draft_full"]
Order = Literal["page_major", "head_major"]
KVProfile = Literal["bf16", "int8", "fp8", "nvfp4", "k8v4"]
Backend = Literal["none", "mtp", "dflash", "dflash2"]


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Plane:
    """One device array of a pool: ``leading`` elements (X) of ``item_bytes`` per token and head.

    Shape, fastest axis first: page-major [X, P, H, N], head-major [X, P, N, H] (KV-06).
    """

    name: str
    leading: int
    heads: int
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all heads."""
        return self.leading * self.heads * self.item_bytes

    def strides(self, pages: int, order: Order, page_tokens: int = PAGE_TOKENS) -> tuple[int, ...]:
        """Byte strides (nb0, nb1, nb2, nb3) of the array of ``pages`` page groups (KV-08)."""
        nb0 = self.item_bytes
        nb1 = nb0 * self.leading
        nb2 = nb1 * page_tokens
        return nb0, nb1, nb2, nb2 * (self.heads if order == "page_major" else pages)


def element_address(
    strides: tuple[int, ...], order: Order, page: int, offset: int, head: int, d: int
) -> int:
    """Byte address inside a plane of element ``d`` of ``head`` at column ``offset`` (KV-08)."""
    nb0, nb1, nb2, nb3 = strides
    g = head * nb2 + page * nb3 if order == "page_major" else page * nb2 + head * nb3
    return d * nb0 + offset * nb1 + g


def kv_planes(profile: KVProfile, layers: int, heads: int, head_dim: int) -> tuple[Plane, ...]:
    """Plane inventory of a closed profile: K and V, code and scale, per layer (KV-07, KV-09)."""
    codecs: dict[str, tuple[tuple[str, int, int], ...]] = {
        "bf16": (("", head_dim, 2),),
        "int8": (("code", head_dim, 1), ("scale", head_dim // 64, 2)),
        "fp8": (("code", head_dim, 1), ("scale", 1, 2)),
        "nvfp4": (("code", head_dim // 2, 1), ("scale", head_dim // 16, 1)),
    }
    if profile not in (*codecs, "k8v4"):
        raise LayoutError(f"KV profile {profile!r} is not one of {[*codecs, 'k8v4']}")
    k_codec, v_codec = ("fp8", "nvfp4") if profile == "k8v4" else (profile, profile)
    group = {"int8": 64, "nvfp4": 16}
    for codec in (k_codec, v_codec):
        if head_dim % group.get(codec, 1):
            raise LayoutError(f"head_dim {head_dim} is no multiple of {codec}'s {group[codec]}")
    return tuple(
        Plane(f"layer{layer}.{side}{part and '.' + part}", leading, heads, item)
        for layer in range(layers)
        for side, codec in (("k", k_codec), ("v", v_codec))
        for part, leading, item in codecs[codec]
    )


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Planes that share frontier, lifetime and page id (KV-01). The pool interprets no profile."""

    name: PoolName
    planes: tuple[Plane, ...]
    order: Order = "page_major"

    def page_bytes(self, page_tokens: int = PAGE_TOKENS) -> int:
        """Bytes of one page group over all planes, on Device and packed on Host (KV-11)."""
        return sum(p.token_bytes for p in self.planes) * page_tokens

    def span_bytes(self, pages: int, page_tokens: int = PAGE_TOKENS) -> int:
        """Device bytes of all planes, the null page and alignment included."""
        slack = sum(ALIGNMENT for p in self.planes if p.token_bytes * page_tokens % ALIGNMENT)
        return self.page_bytes(page_tokens) * (pages + 1) + slack


def pool_specs(
    backend: Backend, main: tuple[Plane, ...], draft: tuple[Plane, ...] = ()
) -> tuple[PoolSpec, ...]:
    """The growing pools of a backend (KV-02): main, and mtp or draft_full where it has planes."""
    specs = [PoolSpec("main", main)]
    if backend == "mtp":
        specs.append(PoolSpec("mtp", draft))
    elif backend in ("dflash", "dflash2") and draft:
        specs.append(PoolSpec("draft_full", draft, "head_major"))
    return tuple(specs)


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """What the runtime says about its model; everything but the number of Main pages.

    ``fixed_bytes`` are persistent state and workspace (CAP-06); ``extra_slots`` and ``host_bytes``
    take their defaults C (CAP-12) and 8 GiB + 8 images (CAP-13) where they are None.
    """

    max_context: int
    concurrency: int
    pools: tuple[PoolSpec, ...]
    image_bytes: int
    extra_slots: int | None = None
    host_bytes: int | None = None
    mtp_window: int = 1
    fixed_bytes: int = 0
    page_tokens: int = PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Fixed size of one pool: ``pages`` page groups (ids 1..pages) of ``page_bytes``."""

    name: PoolName
    pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The capacity vector, fixed for the life of an engine (CAP-11)."""

    max_context: int
    concurrency: int
    page_tokens: int
    pools: tuple[PoolLayout, ...]
    slots: int
    image_bytes: int
    host_bytes: int

    @property
    def logical_pages(self) -> int:
        """L: blocks of one history, and rows of a block table."""
        return ceil_div(self.max_context, self.page_tokens)

    @property
    def main_tokens(self) -> int:
        """Published Main capacity (CAP-09); it does not raise max_context."""
        return self.pools[0].pages * self.page_tokens


def page_limits(
    max_context: int, concurrency: int, page_tokens: int = PAGE_TOKENS
) -> tuple[int, int]:
    """(M_min, M_max) = (max(L, C), C * L) (CAP-02)."""
    if not 1 <= concurrency <= 8:
        raise LayoutError(f"max_concurrency {concurrency} is outside 1..8 (CAP-01)")
    if max_context < 1:
        raise LayoutError(f"max_context {max_context} is below 1 token")
    blocks = ceil_div(max_context, page_tokens)
    return max(blocks, concurrency), concurrency * blocks


def backend_pages(
    name: PoolName,
    main_pages: int,
    concurrency: int,
    mtp_window: int,
    page_tokens: int = PAGE_TOKENS,
) -> int:
    """Page groups of a pool beside ``main_pages`` Main ones (CAP-10)."""
    lead = ceil_div(mtp_window - 1, page_tokens) if name == "mtp" else 0
    return main_pages + concurrency * lead


def layout_for(spec: LayoutSpec, main_pages: int) -> Layout:
    """The one builder of the final layout; raises where a count is not representable (CAP-25)."""
    low, high = page_limits(spec.max_context, spec.concurrency, spec.page_tokens)
    if not low <= main_pages <= high:
        raise LayoutError(f"{main_pages} Main pages are outside {low}..{high} (CAP-02)")
    if not spec.pools or spec.pools[0].name != "main" or len(spec.pools) > 2:
        raise LayoutError("pools are main and at most one backend pool, main first (KV-02)")
    extra = spec.concurrency if spec.extra_slots is None else spec.extra_slots
    host = (8 << 30) + 8 * spec.image_bytes if spec.host_bytes is None else spec.host_bytes
    if extra < 0 or host < 0 or spec.image_bytes < 1:
        raise LayoutError("device_state_slots and Host bytes are >= 0, image bytes >= 1")
    pools = tuple(
        PoolLayout(
            p.name,
            backend_pages(p.name, main_pages, spec.concurrency, spec.mtp_window, spec.page_tokens),
            p.page_bytes(spec.page_tokens),
        )
        for p in spec.pools
    )
    layout = Layout(
        spec.max_context, spec.concurrency, spec.page_tokens, pools,
        spec.concurrency + extra, spec.image_bytes, host,
    )  # fmt: skip
    for p in pools:
        if p.page_bytes < 1 or p.pages >= _I32_MAX or (p.pages + 1) * p.page_bytes > _I64_MAX:
            raise LayoutError(
                f"pool {p.name}: {p.pages} pages of {p.page_bytes} B do not fit int32"
            )
    if layout.slots >= _I32_MAX or host > _I64_MAX:
        raise LayoutError("slots must fit int32 and Host bytes int64; lower them (CAP-25)")
    return layout


def device_reservation(spec: LayoutSpec, main_pages: int) -> int:
    """B(M) in bytes: pools, state slots, block tables, fixed state, of the real layout (CAP-06)."""
    layout = layout_for(spec, main_pages)
    planes = sum(
        s.span_bytes(p.pages, spec.page_tokens)
        for s, p in zip(spec.pools, layout.pools, strict=True)
    )
    tables = 4 * layout.logical_pages * layout.concurrency * len(layout.pools)
    return planes + (layout.slots + 1) * layout.image_bytes + tables + spec.fixed_bytes


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    """B(M) = b_min + (M - m_min) * b_step over m_min..m_max (CAP-04)."""

    m_min: int
    m_max: int
    b_min: int
    b_step: int

    def at(self, pages: int) -> int:
        """Bytes reserved at ``pages`` Main pages."""
        return self.b_min + (pages - self.m_min) * self.b_step


def capacity_curve(reservation: Callable[[int], int], m_min: int, m_max: int) -> CapacityCurve:
    """Measure the curve on the layout builder and verify that it is affine (CAP-04)."""
    b_min = reservation(m_min)
    b_step = reservation(m_min + 1) - b_min if m_max > m_min else 0
    curve = CapacityCurve(m_min, m_max, b_min, b_step)
    for pages in (m_min, (m_min + m_max) // 2, m_max):
        if curve.at(pages) != reservation(pages):
            raise LayoutError(f"reservation is not affine at {pages} pages; fix the layout builder")
    return curve


def headroom(requested: int = 0) -> int:
    """R: at least 1 GiB, more where asked (CAP-07)."""
    return max(MIN_HEADROOM, requested)


def free_device_bytes(really_free: int, budget_left: int | None) -> int:
    """F: the smaller of really free memory and what the budget leaves (CAP-08)."""
    return really_free if budget_left is None else min(really_free, budget_left)


def automatic_pages(curve: CapacityCurve, free: int, reserve: int) -> int:
    """The largest M whose reservation and headroom fit ``free`` bytes (CAP-05)."""
    spare = free - reserve - curve.b_min
    if spare < 0:
        raise LayoutError(
            f"free {free} B < headroom {reserve} B + smallest layout {curve.b_min} B; lower "
            "max_context, max_concurrency or device_state_slots"
        )
    if curve.m_min == curve.m_max or curve.b_step <= 0:
        return curve.m_max
    return min(curve.m_max, curve.m_min + spare // curve.b_step)


def explicit_pages(
    kv_capacity: int,
    max_context: int,
    concurrency: int,
    curve: CapacityCurve | None = None,
    free: int = 0,
    reserve: int = 0,
) -> int:
    """M of an explicit token capacity; with a curve, also that it fits the device (CAP-03)."""
    low, high = page_limits(max_context, concurrency)
    pages = ceil_div(kv_capacity, PAGE_TOKENS)
    if kv_capacity < max_context:
        raise LayoutError(f"kv_capacity {kv_capacity} is below max_context {max_context}; raise it")
    if not low <= pages <= high:
        raise LayoutError(
            f"kv_capacity {kv_capacity} is {pages} pages, outside {low}..{high}; use "
            f"{low * PAGE_TOKENS}..{high * PAGE_TOKENS} tokens"
        )
    if curve is not None and reserve + curve.at(pages) > free:
        raise LayoutError(
            f"{pages} pages need {curve.at(pages)} B + headroom {reserve} B, free are {free} B; "
            "lower kv_capacity or use automatic capacity"
        )
    return pages
