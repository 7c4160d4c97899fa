"""Tests of a Ctrl-C at a moment at which Python would lose it."""

import os
import signal
import time
import weakref
from collections.abc import Iterator

import pytest

from weft.launch.interrupts import keep_interrupts


@pytest.fixture(autouse=True)
def python_handler() -> Iterator[None]:
    """Python's own handler, also where the tests run in the background of a shell and ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class PressesInDel:
    """Object whose finalizer is interrupted, as that of a library may be."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)  # handlers run between two instructions of Python


def test_an_interrupt_in_a_finalizer_is_raised_soon_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), keep_interrupts():  # noqa: PT012 - the block is what is interrupted
        PressesInDel()
        time.sleep(60)
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_lost_is_raised_at_the_end() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), keep_interrupts():  # noqa: PT012 - the block is what is interrupted
        thing = type("Thing", (), {})()
        reference = weakref.ref(thing, lambda _: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0)))
        del thing
        reached.append(reference)
    assert reached


def test_an_interrupt_in_other_code_is_raised_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), keep_interrupts():  # noqa: PT012 - the block is what is interrupted
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
        reached.append(1)
    assert not reached


def test_the_handlers_of_a_caller_are_kept() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with keep_interrupts():
            PressesInDel()
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
    with keep_interrupts():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
