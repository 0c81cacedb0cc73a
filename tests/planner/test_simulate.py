"""Traces and the simulator: real decisions on a virtual clock (OBS-01, OBS-02)."""

import json
import random
from pathlib import Path

import pytest

from planner import Layout, PoolLayout
from planner.errors import PlannerError
from planner.testing import tiny_layout
from planner.world import (
    CostModel,
    Journal,
    SimulationCost,
    TraceError,
    TraceRequest,
    TransferCost,
    WorldConfig,
    load_trace,
    parse_trace,
    replay,
    simulate,
)
from planner.world.simulate import percentiles
from planner.world.trace import node_tokens

FREE = TransferCost(0, 0, 0)
COST = CostModel(FREE, FREE, FREE, token_ns=1_000_000, pair_ns=0)
STEP = SimulationCost(decode_step_ns=10_000_000, decode_row_ns=1_000_000)


def config(
    pages: int = 30, blocks: int = 10, rows: int = 2, slots: int = 8, host: int = 60
) -> WorldConfig:
    layout = tiny_layout(
        pages=pages, blocks=blocks, rows=rows, slots=slots, host=host, page_tokens=4
    )
    return WorldConfig(layout, prefill_chunk=8, cost=COST)


def line(arrival: float = 0, output: int = 1, **fields: object) -> str:
    return json.dumps({"arrival": arrival, "output": output, **fields})


def test_one_request_by_hand() -> None:
    """OBS-02: 17 prompt tokens at 1 ms, then 3 steps of 11 ms; first token after 28 ms."""
    report = simulate(parse_trace([line(output=3, prompt=list(range(18)))]), config(), STEP)
    assert report.ttft == (0.028, 0.028, 0.028)
    assert report.largest_gap == pytest.approx(0.011)
    assert report.seconds == pytest.approx(0.050)
    assert report.tokens_per_second == pytest.approx(60)
    assert (report.requests, report.completed, report.failed) == (1, 1, 0)
    assert (report.prompt_tokens, report.computed_tokens, report.output_tokens) == (18, 17, 3)
    assert (report.hit_tokens, report.replayed_tokens, report.restored_tokens) == (0, 0, 0)
    assert report.admission.p99 == 0


def test_a_conversation_continues_its_output() -> None:
    """The node "output" below a path is what was generated there: the endpoint is a hit."""
    trace = [
        line(0, 5, prefix=["system", "turn1"], lengths=[8, 4]),
        line(1, 2, prefix=["system", "turn1", "output", "turn2"], lengths=[8, 4, 5, 3]),
        line(2, 2, prefix=["system", "other"], lengths=[8, 9]),
    ]
    report = simulate(parse_trace(trace), config(), STEP)
    assert report.hit_tokens == (8 + 4 + 5 - 1) + 8  # endpoint, then the marker after "system"
    assert report.computed_tokens == report.prompt_tokens - report.hit_tokens - report.requests
    assert report.notes["saved"] >= 1
    cold = [line(i, 2, prefix=["system", "turn1"], lengths=[8, 4], cache=False) for i in range(2)]
    assert simulate(parse_trace(cold), config(), STEP).hit_tokens == 0


def test_pauses_are_counted_apart() -> None:
    """OBS-01: replayed work is no first prefill, and a pause is named by its form."""
    trace = parse_trace([line(0, 24, prompt=list(range(i, i + 12))) for i in (100, 200)])
    with_host = simulate(trace, config(pages=10, slots=4), STEP)
    without = simulate(trace, config(pages=10, slots=4, host=0), STEP)
    assert (with_host.snapshots, with_host.replays) == (1, 0)
    assert with_host.restored_tokens > 0
    assert with_host.bytes_moved["d2h"] > 0
    assert (without.snapshots, without.replays) == (0, 1)
    assert without.replayed_tokens > 0
    for report in (with_host, without):
        assert report.completed == 2
        assert report.output_tokens == 48
        assert report.computed_tokens == 22
    assert without.largest_gap > 0.1  # the stall of the paused one


def test_queueing_is_split(tmp_path: Path) -> None:
    """OBS-02: the wait for a lane and the wait for units are two numbers."""
    trace = parse_trace([line(0, 10, prompt=[i, 1, 2]) for i in range(5)])
    report = simulate(trace, config(rows=1, slots=2), STEP)
    assert report.admission.p50 > 0.2
    assert report.ttft.p99 > report.ttft.p50 > report.admission.p50
    assert report.unit_wait.p50 == 0


def test_a_simulation_is_deterministic_and_recorded(tmp_path: Path) -> None:
    """OWN-07: same trace, same report; the record replays."""
    path = tmp_path / "trace.jsonl"
    rows = [
        line(i / 50, 1 + i % 7, prefix=["s" + str(i % 3), str(i % 5)], lengths=[8, 6 + i % 5])
        for i in range(40)
    ]
    path.write_text("\n".join(rows) + "\n\n")
    trace = load_trace(path)
    with Journal(tmp_path / "r", config(pages=12)) as journal:
        one = simulate(trace, config(pages=12), STEP, journal)
    two = simulate(trace, config(pages=12), STEP)
    assert one == two
    assert one.completed == 40
    assert replay(tmp_path / "r").ok
    plain = json.loads(json.dumps(one.to_json()))
    assert plain["ttft"]["p90"] == one.ttft.p90
    assert plain["hit_tokens"] == one.hit_tokens > 0


