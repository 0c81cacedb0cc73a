"""Requests and their sequences, as the worker holds them."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ninfer_jax.engine.response import Response
from ninfer_jax.frontend import Frontend, OutputSession, PreparedPrompt
from ninfer_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from ninfer_jax.program.plans import TokenLogprobs
from ninfer_jax.sampling_params import ResolvedSampling
from planner import Identity, identity
from planner.world import Submitted

ALWAYS = 2**31 - 1
"""`Submitted.synchronous` of a request whose every step waits for the one before."""

Logprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CacheOptions:
    """What a caller says about reuse."""

    enabled: bool = True
    """False: reads nothing and leaves nothing behind (CAT-22)."""
    endpoint: bool = True
    """False: the end is not kept."""
    session: str = ""
    """Name of the conversation (CAT-20); empty: none."""


DEFAULT_CACHE = CacheOptions()


class TokenScore(NamedTuple):
    """Log-probabilities of one generated token, not yet put into words."""

    logprob: float
    rank: int
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(eq=False)
class Sequence:
    """One output of a request: its output session, and where it stands while it runs."""

    request: Request
    index: int
    session: OutputSession
    seed: int
    """64-bit seed of its draws."""
    needs_row: bool
    """Whether the sampler must remember something of it."""
    needs_sampler: bool
    """Whether drawing by temperature and seed alone is not enough."""
    ticket: int = 0
    """Its number in the world; 0 until it is submitted there."""
    lane: int = -1
    """Its row while it is resident, else -1."""
    row_current: bool = False
    """Whether the sampler's memory of its lane is that of its committed tokens."""
    tokens: list[int] = field(default_factory=list)
    """Committed output tokens."""
    scores: list[TokenScore | None] = field(default_factory=list)
    """One a token if log-probabilities were asked for; None for a token that was not sampled."""
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    """Set when its last token is committed or it is given up; it takes no further token."""
    stop_reason: str | int | None = None
    error: str | None = None
    failed: bool = False
    """Given up because its own computation went wrong."""
    settled: bool = False
    """Whether the world has let it go (ENG-05)."""

    def stop(self, error: str, *, failed: bool = False) -> None:
        """Give it up for a reason."""
        self.finish_reason, self.error, self.failed = "abort", error, failed


