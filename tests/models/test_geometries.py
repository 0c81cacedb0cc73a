"""Public geometries and models with random weights."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ninfer_jax as nj
from artifacts.architectures.qwen3_5 import parameter_shapes
from ninfer_jax.models import geometries
from ninfer_jax.models.qwen3_5.params import parameter_layout


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("0.8B", 0.75, None), ("4B", 4.2, None), ("9B", 9.0, None), ("27B", 26.9, None), ("35B-A3B", 34.7, 3.3)],
)  # fmt: skip
def test_a_geometry_has_the_size_in_its_name(name, billions, active):
    config = geometries.GEOMETRIES[name]
    sizes = {n: math.prod(s) for n, s in parameter_shapes(config, ("text",)).items()}
    assert sum(sizes.values()) / 1e9 == pytest.approx(billions, rel=0.03)
    if active:
        experts = sum(size for n, size in sizes.items() if ".experts." in n)
        rest = sum(sizes.values()) - experts
        chosen = experts * config.num_experts_per_tok / config.num_experts
        assert (rest + chosen) / 1e9 == pytest.approx(active, rel=0.1)


def test_random_weights_fill_every_leaf_as_the_layout_says():
    config = replace(
        geometries.GEOMETRIES["35B-A3B"],
        vocab_size=512, hidden_size=64, num_hidden_layers=4,
        layer_types=geometries.GEOMETRIES["4B"].layer_types[:4], ffn_types=("moe",) * 4,
        num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        num_attention_heads=2, num_key_value_heads=1, head_dim=128,
        linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    params = geometries.random_weights(config, dtype=jnp.bfloat16, seed=3)
    layout = jax.tree.leaves(
        parameter_layout(config, jnp.bfloat16), is_leaf=lambda x: hasattr(x, "sources")
    )
    for leaf, array in zip(layout, jax.tree.leaves(params), strict=True):
        assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype)
        values = np.asarray(array, np.float32)
        if "proj" in leaf.sources[0]:
            assert values.std() == pytest.approx(0.02, rel=0.1)
            assert len(values) == 1 or not np.array_equal(values[0], values[1])
    again = geometries.random_weights(config, dtype=jnp.bfloat16, seed=3)
    other = geometries.random_weights(config, dtype=jnp.bfloat16, seed=4)
    assert np.array_equal(*(np.asarray(p.embed, np.float32) for p in (params, again)))
    assert not np.array_equal(*(np.asarray(p.embed, np.float32) for p in (params, other)))
    model = nj.Model(params=params, config=config)
    logits = np.asarray(nj.forward(model, np.arange(10, dtype=np.int32)[None]))
    assert np.isfinite(logits).all()
    assert logits.std() > 0


def test_an_unknown_size_is_refused_by_name():
    with pytest.raises(nj.InputError, match=r"'5B'; known: 0\.8B, 4B"):
        nj.random_model("5B")
