"""The program's calls: slots, tables, chained tokens and transfers among units, on the tiny checkpoints."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import ninfer_jax as nj
from ninfer_jax.config import EngineConfig
from ninfer_jax.errors import EngineFailure
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program import sampler, startup, units
from ninfer_jax.program.plans import DecodePlan, PrefillPlan, SamplingRows
from planner import Copy
from planner.world import DecodeRow, PublishTable, RunDecode, RunPrefill, RunTransfer

C = 3
OPTIONS = {
    "max_context": 320, "max_concurrency": C, "kv_capacity": 15 * 64, "device_state_slots": 4,
    "host_capacity_bytes": 4 << 20, "prefill_chunk": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(goldens):
    return nj.load_model(goldens / "tiny-qwen3.5-dense")


@pytest.fixture(scope="module")
def program(model):
    program = startup.start(model, EngineConfig(**OPTIONS))
    yield program
    program.close()


@pytest.fixture(scope="module")
def ids(model):
    return np.random.default_rng(0).integers(0, 1000, 300).astype(np.int32)


def prefill(program, ids, lane, start, end, read, write=None):
    """Run ids[start:end] in one unit; returns the last hidden state."""
    command = RunPrefill(0, 0, lane, start, end - start, read, write or read)
    return np.asarray(program.prefill(command, ids[start:end]))[end - start - 1]


def row(lane, position, token, read, write=None, replay=False):
    return DecodeRow(0, lane, position, token, read, write or read, replay)


def decode(program, *rows):
    return np.asarray(program.decode(RunDecode(0, rows)).logits)


def transfer(program, *copies):
    program.start_transfer(RunTransfer(0, copies)).complete()


def image(program, slot):
    return [np.asarray(x[slot]).tobytes() for x in jax.tree.leaves(program._state.images)]


def test_a_fork_runs_as_a_copy_would_bit_for_bit(program, ids):
    """ST-04, ST-07, ST-08: the first unit reads one slot and writes another; the source stays what it was."""
    program.publish_table(PublishTable(0, 0, (9, 4)))
    prefill(program, ids, 0, 0, 100, 1)
    source = image(program, 1)
    # Two lanes share the full page 9 and own copies of the tail page 4 (KV-36).
    transfer(
        program,
        Copy("page", "d2d", 0, 4, 7, 0), Copy("page", "d2d", 0, 4, 2, 0), Copy("image", "d2d", -1, 1, 5, 0),
    )  # fmt: skip
    program.publish_table(PublishTable(1, 0, (9, 7, 3)))
    program.publish_table(PublishTable(2, 0, (9, 2, 8)))
    forked = prefill(program, ids, 1, 100, 180, 1, 6)
    copied = prefill(program, ids, 2, 100, 180, 5)
    assert np.array_equal(forked, copied)
    assert image(program, 6) == image(program, 5) != source
    assert image(program, 1) == source
    # The same once more, in decode, both in one unit next to each other.
    transfer(program, Copy("image", "d2d", -1, 1, 5, 0))
    logits = decode(program, row(1, 100, 17, 1, 7), row(2, 100, 17, 5))
    assert np.array_equal(logits[1], logits[2])
    assert image(program, 7) == image(program, 5) != source
    assert image(program, 1) == source


@pytest.mark.parametrize("tokens", [1, 3])
def test_position_0_reads_zeros_whatever_the_slot_holds(program, ids, tokens):
    """ST-03: in prefill and in decode; NaN of who was there before does not get through."""
    program.publish_table(PublishTable(0, 0, (3,)))
    want = None
    for content in (0.0, np.nan, 7.0):
        filled = jax.tree.map(lambda x, c=content: x.at[2].set(c), program._state.images)
        program._state = replace(program._state, images=filled)
        transfer(program, Copy("image", "init", -1, 0, 2, 0))
        if tokens > 1:
            prefill(program, ids, 0, 0, tokens - 1, 2)
        logits = decode(program, row(0, tokens - 1, int(ids[tokens - 1]), 2))[0]
        got = logits.tobytes(), image(program, 2)
        want = want or got
        assert got == want
        assert np.isfinite(logits).all()


def test_a_row_does_not_depend_on_lane_slots_pages_or_neighbours(program, ids):
    """INV-13, KV-12, KV-24: bit for bit."""
    want = None
    for lane, slot, pages in ((0, 1, (1, 2)), (2, 7, (15, 3)), (1, 4, (8, 14))):
        program.publish_table(PublishTable(lane, 0, pages))
        prefill(program, ids, lane, 0, 70, slot)
        alone = decode(program, row(lane, 70, 5, slot))[lane]
        want = alone if want is None else want
        assert np.array_equal(alone, want)
    rows = [row(0, 70, 5, 1), row(2, 70, 5, 7), row(1, 70, 5, 4)]
    for lane, slot in ((0, 1), (2, 7), (1, 4)):  # the step above moved the states on
        prefill(program, ids, lane, 0, 70, slot)
    together = decode(program, *rows)
    for lane in range(C):
        assert np.array_equal(together[lane], want)


def test_a_table_is_taken_by_value(program, ids):
    """KV-33: publishing after a launch does not change the unit that runs."""
    want = None
    for late in (False, True):
        program.publish_table(PublishTable(0, 0, (1, 2, 3)))
        hidden = program.prefill(RunPrefill(0, 0, 0, 0, 128, 1, 1), ids[:128])
        row_in_flight = program._tables.row(0)
        if late:
            program.publish_table(PublishTable(0, 0, (4, 5, 6)))
            program.publish_table(PublishTable(0, 0, (1, 2, 3)))
        logits = program.decode(RunDecode(0, (row(0, 128, 9, 1),))).logits
        if late:
            program.publish_table(PublishTable(0, 0, ()))
        assert row_in_flight.tolist() == [1, 2, 3, 0, 0]
        got = np.asarray(hidden), np.asarray(logits)[0]
        want = want or got
        assert np.array_equal(got[0], want[0])
        assert np.array_equal(got[1], want[1])


def test_a_published_slice_ends_the_row(program):
    """KV-24, KV-33: one contiguous slice; what follows it is null."""
    program.publish_table(PublishTable(2, 0, (3, 1, 2)))
    program.publish_table(PublishTable(2, 1, (7,)))
    assert program._tables.row(2).tolist() == [3, 7, 0, 0, 0]
    program.publish_table(PublishTable(2, 2, (8, 9)))
    assert program._tables.row(2).tolist() == [3, 7, 8, 9, 0]


def test_a_plan_holds_its_rows_and_nothing_of_the_others(program):
    """KV-33: a copy of what is published, here one step on."""
    program.publish_table(PublishTable(0, 0, (5,)))
    program.publish_table(PublishTable(2, 0, (3, 7, 8, 9)))
    program.decode(RunDecode(0, (row(2, 200, -1, 6, 4, replay=True),)))
    program.decode(RunDecode(0, (row(2, 201, 17, 4),)))
    want = {
        "forced": [0, 0, -1], "positions": [0, 0, 202], "read_slots": [0, 0, 4], "write_slots": [0, 0, 4],
        "counted": [0, 0, 1], "sampled": [0, 0, 1], "block_tables": [[0] * 5, [0] * 5, [3, 7, 8, 9, 0]],
    }  # fmt: skip
    program.publish_table(PublishTable(2, 0, (1,)))
    for plan in program._following:
        assert {name: getattr(plan, name).tolist() for name in want} == want


def test_the_plan_that_follows_is_the_same_on_the_host_and_on_the_device():
    """Every field differs, rows that do not run among them."""
    plan = DecodePlan.null(4, 2)
    plan.forced[:] = [-1, 17, 0, 5]
    plan.positions[:] = [200, 63, 0, 9]
    plan.read_slots[:], plan.write_slots[:] = [4, 2, 0, 3], [6, 2, 0, 3]
    plan.counted[:] = [1, 1, 0, 0]  # the last one replays
    plan.block_tables[:] = [[3, 7], [8, 0], [0, 0], [5, 0]]
    want = {
        "forced": [-1, -1, 0, -1], "positions": [201, 64, 0, 10], "read_slots": [6, 2, 0, 3],
        "write_slots": [6, 2, 0, 3], "counted": [1, 1, 0, 1], "sampled": [1, 1, 0, 0],
        "block_tables": plan.block_tables.tolist(),
    }  # fmt: skip
    for after in (plan.following(), jax.jit(DecodePlan.following)(plan)):
        assert {name: getattr(after, name).tolist() for name in want} == want
        assert all(x.dtype == np.int32 for x in jax.tree.leaves(after))


@pytest.mark.parametrize(
    "change",
    [{}, {"position": 24}, {"token": 3}, {"lanes": (2,)}, {"slot": 2}, {"replay": True}, "table"],
)
def test_a_step_that_goes_on_as_before_copies_nothing_to_the_device(program, change):
    """What the host wants to run decides; the plan on the device is used where it is equal."""
    program.publish_table(PublishTable(0, 0, (5, 6)))
    program.publish_table(PublishTable(2, 0, (3, 7)))

    def step(position, token=-1, lanes=(0, 2), slot=1, replay=False):
        rows = [row(lane, position, token, slot + lane, replay=replay) for lane in lanes]
        program.decode(RunDecode(0, tuple(rows)))

    step(20, 9)
    no_copies = partial(jax.transfer_guard_host_to_device, "disallow_explicit")
    with no_copies():
        step(21)
        step(22)
    if change == "table":
        program.publish_table(PublishTable(2, 2, (9,)))
        change = {"slot": 1}
    refused = pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device")
    with refused if change else nullcontext(), no_copies():
        step(**({"position": 23} | change))


def test_what_a_step_donates_stays_where_it_was(program):
    """Or a launched graph would have to be updated."""

    def places():
        kept = (program._state, program._following[1], program._logits)
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(kept)]

    program.publish_table(PublishTable(0, 0, (5, 6)))
    decode(program, row(0, 20, 9, 1))
    before = places()
    decode(program, row(0, 21, -1, 1))
    decode(program, row(0, 22, -1, 1))
    assert places() == before


@pytest.mark.parametrize("unit", ["sample_plain", "sample"])
def test_a_sample_is_drawn_for_the_position_after_the_token(program, model, ids, unit):
    """Seed and position decide a draw: that of the first token after a prompt of n is n (numeric_formats)."""
    V = model.config.vocab_size
    program.install_row(
        0, counts=np.zeros(V, np.int32), prompt=np.zeros(V, bool), bias=np.zeros(V, np.float32)
    )
    program.publish_table(PublishTable(0, 0, (5, 6)))
    prefill(program, ids, 0, 0, 20, 1)
    temperature, seed = np.full(C, 3, np.float32), np.full((C, 2), 11, np.uint32)
    rows = neutral(temperature=temperature, seed=seed)
    for position in range(20, 26):
        logits = program.decode(RunDecode(0, (row(0, position, 7, 1),))).logits
        want = sampler.draw(logits, rows, jax.numpy.full(C, position + 1))
        drawn = getattr(program, unit)(logits, rows)
        assert int(drawn[0, 0]) == int(want[0])


def test_the_next_step_continues_with_what_was_sampled(program, ids):
    """Which is what the logits say, greedy or drawn."""
    program.publish_table(PublishTable(0, 0, (1, 2)))
    prefill(program, ids, 0, 0, 20, 1)
    one = program.decode(RunDecode(0, (row(0, 20, 7, 1),)))
    first, likeliest = int(one.sampled[0, 0]), int(np.argmax(one.logits[0]))
    assert first == likeliest
    chained = np.asarray(program.decode(RunDecode(0, (row(0, 21, -1, 1, 2),))).logits[0])
    forced = program.decode(RunDecode(0, (row(0, 21, first, 1, 3),)))
    assert np.array_equal(forced.logits[0], chained)
    seed = np.full((C, 2), 5, np.uint32)
    drawing = neutral(temperature=np.full(C, 9, np.float32), seed=seed)
    drawn = [f(forced.logits, drawing) for f in (program.sample_plain, program.sample)]
    assert np.array_equal(*drawn)
    assert int(drawn[0][0, 0]) != int(np.argmax(forced.logits[0]))


def neutral(**changes):
    ones, zeros = np.ones(C, np.float32), np.zeros(C, np.float32)
    none, seed = np.zeros(C, np.int32), np.zeros((C, 2), np.uint32)
    return SamplingRows(zeros, none, ones, zeros, zeros, zeros, ones, seed).replace(**changes)


def test_a_step_says_which_rows_are_not_finite(model):
    """Of the rows that ran and of those that sat out; only the former sample."""
    head, embed = model.params.lm_head, model.params.embed
    head = embed if head is None else head
    params = model.params.replace(lm_head=head, embed=embed.at[5].set(np.nan))
    state = new_device_state(model.config, pages=4, slots=4, dtype=jax.numpy.float32)
    plan = DecodePlan.null(4, 1)
    plan.forced[:] = [5, 6, -1, -1]
    plan.write_slots[:] = plan.read_slots[:] = plan.block_tables[:, 0] = [1, 2, 3, 4]
    plan.counted[:] = [1, 1, 1, 0]
    sampled = np.array([[8, 9, 5, 5], [1, 1, 1, 1]], np.int32)
    step = jax.jit(partial(units.decode, model.config))
    *_, (logits, after) = step(
        params, state, plan, np.zeros((4, model.config.vocab_size), np.float32), sampled
    )
    tokens, healthy = np.asarray(after).tolist()
    assert healthy == np.isfinite(logits).all(axis=1).tolist() == [False, True, False, False]
    assert tokens[1] == np.argmax(logits[1])
    assert tokens[3] == 5


@pytest.mark.parametrize(
    ("sampler", "temperature"),
    [("greedy", 0), ("plain", 0), ("plain", 1), ("full", 0), ("full", 1)],
)
def test_lanes_that_sit_out_keep_what_they_sampled(program, model, ids, sampler, temperature):
    """ST-10: a null or replay row neither changes the token a lane continues with, nor counts."""
    V = model.config.vocab_size
    rows = neutral(temperature=np.full(C, temperature, np.float32))
    full = sampler == "full"

    def sample(decoded):
        logits, sampled = decoded
        if full:
            sampled = program.sample(logits, rows)
        elif sampler == "plain":
            sampled = program.sample_plain(logits, rows)
        tokens, healthy = np.asarray(sampled)
        assert healthy.all()
        return tokens

    for lane, slot in ((0, 1), (1, 2)):
        program.install_row(
            lane,
            counts=np.zeros(V, np.int32),
            prompt=np.zeros(V, bool),
            bias=np.zeros(V, np.float32),
        )
        program.publish_table(PublishTable(lane, 0, (1 + 2 * lane, 2 + 2 * lane)))
        prefill(program, ids[lane:], lane, 0, 20, slot)
    decoded = program.decode(RunDecode(0, (row(0, 20, 7, 1), row(1, 20, 8, 2))))
    first = sample(decoded)
    likeliest = np.argmax(decoded.logits, axis=1)
    assert (first[:2] == likeliest[:2]).all() == (temperature == 0)
    assert np.asarray(decoded.sampled)[0, :2].tolist() == likeliest[:2].tolist()
    # Lane 1 runs on alone; lane 0 sits out once and replays once, elsewhere.
    sample(program.decode(RunDecode(0, (row(1, 21, -1, 2),))))
    program.publish_table(PublishTable(2, 0, (9, 10)))
    second = sample(program.decode(RunDecode(0, (row(0, 0, 3, 5, replay=True), row(1, 22, -1, 2)))))
    assert second[0] == first[0]
    counts = np.asarray(program._sampler.counts).sum(axis=1)
    assert counts[:2].tolist() == ([1, 3] if full else [0, 0])
    # Chained: what lane 0 sampled first. Its pages were written over by the replay, so start again.
    logits = []
    for token in (-1, int(first[0])):
        prefill(program, ids, 0, 0, 20, 1)
        logits.append(decode(program, row(0, 20, token, 1))[0])
    assert np.array_equal(*logits)


def test_transfers_among_units(program, ids):
    """DEV-05, TX-09, KV-22, KV-23: a position leaves and comes back elsewhere while others run; nothing changes."""
    size = {
        "page": program.limits.layout.pools[0].page_bytes,
        "image": program.limits.layout.image_bytes,
    }
    for lane, slot, pages in ((0, 1, (1, 2, 3)), (1, 2, (4, 5, 6))):
        program.publish_table(PublishTable(lane, 0, pages))
        prefill(program, ids[10 * lane :], lane, 0, 100, slot)

    def steps(lane, slot, count):
        return [decode(program, row(lane, 100 + i, 11 + i, slot))[lane] for i in range(count)]

    want = steps(0, 1, 3)
    prefill(program, ids, 0, 0, 100, 1)
    leave = program.start_transfer(
        RunTransfer(
            1,
            (
                Copy("image", "d2h", -1, 1, 2 * size["page"], 0),
                Copy("page", "d2h", 0, 1, size["page"], 0),
                Copy("page", "d2h", 0, 2, 0, 0),
            ),
        )
    )
    other = steps(1, 2, 2)
    # What left is overwritten at once: the copies were launched before.
    program.publish_table(PublishTable(0, 0, (1, 2, 3)))
    prefill(program, ids[50:], 0, 0, 100, 1)
    leave.complete()
    come = program.start_transfer(
        RunTransfer(
            2,
            (
                Copy("image", "h2d", -1, 2 * size["page"], 6, 0),
                Copy("page", "h2d", 0, size["page"], 12, 0),
                Copy("page", "h2d", 0, 0, 7, 0),
            ),
        )
    )
    other += [decode(program, row(1, 102, 13, 2))[1]]
    come.complete()
    program.publish_table(PublishTable(2, 0, (12, 7, 8)))
    assert all(map(np.array_equal, steps(2, 6, 3), want))
    prefill(program, ids[10:], 1, 0, 100, 2)
    assert all(map(np.array_equal, steps(1, 2, 3), other))


def test_callers_may_change_their_arrays_after_a_call(program, model, ids):
    """OWN-08, KV-32: units read copies."""
    V = model.config.vocab_size
    program.publish_table(PublishTable(0, 0, (1, 2)))
    mine, counts = ids[:64].copy(), np.zeros(V, np.int32)
    hidden = program.prefill(RunPrefill(0, 0, 0, 0, 64, 1, 1), mine)
    scored = program.prompt_logprobs(hidden, mine)
    mine[:] = 0
    rows = program.put(neutral(temperature=np.ones(C, np.float32)))
    logits = program.decode(RunDecode(0, (row(0, 64, 7, 1),))).logits
    program.install_row(0, counts=counts, prompt=np.zeros(V, bool), bias=np.zeros(V, np.float32))
    counts[:] = 9
    sampled = program.sample(logits, rows)
    again = program.prefill(RunPrefill(0, 0, 0, 0, 64, 1, 1), ids[:64])
    assert np.array_equal(np.asarray(hidden), np.asarray(again))
    rescored = program.prompt_logprobs(again, ids[:64])
    assert np.array_equal(np.asarray(scored.logprob), np.asarray(rescored.logprob))
    resampled = program.sample(logits, rows)
    assert np.array_equal(np.asarray(sampled), np.asarray(resampled))
    assert np.asarray(program._sampler.counts)[0].sum() == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.publish_table(PublishTable(C, 0, (1,))),
        lambda p: p.publish_table(PublishTable(0, 4, (1, 2))),
        lambda p: p.publish_table(PublishTable(0, 0, (0,))),
        lambda p: p.publish_table(PublishTable(0, 0, (16,))),
        lambda p: p.decode(RunDecode(0, (row(0, 63, 5, 8),))),
        lambda p: p.decode(RunDecode(0, (row(0, 63, 5, 0),))),
        lambda p: p.decode(RunDecode(0, (row(0, 64, 5, 1),))),
        lambda p: p.decode(RunDecode(0, (row(0, 1, 5, 1), row(0, 1, 5, 1)))),
        lambda p: p.decode(RunDecode(0, (row(3, 1, 5, 1),))),
        lambda p: p.prefill(RunPrefill(0, 0, 0, 0, 65, 1, 1), np.zeros(65, np.int32)),
        lambda p: p.prefill(RunPrefill(0, 0, 0, 0, 5, 1, 1), np.zeros(4, np.int32)),
        lambda p: p.prefill(RunPrefill(0, 0, 0, 0, 0, 1, 1), np.zeros(0, np.int32)),
        lambda p: p.prefill(RunPrefill(0, 0, 0, 300, 64, 1, 1), np.zeros(64, np.int32)),
        lambda p: p.prefill(RunPrefill(0, 0, 0, 0, 5, 1, 9), np.zeros(5, np.int32)),
    ],
)
def test_a_command_that_cannot_be_right_is_refused(program, call):
    """INV-09, ST-14: an id out of range or an unmapped position would corrupt silently."""
    program.publish_table(PublishTable(0, 0, (1,)))
    with pytest.raises(EngineFailure):
        call(program)


def test_nothing_compiles_after_start(program, ids):
    """CAP-21, CAP-22, INV-20: commands of every kind and size reuse what start-up compiled and ran once."""
    events = []
    listen = lambda name, *_, **__: events.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        program.publish_table(PublishTable(0, 0, (1, 2, 3)))
        for size in (1, 64, 65, 128):
            hidden = program.prefill(RunPrefill(0, 0, 0, 0, size, 1, 2), ids[:size])
            program.prompt_logprobs(hidden, ids[:size])
        for rows in ((), (row(0, 128, -1, 1, 4),)):
            logits = program.decode(RunDecode(0, rows)).logits
            program.sample_plain(logits, program.put(neutral()))
            program.sample(logits, program.put(neutral()))
            program.token_logprobs(logits)
        page = program.limits.layout.pools[0].page_bytes
        for count in (1, 2, 3, 6, 15):
            there = [Copy("page", "d2h", 0, i + 1, i * page, 0) for i in range(count)]
            inside = [Copy("page", "d2d", 0, i + 1, i % 15 + 1, 0) for i in range(count)]
            back = [Copy("page", "h2d", 0, i * page, i + 1, 0) for i in range(count)]
            images = [
                Copy("image", "d2h", -1, 1, 2 << 20, 0),
                Copy("image", "d2d", -1, 1, 2, 0),
                Copy("image", "init", -1, 0, 3, 0),
            ]
            transfer(program, *there, *inside, *images)
            transfer(program, *back, Copy("image", "h2d", -1, 2 << 20, 3, 0))
        assert not [e for e in events if "compile" in e or "trace" in e]
        jax.jit(lambda x: x * 5 + 2)(np.ones(3))
        assert [e for e in events if "compile" in e]  # the listener does hear compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_units_change_the_state_in_place(model, name):
    """CAP-24, KV-43: what a unit needs beside the state does not grow with pages or slots, read slots or not."""

    def workspace(pages, slots):
        state = jax.eval_shape(
            lambda: new_device_state(model.config, pages=pages, slots=slots, dtype="float32")
        )
        i32 = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)  # noqa: E731
        if name == "prefill":
            inputs = (PrefillPlan(i32(64), i32(), i32(), i32(5), i32(), i32()),)
        else:
            logits = jax.ShapeDtypeStruct((C, model.config.vocab_size), np.float32)
            inputs = (DecodePlan(i32(6, C), i32(C, 10)), logits, i32(2, C))
        unit = jax.jit(partial(getattr(units, name), model.config), donate_argnums=1)
        memory = unit.lower(model.params, state, *inputs).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert workspace(400, 60) <= workspace(10, 6) + 1024


def test_memory_says_what_it_knows(program, model):
    """CAP-19: bytes by use, and of start-up only what this platform measures."""
    memory = program.memory()
    limits = program.limits
    layout = limits.layout
    assert memory["weights"] == sum(x.nbytes for x in jax.tree.leaves(model.params))
    assert memory["kv"] == 16 * layout.pools[0].page_bytes
    assert memory["state_images"] == 8 * layout.image_bytes
    assert memory["host_arena"] == 4 << 20
    explicit = memory["kv"] + memory["state_images"] + memory["sampler"]
    assert explicit == memory["runtime_reservation_bytes"] == limits.reservation_bytes
    assert memory["workspace"] > 0
    assert "startup_retained_bytes" not in memory  # the CPU counts nothing


def test_after_close_every_call_says_so(model):
    """OWN-16: transfers under way end first; closing twice is fine."""
    program = startup.start(model, EngineConfig(**OPTIONS))
    leave = program.start_transfer(RunTransfer(1, (Copy("page", "d2h", 0, 1, 0, 0),)))
    zeros = np.zeros(C, np.int32)
    logits = program.decode(RunDecode(0, ())).logits
    program.close()
    program.close()
    assert leave.ready()
    for call in (
        lambda: program.publish_table(PublishTable(0, 0, (1,))),
        lambda: program.prefill(RunPrefill(0, 0, 0, 0, 1, 1, 1), zeros[:1]),
        lambda: program.prompt_logprobs(logits, zeros),
        lambda: program.decode(RunDecode(0, ())),
        lambda: program.sample_plain(logits, neutral()),
        lambda: program.sample(logits, neutral()),
        lambda: program.token_logprobs(logits),
        lambda: program.install_row(0, counts=zeros, prompt=zeros, bias=zeros),
        lambda: program.start_transfer(RunTransfer(1, ())),
        lambda: program.put(zeros),
        program.memory,
    ):
        with pytest.raises(EngineFailure, match="closed"):
            call()
