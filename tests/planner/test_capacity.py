"""CAP rules and the layout half of KV, with the numbers of the worked examples."""

import dataclasses

import numpy as np
import pytest

import planner
from planner import capacity
from planner.capacity import (
    CapacityCurve,
    LayoutSpec,
    Plane,
    PoolSpec,
    automatic_pages,
    backend_pages,
    capacity_curve,
    device_reservation,
    element_address,
    explicit_pages,
    kv_planes,
    layout_for,
    page_limits,
    pool_specs,
)
from planner.errors import LayoutError


def spec(**changes: object) -> LayoutSpec:
    main = kv_planes("bf16", 2, 2, 64)
    base = LayoutSpec(1000, 3, pool_specs("none", main), image_bytes=4096)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_limits_x01() -> None:
    """X-01, CAP-02, CAP-03: limits and explicit capacity."""
    assert page_limits(1000, 3) == (16, 48)
    assert explicit_pages(1000, 1000, 3) == 16
    assert explicit_pages(1025, 1000, 3) == 17
    assert explicit_pages(3072, 1000, 3) == 48
    with pytest.raises(LayoutError, match="below max_context"):
        explicit_pages(999, 1000, 3)
    with pytest.raises(LayoutError, match=r"49 pages, outside 16\.\.48"):
        explicit_pages(3073, 1000, 3)


def test_minimum_gives_each_lane_a_page() -> None:
    """CAP-02: with a short context C bounds M_min; capacity is not divided per lane."""
    assert page_limits(64, 8) == (8, 8)
    assert page_limits(65, 8) == (8, 16)


@pytest.mark.parametrize("concurrency", [0, 9])
def test_concurrency_range(concurrency: int) -> None:
    """CAP-01: C is fixed at start in 1..8."""
    with pytest.raises(LayoutError, match=r"1\.\.8"):
        page_limits(100, concurrency)


@pytest.mark.parametrize(("free", "pages"), [(1360, 4), (2048, 6), (1050, 2)])
def test_automatic_x02(free: int, pages: int) -> None:
    """X-02, CAP-05."""
    curve = CapacityCurve(2, 6, 1000, 128)
    assert automatic_pages(curve, free, 50) == pages


def test_automatic_too_little() -> None:
    """X-02, CAP-05: F < R + B_min fails and says what to lower."""
    with pytest.raises(LayoutError, match="lower"):
        automatic_pages(CapacityCurve(2, 6, 1000, 128), 1049, 50)


def test_automatic_single_point() -> None:
    """CAP-05: M_min = M_max takes that point."""
    assert automatic_pages(CapacityCurve(4, 4, 1000, 0), 10**9, 0) == 4


def test_explicit_must_fit_the_device() -> None:
    """CAP-03: R + B(M) <= F for explicit capacity too."""
    curve = CapacityCurve(16, 48, 1000, 10)
    assert explicit_pages(1025, 1000, 3, curve, free=1060, reserve=50) == 17
    with pytest.raises(LayoutError, match="lower kv_capacity"):
        explicit_pages(1025, 1000, 3, curve, free=1059, reserve=50)


def test_curve_is_measured_on_the_builder() -> None:
    """CAP-04, CAP-06: affine, equal to an independent sum over the real arrays, verified."""
    s = spec(fixed_bytes=777)
    curve = capacity_curve(lambda m: device_reservation(s, m), *page_limits(1000, 3))
    for pages in (16, 17, 48):
        planes = sum(64 * (pages + 1) * 2 * 64 * 2 for _ in range(4))  # P, N, H, D, bf16
        images = (3 + 3 + 1) * 4096
        tables = 16 * 3 * 4
        assert curve.at(pages) == planes + images + tables + 777
    with pytest.raises(LayoutError, match="not affine"):
        capacity_curve(lambda m: m * m, 2, 9)


def test_unaligned_planes_pay_for_alignment() -> None:
    """KV-11, CAP-04: spans are full planes with alignment and the curve stays affine."""
    odd = PoolSpec("main", (Plane("k", 3, 1, 1),))
    s = spec(pools=(odd,))
    capacity_curve(lambda m: device_reservation(s, m), *page_limits(1000, 3))
    assert odd.span_bytes(10) == 3 * 64 * 11 + capacity.ALIGNMENT


def test_headroom_and_free() -> None:
    """CAP-07, CAP-08: R is at least 1 GiB; F is the smaller of budget and really free memory."""
    assert capacity.headroom() == 2**30
    assert capacity.headroom(3 * 2**30) == 3 * 2**30
    assert capacity.free_device_bytes(100, None) == 100
    assert capacity.free_device_bytes(100, 40) == 40
    assert capacity.free_device_bytes(30, 40) == 30


def test_published_capacity() -> None:
    """CAP-09: M * P tokens; rounding never raises the per-request ceiling."""
    layout = layout_for(spec(), 17)
    assert layout.main_tokens == 17 * 64
    assert layout.max_context == 1000
    assert layout.logical_pages == 16


@pytest.mark.parametrize(("window", "pages"), [(1, 20), (5, 23), (66, 26)])
def test_mtp_pages_x03(window: int, pages: int) -> None:
    """X-03, CAP-10."""
    assert backend_pages("mtp", 20, 3, window) == pages
    planes = kv_planes("bf16", 1, 1, 64)
    layout = layout_for(spec(pools=pool_specs("mtp", planes, planes), mtp_window=window), 20)
    assert [p.pages for p in layout.pools] == [20, pages]
    assert layout.logical_pages == 16


