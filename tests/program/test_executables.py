"""Executables on disk: a second start finds the first one's, and nothing else ever does."""

import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ninfer_jax as nj
from ninfer_jax.config import EngineConfig
from ninfer_jax.program import executables, startup
from ninfer_jax.program.executables import Unit
from ninfer_jax.program.plans import SamplingRows
from ninfer_jax.program.program import Program
from ninfer_jax.scoring.scorer import Scorer
from ninfer_jax.scoring.windows import Span
from planner import Copy
from planner.world import DecodeRow, PublishTable, RunDecode, RunPrefill, RunTransfer

DEVICE = jax.devices()[0]
ARGS = (jax.ShapeDtypeStruct((4,), np.int32),)
UNITS = {
    "decode", "take", "prefill", "place", "prompt_logprobs", "sample_plain", "sample", "token_logprobs", "install_row",
    "gather_pages", "scatter_pages", "gather_images", "scatter_images",
}  # fmt: skip
OPTIONS = {
    "max_context": 128, "max_concurrency": 2, "kv_capacity": 3 * 64, "device_state_slots": 1,
    "host_capacity_bytes": 1 << 20, "prefill_chunk": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _settled(monkeypatch):
    """Sources may have been edited right before this run: as if they were imported a minute from now."""
    clear = executables._sources.cache_clear
    clear()
    monkeypatch.setattr(executables, "_IMPORTED", time.time() + 60)
    yield
    clear()


@pytest.fixture
def events():
    """What JAX reports, lowering and compilation among it, each with the name of the function."""
    seen = []
    listen = lambda name, *_, fun_name="", **__: seen.append((name, fun_name))  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def made(events):
    """Names of the functions that were lowered or compiled since the last call."""
    names = {fun for name, fun in events if "mlir_module" in name or "backend_compile" in name}
    events.clear()
    return names


def get(folder, *, args=ARGS, options=None, depends_on="model"):
    """Whether a fresh unit that adds 1 is right on zeros."""
    unit = Unit(jax.jit(lambda x: x + 1), args)
    (done,) = executables.compiled(
        {"add/4": unit}, DEVICE, options or {}, depends_on, folder
    ).values()
    return np.asarray(done(jnp.zeros(args[0].shape, args[0].dtype))).tolist() == [1] * 4


def run(program):
    """The bits of every kind of unit's results."""
    rows = program.limits.max_concurrency
    tokens = np.arange(50, dtype=np.int32)
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    none = np.zeros(rows, np.int32)
    sampling = SamplingRows(
        ones, none, ones, zeros, zeros, zeros, ones, np.ones((rows, 2), np.uint32)
    )
    program.publish_table(PublishTable(0, 0, (1,)))
    first = program.prefill(RunPrefill(0, 0, 0, 0, 20, 1, 1), tokens[:20])
    hidden = program.prefill(RunPrefill(0, 0, 0, 20, 30, 1, 1), tokens[20:])
    out = [first, hidden, program.prompt_logprobs(hidden, tokens[20:])]
    there = (Copy("page", "d2h", 0, 1, 0, 0), Copy("image", "d2h", -1, 1, 1 << 19, 0))
    program.start_transfer(RunTransfer(1, there)).complete()
    back = (Copy("page", "h2d", 0, 0, 2, 0), Copy("image", "h2d", -1, 1 << 19, 2, 0))
    program.start_transfer(RunTransfer(2, back)).complete()
    program.publish_table(PublishTable(1, 0, (2,)))
    for position in range(50, 53):  # state is donated and handed on
        lanes = [
            DecodeRow(0, i, position, 7 if position == 50 else -1, i + 1, i + 1) for i in (0, 1)
        ]
        step = program.decode(RunDecode(0, tuple(lanes)))
        drawn = program.sample(step.logits, sampling)
        # The next step takes the memory of these logits.
        out += jax.tree.map(np.asarray, [step, drawn])
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((out, program._state))]


