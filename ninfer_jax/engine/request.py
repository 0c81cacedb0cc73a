"""Requests and their sequences, as the generation loop holds them."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace

import numpy as np

from ninfer_jax.frontend import Frontend, OutputSession, PreparedPrompt
from ninfer_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from ninfer_jax.program.allocator import Lease
from ninfer_jax.sampling_params import ResolvedSampling

Logprobs = dict[int, Logprob]


@dataclass
class Sequence:
    """One output of a request: its output session, and where it stands while it runs."""

    request: Request
    index: int
    session: OutputSession
    seed: int
    """64-bit seed of its draws."""
    lease: Lease | None = None
    tokens: list[int] = field(default_factory=list)
    """Committed output tokens."""
    logprobs: list[Logprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    forced: int = -1
    """Token the next step must run; -1: the one sampled last, still on the device."""
    launched: int = 0
    """Output tokens asked of the device so far; ahead of `tokens` by the step in flight."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def position(self) -> int:
        """Position of the token that the next step runs."""
        return len(self.request.prompt) - 1 + self.launched

    @property
    def wants_step(self) -> bool:
        """Whether another step may still be launched for it."""
        return self.finish_reason is None and self.launched < self.request.max_tokens

    @property
    def synchronous(self) -> bool:
        """Whether the next step may be launched only when the last one is read.

        A control rule can force its input, or it is the step at which stop tokens become legal.
        """
        s = self.request.sampling
        return s.thinking_budget is not None or 0 < self.launched <= s.min_tokens

    @property
    def needs_full_sampler(self) -> bool:
        """Whether a plain argmax is not enough."""
        s = self.request.sampling
        return not s.greedy or s.logprobs is not None or self.needs_sampler_row

    @property
    def needs_sampler_row(self) -> bool:
        """Whether the sampler must remember something of this sequence."""
        s = self.request.sampling
        return bool(
            s.logit_bias
            or s.min_tokens
            or s.presence_penalty
            or s.frequency_penalty
            or s.repetition_penalty != 1.0
        )


@dataclass
class Request:
    """One prompt with its resolved sampling; `n` sequences."""

    request_id: str
    prompt: PreparedPrompt
    sampling: ResolvedSampling
    """With `max_tokens` filled in."""
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    arrival: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first_token: float = 0.0
    done: float = 0.0
    decode_steps: int = 0

    @property
    def max_tokens(self) -> int:
        """Most output tokens of each sequence."""
        assert self.sampling.max_tokens is not None
        return self.sampling.max_tokens

    @property
    def total_tokens(self) -> int:
        """Most positions one of its sequences can ever write: the last token is never run."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def finished(self) -> bool:
        return all(s.finish_reason is not None for s in self.sequences)

    def output(self) -> RequestOutput:
        """The result so far."""
        metrics = RequestMetrics(
            arrival=self.arrival,
            admitted=self.admitted,
            first_token=self.first_token,
            finished=self.done,
            prefill_tokens=len(self.prompt) - 1,
            decode_steps=self.decode_steps,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            prompt_logprobs=self.prompt_logprobs,
            outputs=[self._completion(s) for s in self.sequences],
            finished=self.finished,
            metrics=metrics if self.finished else None,
        )

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        final = sequence.session.final(scope=f"{self.request_id}-{sequence.index}")
        wanted = self.sampling.logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text=final.content,
            token_ids=list(sequence.tokens),
            cumulative_logprob=sequence.cumulative_logprob if wanted else None,
            logprobs=list(sequence.logprobs) if wanted else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            reasoning=final.reasoning,
            tool_calls=list(final.tool_calls),
            error=sequence.error,
        )


def new_request(
    request_id: str,
    prompt: PreparedPrompt,
    sampling: ResolvedSampling,
    frontend: Frontend,
    *,
    max_context: int,
    default_seed: int,
) -> Request:
    """A request with its n sequences; `default_seed` serves if the sampling names none."""
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=max_context - len(prompt))
    request = Request(request_id, prompt, sampling)
    seed = default_seed if sampling.seed is None else sampling.seed % 2**64
    request.sequences = [
        Sequence(request, i, frontend.output_session(prompt, sampling), child_seed(seed, i))
        for i in range(sampling.n)
    ]
    return request


def child_seed(seed: int, index: int) -> int:
    """Seed of a request's sequence: the first one has the request's own seed, the others a hash of it."""
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def sampler_row(sequence: Sequence, vocab: int) -> dict[str, np.ndarray]:
    """What the sampler must remember of a sequence now: counts, prompt mask and bias, each [vocab]."""
    request = sequence.request
    counts = np.bincount(sequence.tokens, minlength=vocab).astype(np.int32)
    prompt = np.zeros(vocab, bool)
    prompt[list(request.prompt.token_ids)] = True
    bias = np.zeros(vocab, np.float32)
    for token, value in request.sampling.logit_bias:
        bias[token] += value
    if len(sequence.tokens) < request.sampling.min_tokens:
        bias[sorted(t for t in sequence.session.ending_token_ids if t < vocab)] = -np.inf
    return {"counts": counts, "prompt": prompt, "bias": bias}
