"""What `ninfer batch` makes of its options, and of how a run ends; runs of a model are in `test_model.py`."""

import pytest
from typer.testing import CliRunner

from ninfer_jax import InputError
from ninfer_jax.batch.summary import Summary
from ninfer_jax.cli.main import app

FILES = ["batch", "-i", "in", "-o", "out"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-replicas", "2"], "--num-replicas has no effect without --ray"),
        (["--num-gpus", "0"], "--num-gpus has no effect without --ray"),
        (["--num-cpus", "1"], "--num-cpus has no effect without --ray"),
        (["--batch-size", "512"], "--batch-size has no effect without --ray"),
        (["--ray", "--drain", "3"], "--drain has no effect with --ray"),
        (["--ray", "--no-ordered"], "--ordered has no effect with --ray"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(options, words):
    done = CliRunner().invoke(app, [*FILES, *options])
    assert isinstance(done.exception, InputError)
    assert words in str(done.exception)


@pytest.mark.parametrize(
    ("summary", "code", "words"),
    [
        (Summary("out", rows=3), 0, ""),
        (Summary("out", rows=3, errors=3), 0, ""),
        (Summary("out", rows=3, remaining=1, interrupted=True), 130, "2 of 3 rows are in"),
        (Summary("out", rows=3, remaining=1), 1, "1 of 3 rows have no line"),
    ],
)
def test_exit_codes(monkeypatch, summary, code, words):
    monkeypatch.setattr("ninfer_jax.cli.batch.run_batch", lambda *a, **b: summary)
    done = CliRunner().invoke(app, FILES)
    assert done.exit_code == code
    assert words in done.stderr
