"""The head in vocabulary chunks against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.scoring import core


def scores(vocab, *, rows=9, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    head = (scale * rng.normal(size=(vocab, 8))).astype(np.float32)
    hidden = rng.normal(size=(rows, 8)).astype(np.float32)
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T
    peak = logits.max(-1, keepdims=True)
    return head, hidden, logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


@pytest.mark.parametrize("vocab", [5, 2047, 2048, 2049, 5000])
def test_chunks_of_the_vocabulary(vocab):
    head, hidden, want = scores(vocab)
    targets = np.array([0, vocab - 1, *want.argmax(-1)[2:7], -1, 1], np.int32)
    got, greedy = jax.jit(core.token_scores)(head, hidden, targets)
    asked = targets >= 0
    rows = np.arange(9)[asked]
    np.testing.assert_allclose(np.asarray(got)[asked], want[rows, targets[asked]], atol=1e-5)
    np.testing.assert_array_equal(greedy, targets == want.argmax(-1))


def test_logits_of_any_size():
    head, hidden, want = scores(3000, scale=300.0)
    got, _ = core.token_scores(jnp.asarray(head), jnp.asarray(hidden), jnp.zeros(9, jnp.int32))
    np.testing.assert_allclose(got, want[:, 0], rtol=1e-5)


def test_of_equal_tokens_the_lowest_id_is_the_greedy_one():
    targets = jnp.array([0, 1, 4099], jnp.int32)
    _, greedy = core.token_scores(jnp.zeros((4100, 8)), jnp.ones((3, 8)), targets)
    assert greedy.tolist() == [True, False, False]


def test_no_array_holds_all_rows_and_the_whole_vocabulary():
    rows, vocab = 64, 3 * core.VOCAB_CHUNK
    lowered = jax.jit(core.token_scores).lower(
        jax.ShapeDtypeStruct((vocab, 8), jnp.float32),
        jax.ShapeDtypeStruct((rows, 8), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    assert f"{rows}x{vocab}x" not in lowered.as_text()
    assert f"{rows}x{core.VOCAB_CHUNK}x" in lowered.as_text()
