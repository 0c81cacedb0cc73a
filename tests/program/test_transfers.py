"""Copy batches against numpy: contents of pages, slots and arena after random batches of real copies."""

import numpy as np
import pytest
from transfer_cases import PAGES, Machinery, copy, random_batch

import ninfer_jax as nj
from ninfer_jax.errors import EngineFailure
from ninfer_jax.program import copies
from planner import Copy
from planner.world import RunTransfer


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def machinery(request, goldens):
    config = nj.load_model(goldens / "tiny-qwen3.5-dense").config
    machinery = Machinery(config, request.param, np.random.default_rng(0))
    yield machinery
    machinery.transfers.close()


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(machinery, seed):
    """KV-05, KV-12, KV-46, TX-02: whole payloads, any places, every source read before it is overwritten."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        transfer = machinery.start(*random_batch(machinery, rng))
        transfer.complete()
        assert transfer.ready()
        machinery.require_equal()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 16, 17, 24])
def test_there_and_back_is_exact(machinery, count):
    """HOST-04, ST-02: over one, several and many calls, for all bits; the arena is packed."""
    rng = np.random.default_rng(count)
    pages = rng.permutation(PAGES)[:count] + 1
    size = machinery.size["page"]
    offsets = [int(i) * size + 4 for i in rng.permutation(count)]
    before = [machinery.truth.page[p] for p in pages]
    machinery.start(
        *(copy("page", "d2h", p, o) for p, o in zip(pages, offsets, strict=True))
    ).complete()
    for p, o in zip(pages, offsets, strict=True):
        assert machinery.transfers.arena[o : o + size].tobytes() == machinery.truth.page[p]
    targets = rng.permutation(PAGES)[:count] + 1
    back = [copy("page", "h2d", o, t) for o, t in zip(offsets, targets, strict=True)]
    machinery.start(*back).complete()
    machinery.require_equal()
    assert [machinery.truth.page[t] for t in targets] == before


def test_a_batch_inside_the_device_is_ready_at_once(machinery):
    """DEV-04: its order is that of the data; the world need not wait. Position 0 needs no image (ST-03)."""
    before = machinery.truth.image[3]
    transfer = machinery.start(
        copy("image", "d2d", 1, 2), copy("image", "init", 0, 3), copy("page", "d2d", 4, 5)
    )
    assert transfer.ready()
    transfer.complete()
    machinery.require_equal()
    assert machinery.truth.image[3] == before


def test_a_batch_may_exchange_places(machinery):
    """Over several calls as well: all sources are read first."""
    rotation = [copy("page", "d2d", 1 + i, 1 + (i + 5) % PAGES) for i in range(PAGES)]
    machinery.start(*rotation, copy("image", "d2d", 1, 2), copy("image", "d2d", 2, 1)).complete()
    machinery.require_equal()


def test_a_copy_reads_what_was_written_before_and_nothing_later(machinery):
    """TX-02, DEV-05: order of launches is order of effects, while nothing waits."""
    size = machinery.size["page"]
    transfers = [
        machinery.start(copy("page", "d2h", 1, 0)),
        machinery.start(copy("page", "d2d", 2, 1)),
        machinery.start(copy("page", "d2h", 1, size)),
        machinery.start(copy("page", "d2d", 3, 1), copy("page", "d2h", 2, 2 * size)),
    ]
    for transfer in reversed(transfers):
        transfer.complete()
        transfer.complete()  # asking again changes nothing
    machinery.require_equal()


def bad_batches():
    yield [copy("page", "d2d", 1, 0)], "1..24"  # a null destination
    yield [copy("page", "d2h", 25, 0)], "1..24"
    yield [copy("image", "d2d", 7, 1)], "1..6"
    yield [copy("image", "h2d", -4, 1)], "arena"
    yield [copy("image", "d2h", 1, (2 << 20) - 8)], "arena"
    yield [copy("page", "init", 0, 1)], "page"
    yield [Copy("page", "d2d", 1, 1, 2, 1)], "page"  # there is no second pool
    yield [copy("page", "d2d", 1, 2), copy("page", "h2d", 0, 2)], "writes there too"
    yield [copy("page", "d2h", 1, 0), copy("page", "d2h", 2, 8)], "meet"
    yield [copy("page", "h2d", 0, 1), copy("page", "d2h", 2, 8)], "meet"


@pytest.mark.parametrize(("batch", "words"), list(bad_batches()))
def test_a_malformed_batch_launches_nothing(machinery, batch, words):
    """INV-07: a wrong id would be silent corruption, so it is refused before anything is donated."""
    before = machinery.state
    with pytest.raises(EngineFailure, match=words):
        machinery.transfers.start(machinery.state, RunTransfer(1, tuple(batch)))
    assert machinery.state is before
    machinery.require_equal()


def test_two_readers_of_one_extent_may_meet(machinery):
    """One saved page may be restored to two places."""
    machinery.start(copy("page", "h2d", 0, 1), copy("page", "h2d", 0, 2)).complete()
    machinery.require_equal()


def test_a_copy_that_fails_says_so_when_it_is_completed(machinery, monkeypatch):
    """TX-16, TX-19: the failure is raised where the engine asks, and nothing is under way then."""

    def fail(staged, offsets):
        raise OSError("broken")

    monkeypatch.setattr(machinery.transfers, "_land", fail)
    command = RunTransfer(7, (copy("page", "d2h", 1, 0), copy("image", "d2h", 1, 1 << 19)))
    machinery.state, transfer = machinery.transfers.start(machinery.state, command)
    with pytest.raises(EngineFailure, match="transaction 7"):
        transfer.complete()
    assert transfer.ready()
    machinery.require_equal()


@pytest.mark.parametrize("count", range(60))
def test_calls_cover_a_batch_and_waste_less_than_half(count):
    for buckets in ((1, 4, 16), (1,), (1, 4)):
        cut = copies.calls(count, buckets)
        assert sum(n for n, _ in cut) == count
        assert all(b in buckets and n <= b < 2 * n for n, b in cut)


def test_transfers_work_in_place(machinery):
    """KV-43, DEV-06: a unit needs room for its payloads, never for another pool."""
    for name, unit in machinery.transfers._units.items():
        kind, n = (
            machinery.transfers.kinds[name.split("_")[1].split("/")[0]],
            int(name.split("/")[1]),
        )
        assert unit.memory_analysis().temp_size_in_bytes <= 2 * n * kind.size + 4096, name


def test_a_call_is_bounded_in_bytes():
    """CAP-24: staging does not grow with the batch."""
    assert copies.page_kind(100, 4 << 20).buckets == (1, 4, 16)
    assert copies.page_kind(100, 16 << 20).buckets == (1, 4)
    assert copies.page_kind(100, 256 << 20).buckets == (1,)
    assert copies.image_kind(16, 1 << 10).buckets == (1,)
