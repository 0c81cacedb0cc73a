"""Sampling against independent numpy programs and Hugging Face's own distributions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ninfer_jax.program import sampler, units
from ninfer_jax.program.plans import DecodePlan, SamplingRows

V = 37
truncate = jax.jit(sampler.truncate)
adjust = jax.jit(sampler.adjust)
sample = jax.jit(sampler.sample)
plain = jax.jit(units.sample_plain)
sample_unit = jax.jit(units.sample)


def rows(B, **given):
    neutral = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    columns = {}
    for name, default in neutral.items():
        kind = np.int32 if name == "top_k" else np.float32
        columns[name] = np.broadcast_to(np.asarray(given.get(name, default), kind), (B,)).copy()
    seed = np.asarray(given.get("seed", np.zeros((B, 2))), np.uint32)
    return SamplingRows(seed=seed, **columns)


def kept(logits, temperature, top_k, top_p, min_p):
    """Step 3 of numeric_formats in float64, one row: the ids that stay."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    w = np.exp((logits[order] - logits[order[0]]) / temperature)
    total, running, stay = w.sum(), 0.0, []
    for i, x in zip(order, w, strict=True):
        if stay and (x < min_p or (top_p < 1 and running >= top_p * total)):
            break
        stay.append(i)
        running += x
    return set(stay)


@example(1, V, 2.0, 0, 0.95, 0.1, True)  # the border runs between 0.0 and -0.0
@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from([V, 300, 9000]), st.sampled_from([0.3, 1.0, 2.0, 30.0]),
    st.sampled_from([0, 1, 5, V, 100, 128, 129, 1000]), st.sampled_from([1e-6, 0.4, 0.95, 1.0]),
    st.sampled_from([0.0, 1e-4, 0.1, 1.0]), st.booleans(),
)  # fmt: skip
def test_truncation_keeps_the_right_tokens(seed, vocab, temperature, top_k, top_p, min_p, ties):
    """Few or many of them, in vocabularies below and above the number of candidates."""
    logits = np.random.default_rng(seed).standard_normal((2, vocab)).astype(np.float32) * 3
    if ties:
        logits = np.round(logits)
    params = rows(2, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = np.asarray(truncate(logits, params))
    for row in range(2):
        want = kept(logits[row].astype(np.float64), temperature, top_k, top_p, min_p)
        have = set(np.flatnonzero(got[row]).tolist())
        if have != want:  # float32 may differ on a token that stands on a border
            edge = have ^ want
            assert len(edge) == 1
            w = np.exp((logits[row] - logits[row].max()) / temperature).astype(np.float64)
            order = np.argsort(-logits[row], kind="stable")
            top = w[order][: top_k or vocab]
            before = np.cumsum(top) - top
            (rank,) = np.flatnonzero(order == edge.pop())
            near_p = abs(before[rank] - top_p * top.sum()) < 1e-5 * top.sum()
            assert near_p or abs(w[order[rank]] - min_p) < 1e-5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.permutations(range(6)))
def test_what_a_row_keeps_is_its_own_affair(seed, order):
    """Rows that need all of the vocabulary sorted beside such as do not, and greedy and unlimited ones: each keeps what
    it keeps alone (UN-11)."""
    logits = np.random.default_rng(seed).standard_normal((6, 3000)).astype(np.float32)
    kinds = rows(
        6, temperature=[1, 1, 8, 0, 1, 5], top_k=[20, 0, 0, 20, 0, 400], top_p=[0.9, 0.02, 0.95, 0.9, 1, 0.8]
    )  # fmt: skip
    alone = [
        np.asarray(truncate(logits[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], kinds)))[0]
        for i in range(6)
    ]
    picked = jax.tree.map(lambda x: x[np.array(order)], kinds)
    together = np.asarray(truncate(logits[np.array(order)], picked))
    counts = [int(a.sum()) for a in alone]
    assert counts[0] <= 20 < 128 < counts[5] <= 400
    assert counts[1] < 128 < counts[2] < 3000
    assert counts[4] == 3000
    for place, i in enumerate(order):
        assert np.array_equal(together[place], alone[i])


