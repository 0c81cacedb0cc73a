"""What a caller gets back: vLLM's names and shapes (interfaces: generate)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ninfer_jax.frontend import ToolCall

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token under the raw model distribution (before temperature, penalties and truncation)."""

    logprob: float
    rank: int
    """1 is the most probable token."""
    decoded_token: str


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    """Everything generated (for chats: the content channel, tool calls removed where tools were offered)."""
    token_ids: list[int]
    """Every accepted token, the one that ended the output included."""
    cumulative_logprob: float | None = None
    """Sum over the tokens; None unless logprobs were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token the chosen one and the top n; a token forced by a control rule has an empty entry."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id; None for an end-of-sequence token or a length stop."""
    reasoning: str | None = None
    """Thinking text of a chat."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    error: str | None = None
    """Why the sequence was aborted."""

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, seconds on one monotonic clock, and the work it caused."""

    arrival: float
    admitted: float
    first_token: float
    finished: float
    prefill_tokens: int
    """Prompt tokens computed for this request, replay not counted."""
    decode_steps: int
    """Steps in which a sequence of this request ran and something was sampled for it."""
    cached_tokens: int = 0
    """Prompt tokens that were reused and not computed, of the first sequence."""
    replayed_tokens: int = 0
    """Tokens computed a second time after a pause."""
    preemptions: int = 0
    """How often a sequence of this request was paused for another."""

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival to the first token on the host; 0 if there was none."""
        return max(0.0, self.first_token - self.arrival)

    @property
    def queue_time(self) -> float:
        """Seconds from arrival to the first lane; 0 if it never had one."""
        return max(0.0, self.admitted - self.arrival)


@dataclass
class RequestOutput:
    """The result of one prompt."""

    request_id: str
    prompt: str | None
    """The text of the prompt; None if it was given as ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """One entry a prompt token, the first None; None unless asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were reused and not computed."""


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to a streamed output. Reasons come with a chunk of their own, after all text."""

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    output: RequestOutput | None = None
    """The complete result, with the last chunk only."""
    index: int = 0
    """Which of the n sequences goes on."""
