"""Ctrl-C that is not lost in the code of libraries."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

POSTPONED_SECONDS = 0.05


@contextmanager
def keep_interrupts() -> Iterator[None]:
    """Keep a Ctrl-C in the block from being lost.

    Python prints and drops an exception that a signal handler raises in a `__del__` or another callback of the interpreter.
    Making a tokenizer's pattern runs `__del__` thousands of times, so that a run would train on after a Ctrl-C at its start. A
    signal that arrives in a `__del__` is sent again a little later; what is lost elsewhere is raised at the end of the block.

    Does nothing where SIGINT has another handler than Python's own, or outside of the main thread.

    Raises:
        KeyboardInterrupt: SIGINT arrived in the block.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    arrived = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _in_finalizer(frame):
            threading.Timer(POSTPONED_SECONDS, os.kill, (os.getpid(), number)).start()
            return
        arrived.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arrived:
        raise KeyboardInterrupt


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