def test_a_second_program_loads_what_the_first_one_kept(goldens, tmp_path, events):
    """CAP-21: no unit is lowered or compiled, transfers' among them; state is donated; equal bits."""
    model = nj.load_model(goldens / "tiny-qwen3.5-dense")
    limits = startup.resolve(EngineConfig(**OPTIONS), model.config, startup.measure())
    plain = Program(model, limits)
    expected, memory = run(plain), plain.memory()
    plain.close()
    jax.clear_caches()  # of this process: as if it had just begun
    made(events)
    first = Program(model, limits, tmp_path / "units")
    units = {f"jit({name})" for name in UNITS}
    assert made(events) >= units
    assert len(list((tmp_path / "units").iterdir())) == len(first._units)
    jax.clear_caches()
    second = Program(model, limits, tmp_path / "units")
    assert not made(events) & units
    given = second._state
    assert run(second) == run(first) == expected
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    assert not made(events) & units
    assert second.memory().keys() == memory.keys()
    assert second.memory()["workspace"] == memory["workspace"]
    first.close()
    second.close()


def test_a_second_scorer_loads_what_the_first_one_kept(goldens, tmp_path, monkeypatch, events):
    """All units at a start, one by one beside a generating engine: not lowered again, with equal bits."""
    monkeypatch.setattr(startup, "keep_executables", lambda: tmp_path / "units")
    model = nj.load_model(goldens / "tiny-qwen3.5-dense")
    spans = [Span(np.arange(n, dtype=np.int32), 1, 0) for n in (3, 71)]
    scores = []
    for prepares in (True, True, False):
        jax.clear_caches()
        made(events)
        scorer = Scorer(model, max_context=128, prefill_chunk=64)
        if prepares:
            scorer.prepare()
        scores.append([result.logprobs.tobytes() for result in scorer.run(spans)])
        assert ("jit(score)" in made(events)) is (len(scores) == 1)
        scorer.close()
    assert scores[0] == scores[1] == scores[2]


def test_another_model_of_the_same_shapes_shares_nothing(goldens, tmp_path, monkeypatch):
    """INV-09: so do other limits."""
    model = nj.load_model(goldens / "tiny-qwen3.5-dense")
    limits = startup.resolve(EngineConfig(**OPTIONS), model.config, startup.measure())
    more = startup.resolve(
        EngineConfig(**OPTIONS | {"host_capacity_bytes": 2 << 20}), model.config, startup.measure()
    )
    other = replace(model, config=replace(model.config, rms_norm_eps=2 * model.config.rms_norm_eps))
    names = []

    def instead(*given):
        names.append(set(executables._paths(*given).values()))
        raise StopIteration

    monkeypatch.setattr(executables, "compiled", instead)
    for pair in ((model, limits), (model, limits), (other, limits), (model, more)):
        with pytest.raises(StopIteration):
            Program(*pair, tmp_path)
    same, again, *others = names
    assert same == again
    assert same
    assert all(same.isdisjoint(paths) for paths in others)


@pytest.mark.parametrize(
    "change",
    ["nothing", "source", "argument", "options", "depends_on", "config", "variable"],
)
def test_what_decides_the_code_decides_the_entry(change, tmp_path, monkeypatch, events):
    """INV-09: an executable of something else would be silent corruption."""
    assert get(tmp_path)
    assert made(events)
    given = {}
    if change == "source":
        monkeypatch.setattr(executables, "_sources", lambda: "another")
    elif change == "argument":
        given["args"] = (jax.ShapeDtypeStruct((4,), np.float32),)
    elif change == "options":
        given["options"] = {"xla_cpu_enable_fast_math": False}
    elif change == "depends_on":
        given["depends_on"] = "another model"
    elif change == "variable":
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_dump_to=")
    if change == "config":
        with jax.default_matmul_precision("highest"):
            assert get(tmp_path)
    else:
        assert get(tmp_path, **given)
    assert bool(made(events)) == (change != "nothing")


