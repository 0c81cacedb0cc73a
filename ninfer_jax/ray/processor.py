"""`build_processor`: rows in, rows out, in the shape of `ray.data.llm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ninfer_jax.api import load
from ninfer_jax.batch.bodies import Call, Generation, bare, template_variables
from ninfer_jax.batch.inline import answer_works
from ninfer_jax.batch.requests import BatchRequest, request_key
from ninfer_jax.errors import InputError
from ninfer_jax.frontend import Frontend
from ninfer_jax.outputs import RequestOutput
from ninfer_jax.ray.config import ProcessorConfig, mapped
from ninfer_jax.sampling_params import SamplingParams

Row = dict[str, Any]
Change = Callable[[Row], Row]

INPUTS = ("prompt", "messages", "tools", "sampling_params", "chat_template_kwargs")
"""Columns that a processor reads; all others are carried."""
OUTPUTS = (
    "generated_text",
    "generated_tokens",
    "reasoning",
    "finish_reason",
    "num_input_tokens",
    "num_cached_tokens",
    "num_generated_tokens",
    "error",
)
"""Columns that a processor adds."""


def build_processor(
    config: ProcessorConfig,
    preprocess: Change | None = None,
    postprocess: Change | None = None,
) -> Callable[[Any], Any]:
    """A function from a Ray Dataset to a Ray Dataset.

    A row has `prompt` (text or ids) or `messages`, and may have `tools`, `sampling_params` (a mapping) and
    `chat_template_kwargs`. It gets `generated_text`, `generated_tokens`, `reasoning`, `finish_reason`,
    `num_input_tokens`, `num_cached_tokens`, `num_generated_tokens` and `error`: None, or why there is no text. Its
    other columns stay. Without a seed in `sampling_params`, one is made from the prompt and the parameters.

    Args:
      config: model and actors.
      preprocess: makes such a row of yours; the columns of yours that it leaves out are carried.
      postprocess: makes your result of the row with what was added.
    """

    def processor(dataset: Any) -> Any:
        if preprocess is not None:
            dataset = dataset.map(_Carrying(preprocess))
        dataset = mapped(dataset, RowReplica, config)
        return dataset if postprocess is None else dataset.map(postprocess)

    return processor


class _Carrying:
    def __init__(self, change: Change) -> None:
        self._change = change

    def __call__(self, row: Row) -> Row:
        return {**row, **self._change(dict(row))}


class RowReplica:
    """An engine that takes tables of rows."""

    def __init__(self, config: ProcessorConfig) -> None:
        self._engine = load(config.model, **config.engine)
        self._cache = config.cache

    def __call__(self, table: Any) -> Any:
        names = [name for name in INPUTS if name in table.column_names]
        columns = [table.column(name).to_pylist() for name in names]
        results: list[Row] = [{} for _ in range(table.num_rows)]
        works: list[Generation] = []
        for i, result in enumerate(results):
            row = {name: column[i] for name, column in zip(names, columns, strict=True)}
            try:
                works.append(_prepared(str(i), row, self._engine.frontend))
            except InputError as error:
                result["error"] = str(error)
            except Exception as error:  # a fault of ours costs its row, and no other
                result["error"] = f"{type(error).__name__}: {error}"
        for line, outputs in answer_works(self._engine, list(works), cache=self._cache):
            results[int(line["custom_id"])].update(_result(line, outputs))
        return _table(table, results)


def _prepared(name: str, row: Row, frontend: Frontend) -> Generation:
    given = {key: _plain(value) for key, value in row.items() if value is not None}
    try:
        request = BatchRequest(name, "chat", {}, request_key("", given))
    except TypeError as error:  # bytes or times, say, which an Arrow column may hold
        raise InputError(f"a row's inputs must be JSON values: {error}") from None
    params = SamplingParams.from_dict(given.get("sampling_params", {}))
    if params.seed is None:
        params = replace(params, seed=request.seed)
    if ("prompt" in given) == ("messages" in given):
        raise InputError("a row has either prompt or messages")
    if params.n not in (None, 1):
        raise InputError(f"n must be 1: a row gives a row; got {params.n}")
    if "prompt" in given:
        prompt = frontend.prepare_prompt(given["prompt"])
    else:
        variables = template_variables(given.get("chat_template_kwargs"))
        prompt = frontend.prepare_chat(given["messages"], given.get("tools"), **variables)
    return Generation(request, (Call(bare(prompt), params),))


def _plain(value: Any) -> Any:
    """Without the nulls that Arrow puts where another row has a field."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def _result(line: Row, outputs: list[RequestOutput]) -> Row:
    if line["error"] is not None:
        return {"error": line["error"]["message"]}
    (sequence,) = outputs[0].outputs
    return {
        "generated_text": sequence.text,
        "generated_tokens": sequence.token_ids,
        "reasoning": sequence.reasoning,
        "finish_reason": sequence.finish_reason,
        "num_input_tokens": len(outputs[0].prompt_token_ids),
        "num_cached_tokens": outputs[0].num_cached_tokens,
        "num_generated_tokens": len(sequence.token_ids),
    }


def _table(table: Any, results: list[Row]) -> Any:
    """The table with the added columns. Their types are fixed: a table whose rows all failed fits the others."""
    import pyarrow as pa

    texts = dict.fromkeys(("generated_text", "reasoning", "finish_reason", "error"), pa.string())
    table = table.drop_columns([name for name in OUTPUTS if name in table.column_names])
    for name in OUTPUTS:
        number = pa.list_(pa.int64()) if name == "generated_tokens" else pa.int64()
        kind = texts.get(name, number)
        table = table.append_column(name, pa.array([r.get(name) for r in results], kind))
    return table
