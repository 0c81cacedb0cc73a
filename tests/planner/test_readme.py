"""The README's example runs and prints what it says; render draws every kind of thing."""

import re
from pathlib import Path

import pytest

from planner import checkpoint, render
from planner.kv import history
from planner.plans import ImageRef, PageRange, Target
from planner.testing import Driver, tiny_layout
from planner.units import Launch, RowTokens

README = Path(__file__).parents[2] / "planner" / "README.md"


def example() -> str:
    found = re.search(r"test_readme.py -->\n```python\n(.*?)```", README.read_text(), re.S)
    assert found
    return found.group(1)


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The example is about 30 lines, runs, and says why two plans cannot be."""
    code = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 34
    exec(compile(code, str(README), "exec"), {})
    out = capsys.readouterr().out
    assert "history 2: blocks 1..3, on 1[0..1], pages" in out
    assert "bind infeasible at activation/CopyPreparation: needs" in out
    assert "bind infeasible at pressure/CopyPreparation: 2 main page(s)" in out
    assert "restore ('move',)" in out
    assert "outcome='committed'" in out


def test_render_draws_everything() -> None:
    """Pages by holder, slots, Host extents, transaction; equal states give equal text (OBS-03)."""
    d = Driver(tiny_layout(pages=12, blocks=6, rows=3, slots=4, host=8))
    cid = d.cached(1, 5)
    ck = checkpoint(d.state, cid)
    h = history(d.state.pools[0], ck.prefixes[0].history)
    d.complete(Target(demote=(PageRange(0, h.id, 0, 2),)))
    q = d.bind(2, 4)
    d.run(Launch((RowTokens(q.id, (3,)),)))
    d.start(Target(backup=(ImageRef(ck.image),)))
    d.advance(2)
    text = render(d.state)
    for part in (
        "pool main: 3 allocated + 0 reserved + 9 available = 12 pages of 2 tokens",
        f"history {h.id}: blocks 0..3, pages .x2 3, 2 on Host; held by ck{cid}@5",
        f"held by seq{q.id} row 0 writes at 0",
        f"slots 1:image 1@5 | 2:image 2@0 seq{q.id} | 3:free | 4:free",
        f"host [0,1) main history {h.id} block 0 x2 [1,2) main history {h.id} block 1 x2 "
        "[2,4) in flight [4,8) free",
        f"checkpoint {cid}@5: image 1, owners [1]",
        "demote pressure/CopiesInFlight: 1 copies, held [0]",
    ):
        assert part in text, (part, text)
    assert render(d.state) == text
