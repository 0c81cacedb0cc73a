"""The batch bench refuses a job that it cannot measure, before it loads a model."""

import pytest

from scripts import bench_batch


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", "10"], "--rows must be more than the 10 beginnings; got 10"),
        (["--rows", "-1"], "--rows must be more than the 10 beginnings; got -1"),
        (["--max-tokens", "0"], "--max-tokens must be 1 to 256; got 0"),
        (["--max-tokens", "257"], "--max-tokens must be 1 to 256; got 257"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, options, words):
    monkeypatch.setattr("sys.argv", ["bench_batch", *options, "--model", "none"])
    with pytest.raises(SystemExit) as stopped:
        bench_batch.main()
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
