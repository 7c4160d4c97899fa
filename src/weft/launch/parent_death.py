"""End a process when its launcher dies, even if the launcher is killed.

Ranks without a launcher would train without a watchdog, and write into the run folder of the job that replaces them. Linux
sends these ranks SIGKILL as soon as the launcher dies; on other systems a thread checks every second whether the launcher is
still the parent. The kill is safe for checkpoints: a checkpoint becomes visible only when it is complete.
"""

import ctypes
import os
import signal
import threading
import time
from typing import NoReturn

LAUNCHER_VARIABLE = "WEFT_LAUNCHER"  # process number of the launcher, in the environment of its children
POLL_SECONDS = 1.0
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with_launcher() -> None:
    """Bind the lifetime of this process to its launcher; do nothing without a launcher.

    This process must already be a child of the launcher. If the launcher is already dead, the function ends this process. A
    fork of this process does not inherit the binding and must call the function itself.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None:
        return
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        threading.Thread(target=_watch, args=(int(launcher),), name="parent-death", daemon=True).start()
    else:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before the line above, so that no signal will come
        _end()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    _end()


def _end() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process survived SIGKILL")
