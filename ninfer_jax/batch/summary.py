"""What a run did, and the line that shows how far it is."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ninfer_jax.batch.scan import Scan


@dataclass
class Summary:
    """What became of the lines of an input. Counts of this run, unless they say otherwise."""

    output: str
    rows: int = 0
    """Lines of the input."""
    done_before: int = 0
    """Of these, lines that earlier runs had finished."""
    answered: int = 0
    errors: int = 0
    """Lines that got an error."""
    remaining: int = 0
    """Lines that still have nothing, because the run was interrupted."""
    stale: int = 0
    """Lines in the output that nothing in the input asks for any more; they stay where they are."""
    cut_bytes: int = 0
    """Bytes of a torn last line that were cut off the output."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of these, tokens that were reused and not computed."""
    generated_tokens: int = 0
    scored_tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def cached_share(self) -> float:
        """Reused prompt tokens by prompt tokens; 0 without any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by seconds."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @classmethod
    def of(cls, todo: Scan, output: str, cut_bytes: int) -> Summary:
        """What is known before anything runs."""
        return cls(
            output=output,
            rows=todo.rows,
            done_before=todo.done,
            errors=todo.errors,
            remaining=len(todo.todo),
            stale=todo.stale,
            cut_bytes=cut_bytes,
        )

    def count(self, line: dict[str, Any], prompt: int, cached: int, generated: int) -> None:
        """A row has its line; the others are tokens."""
        self.remaining -= 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.generated_tokens += generated
        if line["error"] is None:
            self.answered += 1
            scores = line["response"]["body"].get("scores", ())
            self.scored_tokens += sum(len(score["token_ids"]) for score in scores)
        else:
            self.errors += 1

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        rates = {
            "cached_share": round(self.cached_share, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }
        return dataclasses.asdict(self) | {"seconds": round(self.seconds, 3)} | rates


class Progress:
    """A bar on stderr: rows, time left, tokens/s, errors, cached share."""

    def __init__(self, summary: Summary, *, show: bool) -> None:
        self._summary = summary
        self._started = time.monotonic()
        self._bar = tqdm(
            desc="batch",
            unit="row",
            total=summary.rows,
            initial=summary.rows - summary.remaining,
            disable=not show,
            mininterval=0.5,
        )

    def row(self) -> None:
        """A row has its line."""
        summary = self._summary
        summary.seconds = time.monotonic() - self._started
        self._bar.set_postfix_str(
            f"{summary.tokens_per_second:.1f} tokens/s, {summary.errors} errors, "
            f"{summary.cached_share:.0%} cached",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._summary.seconds = time.monotonic() - self._started
        self._bar.close()