def test_distributions_of_hugging_face(goldens):
    """samp_probs of scoring.npz: temperature, top-k, top-p, min-p and repetition penalty in Hugging Face's order."""
    data = np.load(goldens / "scoring.npz")
    golden = np.load(goldens / "tiny-qwen3.5-dense" / "golden.npz")
    logits = golden["logits"][0, -1:].astype(np.float32)
    vocab = logits.shape[1]
    seen = np.zeros((1, vocab), bool)
    seen[0, data["samp_prompt"].reshape(-1)] = True
    for setting, want, support in zip(
        data["samp_settings"], data["samp_probs"], data["samp_support"], strict=True
    ):
        temperature, top_k, top_p, min_p, repetition = (float(x) for x in setting)
        state = sampler.new_sampler_state(1, vocab).replace(prompt=jnp.asarray(seen))
        params = rows(
            1, temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p, repetition_penalty=repetition
        )  # fmt: skip
        adjusted = adjust(state, logits, params)
        keep = np.asarray(truncate(adjusted, params))[0]
        p = np.where(keep, np.exp((np.asarray(adjusted)[0] - adjusted.max()) / temperature), 0)
        p /= p.sum()
        assert keep.sum() == support
        np.testing.assert_allclose(p, want, atol=2e-5)


def test_draws_follow_the_distribution():
    """20,000 draws at different positions: every token's count within 5 standard deviations, truncated or not."""
    logits = np.random.default_rng(0).standard_normal(V).astype(np.float32) * 2
    n, B = 20_000, 200
    state = sampler.new_sampler_state(B, V)
    tiled = np.tile(logits, (B, 1))
    for options in ({}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}):
        params = rows(B, **options, seed=np.tile([3, 4], (B, 1)))
        draw = jax.jit(partial(sampler.sample, state))
        got = np.concatenate(
            [np.asarray(draw(tiled, params, np.arange(i, i + B, dtype=np.int32))[1]) for i in range(0, n, B)]
        )  # fmt: skip
        temperature = options.get("temperature", 1.0)
        stay = kept(
            logits.astype(np.float64), temperature, options.get("top_k", 0), options.get("top_p", 1.0),
            options.get("min_p", 0.0),
        )  # fmt: skip
        p = np.where(
            np.isin(np.arange(V), sorted(stay)), np.exp(logits / np.float64(temperature)), 0
        )
        p /= p.sum()
        counts = np.bincount(got, minlength=V)
        assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9).all(), options


def test_a_draw_depends_on_seed_and_position_only():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((6, V)).astype(np.float32)
    seeds = rng.integers(0, 2**32, (6, 2)).astype(np.uint32)
    positions = rng.integers(0, 10**6, 6).astype(np.int32)
    state = sampler.new_sampler_state(6, V)
    _, want = sample(state, logits, rows(6, seed=seeds), positions)
    order = rng.permutation(6)
    _, mixed = sample(state, logits[order], rows(6, seed=seeds[order]), positions[order])
    assert np.array_equal(mixed, np.asarray(want)[order])
    same = np.tile(logits[:1], (6, 1))
    for changed in ({"seed": seeds}, {"seed": np.tile(seeds[:1], (6, 1))}):
        at = positions if len(np.unique(changed["seed"])) == 2 else np.full(6, 7, np.int32)
        many = [
            np.asarray(sample(state, same, rows(6, **changed), at + 1000 * i)[1]) for i in range(20)
        ]
        assert len({tuple(x) for x in np.array(many).T.tolist()}) == 6


def test_greedy_takes_the_lowest_id_and_leaves_neighbours_random():
    logits = np.zeros((2, V), np.float32)
    logits[:, [5, 9]] = 1.0
    state = sampler.new_sampler_state(2, V)
    params = rows(2, temperature=np.array([0.0, 1.0]), seed=np.ones((2, 2)))
    tokens = [
        np.asarray(sample(state, logits, params, np.full(2, i, np.int32))[1]) for i in range(40)
    ]
    assert {int(t[0]) for t in tokens} == {5}
    assert len({int(t[1]) for t in tokens}) > 3
    assert np.asarray(sampler.greedy(jnp.asarray(logits))[0]).tolist() == [5, 5]


