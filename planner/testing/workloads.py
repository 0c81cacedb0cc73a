"""Hypothesis strategy for small whole workloads, and how one is run.

A workload is a tiny engine and a script: requests that share prefixes or continue one another, steps
with transfers that complete late or fail, cancels at any moment. Whatever comes, every request must
end once, with the tokens it would have alone, and nothing may stay in use.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from hypothesis import strategies as st

from planner.testing.fake_device import solo
from planner.testing.world_driver import Ask, WorldDriver
from planner.testing.worlds import tiny_layout
from planner.world.config import WorldConfig


class Arrive(NamedTuple):
    """Submit a request. ``follow`` n > 0 continues the n-th last one: its prompt, ``keep`` of its
    outputs, and ``length`` new tokens; else the prompt is a prefix of text number ``text``.

    Frontiers are given in hundredths of the prompt.
    """

    text: int = 0
    length: int = 1
    follow: int = 0
    keep: int = 0
    tail: int = 0
    max_tokens: int = 1
    stop: int = 0
    fail: int = 0
    cache: bool = True
    endpoint: bool = True
    session: str = ""
    recovery: int = 0
    anchor: int = 0
    marker: int = 0
    split: int = 0
    synchronous: int = 0


class Move(NamedTuple):
    """Something else that happens; ``which`` picks the request to cancel."""

    kind: Literal["step", "settle", "complete", "fail", "cancel", "clear"]
    which: int = 0


class Workload(NamedTuple):
    """An engine and its script."""

    config: WorldConfig
    script: tuple[Arrive | Move, ...]


HOST: Final = (0, 0, 3, 6, 12, 30)
"""Host capacities to draw from: a page takes 1, an image 2."""

_FRONTIER = st.sampled_from([0, 0, 40, 75, 100])
_ARRIVE = st.builds(
    Arrive,
    text=st.integers(0, 2),
    length=st.integers(1, 20),
    follow=st.integers(0, 3),
    keep=st.integers(0, 4),
    tail=st.sampled_from([0, 0, 1, 2]),
    max_tokens=st.integers(1, 8),
    stop=st.sampled_from([0, 0, 0, 1, 2, 3]),
    fail=st.sampled_from([0] * 9 + [1, 2]),
    cache=st.sampled_from([True] * 5 + [False]),
    endpoint=st.sampled_from([True] * 5 + [False]),
    session=st.sampled_from(["", "", "a", "b"]),
    recovery=_FRONTIER,
    anchor=_FRONTIER,
    marker=_FRONTIER,
    split=_FRONTIER,
    synchronous=st.sampled_from([0, 0, 0, 2]),
)
_MOVE = st.builds(
    Move,
    kind=st.sampled_from(["step"] * 6 + ["complete"] * 3 + ["settle", "fail", "cancel", "clear"]),
    which=st.integers(0, 7),
)


@st.composite
def workloads(
    draw: st.DrawFn, moves: int = 32, *, tight: bool = False, host: tuple[int, ...] = HOST
) -> Workload:
    """Pools of 4 to 12 pages of 4 tokens, 1 to 4 lanes, some state slots, some Host memory.

    A ``tight`` one has as few pages as the longest request needs, and lanes that compete for them.
    """
    lanes = draw(st.integers(2 if tight else 1, 4))
    blocks = draw(st.integers(3, 7))
    low = max(4, lanes, blocks)
    layout = tiny_layout(
        pages=low if tight else draw(st.integers(low, 12)),
        blocks=blocks,
        rows=lanes,
        slots=lanes + draw(st.integers(0, 3)),
        host=draw(st.sampled_from(host)),
        page_tokens=4,
    )
    config = WorldConfig(
        layout,
        prefill_chunk=draw(st.sampled_from([4, 8, 16])),
        cache=draw(st.sampled_from([True] * 7 + [False])),
    )
    size = draw(st.integers(8, moves))
    move = st.one_of(_ARRIVE, _ARRIVE, _MOVE, _MOVE, _MOVE)
    return Workload(config, tuple(draw(st.lists(move, min_size=size, max_size=size))))


def run_workload(workload: Workload, *, check: bool = True) -> WorldDriver:
    """Run a script to its end and check everything; the driver has the counts."""
    driver = WorldDriver(workload.config, check=check)
    for move in workload.script:
        if isinstance(move, Arrive):
            driver.submit(ask_of(move, driver))
        else:
            _play(move, driver)
    driver.settle()
    return driver


def _play(move: Move, driver: WorldDriver) -> None:
    if move.kind == "step":
        driver.step(transfers=False)
    elif move.kind == "settle":
        while driver.unread:
            driver.read()
    elif move.kind in ("complete", "fail") and driver.transfer:
        driver.finish_transfer(move.kind == "complete")
    elif move.kind == "cancel" and driver.live:
        driver.cancel(driver.live[move.which % len(driver.live)])
    elif move.kind == "clear" and not driver.transfer:
        driver.clear_cache()


def ask_of(a: Arrive, driver: WorldDriver) -> Ask:
    """The request of an arrival: made to fit the context, frontiers made absolute."""
    limit = driver.world.config.layout.max_context
    asks = [life.ask for life in driver.lives.values()]
    if a.follow and len(asks) >= a.follow:
        before = asks[-a.follow]
        head = before.prompt + solo(before.prompt, min(a.keep, before.length))
        prompt = (*head, *(900 + a.text + i for i in range(a.length % 6)))
    else:
        prompt = tuple(100 * a.text + i for i in range(a.length))
    prompt = (*prompt, *(800 + len(asks) for _ in range(a.tail)))[: limit - a.max_tokens]

    def frontier(share: int) -> tuple[int, ...]:
        return (len(prompt) * share // 100,) if share else ()

    return Ask(
        prompt,
        a.max_tokens,
        a.cache,
        a.endpoint,
        a.session,
        recovery=min(len(prompt) - 1, len(prompt) * a.recovery // 100),
        splits=frontier(a.split),
        anchors=frontier(a.anchor),
        markers=frontier(a.marker),
        synchronous=a.synchronous,
        stop=a.stop,
        fail=a.fail,
    )
