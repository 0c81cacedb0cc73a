"""The fake device finds what it must find: stale, poisoned, unmapped and foreign content."""

from collections.abc import Callable

import pytest

from planner.plans import Copy
from planner.testing import ContentError, FakeDevice, next_token, solo, tiny_layout
from planner.world import DecodeRow, PublishTable, RunDecode, RunPrefill, RunTransfer

PROMPT = (5, 6, 7, 8, 9, 10)
INIT = Copy("image", "init", -1, 0, 1, 1)


def device() -> FakeDevice:
    """Request 1 in lane 0 with pages 1 and 2 and an initial state in slot 1."""
    d = FakeDevice(tiny_layout(pages=6, blocks=4, rows=2, slots=4, host=20, page_tokens=4))
    d.add(1, PROMPT)
    d.run(PublishTable(0, 0, (1, 2)))
    transfer(d, INIT)
    return d


def transfer(d: FakeDevice, *copies: Copy, ok: bool = True) -> None:
    d.run(RunTransfer(9, copies))
    d.complete(9, ok)


def prefilled() -> FakeDevice:
    d = device()
    d.run(RunPrefill(1, 1, 0, 0, 4, 1, 1))
    d.run(RunPrefill(2, 1, 0, 4, 1, 1, 1))
    return d


def decode(unit: int, position: int, token: int, read: int = 1, write: int = 1) -> RunDecode:
    return RunDecode(unit, (DecodeRow(1, 0, position, token, read, write),))


def test_tokens_are_those_of_a_solo_run() -> None:
    """ENG, UN-11: prefill, a given input, then chained inputs that nobody has read."""
    d = prefilled()
    d.run(decode(3, 5, PROMPT[-1]))
    d.run(decode(4, 6, -1))
    d.run(decode(5, 7, -1))
    assert tuple(d.read(unit)[1] for unit in (3, 4, 5)) == solo(PROMPT, 3)
    assert solo(PROMPT, 1) == (next_token(PROMPT),)
    assert next_token(PROMPT) != next_token(PROMPT[1:])


def test_a_replayed_row_samples_nothing() -> None:
    """PR-06."""
    d = prefilled()
    d.run(decode(3, 5, PROMPT[-1]))
    first = d.read(3)[1]
    row = DecodeRow(1, 0, 6, first, 1, 1, replay=True)
    d.run(RunDecode(4, (row,)))
    assert d.read(4) == {}
    d.run(decode(5, 7, solo(PROMPT, 2)[1]))
    assert d.read(5)[1] == solo(PROMPT, 3)[2]


def test_a_fork_leaves_its_source_alone() -> None:
    """ST-08: read one slot, write another; the old one still stands where it stood."""
    d = prefilled()
    d.run(PublishTable(1, 0, (1, 3)))
    transfer(d, Copy("page", "d2d", 0, 2, 3, 0, 1, 0, 0, 1))
    d.add(2, PROMPT)
    d.run(RunDecode(3, (DecodeRow(2, 1, 5, PROMPT[-1], 1, 2),)))
    d.run(decode(4, 5, PROMPT[-1]))
    assert d.read(3)[2] == d.read(4)[1]


def test_host_round_trip() -> None:
    """TX-02, KV-15: state and pages leave, others use the places, and they come back elsewhere."""
    d = prefilled()
    page = Copy("page", "d2h", 0, 1, 2, 1, 0, 0, 0, 4)
    tail = Copy("page", "d2h", 0, 2, 3, 1, 1, 0, 0, 1)
    transfer(d, Copy("image", "d2h", -1, 1, 0, 1), page, tail)
    transfer(d, INIT)  # somebody else takes the slot
    back = (
        Copy("image", "h2d", -1, 0, 3, 1),
        Copy("page", "h2d", 0, 2, 5, 1, 0, 0, 0, 4),
        Copy("page", "h2d", 0, 3, 4, 1, 1, 0, 0, 1),
    )
    transfer(d, *back)
    d.run(PublishTable(0, 0, (5, 4)))
    d.run(decode(3, 5, PROMPT[-1], 3, 3))
    assert d.read(3)[1] == solo(PROMPT, 1)[0]