@dataclass(eq=False)
class Request:
    """One prompt with its resolved sampling; `n` sequences."""

    request_id: str
    prompt: PreparedPrompt
    sampling: ResolvedSampling
    """With `max_tokens` filled in."""
    frontend: Frontend
    ids: np.ndarray
    """The prompt, int32 [T]."""
    identity: Identity
    cache: CacheOptions
    timeout: float | None = None
    response: Response = field(default_factory=Response)
    sequences: list[Sequence] = field(default_factory=list)
    scored: list[tuple[np.ndarray, TokenLogprobs]] = field(default_factory=list)
    """Prompt tokens and their log-probabilities on the host, a prefill unit each."""
    arrival: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first_token: float = 0.0
    done: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens that its first sequence reused."""
    prefill_tokens: int = 0
    replayed_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0

    @property
    def max_tokens(self) -> int:
        """Most output tokens of each sequence."""
        assert self.sampling.max_tokens is not None
        return self.sampling.max_tokens

    @property
    def total_tokens(self) -> int:
        """Most positions one of its sequences can ever write: the last token is never run."""
        return len(self.ids) + self.max_tokens - 1

    @property
    def finished(self) -> bool:
        """Whether the world has let all its sequences go."""
        return all(s.settled for s in self.sequences)

    def submitted(self, sequence: Sequence) -> Submitted:
        """What the world is told about one of its sequences."""
        prompt = self.prompt
        synchronous, markers = self.sampling.min_tokens, prompt.markers
        if self.sampling.thinking_budget is not None:
            synchronous = ALWAYS
        if len(self.sequences) > 1 and prompt.recovery != len(self.ids) - 1:
            markers = (*markers[:3], len(self.ids) - 1)  # where the other sequences start
        return Submitted(
            request=sequence.ticket,
            prompt=self.identity,
            max_tokens=self.max_tokens,
            cache=self.cache.enabled,
            endpoint=self.cache.endpoint,
            session="" if sequence.index else self.cache.session,
            recovery=prompt.recovery,
            splits=prompt.splits,
            anchors=prompt.anchors,
            markers=markers,
            synchronous=synchronous,
        )

    def output(self) -> RequestOutput:
        """The complete result. Nothing changes any more when this is called; any thread may."""
        metrics = RequestMetrics(
            arrival=self.arrival,
            admitted=self.admitted,
            first_token=self.first_token,
            finished=self.done,
            prefill_tokens=self.prefill_tokens,
            decode_steps=self.decode_steps,
            cached_tokens=self.cached_tokens,
            replayed_tokens=self.replayed_tokens,
            preemptions=self.preemptions,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[self._completion(s) for s in self.sequences],
            finished=True,
            metrics=metrics,
            num_cached_tokens=self.cached_tokens,
        )

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        final = sequence.session.final(scope=f"{self.request_id}-{sequence.index}")
        count = self.sampling.logprobs
        logprobs = None
        if count is not None:
            logprobs = [
                {} if score is None else self._logprobs(token, score, count)
                for token, score in zip(sequence.tokens, sequence.scores, strict=True)
            ]
        return CompletionOutput(
            index=sequence.index,
            text=final.content,
            token_ids=list(sequence.tokens),
            cumulative_logprob=None if count is None else sequence.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            reasoning=final.reasoning,
            tool_calls=list(final.tool_calls),
            error=sequence.error,
        )

    def _prompt_logprobs(self) -> list[Logprobs | None] | None:
        count = self.sampling.prompt_logprobs
        if count is None:
            return None
        entries: list[Logprobs | None] = [None]
        for targets, result in self.scored:
            for i, target in enumerate(targets.tolist()):
                score = TokenScore(
                    float(result.logprob[i]),
                    int(result.rank[i]),
                    np.asarray(result.top_ids[i]),
                    np.asarray(result.top_logprobs[i]),
                )
                entries.append(self._logprobs(target, score, count))
        return entries

    def _logprobs(self, token: int, score: TokenScore, count: int) -> Logprobs:
        """The chosen token and the `count` most probable ones."""
        decode = self.frontend.tokenizer.decode
        text = decode([token], skip_special_tokens=False)
        entry = {token: Logprob(score.logprob, score.rank, text)}
        for i in range(min(count, len(score.top_ids))):
            other = int(score.top_ids[i])
            if other != token:
                text = decode([other], skip_special_tokens=False)
                entry[other] = Logprob(float(score.top_logprobs[i]), i + 1, text)
        return entry


def new_request(
    request_id: str,
    prompt: PreparedPrompt,
    sampling: ResolvedSampling,
    frontend: Frontend,
    *,
    max_context: int,
    default_seed: int,
    cache: CacheOptions = DEFAULT_CACHE,
    timeout: float | None = None,
) -> Request:
    """A request with its n sequences; `default_seed` serves if the sampling names none.

    Prompt log-probabilities need every position of the prompt computed, so they switch reuse off.
    """
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=max_context - len(prompt))
    if sampling.prompt_logprobs is not None:
        cache = replace(cache, enabled=False)
    ids = prompt.array
    request = Request(
        request_id,
        prompt,
        sampling,
        frontend,
        ids,
        identity(ids),
        cache,
        timeout,
    )
    seed = default_seed if sampling.seed is None else sampling.seed % 2**64
    needs_row = bool(
        sampling.logit_bias
        or sampling.min_tokens
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )
    truncated = bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)
    needs_sampler = needs_row or (truncated and not sampling.greedy)
    request.sequences = [
        Sequence(
            request,
            i,
            frontend.output_session(prompt, sampling),
            child_seed(seed, i),
            needs_row,
            needs_sampler,
        )
        for i in range(sampling.n)
    ]
    return request


def child_seed(seed: int, index: int) -> int:
    """Seed of a request's sequence: the first one has the request's own seed, the others a hash of it."""
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
