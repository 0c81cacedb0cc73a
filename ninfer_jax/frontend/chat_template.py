"""Chat templates: a checkpoint's jinja source, run as it is given (FE-03) in a sandbox.

The environment offers what Hugging Face's does: `tojson`, `raise_exception`, `strftime_now`, loop
controls, the `{% generation %}` block, trimmed blocks, special tokens as variables. A template
comes with a checkpoint and is not to be trusted: attributes of Python's internals are out of reach,
values cannot be changed, and ranges, sizes of strings and the length of the output have limits, so
that none runs away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from artifacts.resources import FrontendResources
from ninfer_jax.errors import ArtifactError, InputError
from ninfer_jax.frontend.messages import normalize_messages, normalize_tools
from ninfer_jax.frontend.template_sandbox import TemplateSandbox

# Marks the end of a message that is to be continued; private-use characters, which no text means
# anything by.
_HERE = "\ue0f1continue\ue0f2"


# What an expression that does not suit its values can raise: a template is code too.
_STUMBLES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _TemplateRefusal(Exception):  # noqa: N818 - the template's own word, not an error of ours
    """`raise_exception` was called."""


class ChatTemplate:
    """One checkpoint's chat template, compiled once. Rendering changes nothing here or in the
    caller's messages."""

    def __init__(
        self,
        source: str | Sequence[Mapping[str, str]],
        *,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile a template.

        Args:
            source: jinja text, or the list form of tokenizer_config.json: `[{"name": ...,
                "template": ...}]` with a "default" and perhaps a "tool_use", which is taken when
                tools are given.
            special_tokens: variables such as `eos_token`.
            clock: what `strftime_now` reads.

        Raises:
            ArtifactError: a syntax error, or a list without a usable entry.
        """
        self._environment = TemplateSandbox()
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        self._special_tokens = dict(special_tokens or {})
        self.sources: Mapping[str, str] = _by_name(source)
        """Jinja text by name, "default" among them."""
        self._templates = {name: self._compile(name, text) for name, text in self.sources.items()}

    @classmethod
    def from_resources(
        cls, resources: FrontendResources, *, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate | None:
        """The checkpoint's template, or None if it has none. Raises ArtifactError as the
        constructor does."""
        source = resources.chat_template or resources.tokenizer_config.get("chat_template")
        return cls(source, special_tokens=special_tokens) if source else None

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: as `messages.normalize_messages` takes them.
            tools: JSON objects of the tools offered; None and [] are alike.
            add_generation_prompt: end with the header of the assistant's answer.
            continue_final_message: end inside the last message, an assistant's, so that the output
                continues it; there is then no header.
            **kwargs: further variables for the template (`enable_thinking`, ...).

        Raises:
            InputError: the messages are malformed, or the template refuses them.
            ArtifactError: the template does what the sandbox forbids.
        """
        offered = normalize_tools(tools)
        uniform = normalize_messages(messages, system_anywhere=self._system_anywhere)
        if continue_final_message:
            _mark_end(uniform)
        text = self._run(
            offered,
            {
                **self._special_tokens,
                **kwargs,
                "messages": uniform,
                "tools": offered,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            },
        )
        if not continue_final_message:
            return text
        cut = text.rfind(_HERE)
        if cut < 0:
            raise InputError(
                "the chat template does not show the last message's content; it cannot be continued"
            )
        return text[:cut]

    @cached_property
    def _system_anywhere(self) -> bool:
        """Whether the template shows a system message that is not first, found by trying."""
        first, later = "\ue0f3first", "\ue0f3later"
        probe = [
            {"role": "system", "content": first},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "system", "content": later},
            {"role": "user", "content": "c"},
        ]
        try:
            text = self._run(
                None,
                {
                    **self._special_tokens,
                    "messages": probe,
                    "tools": None,
                    "add_generation_prompt": True,
                },
            )
        except (InputError, ArtifactError):
            return False
        return 0 <= text.find(first) < text.find(later)

    def _run(self, tools: Any, variables: Mapping[str, Any]) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InputError(
                f"the checkpoint's chat templates are {', '.join(self._templates)}; none is default"
            )
        try:
            return self._environment.render_limited(template, variables)
        except _TemplateRefusal as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error
        except SecurityError as error:
            raise ArtifactError(f"the chat template does what is not allowed: {error}") from error
        except _STUMBLES as error:
            raise InputError(f"the chat template failed on these messages: {error}") from error

    def _compile(self, name: str, text: str) -> jinja2.Template:
        try:
            return self._environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ArtifactError(
                f"chat template {name!r}, line {error.lineno}: {error.message}; replace it with "
                "the original checkpoint's"
            ) from error
        except RecursionError as error:
            raise ArtifactError(f"chat template {name!r} is nested too deeply") from error


def _by_name(source: Any) -> dict[str, str]:
    if isinstance(source, str):
        return {"default": source}
    try:
        named = {entry["name"]: entry["template"] for entry in source}
    except (TypeError, KeyError) as error:
        raise ArtifactError(
            "tokenizer_config.json: chat_template must be a string or a list of {name, template}"
        ) from error
    if not named or not all(isinstance(part, str) for pair in named.items() for part in pair):
        raise ArtifactError("tokenizer_config.json: chat_template has no usable {name, template}")
    return named


def _mark_end(messages: list[dict[str, Any]]) -> None:
    last = messages[-1]
    if last["role"] != "assistant":
        raise InputError(
            "continue_final_message continues an assistant's message; the last one has role "
            f"{last['role']}"
        )
    if last.get("tool_calls"):
        raise InputError("continue_final_message cannot continue a message that calls tools")
    messages[-1] = {**last, "content": last["content"] + _HERE}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own escapes HTML and sorts keys; models were trained on neither.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object = "") -> None:
    raise _TemplateRefusal(str(message))
