"""One request's output: from token ids to text, channels, stops and the reason it ended (FE-02).

The engine shows new tokens to `preview`, which changes nothing; once the program has committed
them, `commit` makes the preview true (FE-05, UN-08). A preview that is never committed leaves no
trace.

    tokens --> end tokens --> channel tags --> bytes to text --> white space --> stop strings

Every stage is an immutable value whose step returns its successor, so a preview is a walk from the
committed state, and several tokens in one preview give what one by one gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ninfer_jax.errors import InputError
from ninfer_jax.frontend.channels import Channel, ChannelState, Tag
from ninfer_jax.frontend.detokenizer import Detokenizer
from ninfer_jax.frontend.prompt import PreparedPrompt
from ninfer_jax.frontend.stops import StopMatch, StopMatcher
from ninfer_jax.frontend.tokenizer import Tokenizer
from ninfer_jax.frontend.tool_calls import ToolCall, parse_tool_calls
from ninfer_jax.sampling_params import ResolvedSampling

FinishReason = Literal["stop", "length"]
"""Why an output ended by itself; a cancelled request's "abort" is the engine's word."""


@dataclass(frozen=True)
class OutputDelta:
    """What one commit adds to an output."""

    token_ids: tuple[int, ...]
    """The accepted tokens, the one that ended the output included."""
    text: str
    """New text: of the content channel in a chat, of everything otherwise."""
    reasoning: str
    """New thinking text; always empty outside chats."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or stop token id that ended the output; None for an end-of-sequence token, or
    if it goes on."""


@dataclass(frozen=True)
class Preview:
    """What would happen if the tokens shown were committed (UN-06)."""

    accepted: int
    """How many of the tokens belong to the output: all of them, or fewer if one before the last
    ends it."""
    delta: OutputDelta
    before: _State
    after: _State

    @property
    def finished(self) -> bool:
        """Whether the output ends with these tokens."""
        return self.delta.finish_reason is not None


@dataclass(frozen=True)
class FinalOutput:
    """A finished output, or as much as there is of an unfinished one."""

    token_ids: tuple[int, ...]
    text: str
    """All text deltas, joined."""
    content: str
    """`text` without tool calls; the same if there are none or none were offered."""
    reasoning: str | None
    """All thinking deltas, joined; None outside chats and if there was no thinking."""
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class _State(NamedTuple):  # a tuple, since several are made for every token
    detokenizer: Detokenizer
    matcher: StopMatcher
    channel: ChannelState | None
    """None: no channels, everything is text."""
    tokens: int = 0
    """Tokens accepted so far."""
    thought: int = 0
    """Of these, tokens in the reasoning channel."""
    finished: bool = False


class OutputSession:
    """The output of one request.

    Rules, in the order in which a token meets them (`k` counts from 1):

    1. Token k <= `min_tokens` ends nothing, and no stop string is complete in its text.
    2. An end-of-sequence token, unless `ignore_eos`: "stop", stop_reason None. A `stop_token_ids`
       token: "stop", its id. The text of such a token is left out unless
       `include_stop_str_in_output`; the id stays in `token_ids`.
    3. A stop string complete in the text: "stop", the string. In a chat only the content is
       searched: the stop strings of a caller are about the answer, not about the thinking that
       precedes it. What follows the match is dropped.
    4. `max_tokens` reached: "length".

    At the end, text held back goes out: an unfinished character as U+FFFD, a part of a stop string
    as it is.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: ResolvedSampling, prompt: PreparedPrompt
    ) -> None:
        """Begin an output.

        Raises:
            InputError: `thinking_budget` for a raw prompt, or a vocabulary without `</think>`.
        """
        if sampling.thinking_budget is not None and (
            prompt.channel is None or tokenizer.think_end_id is None
        ):
            why = "a raw prompt has none" if prompt.channel is None else "this vocabulary has none"
            raise InputError(
                f"thinking_budget limits the thinking of a chat; {why}, leave it unset"
            )
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._prompt = prompt
        self._eos = frozenset() if sampling.ignore_eos else tokenizer.eos_token_ids
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._tags: dict[int, Tag] = {}
        if prompt.channel is not None:
            for token_id, tag in (
                (tokenizer.think_start_id, Tag.OPEN),
                (tokenizer.think_end_id, Tag.CLOSE),
            ):
                if token_id is not None:
                    self._tags[token_id] = tag
        self._state = _State(
            Detokenizer(tokenizer, sampling.skip_special_tokens),
            StopMatcher(sampling.stop, sampling.include_stop_str_in_output),
            None if prompt.channel is None else ChannelState(prompt.channel),
        )
        self._deltas: list[OutputDelta] = []

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that end the output: what the device masks while fewer than `min_tokens` tokens are
        out."""
        return self._eos | self._stop_ids

    @property
    def finished(self) -> bool:
        """Whether a committed token ended the output."""
        return self._state.finished

    @property
    def num_tokens(self) -> int:
        """Committed tokens."""
        return self._state.tokens

    def control_tokens(self) -> tuple[int, ...]:
        """The tokens that must come next whatever the model says (UN-10): `</think>` when the
        thinking budget is used.

        Empty if the model is free. The engine feeds them through `preview` and `commit` like
        sampled ones.
        """
        state, budget = self._state, self._sampling.thinking_budget
        thinking = state.channel is not None and state.channel.channel is Channel.REASONING
        if budget is None or not thinking or state.finished or state.thought < budget:
            return ()
        assert self._tokenizer.think_end_id is not None
        return (self._tokenizer.think_end_id,)

    def preview(self, token_ids: Sequence[int]) -> Preview:
        """What these tokens, produced after the committed ones, would do. Changes nothing.

        Args:
            token_ids: one or more ids; ids the tokenizer does not know are accepted and give no
                text.

        Raises:
            ValueError: no token, or the output is over: a mistake of the engine, not of a user.
        """
        if self._state.finished:
            raise ValueError("the output is finished; no token can follow")
        if not len(token_ids):
            raise ValueError("a preview needs at least one token")
        state = self._state
        text: list[str] = []
        reasoning: list[str] = []
        accepted: list[int] = []
        finish: FinishReason | None = None
        stop: str | int | None = None
        for token_id in map(int, token_ids):
            accepted.append(token_id)
            state, finish, stop = self._step(state, token_id, text, reasoning)
            if finish is not None:
                break
        delta = OutputDelta(tuple(accepted), "".join(text), "".join(reasoning), finish, stop)
        return Preview(len(accepted), delta, self._state, state)

    def commit(self, preview: Preview) -> OutputDelta:
        """Make a preview true, and return what it adds.

        Raises:
            ValueError: the preview was not made from the committed state (another was committed
                since).
        """
        if preview.before is not self._state:
            raise ValueError(
                "a preview can be committed once, and only to the state it was made from"
            )
        self._state = preview.after
        self._deltas.append(preview.delta)
        return preview.delta

    def final(self, *, scope: str = "") -> FinalOutput:
        """Everything committed so far. `scope` makes ids of tool calls differ between answers: the
        request's id."""
        text = "".join(delta.text for delta in self._deltas)
        thoughts = "".join(delta.reasoning for delta in self._deltas)
        content = text
        calls: tuple[ToolCall, ...] = ()
        if self._prompt.channel is not None and self._prompt.tools:
            content, calls = parse_tool_calls(text, self._prompt.tools, scope=scope)
        last = self._deltas[-1] if self._deltas else None
        return FinalOutput(
            token_ids=tuple(i for delta in self._deltas for i in delta.token_ids),
            text=text,
            content=content,
            reasoning=thoughts or None,
            tool_calls=calls,
            finish_reason=last.finish_reason if last else None,
            stop_reason=last.stop_reason if last else None,
        )

    def _step(
        self, state: _State, token_id: int, text: list[str], reasoning: list[str]
    ) -> tuple[_State, FinishReason | None, str | int | None]:
        """One token: the next state, and how the output ends if it does. New text is appended to
        the lists."""
        count = state.tokens + 1
        may_stop = count > self._sampling.min_tokens
        finish: FinishReason | None = None
        stop: str | int | None = None
        if may_stop and token_id in self._eos:
            finish = "stop"
        elif may_stop and token_id in self._stop_ids:
            finish, stop = "stop", token_id
        thinking = state.channel is not None and state.channel.channel is Channel.REASONING
        state = state._replace(tokens=count, thought=state.thought + thinking)
        match: StopMatch | None = None
        if finish is None or self._sampling.include_stop_str_in_output:
            state, match = self._feed(state, token_id, may_stop, text, reasoning)
        if match is None:
            if finish is None and count == self._sampling.max_tokens:
                finish = "length"
            if finish is None:
                return state, None, None
            state, match = self._close(state, may_stop, text, reasoning)
        if match is not None:
            finish, stop = "stop", match.stop
        return state._replace(finished=True), finish, stop

    def _feed(
        self,
        state: _State,
        token_id: int,
        may_stop: bool,
        text: list[str],
        reasoning: list[str],
    ) -> tuple[_State, StopMatch | None]:
        tag = self._tags.get(token_id)
        if tag is not None and state.channel is not None:
            channel, acted = state.channel.tag(tag)
            if acted:
                # The tag's bytes stand in the text the ids decode to, so no character goes on
                # across them.
                state, match = self._end_character(state, may_stop, text, reasoning)
                if match is not None:
                    return state, match
                return state._replace(channel=channel), None
        detokenizer, piece = state.detokenizer.push(token_id)
        if detokenizer is not state.detokenizer:
            state = state._replace(detokenizer=detokenizer)
        return self._emit(state, piece, may_stop, text, reasoning)

    def _emit(
        self, state: _State, piece: str, may_stop: bool, text: list[str], reasoning: list[str]
    ) -> tuple[_State, StopMatch | None]:
        if not piece:
            return state, None
        if state.channel is not None:
            thinking = state.channel.channel is Channel.REASONING
            channel, piece = state.channel.push(piece)
            if channel is not state.channel:
                state = state._replace(channel=channel)
            if thinking:
                reasoning.append(piece)
                return state, None
        matcher, shown, match = state.matcher.push(piece, may_stop=may_stop)
        text.append(shown)
        if matcher is not state.matcher:
            state = state._replace(matcher=matcher)
        return state, match

    def _end_character(
        self, state: _State, may_stop: bool, text: list[str], reasoning: list[str]
    ) -> tuple[_State, StopMatch | None]:
        detokenizer, piece = state.detokenizer.flush()
        return self._emit(state._replace(detokenizer=detokenizer), piece, may_stop, text, reasoning)

    def _close(
        self, state: _State, may_stop: bool, text: list[str], reasoning: list[str]
    ) -> tuple[_State, StopMatch | None]:
        state, match = self._end_character(state, may_stop, text, reasoning)
        if match is None:
            matcher, held = state.matcher.flush()
            text.append(held)
            state = state._replace(matcher=matcher)
        return state, match
