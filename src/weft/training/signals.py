"""Signals that end training after its current step."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

SECOND_SIGNAL_SECONDS = 2.0  # a terminal or a scheduler signals ranks that their launcher signals as well


@dataclass
class Signals:
    """Number of the first signal, or 0. It is checked after each step, so that the current step ends first."""

    first: int = 0
    seconds: float = 0.0
    """Time at which it arrived."""


def catch_signals(names: Sequence[str] = ()) -> Signals:
    """Handle SIGINT, SIGTERM and SIGHUP: the first is recorded, one that comes `SECOND_SIGNAL_SECONDS` later ends the process.

    A second SIGHUP does not end it: a terminal and its shell may both send one.

    Args:
        names: further signals, such as "USR1".
    """
    caught = Signals()

    def handle(signal_number: int, _: object) -> None:
        now = time.monotonic()
        if caught.first and signal_number != signal.SIGHUP and now - caught.seconds > SECOND_SIGNAL_SECONDS:
            signal.signal(signal_number, signal.SIG_DFL)
            os.kill(os.getpid(), signal_number)
        elif not caught.first:
            caught.first, caught.seconds = signal_number, now

    if threading.current_thread() is threading.main_thread():  # a worker of Ray trains in another one
        further = [signal.Signals[f"SIG{name}"] for name in names]
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *further):
            signal.signal(signal_number, handle)
    return caught
