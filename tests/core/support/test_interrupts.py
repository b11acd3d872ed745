"""Tests of interrupts from the keyboard: none is lost, and handlers are left as they were found."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from knowable.core.support.progress import deferred_interrupts


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Forgetful:
    """Where an exception goes nowhere: Python prints it and goes on."""

    def __del__(self) -> None:
        press()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finaliser_has_swallowed_is_found_again():
    with deferred_interrupts() as raise_if_interrupted:
        raise_if_interrupted()
        each = Forgetful()
        del each
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()


def test_an_interrupt_is_raised_where_it_comes():
    with deferred_interrupts(), pytest.raises(KeyboardInterrupt):
        press()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_are_left_alone():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with deferred_interrupts() as raise_if_interrupted:
            press()
            raise_if_interrupted()
        assert seen == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_may_fit_too():
    found = []

    def work() -> None:
        with deferred_interrupts() as raise_if_interrupted:
            raise_if_interrupted()
            found.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]
