"""A caller's end of one request: events as they come, the result, and the way to give it up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ninfer_jax.engine.ingress import Cancel, Ingress
from ninfer_jax.engine.request import Request
from ninfer_jax.engine.response import News
from ninfer_jax.outputs import RequestOutput, StreamChunk


class RequestHandle:
    """A submitted request.

    Iterate it for text as it comes, with `for` or `async for`; or wait for the result with `wait` or
    `await wait_async()`. Several threads may wait; one should iterate. `close`, the end of a `with` block, or
    dropping the handle give up a request that has not ended. A handle keeps its engine alive.
    """

    def __init__(self, request: Request, ingress: Ingress, engine: Any) -> None:
        self._request = request
        self._response = request.response
        self._ingress = ingress
        self._engine = engine
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._abandon = weakref.finalize(self, ingress.send, Cancel(request, released=True))
        self._abandon.atexit = False

    @property
    def request_id(self) -> str:
        """Names the request in `Engine.explain` and in its output."""
        return self._request.request_id

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._response.ended

    def when_started(self, call: Callable[[], None]) -> None:
        """Call back once, from any thread, when its prompt has been computed or it has ended."""
        self._response.when_news(call)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call back once, from any thread, when it has ended."""
        self._response.when_ended(call)

    def cancel(self) -> None:
        """Give the request up at its next boundary (ENG-06). Tokens already committed stay; ended: no effect."""
        if not self.done:
            self._ingress.send(Cancel(self._request))

    def close(self) -> None:
        """Cancel the request if it has not ended, and wait until the engine has let it go."""
        self.cancel()
        self._response.wait_ended(None)
        self._collected()

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, timeout: float | None = None) -> RequestOutput:
        """The result.

        Raises:
          TimeoutError: it has not ended after `timeout` seconds; it goes on.
          EngineFailure: the engine failed.
        """
        if not self._response.wait_ended(timeout):
            raise TimeoutError(f"{self.request_id} has not ended after {timeout} s")
        return self._result()

    async def wait_async(self) -> RequestOutput:
        """`wait` for an event loop."""
        await _called_back(self._response.when_ended)
        return self._result()

    def __iter__(self) -> RequestHandle:
        return self

    def __next__(self) -> StreamChunk:
        while (news := self._take(StopIteration)) is None:
            arrived = threading.Event()
            self._response.when_news(arrived.set)
            arrived.wait()
        return self._chunk(news)

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> StreamChunk:
        while (news := self._take(StopAsyncIteration)) is None:
            await _called_back(self._response.when_news)
        return self._chunk(news)

    def _take(self, stop: type[Exception]) -> News | None:
        """What came, or None if something may still come; `stop` is raised at the end."""
        done = self.done  # asked first: the last news come before it
        news = self._response.take()
        if news is None and done:
            self._raise_failure()
            raise stop
        return news

    def _chunk(self, news: News) -> StreamChunk:
        delta = news.delta
        return StreamChunk(
            text="" if delta is None else delta.text,
            reasoning="" if delta is None else delta.reasoning,
            token_ids=() if delta is None else delta.token_ids,
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
            output=self._result() if news.last else None,
            index=news.sequence,
        )

    def _raise_failure(self) -> None:
        failure = self._response.failure
        if failure is not None:
            self._collected()
            raise type(failure)(*failure.args)

    def _result(self) -> RequestOutput:
        self._raise_failure()
        with self._lock:
            if self._output is None:
                self._output = self._request.output()
        self._collected()
        return self._output

    def _collected(self) -> None:
        if self._abandon.detach() is not None:
            self._response.release()


async def _called_back(register: Any) -> None:
    """Wait until `register(wake)` calls `wake`, from any thread."""
    loop = asyncio.get_running_loop()
    called: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not called.done():
            called.set_result(None)

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(resolve)

    register(wake)
    await called
