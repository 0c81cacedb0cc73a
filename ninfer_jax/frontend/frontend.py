"""The front end of one loaded model: everything between a user's words and the engine's ids
(FE-01)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from artifacts.resources import FrontendResources
from ninfer_jax.errors import InputError
from ninfer_jax.frontend.channels import initial_channel
from ninfer_jax.frontend.chat_template import ChatTemplate
from ninfer_jax.frontend.frontiers import (
    RenderedChat,
    chat_boundaries,
    chat_rewrite_points,
    check_boundaries,
    raw_boundaries,
)
from ninfer_jax.frontend.messages import cache_boundaries, normalize_tools
from ninfer_jax.frontend.output_session import OutputSession
from ninfer_jax.frontend.prompt import PreparedPrompt, check_token_ids
from ninfer_jax.frontend.tokenizer import Tokenizer
from ninfer_jax.sampling_params import ResolvedSampling, SamplingParams


@dataclass(frozen=True)
class Frontend:
    """Tokenizer, chat template and sampling defaults of one checkpoint. Immutable; shared by all
    requests."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    generation_config: Mapping[str, Any]
    vocab_size: int
    """Rows of the model's embedding: the bound on ids. May be larger than the tokenizer's
    vocabulary."""

    @classmethod
    def from_resources(
        cls,
        resources: FrontendResources,
        *,
        vocab_size: int | None = None,
        chat_template: str | None = None,
    ) -> Frontend:
        """Load the front end of a checkpoint or artifact.

        Args:
            resources: its front-end files.
            vocab_size: rows of the model's embedding; None takes the tokenizer's own size.
            chat_template: jinja text to use in place of the checkpoint's (FE-03).

        Raises:
            ArtifactError: a resource is damaged, or of a kind not supported.
        """
        tokenizer = Tokenizer.from_resources(resources)
        special = tokenizer.special_tokens
        template = (
            ChatTemplate(chat_template, special_tokens=special)
            if chat_template is not None
            else ChatTemplate.from_resources(resources, special_tokens=special)
        )
        size = tokenizer.vocab_size if vocab_size is None else vocab_size
        return cls(tokenizer, template, resources.generation_config, size)

    def prepare_prompt(self, prompt: Any, markers: Any = (), anchors: Any = ()) -> PreparedPrompt:
        """A raw prompt: its output is all text, without channels. Nothing rewrites it, so its
        recovery frontier is its P-point, the last token but one (CAT-02).

        Args:
            prompt: a string, a sequence or array of ids, `{"prompt": str}` or `{"prompt_token_ids":
                ids}`.
            markers: token counts after which a shared cache entry would be useful, at most four.
            anchors: token counts at which this caller may want to go on later, at most four.

        Raises:
            InputError: of another type, empty, with ids outside the vocabulary, or with boundaries
                outside it.
        """
        if isinstance(prompt, PreparedPrompt):
            for name, given in (("markers", markers), ("anchors", anchors)):
                if check_boundaries(name, given, len(prompt), "tokens"):
                    raise InputError(f"{name} of a prepared prompt were given when it was prepared")
            return prompt
        if isinstance(prompt, Mapping):
            prompt = self._prompt_of_mapping(prompt)
        if isinstance(prompt, str):
            # A tokenizer with a BOS adds it to raw text; in chats the template writes it.
            text, ids = prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            text, ids = None, prompt
        token_ids = check_token_ids(ids, self.vocab_size)
        length = len(token_ids)
        shared = check_boundaries("markers", markers, length, "tokens")
        private = check_boundaries("anchors", anchors, length, "tokens")
        private, shared, notes = raw_boundaries(length, markers=shared, anchors=private)
        return PreparedPrompt(
            token_ids,
            text,
            recovery=length - 1,
            anchors=private,
            markers=shared,
            notes=notes,
        )

    def prepare_chat(
        self,
        messages: Any,
        tools: Any = None,
        *,
        markers: Any = (),
        anchors: Any = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> PreparedPrompt:
        """A conversation: its output has a thinking and a content channel.

        Args:
            messages: see `messages.normalize_messages`.
            tools: JSON objects of the tools offered.
            markers: message counts after which a shared cache entry would be useful, at most four
                together with the messages whose content parts carry `cache_control`.
            anchors: message counts at which this caller may want to go on later, at most four.
            add_generation_prompt, continue_final_message: see `ChatTemplate.render`.
            **template_kwargs: variables of the template (`enable_thinking`, ...).

        Raises:
            InputError: the checkpoint has no template, the messages or boundaries are malformed, or
                the template refuses them.
        """
        if self.chat_template is None:
            raise InputError(
                "this checkpoint has no chat template; use generate() with a raw prompt, or load "
                "it with chat_template="
            )
        render: Callable[..., str] = partial(
            self.chat_template.render, tools=tools, **template_kwargs
        )
        text = render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        messages = list(messages)
        markers = check_boundaries(
            "markers", markers, len(messages), "messages", cache_boundaries(messages)
        )
        anchors = check_boundaries("anchors", anchors, len(messages), "messages")
        tokenizer = self.tokenizer
        encoded, cuts = tokenizer.encode_with_cuts(text)
        ids = check_token_ids(encoded, self.vocab_size, "the rendered chat")
        channel = initial_channel(
            ids, tokenizer.think_start_id, tokenizer.think_end_id, tokenizer.special_token_ids
        )
        rendered = RenderedChat(text, ids, cuts, tokenizer.encode, render)
        history = messages[:-1] if continue_final_message else messages
        recovery, splits = chat_rewrite_points(rendered, history)
        offered = tuple(normalize_tools(tools) or ())
        private, shared, notes = chat_boundaries(
            rendered, messages, markers=markers, anchors=anchors, has_tools=bool(offered)
        )
        return PreparedPrompt(
            ids,
            text,
            channel,
            offered,
            recovery=recovery,
            splits=splits,
            anchors=private,
            markers=shared,
            notes=notes,
        )

    def resolve(
        self,
        params: SamplingParams,
        prompt: PreparedPrompt | None = None,
        *,
        max_context: int | None = None,
    ) -> ResolvedSampling:
        """`params.resolve` with this checkpoint's defaults and vocabulary, and the prompt's
        length."""
        return params.resolve(
            self.generation_config,
            vocab_size=self.vocab_size,
            max_context=max_context,
            prompt_tokens=0 if prompt is None else len(prompt),
        )

    def output_session(self, prompt: PreparedPrompt, sampling: ResolvedSampling) -> OutputSession:
        """A session for one output of a prepared prompt; each of `n` children has its own
        (FE-02)."""
        return OutputSession(self.tokenizer, sampling, prompt)

    def _prompt_of_mapping(self, prompt: Mapping[str, Any]) -> Any:
        for key in prompt:
            if key == "multi_modal_data":
                raise InputError("multi_modal_data in a prompt is not supported yet: text only")
            if key not in ("prompt", "prompt_token_ids"):
                raise InputError(
                    f"unknown key {key!r} in a prompt; known are prompt, prompt_token_ids"
                )
        if len(prompt) != 1:
            raise InputError("a prompt object holds either prompt or prompt_token_ids")
        if "prompt" in prompt:
            if not isinstance(prompt["prompt"], str):
                raise InputError(f"prompt must be a string, got {type(prompt['prompt']).__name__}")
            return prompt["prompt"]
        if isinstance(prompt["prompt_token_ids"], str | Mapping):
            raise InputError("prompt_token_ids must be a list of token ids")
        return prompt["prompt_token_ids"]
