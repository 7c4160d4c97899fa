"""Lines on stderr that tell a waiting user that a command is running, with and without a terminal."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from weft.errors import WeftError
from weft.launch.environment import started_rank
from weft.launch.log import log

FIRST_SECONDS = 2.0


@contextmanager
def report_waiting(command: str, *, once: bool = False) -> Iterator[None]:
    """Print a line after two seconds, and again whenever the time has doubled. A rank of another launcher prints none.

    A timer of the process, because the launcher forks its ranks if it has one thread only. Forks do not inherit a timer.

    Args:
        command: name of the command.
        once: print one line only, for a command that reports its steps itself.
    """
    if _is_rank():
        yield
        return
    started = time.monotonic()

    def report(_: int, frame: FrameType | None) -> None:
        seconds = time.monotonic() - started
        with suppress(OSError, RuntimeError, ValueError):  # stderr is closed, or the signal came while it was written
            log(f"{command}: {'loading libraries' if _is_importing(frame) else 'running'} ({seconds:.0f} s)")
        if not once:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    handler = signal.signal(signal.SIGALRM, report)
    timer = signal.setitimer(signal.ITIMER_REAL, FIRST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _is_rank() -> bool:
    try:
        return started_rank(os.environ) is not None
    except WeftError:  # the command itself refuses the variables
        return False


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
