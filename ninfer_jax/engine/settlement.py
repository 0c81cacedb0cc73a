"""From a decode unit's results to committed tokens: what goes before the world's commit, and what after (UN-08)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ninfer_jax.engine.flight import DecodeFlight
from ninfer_jax.engine.request import Sequence, TokenScore
from ninfer_jax.engine.response import News
from ninfer_jax.engine.stats import Stats
from ninfer_jax.frontend import Preview
from ninfer_jax.program.plans import TokenLogprobs
from planner.world import RowResult

NAN_ERROR = "the model's logits are not finite; the weights or the input are damaged"


class RowCommit(NamedTuple):
    """A token that was previewed and waits for the world's commit."""

    sequence: Sequence
    preview: Preview
    score: TokenScore | None
    """None: log-probabilities are not wanted, or the token was not sampled."""


def preview_rows(
    flight: DecodeFlight, live: Mapping[int, Sequence], stats: Stats
) -> tuple[tuple[RowResult, ...], list[RowCommit]]:
    """Read a unit. Returns what to tell the world of each row, and what to commit once it agreed.

    Rows that replayed, ended or were cancelled commit nothing (UN-06).
    """
    readings = flight.read()
    results: list[RowResult] = []
    commits: list[RowCommit] = []
    for row in flight.rows:
        sequence = live[row.request]
        if row.replay or sequence.finish_reason is not None:
            results.append(RowResult(row.request))
            continue
        if not readings.healthy[row.lane]:
            stats.nan_rows += 1
            sequence.stop(NAN_ERROR, failed=True)
            results.append(RowResult(row.request, (), "failed"))
            continue
        token, score = readings.tokens[row.lane], None
        if forced := _control_token(sequence):
            token = forced[0]
        elif readings.logprobs is not None and sequence.request.sampling.logprobs is not None:
            score = _score(readings.logprobs, row.lane)
        preview = sequence.session.preview((token,))
        results.append(RowResult(row.request, (token,), "finished" if preview.finished else ""))
        commits.append(RowCommit(sequence, preview, score))
    return tuple(results), commits


def commit_row(commit: RowCommit, stats: Stats, now: float) -> None:
    """Make a preview true and tell the consumer."""
    sequence, preview, score = commit
    request = sequence.request
    delta = sequence.session.commit(preview)
    sequence.tokens.extend(delta.token_ids)
    stats.generated_tokens += len(delta.token_ids)
    sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason
    if request.sampling.logprobs is not None:
        sequence.scores.append(score)
        sequence.cumulative_logprob += 0.0 if score is None else score.logprob
    if len(sequence.tokens) == request.sampling.min_tokens:
        sequence.row_current = False  # end tokens become legal
    if not request.first_token:
        request.first_token = now
        stats.first_token_time.add(now - request.arrival)
    request.response.post(News(sequence.index, delta))


def _control_token(sequence: Sequence) -> tuple[int, ...]:
    """What must stand in the place of the sampled token (UN-10)."""
    if sequence.request.sampling.thinking_budget is None:
        return ()
    forced = sequence.session.control_tokens()
    if forced:
        sequence.row_current = False  # the sampler counted the token it drew
    return forced


def _score(logprobs: TokenLogprobs, lane: int) -> TokenScore:
    return TokenScore(
        float(logprobs.logprob[lane]),
        int(logprobs.rank[lane]),
        np.asarray(logprobs.top_ids[lane]),
        np.asarray(logprobs.top_logprobs[lane]),
    )
