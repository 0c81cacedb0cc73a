"""The flight recorder: exact, compact, and clear about what it cannot read (OWN-07, OBS)."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from planner.checkpoints import MediaSpan, identity
from planner.plans import Copy
from planner.testing import Ask, WorldDriver, tiny_layout
from planner.world import (
    Command,
    DecodeRow,
    Event,
    Journal,
    JournalError,
    Note,
    PublishTable,
    RowResult,
    RunDecode,
    RunTransfer,
    Submitted,
    Tick,
    UnitFinished,
    WorldConfig,
    explain,
    read,
    replay,
)
from planner.world.codec import codec

CONFIG = WorldConfig(tiny_layout(pages=8, blocks=8, rows=2, slots=4, host=20, page_tokens=4), 8)


def driven() -> WorldDriver:
    """Hits, pauses, a cancel and a failed transfer."""
    d = WorldDriver(CONFIG)
    first = tuple(range(100, 113))
    d.submit(Ask(first, 6, session="s", recovery=12, markers=(8,)))
    d.drain()
    for i in range(3):
        d.submit(Ask((*first[:10], i, i), 14, recovery=11))
    for _ in range(6):
        d.step(transfers=False)
        if d.transfer:
            d.finish_transfer(ok=len(d.log) % 3 > 0)
    d.cancel(3)
    d.settle()
    assert d.counts["Paused"]
    return d


@pytest.fixture(scope="module")
def driver() -> WorldDriver:
    return driven()


def write(path: Path, driver: WorldDriver) -> Path:
    with Journal(path, driver.world.config, flush_every=7) as journal:
        for event, commands in driver.log:
            journal.record(event, commands)
    return path


def test_round_trip_and_replay(driver: WorldDriver, tmp_path: Path) -> None:
    """OWN-07: read back equal, and a new world gives the same commands bit for bit."""
    path = write(tmp_path / "r", driver)
    record = read(path)
    assert record.config == CONFIG
    assert [(e.event, e.commands) for e in record] == [(e, c) for e, c in driver.log]
    result = replay(path)
    assert result.ok
    assert result.events == len(driver.log)
    assert not result.torn
    assert result.world == driver.world


def test_lines_are_compact(tmp_path: Path) -> None:
    """Defaults are omitted: an idle tick is a dozen bytes."""
    with Journal(tmp_path / "r", CONFIG) as journal:
        journal.record(Tick(), ())
        journal.record(Tick(), (RunDecode(3, (DecodeRow(1, 0, 5, -1, 1, 1),)),))
        journal.record(UnitFinished(3, (RowResult(1, (7,)),)), ())
    lines = (tmp_path / "r").read_text().splitlines()[1:]
    assert lines == [
        '{"e":"Tick"}',
        '{"e":"Tick","c":[{"RunDecode":{"unit":3,"rows":[[1,0,5,-1,1,1]]}}]}',
        '{"e":{"UnitFinished":{"unit":3,"rows":[[1,[7]]]}}}',
    ]


def test_a_torn_last_line_is_tolerated(driver: WorldDriver, tmp_path: Path) -> None:
    """A crash in the middle of a write loses that line and nothing else."""
    path = write(tmp_path / "r", driver)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    result = replay(path)
    assert result.ok
    assert result.torn
    assert result.events == len(driver.log) - 1
    assert "torn" in str(explain(path)[-1])


def test_the_first_difference_is_named(driver: WorldDriver, tmp_path: Path) -> None:
    """Line, command and both sides."""
    path = write(tmp_path / "r", driver)
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if "RunPrefill" in line)
    lines[number] = lines[number].replace('"length":8', '"length":7')
    path.write_text("\n".join(lines) + "\n")
    found = replay(path).difference
    assert found is not None
    assert found.line == number + 1
    assert "length=7" in found.recorded
    assert "length=8" in found.replayed
    assert f"line {number + 1}, Tick, command" in str(found)


def test_missing_and_extra_commands(driver: WorldDriver, tmp_path: Path) -> None:
    """One side may have nothing to show."""
    path = tmp_path / "r"
    with Journal(path, CONFIG) as journal:
        event, commands = driver.log[0]
        journal.record(event, (*commands, Note(1, "saved", "not true")))
    found = replay(path).difference
    assert found is not None
    assert found.replayed == "nothing"
    assert "not true" in found.recorded


def test_errors_of_advance_are_recorded(tmp_path: Path) -> None:
    """What the planner died of is on disk, and a replay dies of it too."""
    path = tmp_path / "r"
    d = WorldDriver(CONFIG)
    journal = Journal(path, CONFIG)
    world, _ = journal.advance(d.world, Tick())
    with pytest.raises(Exception, match="tickets grow"):
        journal.advance(world, Submitted(-1, identity([1, 2]), 1))
    result = replay(path)  # before `close`: an error is flushed at once
    journal.close()
    assert result.ok
    assert result.events == 1
    assert "tickets grow" in result.error
    assert "tickets grow" in str(explain(path)[-1])
    path.write_text(path.read_text().replace("tickets grow", "tickets shrink"))
    assert not replay(path).ok


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2: no JSON"),
        ("[]", "line 2: no JSON object"),
        ('{"e":"Tick","z":1}', "line 2: 'z' is unknown"),
        ('{"e":"Tock"}', "line 2: 'Tock' is unknown here; this version knows CacheCleared"),
        (
            '{"e":{"Cancelled":{"requets":1}}}',
            "line 2: Cancelled: Cancelled has no field 'requets'",
        ),
        ('{"e":{"Cancelled":{}}}', "line 2: Cancelled: Cancelled lacks its field 'request'"),
        ('{"e":{"Cancelled":{"request":"1"}}}', "line 2: Cancelled: request: int expected"),
        ('{"e":{"Cancelled":{"request":true}}}', "int expected, found True"),
        ('{"e":{"UnitFinished":{"unit":1,"rows":[[1,[2,"x"]]]}}}', "rows: item 0: tokens: item 1"),
        ('{"e":{"UnitFinished":{"unit":1,"rows":[[]]}}}', "a list of 1 to 3 fields"),
        ('{"e":{"UnitFinished":{"unit":1,"rows":[[1,[],"gone"]]}}}', "one of \\('', 'finished'"),
        ('{"e":"Tick","c":"Note"}', "a list of commands"),
        ('{"e":"Tick","c":[{"Note":{"request":1,"kind":"x"}}]}', "lacks its field 'text'"),
    ],
)
def test_wrong_lines_are_clear_errors(tmp_path: Path, line: str, words: str) -> None:
    """The file, the line, the place in it, and what would be right."""
    path = tmp_path / "r"
    Journal(path, CONFIG).close()
    path.write_text(path.read_text() + line + "\n" + '{"e":"Tick"}\n')
    with pytest.raises(JournalError, match=words):
        list(read(path))


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("", "no planner record"),
        ('{"format":1', "no planner record"),
        ('{"format":2,"config":{}}\n', "format 2, this version reads 1"),
        ('{"format":1,"config":{}}\n', "line 1: WorldConfig lacks its field 'layout'"),
    ],
)
def test_wrong_headers(tmp_path: Path, head: str, words: str) -> None:
    path = tmp_path / "r"
    path.write_text(head)
    with pytest.raises(JournalError, match=words):
        read(path)


def test_the_types_are_closed() -> None:
    """Nothing foreign gets in, on either side; and there is no silent conversion."""
    import numpy as np

    events = codec(Event)
    commands = codec(Command)
    for wrong in (Note(1, "x", "y"), object(), None):
        with pytest.raises(JournalError, match="expected"):
            events.encode(wrong)
    with pytest.raises(JournalError, match="pages: item 1: int expected"):
        commands.encode(PublishTable(0, 0, (1, np.int64(2))))  # type: ignore[arg-type]
    with pytest.raises(JournalError, match="a tuple expected"):
        commands.encode(PublishTable(0, 0, [1]))  # type: ignore[arg-type]

    @dataclass
    class Odd:
        values: list[int]

    with pytest.raises(JournalError, match="no type that a journal can hold"):
        codec(Odd)
    with pytest.raises(JournalError, match="flush_every is 0"):
        Journal("/nowhere", CONFIG, flush_every=0)


def test_values_keep_their_bits() -> None:
    """Identities with every field, floats, long bytes (deflated) and short ones."""
    import numpy as np

    where = np.arange(900, dtype="<i4").reshape(300, 3)
    odd = identity(
        list(range(300)), types=[1] * 300, positions=where, spans=[MediaSpan(3, 5, b"\x00\xff")],
        rope_delta=-4, mode="think", splits=[7, 9],
    )  # fmt: skip
    events, commands = codec(Event), codec(Command)
    submitted = Submitted(3, odd, 5, cache=False, session="ä\n", anchors=(1, 2))
    text = json.dumps(events.encode(submitted))
    assert len(text) < 3000
    assert events.decode(json.loads(text)) == submitted
    moved = RunTransfer(
        4, (Copy("image", "init", -1, 0, 2, 3), Copy("page", "h2d", 0, 1, 2, 3, keep=True))
    )
    assert commands.decode(json.loads(json.dumps(commands.encode(moved)))) == moved
    config = codec(WorldConfig)
    assert config.decode(json.loads(json.dumps(config.encode(CONFIG)))) == CONFIG


def test_explain_tells_one_life_in_order(driver: WorldDriver, tmp_path: Path) -> None:
    """Why it started where it did, for whom it paused, how it ended; and nothing of others."""
    path = write(tmp_path / "r", driver)
    lines = explain(path, 2)
    assert {line.request for line in lines} == {2}
    assert [line.line for line in lines] == sorted(line.line for line in lines)
    words = [line.text for line in lines]
    assert words[0] == "submitted: 12 prompt tokens, at most 14 output tokens; recovery point 11"
    assert "admitted to lane" in words[1]
    assert words[-1] == "finished"
    everything = explain(path)
    assert {line.request for line in everything} >= {0, 1, 2, 3, 4}
    assert any("paused (" in line.text for line in everything)
    assert "cancel asked for" in [line.text for line in everything if line.request == 3]
    assert str(everything[0]).strip().startswith("2  request 1: submitted")
    assert explain(path, 77) == []
