"""lm-evaluation-harness: this runtime as its model `ninfer` (extra `eval`).

Importing this module registers the model; `python -m ninfer_jax.evaluation` is the harness's own command line with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import lm_eval.models  # noqa: F401 - the harness registers its own models only while it knows none
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ninfer_jax.api import load
from ninfer_jax.engine import Engine
from ninfer_jax.errors import InputError
from ninfer_jax.sampling_params import SamplingParams
from ninfer_jax.scoring.requests import prefix_token_id

_LOG = logging.getLogger("ninfer_jax")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks use for the most tokens to generate, the first that is given counts."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Parameters of a task's generation that are ours under the same name."""


@register_model("ninfer")
class NinferLM(TemplateLM):
    """A model folder, artifact or shipped name behind the harness's three kinds of requests.

    Log-likelihoods run on an engine that only scores; the first `generate_until` loads one that generates in its place.
    What is too long is cut from the left, counted in `truncated`, and said once a call.
    """

    def __init__(
        self,
        pretrained: str = "demo",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        dtype: str = "auto",
        max_concurrency: int = 8,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ) -> None:
        """Load the model.

        Args:
          pretrained: as `ninfer_jax.load` takes it.
          max_length: most tokens of a sequence; None: as in `EngineConfig.max_context`.
          max_gen_toks: most tokens to generate where a task does not say.
          dtype, max_concurrency: as in `EngineConfig`.
          prefix_token_id: the token before a text without context; None: BOS, else EOS.
          enable_thinking: variable of the chat template; None leaves it out.
          batch_size, max_batch_size, device: what the harness passes to every model; numbers do not depend on the
            first two, and JAX chooses the device.
        """
        super().__init__()
        self.max_gen_toks = int(max_gen_toks)
        self.batch_size = batch_size
        self.truncated = 0
        """Sequences cut so far."""
        self._pretrained = pretrained
        self._options: dict[str, Any] = {
            "max_context": None if max_length is None else int(max_length),
            "dtype": dtype,
        }
        self._concurrency = int(max_concurrency)
        self._prefix = None if prefix_token_id is None else int(prefix_token_id)
        self._template = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.engine: Engine = load(pretrained, purpose="scoring", **self._options)
        self._generates = False

    @property
    def max_length(self) -> int:
        """Most tokens the model runs on in one sequence."""
        return self.engine.limits.max_context

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        tokenizer = self.engine.frontend.tokenizer
        found = tokenizer.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
        return min(tokenizer.eos_token_ids) if found is None else found

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        return prefix_token_id(self.engine.frontend) if self._prefix is None else self._prefix

    @property
    def tokenizer_name(self) -> str:
        """What the harness keys its caches by."""
        return f"ninfer/{self.engine.name}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids; without special tokens unless asked for."""
        return self.engine.frontend.tokenizer.encode(string, bool(add_special_tokens))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template that `apply_chat_template` runs."""
        template = self.engine.frontend.chat_template
        if not chat_template or template is None:
            return None
        return template.sources.get("default") or next(iter(template.sources.values()))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; without a generation prompt it ends inside the assistant's message."""
        template = self.engine.frontend.chat_template
        if template is None:
            raise InputError(
                f"{self._pretrained} has no chat template; run without --apply_chat_template"
            )
        return template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._template,
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Sums over whole texts, in windows of `max_length` that begin with the prefix token."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in rolling:
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        sums = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for index, (logprob, _) in zip(owners, scored, strict=True):
            sums[index] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        room = self.max_length + 1
        contexts, continuations, cut = [], [], 0
        for _, context, continuation in requests:
            cut += len(context) + len(continuation) > room
            continuations.append(continuation[-(room - 1) :])
            contexts.append(context[-(room - len(continuations[-1])) :])
        self._tell(cut, len(requests), f"to the last {room} tokens")
        hide = bool(options.get("disable_tqdm"))
        scores = self.engine.score(contexts, continuations, use_tqdm=not hide)
        results = [(score.sum_logprob, score.is_greedy) for score in scores]
        for (key, _, _), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Text up to the first stop string or the end of the text, whichever comes first."""
        if not self._generates:
            self.engine.close()
            self.engine = load(self._pretrained, max_concurrency=self._concurrency, **self._options)
            self._generates = True
        prompts, params, cut = [], [], 0
        for request in requests:
            context, task = request.args
            sampling = self._sampling(task)
            assert sampling.max_tokens is not None
            room = self.max_length - sampling.max_tokens
            if room < 1:
                raise InputError(
                    f"{sampling.max_tokens} tokens to generate leave no room for a prompt; max_length is "
                    f"{self.max_length}. Lower max_gen_toks, or raise max_length"
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            cut += len(ids) > room
            prompts.append(ids[-room:])
            params.append(sampling)
        self._tell(cut, len(requests), "to leave room for what is generated")
        outputs = self.engine.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = []
        for request, output in zip(requests, outputs, strict=True):
            answer = output.outputs[0]
            if answer.error is not None:
                raise InputError(f"a prompt was not answered: {answer.error}")
            texts.append(answer.text)
            self.cache_hook.add_partial("generate_until", request.args, answer.text)
        return texts

    def _sampling(self, task: dict[str, Any]) -> SamplingParams:
        """A task's generation parameters; greedy unless it samples with a temperature."""
        until = task.get("until") or []
        stops = [s for s in ([until] if isinstance(until, str) else until) if s]
        length = next((task[n] for n in _LENGTHS if task.get(n) is not None), self.max_gen_toks)
        given = {name: task[name] for name in _SAMPLING if task.get(name) is not None}
        greedy = task.get("do_sample") is False or not given.get("temperature")
        if greedy:
            given = {n: v for n, v in given.items() if n == "repetition_penalty"}
            given["temperature"] = 0.0
        # The checkpoint's own sampling defaults are no part of a task.
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        return SamplingParams(max_tokens=int(length), stop=stops or None, **(neutral | given))

    def _tell(self, cut: int, count: int, how: str) -> None:
        if cut:
            self.truncated += cut
            _LOG.warning(
                "%d of %d sequences are longer than max_length=%d allows and were cut from the left %s; load with a "
                "larger max_length to keep them whole",
                cut,
                count,
                self.max_length,
                how,
            )
