"""`run_batch`: an input file through an engine into an output file, as far as it is not there yet."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

from ninfer_jax.api import load
from ninfer_jax.batch.flow import Flow
from ninfer_jax.batch.interrupt import Interrupt
from ninfer_jax.batch.journal import Journal
from ninfer_jax.batch.scan import scan
from ninfer_jax.batch.summary import Progress, Summary
from ninfer_jax.batch.windows import Ahead, windows
from ninfer_jax.engine import Engine
from ninfer_jax.errors import EngineFailure, InputError
from ninfer_jax.outputs import RequestOutput


def run_batch(
    input: str | Path,
    output: str | Path,
    model: str | Path | Engine = "demo",
    *,
    ordered: bool = True,
    cache: bool = True,
    drain: float = 30.0,
    progress: bool = True,
    **config: Any,
) -> Summary:
    """Answer every line of an OpenAI batch file that the output has no line for yet.

    The output may be there from an earlier run, however that ended: a torn last line is cut off, and lines are
    matched by custom_id and a hash of the request. A mistake in a line gives an error line and stops nothing.

    On SIGINT or SIGTERM, if called in the main thread, nothing new is started and what runs is finished; after
    `drain` seconds or a second signal it is cancelled. The summary then says `interrupted`.

    Args:
      input: JSON Lines of `{"custom_id", "method", "url", "body"}`.
      output: where lines of `{"id", "custom_id", "response", "error"}` are appended, as they are finished.
      model: an engine, or what `load` takes; it is loaded only if there is something to do.
      ordered: run rows that share the beginning of their prompts beside each other, long ones first; False: in the
        order of the file.
      cache: False neither reuses nor keeps anything.
      drain: seconds.
      progress: show a bar on stderr.
      **config: as in `load`, if the model is not an engine.

    Raises:
      InputError: the output is in use or is something else; unknown configuration.
      EngineFailure: the engine failed; what was finished is in the output.
      OSError: a file cannot be read or written.
    """
    if isinstance(model, Engine) and config:
        raise InputError(f"the engine is loaded already; {', '.join(config)} must be given to load")
    check_paths(Path(input), Path(output))
    with Journal(output) as journal:
        todo = scan(input, journal)
        summary = Summary.of(todo, str(output), journal.cut_bytes)
        if not todo.todo:
            return summary
        engine = model if isinstance(model, Engine) else load(model, **config)
        bar = Progress(summary, show=progress)

        def done(line: dict[str, Any], outputs: list[RequestOutput]) -> None:
            journal.add(line)
            summary.count(
                line,
                sum(len(o.prompt_token_ids) for o in outputs),
                sum(o.num_cached_tokens for o in outputs),
                sum(len(s.token_ids) for o in outputs for s in o.outputs),
            )
            bar.row()

        flow = Flow(engine, done, cache=cache)
        source = windows(
            todo.requests(), engine.frontend, engine.limits.max_context, ordered=ordered and cache
        )
        try:
            with Interrupt(flow.wake) as interrupt:
                ahead = Ahead(source, flow.wake)
                try:
                    flow.run(ahead, journal.tick, lambda: _level(interrupt, drain))
                finally:
                    ahead.close()
                summary.interrupted = interrupt.count > 0 and summary.remaining > 0
        except EngineFailure as error:
            journal.flush()
            raise EngineFailure(
                f"{summary.rows - summary.remaining} of {summary.rows} rows are in {output}; run the same again for "
                f"the others. {error}"
            ) from error
        finally:
            bar.close()
            if not isinstance(model, Engine):
                engine.close()
        return summary


def check_paths(input: Path, output: Path) -> None:
    """Before the output is made. Raises InputError for an input that cannot serve, OSError if it is not there."""
    if not stat.S_ISREG(input.stat().st_mode):
        raise InputError(
            f"{input} is no file; a batch goes to and fro in its input, so write what a pipe gives to a file first"
        )
    if output.exists() and input.samefile(output):
        raise InputError(f"{output} is the input; give another output")


def _level(interrupt: Interrupt, drain: float) -> int:
    overdue = interrupt.count and time.monotonic() - interrupt.since > drain
    return 2 if overdue else interrupt.count
