"""`ninfer batch --ray`: an input file over many engines, into one output file, resumed as without Ray.

The driver looks at the input, hands out byte offsets, and is the only one that writes. Actors read the lines, so the
input must be on storage that every machine sees; through Ray's object store go offsets and answers only.
"""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ninfer_jax.api import load
from ninfer_jax.batch.inline import answer_lines
from ninfer_jax.batch.interrupt import Interrupt
from ninfer_jax.batch.journal import Journal
from ninfer_jax.batch.run import check_paths
from ninfer_jax.batch.scan import Scan, scan
from ninfer_jax.batch.summary import Progress, Summary
from ninfer_jax.batch.windows import Ahead
from ninfer_jax.errors import EngineFailure
from ninfer_jax.ray.config import ProcessorConfig, mapped, ray_data

TICK = 0.25
"""Seconds after which the journal and signals are looked after although no answers came."""


def run_batch(
    input: str | Path, output: str | Path, config: ProcessorConfig, *, progress: bool = True
) -> Summary:
    """`ninfer_jax.run_batch` over `config.num_replicas` engines of a Ray cluster; without `ray.init`, of this machine.

    Rows of an actor that dies run again on another. An interrupted run ends at once, loses what actors are at, and is
    gone on with by the same call.

    Raises:
      InputError: the output is in use or is something else; Ray Data is not installed.
      EngineFailure: no actor can load the model, or Ray gave up; what was finished is in the output.
      OSError: a file cannot be read or written.
    """
    data = ray_data()
    check_paths(Path(input), Path(output))
    with Journal(output) as journal:
        todo = scan(input, journal)
        summary = Summary.of(todo, str(output), journal.cut_bytes)
        if not todo.todo:
            return summary
        offsets = np.asarray(todo.todo, np.int64)
        pieces = np.array_split(offsets, -(-len(offsets) // config.batch_size))
        dataset = mapped(
            data.from_numpy(pieces), LineReplica, config, path=str(Path(input).absolute())
        )
        bar = Progress(summary, show=progress)
        taken: set[str] = set()
        news: queue.SimpleQueue[None] = queue.SimpleQueue()

        def wake() -> None:
            news.put(None)

        # Ray is waited for by a thread, so that finished lines are safe and signals are heard while actors work.
        ahead = Ahead(_rows(dataset), wake)
        try:
            with Interrupt(wake) as interrupt:
                while not (ahead.exhausted or interrupt.count):
                    for row in _take(ahead, summary):
                        line = json.loads(row["line"])
                        if line["id"] in taken:  # its actor died after it had been handed on
                            continue
                        taken.add(line["id"])
                        journal.add(line)
                        summary.count(line, row["prompt"], row["cached"], row["generated"])
                        bar.row()
                    journal.tick()
                    with contextlib.suppress(queue.Empty):
                        news.get(timeout=TICK)
                summary.interrupted = interrupt.count > 0 and summary.remaining > 0
        finally:
            bar.close()
            ahead.close(timeout=1.0)  # after an interruption it ends when Ray gives it something
        return summary


def _rows(dataset: Any) -> Iterator[list[dict[str, Any]]]:
    for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield table.to_pylist()


def _take(ahead: Ahead[dict[str, Any]], summary: Summary) -> list[dict[str, Any]]:
    try:
        return ahead.take()
    except Exception as error:  # Ray wraps what an actor raises, in one of many classes
        raise EngineFailure(
            f"{summary.rows - summary.remaining} of {summary.rows} rows are in {summary.output}; run the same again "
            f"for the others. {_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """What began it: the end of Ray's report, which is a traceback of the actor as text."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


class LineReplica:
    """An engine that takes offsets of lines."""

    def __init__(self, config: ProcessorConfig, path: str) -> None:
        self._engine = load(config.model, **config.engine)
        self._cache, self._path = config.cache, path

    def __call__(self, table: Any) -> Any:
        import pyarrow as pa

        todo = Scan(Path(self._path))
        todo.todo.extend(table.column("data").to_pylist())
        answers = answer_lines(self._engine, todo.requests(), cache=self._cache)
        return pa.table(
            {
                "line": pa.array([json.dumps(line) for line, _ in answers], pa.string()),
                "prompt": _sums(pa, [[len(o.prompt_token_ids) for o in x] for _, x in answers]),
                "cached": _sums(pa, [[o.num_cached_tokens for o in x] for _, x in answers]),
                "generated": _sums(
                    pa, [[len(s.token_ids) for o in x for s in o.outputs] for _, x in answers]
                ),
            }
        )


def _sums(pa: Any, counts: list[list[int]]) -> Any:
    return pa.array([sum(each) for each in counts], pa.int64())
