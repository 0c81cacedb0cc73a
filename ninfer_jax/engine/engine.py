"""The engine: one loaded model behind `generate`, `chat` and `stream`."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from artifacts import open_checkpoint
from ninfer_jax.config import EngineConfig
from ninfer_jax.engine.loop import GenerationLoop
from ninfer_jax.engine.request import Request, new_request
from ninfer_jax.errors import InputError
from ninfer_jax.frontend import Frontend, PreparedPrompt
from ninfer_jax.models import Model, model_from_checkpoint
from ninfer_jax.outputs import RequestOutput, StreamChunk
from ninfer_jax.program import startup
from ninfer_jax.program.allocator import Allocator, pages_for
from ninfer_jax.program.program import Program
from ninfer_jax.sampling_params import SamplingParams


class Engine:
    """A model ready to run: everything is allocated and compiled, nothing compiles later (CAP-21).

    Calls from several threads are served one after the other.
    """

    def __init__(
        self, model: Model, frontend: Frontend, program: Program, name: str = "model"
    ) -> None:
        self.model = model
        self.frontend = frontend
        self.limits = program.limits
        self.name = name
        self._program = program
        self._allocator = Allocator(program.limits)
        self._loop = GenerationLoop(self._program, self._allocator, frontend)
        self._lock = threading.Lock()
        self._running_thread: int | None = None
        self._ids = itertools.count()

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
        limits = startup.resolve(config, checkpoint.config, startup.measure())
        frontend = Frontend.from_resources(
            checkpoint.frontend,
            vocab_size=checkpoint.config.vocab_size,
            chat_template=chat_template,
        )
        model = model_from_checkpoint(checkpoint, limits.dtype)
        return cls(model, frontend, startup.start(model, config), checkpoint.name)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or many; results come in the order of the prompts.

        Args:
          prompts: a string, a list of token ids, `{"prompt": str}`, `{"prompt_token_ids": ids}`, or a list of those.
          sampling_params: one for all, or one a prompt; None takes the checkpoint's defaults.
          use_tqdm: show progress with tokens/s on stderr when there are several prompts.

        Raises:
          InputError: a prompt or parameter is malformed or cannot fit; nothing has run then.
        """
        prepared = [self.frontend.prepare_prompt(p) for p in _listed(prompts)]
        return self._run(self._requests(prepared, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        tools: Any = None,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of those).

        Args:
          messages: OpenAI chat messages.
          sampling_params: as in `generate`.
          tools: JSON objects of the tools offered.
          use_tqdm: as in `generate`.
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
            self.frontend.prepare_chat(c, tools=tools, **template_kwargs) for c in conversations
        ]
        return self._run(self._requests(prepared, sampling_params), use_tqdm)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamChunk, None, None]:
        """Continue one prompt, yielding text as it comes; the last chunk carries the complete result.

        Input is checked before this returns. Closing the iterator cancels the request.
        """
        return self._stream(self.frontend.prepare_prompt(prompt), sampling_params)

    def stream_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Any = None,
        **template_kwargs: Any,
    ) -> Generator[StreamChunk, None, None]:
        """`stream` for a conversation; thinking comes in the chunks' `reasoning`."""
        prepared = self.frontend.prepare_chat(messages, tools=tools, **template_kwargs)
        return self._stream(prepared, sampling_params)

    def memory(self) -> dict[str, int]:
        """Bytes by use on the device and the host; see `Program.memory`."""
        return self._program.memory()

    @property
    def idle(self) -> bool:
        """Whether no lane, slot or page is in use."""
        limits = self.limits
        return self._allocator.available == (
            limits.max_concurrency,
            limits.slots,
            limits.pages,
        )

    def _requests(
        self,
        prompts: list[PreparedPrompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
    ) -> list[Request]:
        if params is None or isinstance(params, SamplingParams):
            each: list[SamplingParams] = [params or SamplingParams()] * len(prompts)
        elif isinstance(params, SequenceOf) and all(isinstance(p, SamplingParams) for p in params):
            each = list(params)
        else:
            raise InputError(
                f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}"
            )
        if len(each) != len(prompts):
            raise InputError(
                f"{len(each)} sampling_params for {len(prompts)} prompts; give one, or one a prompt"
            )
        return [self._request(p, s) for p, s in zip(prompts, each, strict=True)]

    def _request(self, prompt: PreparedPrompt, params: SamplingParams) -> Request:
        limits = self.limits
        sampling = self.frontend.resolve(params, prompt, max_context=limits.max_context)
        if sampling.n > limits.max_concurrency:
            raise InputError(
                f"n={sampling.n} sequences cannot run together; max_concurrency is {limits.max_concurrency}"
            )
        number = next(self._ids)
        data = f"{limits.seed}/{number}".encode()
        request = new_request(
            f"request-{number}",
            prompt,
            sampling,
            self.frontend,
            max_context=limits.max_context,
            default_seed=int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"),
        )
        pages = sampling.n * pages_for(request.total_tokens)
        if pages > limits.pages:
            raise InputError(
                f"n={sampling.n} sequences of {len(prompt)} prompt and {request.max_tokens} output tokens need {pages} "
                f"KV pages, the pool has {limits.pages}; lower max_tokens or raise kv_capacity"
            )
        return request

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        hide = not use_tqdm or len(requests) < 2
        bar = tqdm(total=len(requests), desc="Generating", unit="req", disable=hide)
        tokens = 0
        with bar, self._turn(), closing(self._loop.run(requests)) as events:
            for sequence, delta in events:
                tokens += len(delta.token_ids)
                if sequence.finish_reason is not None and sequence.request.finished:
                    bar.update()
                    elapsed = bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{tokens / max(elapsed, 1e-9):.1f} tokens/s")
        return [r.output() for r in requests]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One caller at a time; a caller that would wait for itself is told so."""
        if self._running_thread == threading.get_ident():
            raise InputError("a stream of this engine is still open; exhaust or close it first")
        with self._lock:
            self._running_thread = threading.get_ident()
            try:
                yield
            finally:
                self._running_thread = None

    def _stream(
        self, prompt: PreparedPrompt, params: SamplingParams | None
    ) -> Generator[StreamChunk, None, None]:
        (request,) = self._requests([prompt], params)
        if request.sampling.n != 1:
            raise InputError(f"n={request.sampling.n} cannot be streamed; use generate()")
        return self._stream_request(request)

    def _stream_request(self, request: Request) -> Generator[StreamChunk, None, None]:
        with self._turn(), closing(self._loop.run([request])) as events:
            for sequence, delta in events:
                yield StreamChunk(
                    text=delta.text,
                    reasoning=delta.reasoning,
                    token_ids=delta.token_ids,
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                    output=request.output() if request.finished else None,
                )


def _listed(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or many. A list of integers is one prompt."""
    if isinstance(prompts, list | tuple) and not (
        prompts and all(isinstance(x, int) and not isinstance(x, bool) for x in prompts)
    ):
        return list(prompts)
    return [prompts]
