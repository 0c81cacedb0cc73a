"""The trunk and the engine against Hugging Face's float32 outputs, on every tiny checkpoint."""

import pytest

from scripts.parity import compare

CHECKPOINTS = ["tiny-qwen3.5-dense", "tiny-qwen3.5-moe", "tiny-qwen3.5-vl", "tiny-qwen3-next"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_parity_with_hugging_face(goldens, name):
    checks = list(compare(goldens / name))
    assert not [c for c in checks if not c.passed]
    # Nothing was left out in silence: logits twice, argmax twice, both greedy runs, states and planes, every layer.
    names = [c.name for c in checks]
    for needed in ("forward: logits", "chunked prefill: logits", "wrong greedy tokens of 64"):
        assert needed in names
    assert "wrong greedy tokens_2 of 64" in names
    for part in ("recurrent state", "conv state", "key of", "value of", "output of layer"):
        assert any(n.startswith(part) for n in names), part
