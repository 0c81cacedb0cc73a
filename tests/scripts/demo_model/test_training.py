"""Training of the demo: batches, objectives against slow obvious code, resuming, and the way to an artifact."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from artifacts import convert, open_checkpoint
from ninfer_jax.models.dflash import draft
from ninfer_jax.models.dflash.params import draft_layout
from ninfer_jax.models.loading import load_tree
from ninfer_jax.models.qwen3_5 import mtp, trunk
from ninfer_jax.models.qwen3_5.params import (
    FullAttention,
    mtp_layout,
    parameter_layout,
    random_parameters,
)
from scripts import train_demo
from scripts.demo_model import geometry
from scripts.demo_model.acceptance import Answer, measure
from scripts.demo_model.batches import PROMPT_WEIGHT, Windows, read_streams, sample
from scripts.demo_model.bits import bits_per_byte
from scripts.demo_model.export import write_draft, write_trunk
from scripts.demo_model.loop import Recipe, train
from scripts.demo_model.objectives import BLOCK_DECAY, Drafts, draft_loss, trunk_loss
from scripts.demo_model.packing import HeldOut, pack_chat

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
}  # fmt: skip
SMALL_TRUNK = geometry.TRUNK | SMALL | {
    "rope_parameters": geometry.TRUNK["rope_parameters"] | {"mrope_section": [3, 3, 2]},
}  # fmt: skip
SMALL_DRAFT = geometry.DRAFT | {
    "hidden_size": 32, "intermediate_size": 48, "num_target_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "block_size": 4,
    "dflash_config": {"mask_token_id": geometry.MASK, "target_layer_ids": [0, 2]},
}  # fmt: skip


@pytest.fixture(scope="module")
def small():
    """Configurations and random parameters of a small trunk and its drafts."""
    patch = pytest.MonkeyPatch()
    patch.setattr(geometry, "TRUNK", SMALL_TRUNK)
    patch.setattr(geometry, "DRAFT", SMALL_DRAFT)
    config, block = geometry.trunk_config(), geometry.draft_config()
    text = random_parameters(parameter_layout(config, jnp.float32), 1)
    # Enough of a spread that argmax means something.
    text = jax.tree.map(lambda a: a * 3 if a.ndim > 1 else a, text)
    heads = Drafts(
        random_parameters(mtp_layout(config, jnp.float32), 2),
        train_demo._plain_norms(random_parameters(draft_layout(block, jnp.float32), 3)),
    )
    yield config, block, text, heads
    patch.undo()


@pytest.fixture
def data(tmp_path):
    """Three documents and two dialogues, packed."""
    end = geometry.END_OF_TEXT
    documents = [np.arange(10, 30), np.arange(100, 190), np.arange(200, 260)]
    text = np.concatenate([np.append(d, end) for d in documents]).astype(np.uint16)
    np.save(tmp_path / "text.npy", text)
    dialogues = [
        (np.arange(300, 350), np.arange(50) >= 40),
        (np.arange(400, 470), np.arange(70) % 2 == 0),
    ]
    pack_chat(tmp_path, dialogues, end)
    return tmp_path


def test_windows_begin_where_sequences_begin(data):
    text, chat = read_streams(data)
    windows = sample(jax.random.key(0), text, 64, 40, anywhere=0.0)
    tokens = np.asarray(windows.tokens)
    assert tokens.shape == (64, 41)
    # After the end-of-text token before a document; the last one that fits wins.
    starts = {tuple(row[:2]) for row in tokens.tolist()}
    assert starts == {
        (geometry.END_OF_TEXT, 10),
        (geometry.END_OF_TEXT, 100),
        (geometry.END_OF_TEXT, 200),
    }
    assert np.all(np.asarray(windows.weights) == 1)
    free = sample(jax.random.key(0), text, 64, 40, anywhere=1.0)
    assert len({row[0] for row in np.asarray(free.tokens).tolist()}) > 20

    windows = sample(jax.random.key(1), chat, 16, 45, anywhere=0.0)
    for tokens, weights in zip(
        np.asarray(windows.tokens), np.asarray(windows.weights), strict=True
    ):
        assert tokens[0] in (300, 400)
        mine = tokens[1:] >= 340 if tokens[0] == 300 else tokens[1:] % 2 == 0
        mine &= tokens[1:] < 500  # the end-of-text token is not the assistant's
        assert np.allclose(weights, np.where(mine, 1.0, PROMPT_WEIGHT))


def test_a_step_mixes_text_and_dialogues_by_its_share(data, monkeypatch):
    monkeypatch.setattr(train_demo, "LONG", 40)
    monkeypatch.setattr(train_demo, "SHORT", 20)
    for share in (0.0, 1.0):
        long, short = train_demo._batches(jax.random.key(0), read_streams(data), 32, share)
        of_chat = np.asarray(long.tokens[:, 1:]).max(axis=1) > 300
        tokens = np.asarray(long.tokens)
        of_text = ((tokens < 300) | (tokens == geometry.END_OF_TEXT)).all(axis=1)
        assert long.tokens.shape == (16, 41)
        assert of_text.all() if share else of_chat.all()
        assert set(np.asarray(short.tokens[:, 0]).tolist()) == {300, 400}


def test_the_trunk_loss_is_the_weighted_mean_cross_entropy(small):
    config, _, text, _ = small
    rng = np.random.default_rng(0)
    windows = tuple(
        Windows(
            jnp.asarray(rng.integers(0, 6000, (2, T + 1))),
            jnp.asarray(rng.random((2, T), np.float32)),
        )
        for T in (9, 5)
    )
    total = weight = 0.0
    for w in windows:
        hidden = trunk.forward(config, text, w.tokens[:, :-1])
        logits = np.asarray(trunk.logits(text, hidden), np.float64)
        logits -= logits.max(-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for b in range(2):
            for t in range(w.weights.shape[1]):
                total -= float(w.weights[b, t]) * log_p[b, t, int(w.tokens[b, t + 1])]
                weight += float(w.weights[b, t])
    assert float(trunk_loss(config, text, windows, jnp.float32)) == pytest.approx(
        total / weight, abs=1e-4
    )


def test_the_draft_loss_compares_with_what_the_trunk_says_at_the_drafted_place(small):
    config, block, text, heads = small
    rng = np.random.default_rng(1)
    T, K = 12, block.block_size
    tokens = rng.integers(0, 6000, (1, T + 1)).astype(np.int32)
    weights = rng.random((1, T)).astype(np.float32)
    anchors = np.array([[2, 7]], np.int32)
    loss, metrics = draft_loss(
        config,
        block,
        text,
        heads,
        Windows(jnp.asarray(tokens), jnp.asarray(weights)),
        jnp.asarray(anchors),
    )

    def log_softmax(logits):
        logits = np.asarray(logits, np.float64)
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    hidden, outputs = trunk.forward_with_layers(config, text, jnp.asarray(tokens[:, :-1]))
    target = log_softmax(trunk.logits(text, hidden))[0]  # target[t] is about token t + 1

    rows = mtp.forward(config, heads.mtp, hidden, text.embed[tokens[:, 1:]])
    head = log_softmax(trunk.logits(text, rows))[0]  # head[i] is about token i + 2
    found = [-(np.exp(target[i + 1]) * head[i]).sum() for i in range(T - 1)]
    share = [float(head[i].argmax() == target[i + 1].argmax()) for i in range(T - 1)]
    assert float(metrics["mtp_loss"]) == pytest.approx(
        np.average(found, weights=weights[0, 1:]), abs=1e-4
    )
    assert float(metrics["mtp_match"]) == pytest.approx(
        np.average(share, weights=weights[0, 1:]), abs=1e-5
    )

    context = draft.context(block, heads.dflash, draft.features(block, outputs))
    total = weight = 0.0
    for anchor in anchors[0]:
        ids = np.full((1, 1, K), block.mask_token_id)
        ids[0, 0, 0] = tokens[0, anchor]
        x = draft.draft_blocks(
            block, heads.dflash, context, text.embed[ids], jnp.asarray([[anchor]])
        )
        said = log_softmax(trunk.logits(text, x))[0, 0]
        for j in range(1, K):  # row j is about token anchor + j
            w = np.exp(-(j - 1) / BLOCK_DECAY) * weights[0, anchor + j - 1]
            total -= w * (np.exp(target[anchor + j - 1]) * said[j]).sum()
            weight += w
    assert float(metrics["dflash_loss"]) == pytest.approx(total / weight, abs=1e-4)
    assert float(loss) == pytest.approx(
        float(metrics["mtp_loss"] + metrics["dflash_loss"]), abs=1e-5
    )


@jax.numpy_dtype_promotion("standard")  # optax counts on it
@jax.numpy_rank_promotion("allow")
def test_a_stopped_run_ends_as_an_uninterrupted_one(tmp_path):
    goal = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 4)), jnp.float32)

    def loss(params, key, data):
        error = params.o_proj - goal + 0.1 * jax.random.normal(key, goal.shape)
        return jnp.mean(error**2) + data * jnp.mean((params.q_norm - 1) ** 2), {}

    # One leaf for Muon, one for AdamW.
    start = FullAttention(None, jnp.zeros((3,)), None, jnp.zeros_like(goal))
    recipe = Recipe(steps=8, peak=0.1, warmup=2, save_every=3, log_every=4)
    whole = train(recipe, start, loss, 1.0, tmp_path / "whole")

    class StopError(Exception):
        pass

    def stop(_):
        raise StopError

    interrupted = replace(recipe, log_every=5, evaluate_every=5)
    with pytest.raises(StopError):  # at step 5; the checkpoint of step 3 is there
        train(interrupted, start, loss, 1.0, tmp_path / "twice", stop)
    again = train(recipe, start, loss, 1.0, tmp_path / "twice")
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    assert not np.array_equal(np.asarray(whole.o_proj), np.zeros_like(goal))
    lines = [
        json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [4, 8]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_what_was_trained_reaches_the_artifact_bit_for_bit(small, tmp_path, goldens):
    config, block, text, heads = small
    write_trunk(tmp_path / "model", SMALL_TRUNK, config, text, heads.mtp)
    write_draft(tmp_path / "draft", SMALL_DRAFT, block, heads.dflash)
    tokenizer = goldens / "tiny-qwen3.5-dense" / "tokenizer.json"
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    checkpoint = open_checkpoint(
        convert(tmp_path / "model", tmp_path / "out", draft=tmp_path / "draft")
    )
    assert checkpoint.components == ("text", "mtp", "dflash")
    device = jax.devices()[0]
    for layout, tree in (
        (parameter_layout(config, jnp.float32), text),
        (mtp_layout(config, jnp.float32), heads.mtp),
        (draft_layout(block, jnp.float32), heads.dflash),
    ):
        loaded = jax.tree_util.tree_leaves_with_path(load_tree(layout, checkpoint, device))
        for (path, got), want in zip(loaded, jax.tree.leaves(tree), strict=True):
            want = np.asarray(want)
            if path[-1].name not in ("a_log", "norm"):  # those two stay in float32
                want = want.astype(ml_dtypes.bfloat16).astype(np.float32)
            assert np.array_equal(np.asarray(got), want), path
    assert checkpoint.dtype("text.layers.0.linear_attn.A_log") == np.float32
    assert checkpoint.dtype("text.layers.0.linear_attn.in_proj_z") == ml_dtypes.bfloat16


def test_bits_per_byte_count_every_token_once():
    rng = np.random.default_rng(0)
    lengths = [5, 40, 17, 16, 1]
    ids = rng.integers(0, 6000, sum(lengths)).astype(np.uint16)
    text = HeldOut(
        ids=ids,
        offsets=np.cumsum([0, *lengths]),
        byte_counts=np.array([20, 160, 68, 64, 4]),
        sources=np.array(["a", "b", "a", "b", "b"]),
        names=np.array(list("vwxyz")),
    )
    seen = []

    def score(tokens):
        seen.append(tokens.shape)
        return tokens[:, 1:].astype(np.float64)  # each token costs its own id

    found = bits_per_byte(text, score, batch=2, length=16)
    assert set(seen) == {(2, 17)}
    of_a = ids[:5].sum() + ids[45:62].sum()
    assert found["a"] == pytest.approx(of_a / np.log(2) / 88)
    assert found["all"] == pytest.approx(ids.sum(dtype=np.int64) / np.log(2) / 316)


@pytest.mark.slow
def test_acceptance_by_verifying_every_draft_one_token_at_a_time(small, tmp_path, goldens):
    config, block, text, heads = small
    write_trunk(tmp_path / "model", SMALL_TRUNK, config, text, heads.mtp)
    write_draft(tmp_path / "draft", SMALL_DRAFT, block, heads.dflash)
    checkpoint = open_checkpoint(tmp_path / "model", draft=tmp_path / "draft")
    from ninfer_jax.models import model_from_checkpoint

    model = model_from_checkpoint(checkpoint, "float32")
    device = jax.devices()[0]
    head = load_tree(mtp_layout(config, jnp.float32), checkpoint, device)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 6000, 6).tolist()
    tokens = list(prompt)
    # An "answer" that the head itself would draft now and then, so that acceptance is neither 0 nor 1.
    for step in range(6):
        hidden = trunk.forward(config, model.params, jnp.asarray([tokens]))
        after = jnp.asarray([[*tokens[1:], 0]])
        rows = mtp.forward(config, head, hidden, model.params.embed[after])
        best = int(np.asarray(trunk.logits(model.params, rows[0, -2])).argmax())
        tokens.append(best if step % 3 else int(rng.integers(0, 6000)))
    answer = Answer(np.array(tokens, np.int32), len(prompt))
    found = measure(checkpoint, model, [answer])["mtp"]

    # The slow way: at each anchor, sequences of their own, extended token by token.
    runs = []
    for anchor in range(answer.start, len(tokens) - 1):
        hidden = trunk.forward(config, model.params, jnp.asarray([tokens[:anchor]]))
        following = tokens[1 : anchor + 1]
        run, alive = 0, True
        for j in range(3):
            rows = mtp.forward(config, head, hidden, model.params.embed[jnp.asarray([following])])
            drafted = int(np.asarray(trunk.logits(model.params, rows[0, -1])).argmax())
            alive &= anchor + 1 + j < len(tokens) and drafted == tokens[anchor + 1 + j]
            run += alive
            hidden = jnp.concatenate([hidden, rows[:, -1:]], axis=1)
            following = [*following, drafted]
        runs.append(run)
    assert found.places == len(runs)
    assert 0 < sum(runs) < 3 * len(runs)
    assert found.by_position == pytest.approx([np.mean([r > j for r in runs]) for j in range(3)])
    place = rounds = 0
    while place < len(runs):
        place += runs[place] + 1
        rounds += 1
    assert found.tokens_per_round == pytest.approx(len(runs) / rounds)