def test_a_changed_source_is_another_digest(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "a.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(executables, "PACKAGES", ("some_package",))
    (package / "__init__.py").write_text("")

    def digest():
        executables._sources.cache_clear()
        return executables._sources()

    before = digest()
    assert digest() == before
    (package / "inner" / "a.py").write_text("x = 2\n")
    assert digest() != before
    (package / "inner" / "a.py").write_text("x = 1\n")
    assert digest() == before
    (package / "inner" / "a.py").rename(package / "a.py")
    assert digest() != before


def test_sources_that_may_not_be_what_was_imported_keep_nothing(
    tmp_path, monkeypatch, caplog, events
):
    """An edit of a running process's sources must not give the old code the new code's name."""
    assert get(tmp_path)
    executables._sources.cache_clear()
    newest = max(p.stat().st_ctime for p in Path(executables.__file__).parent.glob("*.py"))
    monkeypatch.setattr(executables, "_IMPORTED", newest + 9)
    made(events)
    for _ in range(2):
        assert get(tmp_path)
        assert made(events)
    assert "changed as this process started" in caplog.text
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "not one of ours"])
def test_a_damaged_entry_is_dropped_and_made_anew(damage, tmp_path, caplog, events):
    assert get(tmp_path)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    entry.write_bytes(
        {"empty": b"", "truncated": whole[:-1], "flipped": bytes(flipped), "not one of ours": whole[32:]}[damage]
    )  # fmt: skip
    made(events)
    assert get(tmp_path)
    assert made(events)
    assert "compiled anew" in caplog.text
    assert get(tmp_path)
    assert not made(events)


def test_where_nothing_can_be_kept_units_run_all_the_same(tmp_path, monkeypatch, caplog, events):
    blocked = tmp_path / "file"
    blocked.write_text("")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for folder in (blocked, blocked / "below", open_to_all):
        caplog.clear()
        for times in (1, 2):
            assert get(folder)
            assert made(events)
            assert caplog.text.count("executables are not kept") == times
    assert not list(open_to_all.iterdir())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(executables.tempfile, "NamedTemporaryFile", full)
    assert get(tmp_path / "new")
    assert "No space left" in caplog.text


def test_the_folder_is_the_users_own(tmp_path):
    assert get(tmp_path / "a" / "units")
    assert stat.S_IMODE((tmp_path / "a" / "units").stat().st_mode) == 0o700
    (entry,) = (tmp_path / "a" / "units").iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_entries_used_longest_ago_make_room(tmp_path, monkeypatch, events):
    for i in range(3):
        assert get(tmp_path, depends_on=i)
        (newest,) = (p for p in tmp_path.iterdir() if p.stat().st_mtime > 3)
        os.utime(newest, (1 + i, 1 + i))
    size = newest.stat().st_size
    assert get(tmp_path, depends_on=0)  # used again
    monkeypatch.setattr(executables, "LIMIT_BYTES", int(3.5 * size))
    assert get(tmp_path, depends_on=3)
    assert len(list(tmp_path.iterdir())) == 3
    made(events)
    assert [get(tmp_path, depends_on=i) and not made(events) for i in (0, 2, 3)] == [True] * 3
    get(tmp_path, depends_on=1)
    assert made(events)


PROCESS = """
import sys, time
from pathlib import Path
import jax, numpy as np
from ninfer_jax.program import executables
from ninfer_jax.program.plans import SamplingRows
executables._IMPORTED = time.time() + 60
keep = executables._keep
def when_told(units):
    print("ready", flush=True)
    sys.stdin.readline()
    keep(units)
executables._keep = when_told
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
rows = SamplingRows(*[jax.ShapeDtypeStruct((2,), np.float32)] * 8)
unit = executables.Unit(jax.jit(lambda r: jax.tree.map(lambda x: x * 2, r)), (rows,))
units = {f"double/{i}": unit for i in range(20)}
done = executables.compiled(units, jax.devices()[0], {}, "model", Path(sys.argv[1]))
ones = SamplingRows(*[np.ones(2, np.float32)] * 8)
print(sum("mlir_module" in e for e in events))
assert all(np.all(np.asarray(x) == 2) for u in done.values() for x in jax.tree.leaves(u(ones)))
"""


def test_processes_share_a_folder(tmp_path):
    """Two that write at once leave whole entries, and a third, whose hashes are seeded otherwise, finds all of them."""

    def begin(seed):
        return subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path)], text=True, cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONHASHSEED": str(seed)},
        )  # fmt: skip

    with begin(1) as one, begin(2) as two:
        assert [p.stdout.readline() for p in (one, two)] == ["ready\n"] * 2
        for process in (one, two):
            process.stdin.write("\n")
            process.stdin.flush()
        assert all(int(p.stdout.read()) > 0 for p in (one, two))
    assert one.returncode == two.returncode == 0
    assert len(list(tmp_path.iterdir())) == 20
    with begin(3) as three:
        assert int(three.stdout.read()) == 0
    assert three.returncode == 0
