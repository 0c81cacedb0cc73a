"""The DFlash draft against its authors' package: blocks proposed for the tiny dense target, greedy rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ninfer_jax as nj
from artifacts import open_checkpoint
from ninfer_jax.models.dflash import draft
from ninfer_jax.models.dflash.params import draft_layout
from ninfer_jax.models.loading import load_tree
from ninfer_jax.models.qwen3_5 import trunk

TARGET = "tiny-qwen3.5-dense"


@pytest.fixture(scope="module")
def target(goldens):
    return nj.load_model(goldens / TARGET, dtype="float32")


def _draft(goldens, name):
    checkpoint = open_checkpoint(goldens / TARGET, draft=goldens / name)
    config = checkpoint.config.dflash
    params = load_tree(draft_layout(config, jnp.float32), checkpoint, jax.devices()[0])
    return config, params, np.load(goldens / name / "golden.npz")


@pytest.mark.parametrize("name", ["tiny-dflash-full", "tiny-dflash-swa"])
def test_blocks_equal_the_golden(goldens, target, name):
    config, params, golden = _draft(goldens, name)
    prompt = np.load(goldens / TARGET / "golden.npz")["input_ids"][0]
    tokens = np.concatenate([prompt, golden["tokens"]]).astype(np.int32)
    _, outputs = trunk.forward_with_layers(target.config, target.params, jnp.asarray(tokens)[None])
    context = draft.context(config, params, draft.features(config, outputs))
    for i in range(4):
        anchor = int(golden["rounds"][i, 0])
        block = golden[f"r{i}_block"]
        assert block[0] == tokens[anchor]
        hidden = draft.draft_blocks(
            config,
            params,
            context,
            target.params.embed[block][None, None],
            jnp.asarray([[anchor]], jnp.int32),
        )[0, 0]
        assert np.abs(np.asarray(hidden) - golden[f"r{i}_hidden"]).max() < 1e-3
        logits = np.asarray(trunk.logits(target.params, hidden[1:]))
        assert np.abs(logits - golden[f"r{i}_logits"]).max() < 1e-3
        assert logits.argmax(-1).tolist() == golden[f"r{i}_proposal"].tolist()


def test_a_block_reads_only_what_stands_before_its_anchor(goldens, target):
    config, params, golden = _draft(goldens, "tiny-dflash-full")
    rng = np.random.default_rng(0)
    context = jnp.asarray(rng.standard_normal((1, 24, config.hidden_size)), jnp.float32)
    blocks = target.params.embed[golden["r0_block"]][None, None]
    anchors = jnp.asarray([[9]], jnp.int32)

    def run(context):
        return np.asarray(draft.draft_blocks(config, params, context, blocks, anchors))

    plain = run(context)
    assert np.array_equal(plain, run(context.at[:, 9:].set(7.0)))
    assert not np.array_equal(plain, run(context.at[:, 8].set(7.0)))
    # Blocks drafted together do not see each other.
    both = draft.draft_blocks(
        config, params, context, jnp.tile(blocks, (1, 2, 1, 1)), jnp.asarray([[9, 17]], jnp.int32)
    )
    assert np.abs(np.asarray(both)[:, :1] - plain).max() < 1e-5
