"""Two lanes of computation on one rank, of which one runs: a lane that would wait for a message lets the other one run.

    lane 0, calling thread    forward  |........|  forward  |........|  forward
    lane 1, worker thread     .........|backward|...........|backward|
    messages                           lane 0's             lane 0's

Hand-overs are at fixed places of a program, so that all ranks start the messages of both lanes in one order. The lanes share
every object: what belongs to one lane alone is exchanged at each hand-over, like the registers of a thread.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Result = TypeVar("Result")


class Registers(Protocol):
    """State of which each lane has its own values."""

    def take(self) -> Any:
        """Values of the lane that stops. What they replaced in the model is restored; called in reverse order."""

    def give(self, values: Any, other: Any) -> None:
        """Set the values of the lane that runs next; `other` are those of the lane that has stopped."""


class _OtherLaneFailed(BaseException):
    """Ends a lane whose other lane has raised an error."""


class Lanes:
    """Runs two functions, one of which runs at a time. Used by one thread."""

    def __init__(self) -> None:
        self.registers: list[Registers] = []
        """State that is exchanged at hand-overs, outermost first."""
        self.handovers = 0
        """Number of hand-overs so far."""
        self._turns = threading.Semaphore(0), threading.Semaphore(0)
        self._values: list[list[Any]] = [[], []]
        self._alive, self._has_failed, self._holds = [False, False], False, 0
        self._lane = 0
        """Lane that runs. Not the current thread: on an accelerator a backward runs in a thread of autograd."""
        self._worker: ThreadPoolExecutor | None = None

    def run(self, first: Callable[[], Result], second: Callable[[], object]) -> Result:
        """Run two functions; the first begins. They run one after the other in a dispatch mode, which a thread has alone.

        Args:
            first: runs in the calling thread.
            second: runs in a worker thread, with gradients enabled.

        Returns:
            The result of `first`.

        Raises:
            Exception: what a function has raised first; it has ended the other one at its next hand-over.
        """
        if is_in_torch_dispatch_mode():
            result = first()
            second()
            return result
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="weft-lane", initializer=_same_device())
        values = [registers.take() for registers in self.registers]
        self._values, self._alive, self._lane, self._has_failed = [values, values], [True, True], 0, False
        ended = self._worker.submit(self._run_second, second)
        try:
            result = first()
        except _OtherLaneFailed:
            pass
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._end()
            error = ended.exception()
        if error is not None:
            raise error
        return result

    def hand_over(self) -> None:
        """Let the other lane run until it hands over or ends; nothing without another lane."""
        if not all(self._alive) or self._holds:
            return
        self.handovers += 1
        own = self._lane
        self._switch()
        self._turns[own].acquire()
        if self._has_failed:
            raise _OtherLaneFailed

    def begin_message(self) -> Callable[[], None]:
        """Note the start of a message.

        Returns:
            A function to call before the wait for the message. It hands over, unless this lane has handed over since the
            start: the message has then been overlapped with the other lane, which needs its turns for other messages.
        """
        begun = self.handovers

        def before_wait() -> None:
            if self.handovers == begun:
                self.hand_over()

        return before_wait

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which the running lane does not hand over."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def _run_second(self, second: Callable[[], object]) -> None:
        self._turns[1].acquire()
        try:
            if not self._has_failed:
                second()
        except _OtherLaneFailed:
            pass
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """End the lane that runs; the other one goes on alone."""
        self._alive[self._lane] = False
        if self._alive[1 - self._lane]:
            self._switch()

    def _switch(self) -> None:
        own, other = self._lane, 1 - self._lane
        self._values[own] = [registers.take() for registers in reversed(self.registers)][::-1]
        for registers, values, stopped in zip(self.registers, self._values[other], self._values[own], strict=True):
            registers.give(values, stopped)
        self._lane = other
        self._turns[other].release()


def _same_device() -> Callable[[], None]:
    """Function that gives another thread the accelerator of this one."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)
