"""The MTP head against Hugging Face-style reference outputs in the goldens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ninfer_jax as nj
from artifacts import open_checkpoint
from ninfer_jax.models.loading import load_tree
from ninfer_jax.models.qwen3_5 import mtp, trunk
from ninfer_jax.models.qwen3_5.params import mtp_layout


@pytest.mark.parametrize("name", ["tiny-qwen3.5-dense", "tiny-qwen3.5-moe"])
def test_the_head_and_a_recycled_draft_equal_the_golden(goldens, name):
    golden = np.load(goldens / name / "golden.npz")
    checkpoint = open_checkpoint(goldens / name)
    model = nj.load_model(goldens / name, dtype="float32")
    head = load_tree(mtp_layout(model.config, jnp.float32), checkpoint, jax.devices()[0])
    ids = golden["input_ids"].astype(np.int32)
    first = golden["greedy_tokens"][:1]
    tokens = jnp.asarray(np.concatenate([ids[0], first]))[None]
    hidden = trunk.forward(model.config, model.params, tokens[:, :-1])
    run = jax.jit(lambda h, e: mtp.forward(model.config, head, h, e))

    rows = run(hidden, model.params.embed[tokens[:, 1:]])
    assert np.abs(np.asarray(rows) - golden["mtp_hidden"]).max() < 1e-3
    logits = trunk.logits(model.params, rows)
    assert np.abs(np.asarray(logits[:, -8:]) - golden["mtp_logits"]).max() < 1e-3

    # A draft of several tokens: each row after the first recycles the head's own output.
    drafted = []
    for want in golden["mtp_draft_logits"]:
        last = np.asarray(trunk.logits(model.params, rows[:, -1]))[0]
        assert np.abs(last - want).max() < 2e-3
        drafted.append(int(last.argmax()))
        hidden = jnp.concatenate([hidden, rows[:, -1:]], axis=1)
        tokens = jnp.concatenate([tokens, jnp.asarray([[drafted[-1]]], tokens.dtype)], axis=1)
        rows = run(hidden, model.params.embed[tokens[:, 1:]])
    assert drafted == golden["mtp_draft_tokens"].tolist()
