"""Times from a profile, with a profile that is made up."""

import jax.numpy as jnp
import pytest

from pallas_kernels import measuring


@pytest.fixture
def profile(monkeypatch):
    """What `device_events` answers: each call a kernel of 5 us, a gap of 1, and one of 2; the first call is slow."""
    calls = []

    def device_events(run):
        before = len(calls)
        run()
        events, now = [], 0.0
        for call in range(len(calls) - before):
            for name, duration in (("attend_kernel", 5000.0), ("loop_fusion", 2000.0)):
                events.append((now, duration + 50_000 * (call == 0), name))
                now += duration + 1000 + 50_000 * (call == 0)
        return events

    monkeypatch.setattr(measuring, "device_events", device_events)
    return calls


def test_a_call_lasts_from_its_first_kernel_to_its_last(profile):
    run = lambda x: profile.append(0) or x + 1  # noqa: E731
    assert measuring.device_seconds(run, jnp.zeros(())) == pytest.approx(8e-6)


def test_kernels_are_found_by_name(profile):
    run = lambda x: profile.append(0) or x + 1  # noqa: E731
    assert measuring.kernel_seconds(run, jnp.zeros(()), "attend") == pytest.approx(5e-6)
    with pytest.raises(RuntimeError, match="no kernels named chain"):
        measuring.kernel_seconds(run, jnp.zeros(()), "chain")


def test_calls_that_run_different_kernels_are_not_compared(monkeypatch):
    events = [(float(i), 1.0, f"kernel {i}") for i in range(12)]
    monkeypatch.setattr(measuring, "device_events", lambda run: run() and events)
    with pytest.raises(RuntimeError, match="different kernels"):
        measuring.device_seconds(lambda x: x + 1, jnp.ones(()))
