"""Every error a user can meet: what happened, where, the rule that was broken, and the fix.

An error of Weft fits one screen and is printed once, whatever the number of ranks. Its class decides the exit code of the
command: 2 for input that is refused before anything runs, 1 for a failure while running.
"""

import difflib
import signal
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The fix of an error about an unknown name: the known one that is most like it."""
    near = difflib.get_close_matches(name, known, 1, 0.3)
    return f"write {near[0]!r}" if near else "choose one of them"


class WeftError(Exception):
    """Base of all errors of Weft.

    Args:
        what: what happened, with the offending value.
        where: file, key, module, tensor or rank it belongs to.
        rule: the rule that the value breaks.
        fix: what the user can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, rule: str | None = None, fix: str | None = None):
        self.what, self.where, self.rule, self.fix = what, where, rule, fix
        super().__init__(what)

    def __str__(self) -> str:
        parts = [("where", self.where), ("rule", self.rule), ("fix", self.fix)]
        return "\n".join([self.what, *(f"  {label + ':':7}{text}" for label, text in parts if text)])


class JobError(WeftError):
    """A job, or one of its values, cannot be run as written."""

    exit_code = 2


class PlanError(JobError):
    """A plan contradicts itself or does not fit the number of ranks."""


class ModelError(WeftError):
    """A model cannot be built, or its anatomy cannot be read."""

    exit_code = 2


class DataError(WeftError):
    """Data is missing, empty, damaged or too large for the disk."""

    exit_code = 2


class DeviceError(WeftError):
    """The machine's devices cannot do what was asked of them."""

    exit_code = 2


class CommunicationError(WeftError):
    """Ranks do not agree on what they send each other."""


class RendezvousError(WeftError):
    """The hosts of a job cannot meet: an address, a token or a number is wrong, or a host does not come."""

    exit_code = 2


class TopologyError(WeftError):
    """A declared topology contradicts itself, or is of other hosts and ranks."""

    exit_code = 2


class CheckpointError(WeftError):
    """A folder with weights is missing, incomplete or damaged."""

    exit_code = 2


class NumericError(WeftError):
    """Training makes no finite numbers any more. Starting it again would not help."""

    exit_code = 2


class RankFailure(WeftError):
    """One rank failed while the job ran, or a whole host; the message names it.

    Args:
        rank: its number, if it is known.
    """

    def __init__(self, what: str, *, rank: int | None = None, **parts: str | None):
        super().__init__(what, **parts)
        self.rank = rank


class Stopped(WeftError):
    """The command was ended by a signal. It is no failure: the exit code is 128 + the signal, as a shell expects.

    Args:
        number: the signal.
    """

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
