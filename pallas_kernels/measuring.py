"""What the benches of the ops share: times, a ceiling, and the line they print."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


def seconds(run: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Median time of a call, without the first."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def seconds_in_turn(
    run: Callable[[Any], Any], carry: Any, *, calls: int, repeats: int = 5
) -> float:
    """Median time of a call that takes the last one's result, `calls` of them under way at once."""
    carry = jax.block_until_ready(run(run(carry)))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            carry = run(carry)
        jax.block_until_ready(carry)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def device_events(run: Callable[[], Any]) -> list[tuple[float, float, str]]:
    """Kernels of the device while `run` runs, in turn: start and duration in nanoseconds, and name.

    Raises:
      RuntimeError: the profile shows no kernels.
    """
    events: list[tuple[float, float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                if "Compute" in line.name:  # the stream of the kernels, whatever else runs on it
                    events += [(e.start_ns, e.duration_ns, e.name) for e in line.events]
    if not events:
        raise RuntimeError("the profile shows no kernels")
    return sorted(events)


_CALLS = 6
"""Calls in a profile, of which the first does not count."""


def device_seconds(run: Callable[[Any], Any], carry: Any) -> float:
    """Median time from the start of a call's first kernel to the end of its last one, for a call that takes the last
    one's result. The kernels of one graph follow each other, however late the host launches it; where a call is no
    graph, the host's part of its launches counts.

    Raises:
      RuntimeError: calls ran different kernels.
    """
    calls = _calls(run, carry)
    times = [max(start + duration for start, duration, _ in call) - call[0][0] for call in calls]
    return statistics.median(times) / 1e9


def kernel_seconds(run: Callable[[Any], Any], carry: Any, name: str) -> float:
    """Median time that a call spends in kernels with `name` in their names, whatever else runs between them.

    Raises:
      RuntimeError: there are none, or calls ran different kernels.
    """
    calls = _calls(run, carry)
    times = [[duration for _, duration, kernel in call if name in kernel] for call in calls]
    if not times[0]:
        raise RuntimeError(f"the profile shows no kernels named {name}")
    return statistics.median(map(sum, times)) / 1e9


def _calls(run: Callable[[Any], Any], carry: Any) -> list[list[tuple[float, float, str]]]:
    """Kernels of each of some calls, for a call that takes the last one's result."""

    def in_turn() -> Any:
        result = carry
        for _ in range(_CALLS):
            result = run(result)
        return result

    carry = jax.block_until_ready(run(run(carry)))
    events = device_events(in_turn)
    each = [
        events[i * len(events) // _CALLS : (i + 1) * len(events) // _CALLS] for i in range(_CALLS)
    ]
    if any([e[2] for e in call] != [e[2] for e in each[0]] for call in each):
        raise RuntimeError("the calls of a profile ran different kernels")
    return each[1:]


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of adding one to 1 GB."""
    x = jnp.ones((256, 1024, 1024), jnp.float32)
    run = jax.jit(lambda x: x + 1, donate_argnums=0)
    return 2 * x.nbytes / seconds_in_turn(run, x, calls=8)


def last_timeline(folder: str, run: Callable[[int], Any], calls: int = 6) -> None:
    """Call what leaves timelines in a folder (see `mosaic.timeline`) a few times and keep the last: a second one of the
    same name would not be written."""
    for i in range(calls):
        for before in Path(folder).glob("*-trace.json"):
            before.unlink()
        jax.block_until_ready(run(i))
        jax.effects_barrier()


def report(op: str, shape: str, **figures: Any) -> None:
    """Print one JSON line."""
    device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(json.dumps({"op": op, "shape": shape} | device | figures), flush=True)


def report_bytes(
    op: str, shape: str, implementation: str, taken: float, moved: int, copy: float
) -> None:
    """Print the line of an op that the memory limits: `moved` bytes in `taken` seconds, beside a copy's bytes/s."""
    report(
        op,
        shape,
        implementation=implementation,
        us=round(taken * 1e6, 2),
        **{"GB/s": round(moved / taken / 1e9, 1), "share_of_copy": round(moved / taken / copy, 3)},
    )