@given(
    seed=st.integers(0, 2**31), vocab=st.sampled_from([V, 1000, 4099]), lost=st.sampled_from([0.0, 0.9]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_plain_sampling_is_full_sampling_that_asks_for_nothing(seed, vocab, lost):
    """UN-11: a row's tokens are the same bit for bit whatever sampler its neighbours call for."""
    rng = np.random.default_rng(seed)
    B = 6
    logits = rng.standard_normal((B, vocab)).astype(np.float32) * 4
    logits[rng.random(logits.shape) < lost] = -np.inf
    logits[:, 0] = 0
    plan = DecodePlan.null(B, 3)
    plan.positions[:] = rng.integers(0, 10**6, B)
    plan.sampled[:] = [1, 1, 1, 1, 1, 0]
    seeds = rng.integers(0, 2**32, (B, 2))
    temperature = np.array([0.0, 0.6, 1.0, 1.7, 1e-3, 1.0])
    sampled = np.stack([np.argmax(logits, axis=1), [1, 1, 0, 1, 1, 1]]).astype(np.int32)
    sampled[0, 5] = 7
    got = np.asarray(plain(logits, sampled, plan, rows(B, temperature=temperature, seed=seeds)))
    # The first three rows ask for nothing either time, the next two for a penalty and a truncation.
    counts = np.zeros((B, vocab), np.int32)
    counts[3] = rng.integers(0, 3, vocab)
    state = sampler.new_sampler_state(B, vocab).replace(counts=jnp.asarray(counts))
    for options, same in (
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": [0, 0, 0, 0, 3, 0]}, [0, 1, 2, 3, 5]),
        ({"presence_penalty": [0, 0, 0, 1, 0, 0], "top_p": [1, 1, 1, 1, 0.5, 1]}, [0, 1, 2, 5]),
    ):
        params = rows(B, temperature=temperature, seed=seeds, **options)
        after, full = sample_unit(state, logits, sampled, plan, params)
        assert np.array_equal(got[:, same], np.asarray(full)[:, same])
        assert (np.asarray(after.counts) - counts).sum(axis=1).tolist() == [1, 1, 1, 1, 1, 0]
    assert got[0, 0] == sampled[0, 0]
    assert got[0, 5] == 7
    assert got[1].tolist() == sampled[1].tolist()


def test_counts_follow_the_drawn_tokens():
    state = sampler.new_sampler_state(2, V)
    logits = np.zeros((2, V), np.float32)
    logits[0, 3] = logits[1, 8] = 50
    for i in range(3):
        state, _ = sample(state, logits, rows(2, temperature=0.0), np.full(2, i, np.int32))
    assert np.asarray(state.counts)[0, 3] == 3
    assert np.asarray(state.counts)[1, 8] == 3
    assert np.asarray(state.counts).sum() == 6


def test_broken_rows_are_told_apart():
    logits = np.zeros((4, V), np.float32)
    logits[1, 4] = np.nan
    logits[2, 4] = np.inf
    logits[3] = -np.inf
    _, healthy = sampler.greedy(jnp.asarray(logits))
    assert np.asarray(healthy).tolist() == [True, False, False, False]


@given(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0]), min_size=1, max_size=9))
@settings(deadline=None)
def test_greedy_takes_the_first_of_the_largest(row):
    """Not a number is larger than all numbers, as numpy has it."""
    logits = np.array([row, row[::-1]], np.float32)
    tokens, healthy = sampler.greedy(jnp.asarray(logits))
    want = np.argmax(logits, axis=1)
    assert np.array_equal(tokens, want)
    assert np.array_equal(healthy, np.isfinite(np.take_along_axis(logits, want[:, None], 1)[:, 0]))


def test_extreme_logits_and_bias_stay_finite():
    logits = np.full((1, V), -1e30, np.float32)
    logits[0, 2] = 1e30
    state = sampler.new_sampler_state(1, V)
    state = state.replace(bias=state.bias.at[0, 2].set(-np.inf))
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 1e-3, "min_p": 0.5}):
        _, drawn = sample(state, logits, rows(1, **options), np.zeros(1, np.int32))
        assert int(drawn[0]) != 2


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 20, 63, 990, 4096, 5000, 248_320]),
    levels=st.sampled_from([2, 30, 10**6]),
    lost=st.sampled_from([0.0, 0.5, 1.0]),
    count=st.sampled_from([sampler.MAX_LOGPROBS, sampler.CANDIDATES]),
)
@settings(max_examples=60, deadline=None)
def test_the_largest_are_those_of_a_whole_sort(seed, vocab, levels, lost, count):
    """With many equal values, and with -inf among them or everywhere."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, levels, (3, vocab)).astype(np.float32)
    x[rng.random(x.shape) < lost] = -np.inf
    count = min(count, vocab)
    values, ids = sampler.largest(jnp.asarray(x), count)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(np.asarray(ids), order)
    assert np.array_equal(np.asarray(values), np.take_along_axis(x, order, axis=-1))
