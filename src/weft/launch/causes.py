"""Causes of the end of a rank. Imports no torch."""

import signal
from enum import IntEnum
from typing import Any

UNKNOWN_SIGNAL = -256  # exit code of a process whose launcher alone knows the signal that ended it

# Error texts of a rank that has lost a peer: consequences of the failure of another rank.
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "remote process exited",
    "Timed out waiting",
    "did not join a collective within",
    "not set within",
    "the store of rank 0 is lost",
)


class Cause(IntEnum):
    """Causes of a rank's end, from the most to the least likely root cause. The rank with the lowest value is blamed."""

    OWN = 0
    ABORT = 1  # gloo and NCCL abort a process that lost its peer
    TERMINATED = 2
    EARLY_EXIT = 3  # with code 0, while other ranks were still running
    CONSEQUENCE = 4


def describe_signal(code: int) -> str:
    """Description of a negative exit code."""
    if code == UNKNOWN_SIGNAL:
        return "ended without an error report, most likely by SIGKILL: its launcher has its exit code"
    return f"was killed by {signal.Signals(-code).name}"


def find_cause(code: int | None, report: dict[str, Any]) -> Cause:
    """Cause of the end of a rank, from its exit code and its error report."""
    if report:
        return Cause.CONSEQUENCE if any(mark in report["traceback"] for mark in CONSEQUENCES) else Cause.OWN
    causes = {0: Cause.EARLY_EXIT, -signal.SIGTERM: Cause.TERMINATED, -signal.SIGABRT: Cause.ABORT}
    return causes.get(code or 0, Cause.OWN)
