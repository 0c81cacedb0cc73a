"""The text front end: tokenizer, chat templates, detokenisation, stops, channels, tool calls. Knows
no engine."""

from ninfer_jax.frontend.channels import Channel, initial_channel
from ninfer_jax.frontend.chat_template import ChatTemplate
from ninfer_jax.frontend.detokenizer import Detokenizer
from ninfer_jax.frontend.frontend import Frontend
from ninfer_jax.frontend.messages import normalize_messages, normalize_tools
from ninfer_jax.frontend.output_session import (
    FinalOutput,
    FinishReason,
    OutputDelta,
    OutputSession,
    Preview,
)
from ninfer_jax.frontend.prompt import PreparedPrompt
from ninfer_jax.frontend.stops import StopMatch, StopMatcher
from ninfer_jax.frontend.tokenizer import Tokenizer
from ninfer_jax.frontend.tool_calls import ToolCall, parse_tool_calls

__all__ = [
    "Channel",
    "ChatTemplate",
    "Detokenizer",
    "FinalOutput",
    "FinishReason",
    "Frontend",
    "OutputDelta",
    "OutputSession",
    "PreparedPrompt",
    "Preview",
    "StopMatch",
    "StopMatcher",
    "Tokenizer",
    "ToolCall",
    "initial_channel",
    "normalize_messages",
    "normalize_tools",
    "parse_tool_calls",
]
