"""What an actor of `build_processor` makes of a table, in this process. Needs pyarrow, of the extra `ray`."""

import datetime

import pytest

import ninfer_jax as nj
from ninfer_jax.ray.processor import OUTPUTS, RowReplica
from tests.conftest import GOLDENS

pa = pytest.importorskip("pyarrow", reason="pyarrow comes with the extra `ray`")
pytestmark = [pytest.mark.eval, pytest.mark.filterwarnings("ignore")]

ENGINE = {"max_context": 320, "max_concurrency": 4, "prefill_chunk": 64}


@pytest.fixture(scope="module")
def replica():
    made = RowReplica(nj.ray.ProcessorConfig(str(GOLDENS / "tiny-qwen3.5-dense"), engine=ENGINE))
    yield made
    made._engine.close()


def test_carried_columns_keep_their_types(replica):
    """A block whose values say less than their type would not fit the blocks of other actors."""
    day = datetime.datetime(2026, 1, 1)
    kept = {
        "small": pa.array([1, 2], pa.int8()),
        "time": pa.array([day, None], pa.timestamp("ms")),
        "empty": pa.array([None, None], pa.string()),
        "picture": pa.array([[1, 2], [3, 4]], pa.list_(pa.uint8(), 2)),
        "word": pa.array(["a", "a"]).dictionary_encode(),
    }
    prompts = {
        "prompt": pa.array(["One", ""], pa.large_string()),
        "error": pa.array(["old", "old"]),
    }
    out = replica(pa.table({**kept, **prompts}))
    for name, column in kept.items():
        assert out.column(name).combine_chunks().equals(column), name
    assert out.column("prompt").type == pa.large_string()
    assert sorted(out.column_names) == sorted({*kept, *prompts, *OUTPUTS})
    first, second = out.column("error").to_pylist()
    assert first is None
    assert "empty" in second
    failed = replica(pa.table({"prompt": [""]}))
    assert [failed.schema.field(n).type for n in OUTPUTS] == [out.schema.field(n).type for n in OUTPUTS]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "either prompt or messages"),
        ({"prompt": "x", "sampling_params": "temperature=0"}, "must be a mapping"),
        ({"prompt": "x", "sampling_params": {"max_tokens": "3"}}, "max_tokens"),
        ({"prompt": b"x"}, "JSON values"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": "x"}, "must be an object"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": 1}}, "cannot set 'tools'"),
        ({"messages": "x"}, "messages"),
        ({"prompt": "x", "sampling_params": {"n": 2}}, "n must be 1"),
    ],
)  # fmt: skip
def test_a_row_that_makes_no_sense_says_why(replica, row, words):
    (error,) = replica(pa.Table.from_pylist([row])).column("error").to_pylist()
    assert words in error


def test_seeds(replica):
    """Without one it is made of the row, so a row that runs again draws the same; a given one counts."""
    drawn = {"max_tokens": 8, "ignore_eos": True, "temperature": 1}
    params = [drawn | {"seed": seed} for seed in (None, None, 1, 1, 2)]
    table = pa.Table.from_pylist([{"prompt": "x", "sampling_params": p} for p in params])
    a, again, b, also, c = replica(table).column("generated_tokens").to_pylist()
    assert (a, b) == (again, also)
    assert len({tuple(a), tuple(b), tuple(c)}) == 3
