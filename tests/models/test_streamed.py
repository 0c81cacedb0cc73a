"""The streamed decode step against the plain one: which stack goes where, norms, residual stream, state updates."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from artifacts import Qwen3_5Config
from ninfer_jax.models.geometries import GEOMETRIES
from ninfer_jax.models.loading import map_leaves
from ninfer_jax.models.qwen3_5 import streamed, trunk
from ninfer_jax.models.qwen3_5.params import parameter_layout, random_parameters
from ninfer_jax.models.qwen3_5.state import new_device_state
from pallas_kernels.decode_chain import kernel as chain_kernel
from pallas_kernels.gated_delta import decode_kernel as delta_kernel
from pallas_kernels.paged_attention import decode_kernel as attention_kernel

LINEAR, FULL = "linear_attention", "full_attention"
# The head sizes of the published models; everything else is small.
SMALL = {
    "vocab_size": 96, "hidden_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
    "rope_theta": 1e4, "rotary_dim": 64, "mrope_section": (11, 11, 10), "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "intermediate_size": 512, "num_experts": 0, "num_experts_per_tok": 0,
    "moe_intermediate_size": 0, "shared_expert_intermediate_size": 0, "norm_topk_prob": True,
    "max_position_embeddings": 512, "mtp_num_hidden_layers": 0,
}  # fmt: skip
SPARSE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def small(mixers, ffns, tied, **changes):
    return Qwen3_5Config(
        **SMALL | changes,
        num_hidden_layers=len(mixers),
        layer_types=mixers,
        ffn_types=ffns,
        tie_word_embeddings=tied,
    )


CONFIGS = {
    "dense": small((LINEAR, LINEAR, FULL, LINEAR), ("dense",) * 4, tied=True),
    "full attention last": small((FULL, LINEAR, FULL), ("dense",) * 3, tied=False),
    "sparse": small((LINEAR, FULL, LINEAR), ("moe",) * 3, tied=False, **SPARSE),
    "both": small(
        (LINEAR, LINEAR, FULL, FULL), ("moe", "dense", "dense", "moe"), tied=True, **SPARSE
    ),
}


def arguments(config, dtype, seed):
    """Parameters of no special value, a state full of numbers, and five rows of each sort."""
    rng = np.random.default_rng(seed)

    def noise(leaf):
        # A mistaken index of a norm shows only where norms differ.
        return leaf + 0.3 * jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    params = random_parameters(parameter_layout(config, dtype), seed)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: noise(leaf) if "norm" in path[-1].name else leaf, params
    )
    state = new_device_state(config, pages=12, slots=8, dtype=dtype)
    state = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), state)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, 5), jnp.int32)
    # A continued row, a fork, one that does not run, a first token, a fork to an earlier slot.
    positions = jnp.asarray([100, 63, 0, 0, 64], jnp.int32)
    tables = jnp.asarray([[3, 7], [9, 0], [0, 0], [5, 0], [2, 11]], jnp.int32)
    slots = jnp.asarray([4, 6, 0, 2, 1], jnp.int32)
    read_slots = jnp.asarray([4, 3, 0, 2, 8], jnp.int32)
    return params, state, tokens, positions, tables, slots, read_slots


def plain(config, params, *rest):
    state, hidden = trunk.decode(config, params, *rest)
    return state, trunk.logits(params, hidden)


def compare(config, dtype, args, most):
    state, logits = jax.jit(partial(streamed.decode, config))(*args)
    want_state, want = jax.jit(partial(plain, config))(*args)
    runs = np.asarray(args[5]) > 0
    assert logits.dtype == jnp.float32
    assert logits.shape == want.shape
    pairs = [(logits[runs], want[runs])]
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        assert got.dtype == expected.dtype
        # Null contents do not count: page 0 (second axis of a plane), slot 0.
        if got.ndim == 5 and got.shape[1] == 13:
            got, expected = got[:, 1:], expected[:, 1:]
        else:
            got, expected = got[1:], expected[1:]
        pairs.append((got, expected))
    for got, expected in pairs:
        got, expected = (np.asarray(x.astype(jnp.float32), np.float64) for x in (got, expected))
        assert np.linalg.norm(got - expected) <= most * np.linalg.norm(expected)
    return state


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_agrees_with_the_trunk(name):
    config = CONFIGS[name]
    args = arguments(config, jnp.float32, seed=1)
    state = compare(config, jnp.float32, args, 1e-5)
    # What a row only reads stays as it is, and so does what belongs to nobody.
    for new, old in ((state.images.window, args[1].images.window),
                     (state.images.recurrent, args[1].images.recurrent)):  # fmt: skip
        for slot in (3, 5, 7, 8):
            assert np.array_equal(new[slot], old[slot])


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_bfloat16_agrees_with_the_trunk(name):
    # All experts take part: a choice between near equals may fall either way.
    changes = {"num_experts_per_tok": 4} if name == "sparse" else {}
    config = CONFIGS[name].__class__(**CONFIGS[name].__dict__ | changes)
    compare(config, jnp.bfloat16, arguments(config, jnp.bfloat16, seed=2), 2e-2)


@pytest.mark.parametrize("rows", [1, 8])
def test_any_number_of_rows(rows):
    config = CONFIGS["both"]
    params, state, *each = arguments(config, jnp.float32, seed=3)
    order = np.array([1, 0, 3, 4, 2, 2, 2, 2])[:rows]
    compare(config, jnp.float32, (params, state, *(x[order] for x in each)), 1e-5)


def test_several_steps_follow_one_another():
    config = CONFIGS["dense"]
    params, mine, tokens, positions, tables, slots, _ = arguments(config, jnp.float32, seed=4)
    theirs = mine
    step, other = jax.jit(partial(streamed.decode, config)), jax.jit(partial(plain, config))
    for n in range(3):
        at = (tokens, positions + n, tables, slots, slots)
        mine, got = step(params, mine, *at)
        theirs, want = other(params, theirs, *at)
        runs = np.asarray(slots) > 0
        assert np.abs(np.asarray(got - want)[runs]).max() <= 1e-4 * np.abs(np.asarray(want)).max()
        tokens = jnp.argmax(want, axis=1).astype(jnp.int32)


def test_it_does_not_fit_here():
    config = CONFIGS["dense"]
    params = parameter_layout(config, jnp.bfloat16)
    assert "needs a GPU" in streamed.unfit(config, params, 1)
    assert "not 9" in streamed.unfit(config, params, 9)


@pytest.mark.parametrize("name", ["0.8B", "35B-A3B"])
def test_the_whole_step_lowers_for_the_gpu(name, monkeypatch):
    """With every op's kernel, as on a GPU."""
    monkeypatch.setattr(streamed, "chain", chain_kernel.chain)
    monkeypatch.setattr(streamed, "gated_delta_decode", delta_kernel.gated_delta_decode)
    monkeypatch.setattr(streamed, "attention_decode", attention_kernel.attention_decode)
    config = GEOMETRIES[name]
    config = config.__class__(
        **config.__dict__ | {
            "num_hidden_layers": 4,
            "layer_types": config.layer_types[:4],
            "ffn_types": config.ffn_types[:4],
        }
    )  # fmt: skip
    spec = jax.ShapeDtypeStruct
    layout = parameter_layout(config, jnp.bfloat16)
    params = map_leaves(lambda leaf: spec(leaf.shape, leaf.dtype), layout)
    state = jax.eval_shape(lambda: new_device_state(config, pages=64, slots=4, dtype=jnp.bfloat16))
    ints = [spec(shape, jnp.int32) for shape in ((2,), (2,), (2, 16), (2,), (2,))]
    step = jax.jit(partial(streamed.decode, config))
    text = step.trace(params, state, *ints).lower(lowering_platforms=("cuda",)).as_text()
    assert "dynamic_slice" not in text, "a layer's weights are cut out of their stack"
    calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    in_place = [line.count("output_operand_alias<") for line in calls]
    assert in_place.count(2) == 2, "a mixer does not update its two arrays in place"
    # Equal layers share one function: what comes after a layer differs by its mixer and by the next one's.
    assert len(calls) == 1 + 1 + 3 + 2


