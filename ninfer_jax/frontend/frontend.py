"""The front end of one loaded model: everything between a user's words and the engine's ids
(FE-01)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.resources import FrontendResources
from ninfer_jax.errors import InputError
from ninfer_jax.frontend.channels import initial_channel
from ninfer_jax.frontend.chat_template import ChatTemplate
from ninfer_jax.frontend.messages import normalize_tools
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

    def prepare_prompt(self, prompt: Any) -> PreparedPrompt:
        """A raw prompt: its output is all text, without channels.

        Args:
            prompt: a string, a sequence or array of ids, `{"prompt": str}` or `{"prompt_token_ids":
                ids}`.

        Raises:
            InputError: of another type, empty, or with ids outside the vocabulary.
        """
        if isinstance(prompt, PreparedPrompt):
            return prompt
        if isinstance(prompt, Mapping):
            prompt = self._prompt_of_mapping(prompt)
        if isinstance(prompt, str):
            # A tokenizer with a BOS adds it to raw text; in chats the template writes it.
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
            return PreparedPrompt(check_token_ids(ids, self.vocab_size), prompt)
        return PreparedPrompt(check_token_ids(prompt, self.vocab_size))

    def prepare_chat(
        self, messages: Any, tools: Any = None, **template_kwargs: Any
    ) -> PreparedPrompt:
        """A conversation: its output has a thinking and a content channel.

        Args:
            messages: see `messages.normalize_messages`.
            tools: JSON objects of the tools offered.
            **template_kwargs: `add_generation_prompt`, `continue_final_message`, and variables of
                the template (`enable_thinking`, ...).

        Raises:
            InputError: the checkpoint has no template, the messages are malformed, or the template
                refuses them.
        """
        if self.chat_template is None:
            raise InputError(
                "this checkpoint has no chat template; use generate() with a raw prompt, or load "
                "it with chat_template="
            )
        text = self.chat_template.render(messages, tools=tools, **template_kwargs)
        tokenizer = self.tokenizer
        ids = check_token_ids(tokenizer.encode(text), self.vocab_size, "the rendered chat")
        channel = initial_channel(
            ids, tokenizer.think_start_id, tokenizer.think_end_id, tokenizer.special_token_ids
        )
        return PreparedPrompt(ids, text, channel, tuple(normalize_tools(tools) or ()))

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
