"""Many requests to their ends, in bounded numbers at a time, with a progress bar."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from functools import partial

from tqdm import tqdm

from ninfer_jax.engine.handle import RequestHandle
from ninfer_jax.engine.request import Request
from ninfer_jax.errors import OverloadError
from ninfer_jax.outputs import RequestOutput


def collect(
    requests: list[Request], submit: Callable[..., RequestHandle], *, use_tqdm: bool
) -> list[RequestOutput]:
    """Results in the order of the requests; whatever ends this early cancels the rest.

    Args:
      requests: any number; those that the queue has no place for wait here.
      submit: takes a request and `wait`, whether to block until there is a place.
      use_tqdm: show progress with tokens/s if there are several.
    """
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    waiting = deque(enumerate(requests))
    running: dict[int, RequestHandle] = {}
    results: dict[int, RequestOutput] = {}
    hide = not use_tqdm or len(requests) < 2
    tokens = 0
    with tqdm(total=len(requests), desc="Generating", unit="req", disable=hide) as bar:
        try:
            while waiting or running:
                while waiting:
                    index, request = waiting[0]
                    try:
                        running[index] = submit(request, wait=not running)
                    except OverloadError:
                        break
                    waiting.popleft()
                    request.response.when_ended(partial(ended.put, index))
                index = ended.get()
                results[index] = running.pop(index).wait()
                tokens += sum(len(o.token_ids) for o in results[index].outputs)
                bar.update()
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{tokens / max(elapsed, 1e-9):.1f} tokens/s")
        finally:
            for handle in running.values():
                handle.cancel()
            for handle in running.values():
                handle.close()
    return [results[i] for i in range(len(requests))]