def test_which_models_take_this_path(monkeypatch):
    """Every public geometry on a Hopper GPU; no other device, dtype, vocabulary or number of rows."""

    def described(config, dtype=jnp.bfloat16):
        layout = parameter_layout(config, dtype)
        return map_leaves(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), layout)

    class Hopper:
        device_kind, compute_capability, core_count = "a card", "9.0", 132
        platform = "gpu"

    small, sparse = GEOMETRIES["0.8B"], GEOMETRIES["35B-A3B"]
    assert "needs a GPU" in streamed.unfit(small, described(small), 8)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Hopper()])
    for config in GEOMETRIES.values():
        assert streamed.unfit(config, described(config), 8) is None
    assert "not 9" in streamed.unfit(small, described(small), 9)
    assert "float32" in streamed.unfit(small, described(small, jnp.float32), 8)
    wider = replace(sparse, shared_expert_intermediate_size=1024)
    assert "shared expert" in streamed.unfit(wider, described(wider), 8)
    # All blocks of a layer of experts must be resident at once.
    monkeypatch.setattr(Hopper, "core_count", 114)
    assert "need 128 multiprocessors" in streamed.unfit(sparse, described(sparse), 8)
    assert streamed.unfit(small, described(small), 8) is None
    odd = replace(small, vocab_size=248_321)
    assert "248321 outputs" in streamed.unfit(odd, described(odd), 8)
    monkeypatch.setattr(Hopper, "compute_capability", "8.0")
    assert "has 8.0" in streamed.unfit(small, described(small), 8)
