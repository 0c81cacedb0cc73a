"""The engine: one loaded model behind `submit`, `generate`, `chat`, `stream`, `score` and `perplexity`."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Any

from artifacts import open_checkpoint
from ninfer_jax.config import PAGE_TOKENS, EngineConfig, Limits
from ninfer_jax.engine.arguments import (
    CacheMode,
    cache_options,
    checked_timeout,
    listed,
    one_each,
)
from ninfer_jax.engine.collect import collect
from ninfer_jax.engine.handle import RequestHandle
from ninfer_jax.engine.history import REQUESTS, History
from ninfer_jax.engine.ingress import Close, Ingress
from ninfer_jax.engine.request import Request, new_request
from ninfer_jax.engine.scores import Scores
from ninfer_jax.engine.stats import Stats
from ninfer_jax.engine.worker import Worker
from ninfer_jax.errors import InputError
from ninfer_jax.frontend import Frontend, PreparedPrompt
from ninfer_jax.models import Model, model_from_checkpoint
from ninfer_jax.outputs import RequestOutput
from ninfer_jax.program import startup
from ninfer_jax.program.program import Program
from ninfer_jax.sampling_params import SamplingParams
from ninfer_jax.scoring import Scorer
from planner.world import WorldConfig

Sampling = SamplingParams | SequenceOf[SamplingParams] | None
SCORES_ONLY = (
    'this engine was loaded with purpose="scoring" and only scores; load the model again without it, or with '
    'purpose="generation", to generate'
)


class Engine(Scores):
    """A model ready to run: everything is allocated and compiled, nothing compiles later (CAP-21).

    Any number of threads and event loops may use it. One worker thread runs all requests together; it ends
    with `close`, with the `with` block, or when nobody refers to the engine or one of its handles any more.
    """

    def __init__(
        self, model: Model, frontend: Frontend, program: Program | Limits, name: str = "model"
    ) -> None:
        """Start the worker on a program; given the limits of one sequence instead, the engine only scores (SC-02)."""
        self.model = model
        self.frontend = frontend
        self.limits: Limits = program if isinstance(program, Limits) else program.limits
        self.name = name
        self._ids = itertools.count()
        self._ingress = Ingress(self.limits.max_queue)
        self._scorer = Scorer(
            model,
            max_context=self.limits.max_context,
            prefill_chunk=self.limits.prefill_chunk,
        )
        self._program: Program | None = None
        self._worker: Worker | None = None
        if isinstance(program, Limits):
            self._ingress.refuse(InputError(SCORES_ONLY))
            self._scorer.prepare()
            return
        self._program = program
        world = WorldConfig(
            layout=self.limits.layout,
            prefill_chunk=self.limits.prefill_chunk,
            cache=self.limits.cache,
            policy=self.limits.policy,
        )
        self._worker = Worker(
            program, frontend.vocab_size, self._ingress, world, self.limits.record
        )
        self._worker.start()
        weakref.finalize(self, self._ingress.send, Close()).atexit = False

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        chat_template: str | None = None,
        verify: bool = True,
    ) -> Engine:
        """Open a checkpoint or artifact folder and start an engine on it. See `ninfer_jax.load`."""
        config = config or EngineConfig()
        checkpoint = open_checkpoint(path, verify=verify)
        # A configuration that cannot work is refused before the weights are read.
        scores = config.purpose == "scoring"
        asked = startup.scoring_config(config) if scores else config
        limits = startup.resolve(asked, checkpoint.config, startup.measure())
        frontend = Frontend.from_resources(
            checkpoint.frontend,
            vocab_size=checkpoint.config.vocab_size,
            chat_template=chat_template,
        )
        startup.keep_executables()
        model = model_from_checkpoint(checkpoint, limits.dtype)
        program = limits if scores else startup.start(model, config)
        return cls(model, frontend, program, checkpoint.name)

    # One request

    def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        session: str | None = None,
        cache: CacheMode = "read_write",
        markers: SequenceOf[int] = (),
        anchors: SequenceOf[int] = (),
        timeout: float | None = None,
    ) -> RequestHandle:
        """Queue a prompt and return at once; the handle gives text as it comes and the result.

        Args:
          prompt: a string, a list of token ids, `{"prompt": str}` or `{"prompt_token_ids": ids}`.
          sampling_params: None takes the checkpoint's defaults.
          session: a name for this conversation. It only helps to find what can be reused; equal prompts
            are found without it.
          cache: "off" neither reuses anything nor leaves anything behind; "prompt" reuses, and leaves what is asked for
            within the prompt but not its end: for requests that nobody goes on from.
          markers: token counts (in a chat: message counts) after which many requests may differ; at most four.
          anchors: counts at which this conversation may be taken up again after an edit; at most four.
          timeout: seconds, waiting included, after which the request is cancelled with what it has.

        Raises:
          InputError: something is malformed or can never fit.
          OverloadError: the queue is full.
          EngineFailure: the engine is closed or has failed.
        """
        prepared = self.frontend.prepare_prompt(prompt, markers=markers, anchors=anchors)
        return self._submit(self._request(prepared, sampling_params, session, cache, timeout))

    def submit_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Any = None,
        session: str | None = None,
        cache: CacheMode = "read_write",
        markers: SequenceOf[int] = (),
        anchors: SequenceOf[int] = (),
        timeout: float | None = None,
        **template_kwargs: Any,
    ) -> RequestHandle:
        """`submit` for a conversation. See `chat` for messages, tools and template variables."""
        prepared = self.frontend.prepare_chat(
            messages, tools=tools, markers=markers, anchors=anchors, **template_kwargs
        )
        return self._submit(self._request(prepared, sampling_params, session, cache, timeout))

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestHandle:
        """Continue one prompt: iterate the result for text as it comes; the last chunk carries the complete output.

        The same as `submit`, whose `options` it takes.
        """
        return self.submit(prompt, sampling_params, **options)

    def stream_chat(
        self, messages: Any, sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestHandle:
        """`stream` for a conversation; thinking comes in the chunks' `reasoning`."""
        return self.submit_chat(messages, sampling_params, **options)

    # Many requests

    def generate(
        self,
        prompts: Any,
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        session: str | SequenceOf[str] | None = None,
        cache: CacheMode = "read_write",
        markers: SequenceOf[int] = (),
        anchors: SequenceOf[int] = (),
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or many; results come in the order of the prompts.

        Prompts for which the queue has no place are submitted as others end.

        Args:
          prompts: one prompt as in `submit`, or a list of those.
          sampling_params: one for all, or one a prompt; None takes the checkpoint's defaults.
          use_tqdm: show progress with tokens/s on stderr when there are several prompts.
          session: one name, or one a prompt.
          cache, markers, anchors, timeout: as in `submit`, for each prompt.

        Raises:
          InputError: a prompt or parameter is malformed or cannot fit; nothing has run then.
          EngineFailure: the engine is closed or has failed.
        """
        prepared = [
            self.frontend.prepare_prompt(p, markers=markers, anchors=anchors)
            for p in listed(prompts)
        ]
        requests = self._requests(prepared, sampling_params, session, cache, timeout)
        return collect(requests, self._submit, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: Sampling = None,
        *,
        tools: Any = None,
        use_tqdm: bool = True,
        session: str | SequenceOf[str] | None = None,
        cache: CacheMode = "read_write",
        markers: SequenceOf[int] = (),
        anchors: SequenceOf[int] = (),
        timeout: float | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of those).

        Args:
          messages: OpenAI chat messages.
          sampling_params: as in `generate`.
          tools: JSON objects of the tools offered.
          use_tqdm, session, cache, timeout: as in `generate`.
          markers, anchors: as in `submit`; they count messages.
          **template_kwargs: variables of the chat template (`enable_thinking`, ...), `add_generation_prompt`,
            `continue_final_message`.

        Raises:
          InputError: as in `generate`, or the template refuses the messages.
        """
        if isinstance(messages, SequenceOf) and messages and not isinstance(messages[0], Mapping):
            conversations = list(messages)
        else:
            conversations = [messages]
        prepared = [
            self.frontend.prepare_chat(
                c, tools=tools, markers=markers, anchors=anchors, **template_kwargs
            )
            for c in conversations
        ]
        requests = self._requests(prepared, sampling_params, session, cache, timeout)
        return collect(requests, self._submit, use_tqdm=use_tqdm)

    # The engine itself

    @property
    def idle(self) -> bool:
        """Whether no request is waiting, running or paused."""
        return not self._ingress.live

    def stats(self) -> dict[str, Any]:
        """Counters since the start: requests, tokens by origin, cache, preemptions, transfers, times (OBS-01).

        `scoring` counts apart from all of these.
        """
        stats = Stats() if self._worker is None else self._worker.stats
        return stats.as_dict() | {"scoring": self._scorer.stats()}

    def explain(self, request_id: str | None = None) -> str:
        """What happened to a request and why: its source, what was saved or not, pauses, its end.

        Args:
          request_id: of a handle or a result, among the last 1,000; None: what concerns no single request.

        Raises:
          InputError: the request is not known (any more).
        """
        history = History() if self._worker is None else self._worker.history
        lines = history.of_engine() if request_id is None else history.of(request_id)
        if lines is None:
            raise InputError(
                f"no request {request_id!r} among the last {REQUESTS:,}; ids are those of handles and results"
            )
        return "\n".join(lines)

    def memory(self) -> dict[str, int]:
        """Bytes held, by use. Of an engine that only scores, `kv` and `state_images` exist only while it does."""
        return self._scorer.memory() if self._program is None else self._program.memory()

    def clear_cache(self) -> None:
        """Let go of everything that is kept for later requests. Running requests keep what they use."""
        self._ingress.clear().result()

    def close(self) -> None:
        """Cancel every request, end the worker and free the device's memory. A second call does nothing."""
        self._scorer.close()
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Checks

    def _submit(self, request: Request, *, wait: bool = False) -> RequestHandle:
        self._ingress.submit(request, wait=wait)
        return RequestHandle(request, self._ingress, self)

    def _requests(
        self,
        prompts: list[PreparedPrompt],
        params: Sampling,
        session: str | SequenceOf[str] | None,
        cache: CacheMode,
        timeout: float | None,
    ) -> list[Request]:
        count = len(prompts)
        each = one_each("sampling_params", params, SamplingParams, count)
        names = one_each("session", session, str, count)
        return [
            self._request(p, s, name, cache, timeout)
            for p, s, name in zip(prompts, each, names, strict=True)
        ]

    def _request(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams | None,
        session: str | None,
        cache: CacheMode,
        timeout: float | None,
    ) -> Request:
        if params is not None and not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        limits = self.limits
        sampling = self.frontend.resolve(
            params or SamplingParams(), prompt, max_context=limits.max_context
        )
        if sampling.n > limits.max_queue:
            raise InputError(f"n={sampling.n} is over max_queue={limits.max_queue}; lower n")
        number = next(self._ids)
        data = f"{limits.seed}/{number}".encode()
        request = new_request(
            f"request-{number}",
            prompt,
            sampling,
            self.frontend,
            max_context=limits.max_context,
            default_seed=int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"),
            cache=cache_options(cache, session),
            timeout=checked_timeout(timeout),
        )
        pages = -(-request.total_tokens // PAGE_TOKENS)
        if pages > limits.pages:
            raise InputError(
                f"{len(prompt)} prompt and {request.max_tokens} output tokens need {pages} KV pages, the pool has "
                f"{limits.pages}; lower max_tokens or raise kv_capacity"
            )
        return request