def unmapped(d: FakeDevice) -> None:
    d.run(PublishTable(0, 1, ()))
    d.run(RunPrefill(1, 1, 0, 0, 5, 1, 1))


def wrong_slot(d: FakeDevice) -> None:
    d.run(RunPrefill(1, 1, 0, 0, 4, 2, 2))


def skipped_tokens(d: FakeDevice) -> None:
    d.run(RunPrefill(1, 1, 0, 1, 2, 1, 1))


def last_prompt_token(d: FakeDevice) -> None:
    d.run(RunPrefill(1, 1, 0, 0, 6, 1, 1))


def wrong_page(d: FakeDevice) -> None:
    d.run(RunPrefill(1, 1, 0, 0, 4, 1, 1))
    d.run(PublishTable(0, 0, (3, 2)))
    d.run(RunPrefill(2, 1, 0, 4, 1, 1, 1))


def wrong_input(d: FakeDevice) -> None:
    d.run(RunPrefill(1, 1, 0, 0, 5, 1, 1))
    d.run(decode(2, 5, PROMPT[-1] + 1))


def nothing_sampled(d: FakeDevice) -> None:
    d.run(RunPrefill(1, 1, 0, 0, 5, 1, 1))
    d.run(decode(2, 5, -1))


def unfinished_copy(d: FakeDevice) -> None:
    d.run(RunTransfer(1, (Copy("image", "init", -1, 0, 2, 2),)))
    d.run(RunPrefill(1, 1, 0, 0, 4, 2, 2))


def failed_copy(d: FakeDevice) -> None:
    transfer(d, Copy("image", "init", -1, 0, 2, 2), ok=False)
    d.run(RunPrefill(1, 1, 0, 0, 4, 2, 2))


def unwritten_columns(d: FakeDevice) -> None:
    d.run(RunPrefill(1, 1, 0, 0, 2, 1, 1))
    transfer(d, Copy("page", "d2d", 0, 1, 3, 0, 0, 0, 0, 3))


def overlapping_host(d: FakeDevice) -> None:
    d.run(RunPrefill(1, 1, 0, 0, 4, 1, 1))
    transfer(d, Copy("image", "d2h", -1, 1, 0, 1))
    transfer(d, Copy("page", "d2h", 0, 1, 1, 1, 0, 0, 0, 4))
    transfer(d, Copy("image", "h2d", -1, 0, 2, 1))


def outside_host(d: FakeDevice) -> None:
    transfer(d, Copy("image", "d2h", -1, 1, 19, 1))


def same_lane_twice(d: FakeDevice) -> None:
    row = DecodeRow(1, 0, 5, 10, 1, 1)
    d.run(RunDecode(1, (row, row)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (unmapped, "position 4, which is not mapped"),
        (wrong_slot, "reads slot 2: nothing"),
        (skipped_tokens, "reads slot 1: the empty prefix"),
        (last_prompt_token, "all prompt but its last"),
        (wrong_page, "column 0 of page 3: nothing"),
        (wrong_input, "has as input"),
        (nothing_sampled, "lane 0 sampled nothing"),
        (unfinished_copy, "slot 2: poison"),
        (failed_copy, "slot 2: poison"),
        (unwritten_columns, "nothing"),
        (overlapping_host, "reads"),
        (outside_host, "outside the Host arena"),
        (same_lane_twice, "lanes"),
    ],
)
def test_wrong_orders_are_found(wrong: Callable[[FakeDevice], None], words: str) -> None:
    """INV-04, INV-07, KV-33, TX-09: each in words that name the place."""
    with pytest.raises(ContentError, match=words):
        wrong(device())
