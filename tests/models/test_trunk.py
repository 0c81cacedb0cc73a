"""Prefill in any chunks, decode, gradients, bfloat16, and what the compiled step contains."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ninfer_jax as nj
from artifacts import Qwen3_5Config
from ninfer_jax.models.loading import _fill_by_updates, _leaf_blocks, map_leaves
from ninfer_jax.models.qwen3_5 import trunk
from ninfer_jax.models.qwen3_5.params import parameter_layout, separate
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program import units
from ninfer_jax.program.plans import DecodePlan

CAPACITY = 320


@pytest.fixture(scope="module")
def model(goldens):
    return nj.load_model(goldens / "tiny-qwen3.5-dense")


class Row:
    """One sequence on its own pages, run chunk by chunk in a fixed bucket."""

    def __init__(self, model, rng):
        self.model = model
        self.state = new_device_state(
            model.config, pages=12, slots=2, dtype=model.params.embed.dtype
        )
        self.table = (rng.permutation(12)[:5] + 1).astype(np.int32)[None]
        self.slot = np.array([int(rng.integers(1, 3))], np.int32)
        self.start = 0

    def prefill(self, ids):
        bucket = np.zeros((1, 256), np.int32)
        bucket[0, : len(ids)] = ids
        at = (
            np.array([self.start], np.int32),
            np.array([len(ids)], np.int32),
            self.table,
            self.slot,
        )
        self.state, hidden = prefill(self.model.config, self.model.params, self.state, bucket, *at)
        self.start += len(ids)
        return np.asarray(logits(self.model.params, hidden))[0, : len(ids)]

    def decode(self, token):
        at = (np.array([self.start], np.int32), self.table, self.slot)
        args = (np.array([token], np.int32), *at)
        self.state, hidden = decode(self.model.config, self.model.params, self.state, *args)
        self.start += 1
        return np.asarray(logits(self.model.params, hidden))[0]

    @property
    def image(self):
        return jax.tree.map(lambda x: np.asarray(x[self.slot[0]]), self.state.images)


prefill = jax.jit(trunk.prefill, static_argnums=0, donate_argnums=2)
decode = jax.jit(trunk.decode, static_argnums=0, donate_argnums=2)
logits = jax.jit(trunk.logits)


def greedy(row, last, count=6):
    tokens = [int(last.argmax())]
    for _ in range(count):
        tokens.append(int(row.decode(tokens[-1]).argmax()))
    return tokens


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_any_split_gives_the_same_tokens_and_states(model, goldens, sizes, seed):
    ids = np.load(goldens / "tiny-qwen3.5-dense" / "golden.npz")["input_ids"][0]
    rng = np.random.default_rng(seed)
    whole = Row(model, rng)
    want_logits = whole.prefill(ids)
    want_image = whole.image
    split, start, got = Row(model, rng), 0, []
    for size in [*sizes, len(ids)]:
        if start < len(ids):
            got.append(split.prefill(ids[start : start + size]))
            start += size
    assert split.start == len(ids)
    assert np.abs(np.concatenate(got) - want_logits).max() < 1e-3
    for mine, theirs in zip(jax.tree.leaves(split.image), jax.tree.leaves(want_image), strict=True):
        assert np.abs(mine - theirs).max() < 1e-4
    assert greedy(split, got[-1][-1]) == greedy(whole, want_logits[-1])


def test_decode_from_the_first_token_equals_prefill(model):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1000, 20)
    stepped, chunked = Row(model, rng), Row(model, rng)
    rows = np.stack([stepped.decode(int(i)) for i in ids])
    assert np.abs(rows - chunked.prefill(ids)).max() < 1e-3


def test_decode_rows_do_not_depend_on_their_place_or_neighbours(goldens):
    for name, C in (("tiny-qwen3.5-dense", 8), ("tiny-qwen3.5-dense", 5), ("tiny-qwen3.5-moe", 8)):
        model = nj.load_model(goldens / name)
        rng = np.random.default_rng(C)
        state = new_device_state(model.config, pages=2 * C, slots=C, dtype=jnp.float32)
        state = jax.tree.map(
            lambda x, rng=rng: jnp.asarray(rng.standard_normal(x.shape), x.dtype), state
        )
        tokens = rng.integers(0, 1000, C).astype(np.int32)
        positions = rng.integers(1, 127, C).astype(np.int32)
        tables = (rng.permutation(2 * C) + 1).astype(np.int32).reshape(C, 2)
        slots = (rng.permutation(C) + 1).astype(np.int32)
        run = jax.jit(trunk.decode, static_argnums=0)
        at = (model.config, model.params, state)
        _, want = run(*at, tokens, positions, tables, slots)
        order = rng.permutation(C)
        _, mixed = run(*at, tokens[order], positions[order], tables[order], slots[order])
        assert np.array_equal(np.asarray(mixed), np.asarray(want)[order]), (name, C)
        for row in range(C):  # alone among idle rows
            idle = np.arange(C) != row
            alone = [np.where(idle, 0, x) for x in (tokens, positions)]
            left, got = run(
                *at, *alone, np.where(idle[:, None], 0, tables), np.where(idle, 0, slots)
            )
            assert np.array_equal(np.asarray(got)[row], np.asarray(want)[row]), (name, C, row)
            others = np.delete(np.arange(C + 1), [0, slots[row]])
            images = (jax.tree.leaves(s.images) for s in (left, state))
            for new, old in zip(*images, strict=True):
                assert np.array_equal(new[others], old[others]), (name, C, row)


def test_public_functions_are_pure_and_jittable(model, goldens):
    golden = np.load(goldens / "tiny-qwen3.5-dense" / "golden.npz")
    ids = golden["input_ids"].astype(np.int32)
    run = jax.jit(nj.prefill, static_argnames="capacity")
    step = jax.jit(nj.decode)
    scores, state = run(model, ids, capacity=200 + 8)
    assert np.abs(np.asarray(scores) - golden["logits"]).max() < 1e-3
    token, got = np.asarray(scores)[:, -1].argmax(-1), []
    first = state
    for _ in range(8):
        got.append(int(token[0]))
        scores, state = step(model, token, state)
        token = np.asarray(scores).argmax(-1)
    assert got == golden["greedy_tokens"].reshape(-1)[:8].tolist()
    # Pure: the first state is still what it was.
    again, _ = step(model, np.array(got[:1]), first)
    assert int(np.asarray(again).argmax()) == got[1]
    two, _ = run(model, np.repeat(ids, 2, axis=0), capacity=256)
    assert np.abs(np.asarray(two) - golden["logits"]).max() < 1e-3
    with pytest.raises(nj.CapacityError, match="200 tokens"):
        nj.prefill(model, ids, capacity=100)


SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4,
    "layer_types": ("linear_attention",) * 3 + ("full_attention",),
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rope_theta": 1e4,
    "rotary_dim": 4, "mrope_section": (2, 0, 0), "rms_norm_eps": 1e-6, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "ffn_types": ("dense", "moe", "dense", "moe"), "intermediate_size": 24,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "norm_topk_prob": True, "tie_word_embeddings": True,
    "max_position_embeddings": 256, "mtp_num_hidden_layers": 0,
}  # fmt: skip


def test_gradient_of_forward_matches_finite_differences():
    # Every expert takes part: a choice of experts would make the loss jump.
    model = nj.init_model(Qwen3_5Config(**SMALL | {"num_experts_per_tok": 4}), seed=3)
    params = jax.tree.map(lambda w: w * 2 if w.ndim > 2 else w, model.params)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 70))

    def loss(params):
        logprobs = jax.nn.log_softmax(nj.forward(nj.Model(params, model.config), tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1))

    value = jax.jit(loss)
    gradient = jax.device_get(jax.jit(jax.grad(loss))(params))
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(jax.device_get(params))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for i, (leaf, g) in enumerate(zip(leaves, jax.tree.leaves(gradient), strict=True)):
        direction = rng.standard_normal(leaf.shape).astype(np.float32)
        direction /= np.linalg.norm(direction)
        # Along the gradient as well, where the signal stands out from float32 noise.
        direction = direction + g / max(np.linalg.norm(g), 1e-12)
        # Large enough to stand out from float32 noise (about 1e-6), small enough for curvature.
        size = max(np.linalg.norm(leaf), 1.0)
        exact = np.vdot(g, direction)
        eps = min(1e-3 / exact, 0.015 * size)

        def at(step, i=i, leaf=leaf, direction=direction):
            moved = leaf + np.float32(step) * direction
            return float(value(jax.tree.unflatten(tree, [*leaves[:i], moved, *leaves[i + 1 :]])))

        numeric = (at(eps) - at(-eps)) / (2 * eps)
        assert abs(numeric - exact) <= 0.03 * abs(exact) + 1e-6 / eps, paths[i]
        assert np.linalg.norm(g) > 0, paths[i]


def test_unrolled_runs_of_layers_are_the_same(model, monkeypatch):
    ids = np.random.default_rng(0).integers(0, 900, (1, 20))
    looped = jax.jit(nj.forward)(model, ids)
    monkeypatch.setattr(trunk, "_unroll_runs", lambda: True)
    run = jax.jit(lambda model, ids: nj.forward(model, ids))
    # One over the layers, and one over the chunks of each of the three delta rules.
    assert run.lower(model, ids).as_text().count("stablehlo.while") == 4
    assert np.abs(np.asarray(looped - run(model, ids))).max() < 1e-4


def test_mixed_layer_patterns_run(goldens):
    """No period shorter than the depth, and dense and sparse MLPs side by side: prefill + decode equal forward."""
    config = Qwen3_5Config(
        **SMALL
        | {
            "num_hidden_layers": 5,
            "layer_types": ("full_attention", *("linear_attention",) * 3, "full_attention"),
            "ffn_types": ("dense", "moe", "moe", "dense", "dense"),
        }
    )
    assert trunk.layer_pattern(config)[1] == 1
    model = nj.init_model(config, seed=1)
    ids = np.random.default_rng(0).integers(0, 50, (2, 30))
    want = np.asarray(jax.jit(nj.forward)(model, ids))
    got, state = jax.jit(nj.prefill, static_argnames="capacity")(model, ids[:, :29], capacity=30)
    last, _ = jax.jit(nj.decode)(model, ids[:, 29], state)
    assert np.abs(np.asarray(got) - want[:, :29]).max() < 1e-4
    assert np.abs(np.asarray(last) - want[:, 29]).max() < 1e-4


def test_bfloat16_stays_near_float32(goldens):
    """Stated tolerance: relative error of all logits at most 6e-2, argmax equal at 90% of the positions or more.

    A sparse model also changes its choice of experts where two are nearly equal: 25% and 75% there.
    """
    limits = {
        "tiny-qwen3.5-dense": (6e-2, 0.9),
        "tiny-qwen3-next": (6e-2, 0.9),
        "tiny-qwen3.5-moe": (0.25, 0.75),
    }
    for name, (most, least) in limits.items():
        golden = np.load(goldens / name / "golden.npz")
        model = nj.load_model(goldens / name, dtype="bfloat16")
        assert model.params.embed.dtype == jnp.bfloat16
        assert model.params.linear_attention.a_log.dtype == jnp.float32
        ids = golden["input_ids"].astype(np.int32)
        got, state = jax.jit(nj.prefill, static_argnames="capacity")(model, ids, capacity=256)
        assert state.device.kv.k.dtype == jnp.bfloat16
        assert state.device.images.recurrent.dtype == jnp.float32
        got = np.asarray(got)
        error = np.linalg.norm(got - golden["logits"]) / np.linalg.norm(golden["logits"])
        assert error < most
        assert (got.argmax(-1) == golden["logits"].argmax(-1)).mean() > least


def test_weights_are_arguments_of_a_step_not_constants(model):
    state = new_device_state(model.config, pages=4, slots=2, dtype=jnp.float32)
    inputs = model.params, state, DecodePlan.null(2, 2)
    inputs += np.zeros((2, model.config.vocab_size), np.float32), np.zeros((2, 2), np.int32)
    jaxpr = jax.make_jaxpr(partial(units.decode, model.config))(*inputs)
    assert sum(np.size(c) for c in jaxpr.consts) < 100


def test_the_accelerator_way_of_loading_fills_the_same_arrays(goldens):
    """On CPU leaves are filled in host memory; the way through donated updates must give the same."""
    from artifacts import open_checkpoint

    for name in ("tiny-qwen3-next", "tiny-qwen3.5-moe"):
        checkpoint = open_checkpoint(goldens / name)
        model = nj.load_model(goldens / name, dtype="bfloat16")
        device = jax.devices()[0]
        other = map_leaves(
            lambda leaf, c=checkpoint, d=device: _fill_by_updates(leaf, _leaf_blocks(leaf, c), d),
            parameter_layout(checkpoint.config, jnp.bfloat16),
        )
        for a, b in zip(jax.tree.leaves(model.params), jax.tree.leaves(other), strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    "name", ["tiny-qwen3.5-dense", "tiny-qwen3.5-moe", "tiny-qwen3.5-vl", "tiny-qwen3-next"]
)
def test_separate_layers_compute_what_the_loop_does(goldens, name):
    """Every layer is taken from its place, and its image goes to its own."""
    model = nj.load_model(goldens / name)
    apart = separate(model.config, model.params)
    rng = np.random.default_rng(3)
    state = new_device_state(model.config, pages=6, slots=3, dtype=jnp.float32)
    noise = lambda x: jnp.asarray(rng.normal(size=x.shape).astype(np.float32) * 0.3)  # noqa: E731
    state = jax.tree.map(noise, state)
    tables = np.array([[3, 1], [2, 6]], np.int32)
    where = (np.array([70, 9], np.int32), tables, np.array([2, 1], np.int32))
    tokens = np.array([5, 9], np.int32)
    run = jax.jit(trunk.decode, static_argnums=0)
    want = run(model.config, model.params, state, tokens, *where)
    got = run(model.config, apart, state, tokens, *where)
    chex.assert_trees_all_close(got, want, atol=1e-5)
    assert np.array_equal(
        trunk.logits(apart, got[1]).argmax(-1), trunk.logits(model.params, want[1]).argmax(-1)
    )


def test_separate_layers_share_the_memory_of_the_stacks(model):
    """On CPU a model is not held twice."""
    apart = separate(model.config, model.params)
    for field in ("gate_up_proj", "down_proj"):
        stack = getattr(model.params.dense_mlp, field)
        first = stack.unsafe_buffer_pointer()
        for i, layer in enumerate(apart.layers):
            place = getattr(layer.dense_mlp, field).unsafe_buffer_pointer()
            assert place == first + i * stack[0].nbytes