def test_synthetic_tokens_follow_from_the_path() -> None:
    """Equal paths are equal tokens, in every process; siblings differ from the first token on."""
    assert node_tokens(["a", "b"], 3) == node_tokens(["a", "b"], 5)[:3]
    assert node_tokens(["a"], 3) == (78347, 26963, 15023)
    assert node_tokens(["a/b"], 4) != node_tokens(["a", "b"], 4)
    assert len(set(node_tokens(["a"], 1000))) > 900


def test_arrivals_are_sorted_and_markers_default_to_the_first_node() -> None:
    trace = parse_trace(
        [
            line(2.5, prompt=[1, 2], session="x"),
            line(1, prefix=["a", "b"], lengths=[3, 4]),
            line(1, prefix=["a"], lengths=[3], markers=[2]),
        ]
    )
    assert [(r.arrival, r.line) for r in trace] == [(10**9, 2), (10**9, 3), (2_500_000_000, 1)]
    assert [r.markers for r in trace] == [(3,), (2,), ()]
    assert trace[2].session == "x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 2: no JSON"),
        ("[1]", "one JSON object"),
        (line(-1, prompt=[1]), '"arrival" is -1'),
        ('{"arrival": NaN, "prompt": [1], "output": 1}', '"arrival" is nan'),
        (line(True, prompt=[1]), '"arrival" is True'),
        (line(0), 'either "prompt"'),
        (line(0, prompt=[1], prefix=["a"], lengths=[1]), 'either "prompt"'),
        (line(0, 0, prompt=[1]), '"output" is 0'),
        (line(0, prompt=[]), '"prompt" is a list of whole numbers from 0'),
        (line(0, prompt=[1, -1]), '"prompt" is a list of whole numbers from 0'),
        (line(0, prompt=[1, 2.0]), '"prompt" is a list of whole numbers from 0'),
        (line(0, prefix=["a", 1], lengths=[1, 1]), '"prefix" is a list of names'),
        (line(0, prefix=["a", "b"], lengths=[1]), "2 names"),
        (line(0, prefix=["a"], lengths=[0]), '"lengths" is a list of whole numbers from 1'),
        (line(0, prefix=["a"], lengths=[9]), "a has 9 tokens here and 3 before"),
        (line(0, prompt=[1], session=3), '"session" is a text'),
        (line(0, prompt=[1], cache=1), '"cache" true or false'),
        (line(0, prompt=[1], tokens=3), "'tokens' is unknown"),
    ],
)
def test_bad_lines_are_clear_errors(text: str, words: str) -> None:
    """A message names the line and what would be right."""
    with pytest.raises(TraceError) as error:
        parse_trace([line(0, prefix=["a"], lengths=[3]), text])
    assert "line 2: " in str(error.value)
    assert words in str(error.value)


def test_what_cannot_run_is_said_before() -> None:
    """ENG-07: too long a request, and an empty trace."""
    with pytest.raises(
        TraceError, match="line 1: prompt and output are 41 tokens, max_context is 40"
    ):
        simulate(parse_trace([line(0, 1, prompt=list(range(40)))]), config(), STEP)
    with pytest.raises(TraceError, match="holds no request"):
        parse_trace(["", "\n"])
    bad = WorldConfig(config().layout, prefill_chunk=6)
    with pytest.raises(PlannerError, match="prefill_chunk 6"):
        simulate(parse_trace([line(0, prompt=[1, 2])]), bad)


def test_nearest_rank_percentiles() -> None:
    assert percentiles([10**9 * n for n in range(1, 101)]) == (50, 90, 99)
    assert percentiles([3 * 10**9]) == (3, 3, 3)
    assert percentiles([]) == (0, 0, 0)


def crowded(seed: int) -> tuple[WorldConfig, list[TraceRequest]]:
    """60 requests that branch off each other in little memory, in pools of different page sizes."""
    draw = random.Random(seed)
    pages = draw.randint(8, 24)
    pools = tuple(
        PoolLayout(f"p{size}", pages, size) for size in draw.choice([(1,), (1, 2), (3, 1)])
    )
    layout = Layout(
        32, draw.randint(1, 3), 4, pools, draw.randint(4, 7), 3, draw.choice([12, 20, 40])
    )
    roots: list[tuple[int, ...]] = [(), (1, 2, 3, 4, 5), (1, 2, 3, 9, 9, 9, 9)]
    trace = []
    for i in range(60):
        own = tuple(draw.randint(10, 60) for _ in range(draw.randint(1, 6)))
        prompt = (draw.choice(roots) + own)[:26]
        output = tuple(draw.randint(10, 60) for _ in range(draw.randint(1, 5)))
        trace.append(TraceRequest(i * 10**7, prompt, output, draw.choice(["", "", "talk"])))
        roots = [*roots[:3], *roots[3:][-6:], (prompt + output)[:22]]
    return WorldConfig(layout, prefill_chunk=8), trace


@pytest.mark.parametrize("seed", [*range(6), 19, 26, 30, 87, 90, 91])
def test_whatever_is_short_every_request_ends(seed: int) -> None:
    """SCH-16: what finds no place on Host is given up. It ended the engine, with seeds from 19 on."""
    config, trace = crowded(seed)
    assert simulate(trace, config).completed == len(trace)
