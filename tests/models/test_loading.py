"""Loading a checkpoint folder into a model: host memory, dtypes, and errors that reach the user of `nj.load`."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import ninfer_jax as nj
from artifacts import open_checkpoint

MEASURE = """
import json, sys
import jax, jax.numpy as jnp
import ninfer_jax as nj

def high_water():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))

nj.load_model(sys.argv[2])          # imports, the backend and every code path are in memory from here on
before = high_water()
model = nj.load_model(sys.argv[1])
weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
print(json.dumps({"grown": high_water() - before, "weights": weights}))
"""


@pytest.fixture(scope="module")
def large(goldens, tmp_path_factory):
    """The tiny dense checkpoint with its vocabulary blown up to 160,000 rows: two tensors of 41 MB in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    source = goldens / "tiny-qwen3.5-dense"
    config = json.loads((source / "config.json").read_text())
    config["vocab_size"] = 160_000
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(source)
    from safetensors.numpy import load_file

    tensors = load_file(source / "model.safetensors")
    rows = np.ones((160_000, checkpoint.config.hidden_size), ml_dtypes.bfloat16)
    tensors["model.embed_tokens.weight"] = rows
    tensors["lm_head.weight"] = rows * ml_dtypes.bfloat16(2)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_loading_needs_little_more_than_the_weights(large, goldens):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, large, goldens / "tiny-qwen3.5-dense"],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    measured = json.loads(done.stdout)
    largest = 160_000 * 128 * 2
    assert measured["weights"] > 2 * 160_000 * 128 * 4
    assert measured["grown"] < measured["weights"] + 1.3 * largest


def test_what_is_not_a_model_folder_is_one_clear_error(tmp_path):
    with pytest.raises(nj.ArtifactError, match="no such folder"):
        nj.load(tmp_path / "missing")
    with pytest.raises(nj.ArtifactError, match=r"config\.json"):
        nj.load(tmp_path)


def test_the_shipped_model_loads_by_name():
    model = nj.load_model(nj.shipped_model("demo"))
    assert model.config.num_hidden_layers == 12
    (result,) = nj.generate("Once", nj.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 3
