"""Launches in threads that take turns."""

import threading

import pytest

from ninfer_jax.program.launchers import Launchers


def test_threads_take_turns_and_end():
    launchers = Launchers(2)
    names = [launchers.launch(threading.get_ident) for _ in range(6)]
    assert len(set(names)) == 2
    assert names[:2] * 3 == names
    assert threading.get_ident() not in names
    launchers.close()
    assert not {t.ident for t in threading.enumerate()} & set(names)


def test_an_error_reaches_the_caller_and_the_thread_goes_on():
    launchers = Launchers(1)
    with pytest.raises(ZeroDivisionError):
        launchers.launch(lambda x: 1 // x, 0)
    assert launchers.launch(lambda x: 1 // x, 1) == 1
    launchers.close()
