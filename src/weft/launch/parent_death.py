"""A process that ends with its launcher, also where that is killed and can tell nobody.

Ranks that went on alone would train without a watchdog, and write into the folder of the run that takes their place. Linux
sends them SIGKILL in the moment the launcher dies; elsewhere a thread looks every second whether it is still their parent.
Nothing is lost by the kill that the launcher's death has not lost: checkpoints become visible whole or not at all.
"""

import ctypes
import os
import signal
import threading
import time
from typing import NoReturn

LAUNCHER_VARIABLE = "WEFT_LAUNCHER"  # process number of the launcher, in the environment of what it starts
POLL_SECONDS = 1.0
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_launcher() -> None:
    """Let this process end when its launcher does; without a launcher, do nothing.

    The process must be a child of the launcher by now. Where the launcher has died before, this does not return. A fork of this
    process is not bound: it calls this itself.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None:
        return
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        threading.Thread(target=_watch, args=(int(launcher),), name="parent", daemon=True).start()
    else:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it may have died before the line above: nothing would come any more
        _end()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    _end()


def _end() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlives SIGKILL")