def test_pool_sets() -> None:
    """KV-02, CAP-10, SPEC-04: one or two pools; a local-only draft has none."""
    planes = kv_planes("bf16", 1, 1, 64)
    assert [p.name for p in pool_specs("none", planes)] == ["main"]
    assert [p.name for p in pool_specs("mtp", planes, planes)] == ["main", "mtp"]
    assert [p.name for p in pool_specs("dflash", planes, planes)] == ["main", "draft_full"]
    assert [p.name for p in pool_specs("dflash2", planes)] == ["main"]
    full = layout_for(spec(pools=pool_specs("dflash", planes, planes)), 20)
    assert [p.pages for p in full.pools] == [20, 20]


def test_pools_are_separate_vectors() -> None:
    """CAP-11: one typed vector, never resized; frozen values cannot be."""
    layout = layout_for(spec(), 20)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.slots = 9  # type: ignore[misc]
    s = planner.initial(layout)
    assert s.pools[0].capacity == 20


def test_slots_and_host_defaults() -> None:
    """CAP-12, CAP-13: H defaults to C; Host to 8 GiB + 8 images."""
    layout = layout_for(spec(), 20)
    assert layout.slots == 6
    assert layout.host_bytes == 8 * 2**30 + 8 * 4096
    assert layout_for(spec(extra_slots=0, host_bytes=0), 20).slots == 3


def test_only_context_is_in_the_vector() -> None:
    """CAP-14: the Host arena holds context only; nothing else has an axis here."""
    assert set(planner.Usage._fields) == {"pages", "slots", "host", "rows"}


def test_representable() -> None:
    """CAP-25: counts and sizes fit, and a minimum active capacity exists, else startup fails."""
    with pytest.raises(LayoutError, match="CAP-02"):
        layout_for(spec(), 15)
    huge = PoolSpec("main", (Plane("k", 2**40, 1, 2**20),))
    with pytest.raises(LayoutError, match="fit"):
        layout_for(spec(pools=(huge,)), 16)
    with pytest.raises(LayoutError, match="image bytes"):
        layout_for(spec(image_bytes=0), 16)
    with pytest.raises(LayoutError, match="main first"):
        layout_for(spec(pools=()), 16)


PROFILES = {"bf16": 1024, "int8": 528, "fp8": 516, "nvfp4": 288, "k8v4": 402}
X04 = {
    "bf16": 4_194_304,
    "int8": 2_162_688,
    "fp8": 2_113_536,
    "nvfp4": 1_179_648,
    "k8v4": 1_646_592,
}


@pytest.mark.parametrize("profile", PROFILES)
def test_page_bytes_x04(profile: str) -> None:
    """X-04, KV-09, KV-11: bytes per token and head, and of a page of 16 layers and 4 heads."""
    one = kv_planes(profile, 1, 1, 256)  # type: ignore[arg-type]
    assert sum(p.token_bytes for p in one) == PROFILES[profile]
    pool = PoolSpec("main", kv_planes(profile, 16, 4, 256))  # type: ignore[arg-type]
    assert pool.page_bytes() == X04[profile]


def test_plane_inventory() -> None:
    """KV-07, KV-09, KV-10: leading extents per codec; K8V4 is FP8 keys and NVFP4 values."""
    names = {p.name: (p.leading, p.item_bytes) for p in kv_planes("k8v4", 1, 4, 256)}
    assert names == {
        "layer0.k.code": (256, 1),
        "layer0.k.scale": (1, 2),
        "layer0.v.code": (128, 1),
        "layer0.v.scale": (16, 1),
    }
    int8 = {p.name: (p.leading, p.item_bytes) for p in kv_planes("int8", 1, 4, 256)}
    assert int8["layer0.k.scale"] == (4, 2)
    with pytest.raises(LayoutError, match="no multiple"):
        kv_planes("int8", 1, 1, 100)
    with pytest.raises(LayoutError, match="not one of"):
        kv_planes("fp4", 1, 1, 64)  # type: ignore[arg-type]


def test_one_id_selects_every_plane() -> None:
    """KV-05, KV-11: a page group is one slice of each plane; pages of a pool are equal."""
    planes = kv_planes("k8v4", 2, 4, 256)
    pool = PoolSpec("main", planes)
    assert pool.page_bytes() == sum(p.token_bytes * 64 for p in planes)
    assert len({layout_for(spec(pools=(pool,)), m).pools[0].page_bytes for m in (16, 48)}) == 1


@pytest.mark.parametrize("order", ["page_major", "head_major"])
def test_addresses(order: str) -> None:
    """KV-06, KV-08: the formula agrees with numpy's own addressing of the shape."""
    P, H, N, X = 64, 3, 5, 16
    plane = Plane("k", X, H, 2)
    strides = plane.strides(N, order)  # type: ignore[arg-type]
    shape = (N, H, P, X) if order == "page_major" else (H, N, P, X)  # slowest axis first
    array = np.arange(N * H * P * X, dtype=np.int16).reshape(shape)
    for page, offset, head, d in [(0, 0, 0, 0), (4, 63, 2, 15), (2, 17, 1, 3)]:
        index = (page, head, offset, d) if order == "page_major" else (head, page, offset, d)
        address = element_address(strides, order, page, offset, head, d)  # type: ignore[arg-type]
        assert array.tobytes()[address : address + 2] == array[index].tobytes()


def test_page_tokens_is_a_constant() -> None:
    """KV-04, KV-47, INV-14: P = 64 unless a test world says otherwise; no pool has its own."""
    assert planner.PAGE_TOKENS == 64
    assert layout_for(spec(), 20).page_tokens == 64
    assert not {f.name for f in dataclasses.fields(PoolSpec)} & {"page_tokens"}
