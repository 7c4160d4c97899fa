"""Errors for users: message, location, broken rule and fix.

An error fits one screen and is printed once, whatever the number of ranks. Its class decides the exit code of the command: 2
if a restart would end in the same way, as for input that is refused, and 1 for a failure at run time.
"""

import difflib
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than line ends and tabs, marks that reorder a text, and halves of characters."""


def printable(text: object) -> str:
    """Text for a terminal: a name or a file of somebody else cannot move its cursor, hide a line or change its colors."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def nearest(name: str, known: Iterable[str]) -> str:
    """Fix for an unknown name: the most similar known name."""
    near = difflib.get_close_matches(name, known, 1, 0.3)
    return f"write {near[0]!r}" if near else "choose a known name"


class WeftError(Exception):
    """Base class of all errors of Weft.

    Args:
        what: description of the failure, with the offending value.
        where: file, key, module, tensor or rank of the failure.
        rule: rule that the value breaks.
        fix: action for the user.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, rule: str | None = None, fix: str | None = None):
        self.what = printable(what)
        self.where, self.rule, self.fix = (part and printable(part) for part in (where, rule, fix))
        super().__init__(self.what)

    def __str__(self) -> str:
        parts = [("where", self.where), ("rule", self.rule), ("fix", self.fix)]
        return "\n".join([self.what, *(f"  {label + ':':7}{text}" for label, text in parts if text)])


class JobError(WeftError):
    """A job or one of its values is invalid."""

    exit_code = 2


class PlanError(JobError):
    """A plan contradicts itself or does not fit the number of ranks."""


class ModelError(WeftError):
    """A model cannot be built, or its structure is not supported."""

    exit_code = 2


class DataError(WeftError):
    """Data is missing, empty, damaged, or too large for the disk."""

    exit_code = 2


class DeviceError(WeftError):
    """The devices of this machine do not support the request."""

    exit_code = 2


class CommunicationError(WeftError):
    """Ranks called collectives that do not match."""


class RendezvousError(WeftError):
    """Rendezvous of hosts failed: an address, a token or a host count is wrong, or a host is missing."""

    exit_code = 2


class TopologyError(WeftError):
    """A declared topology contradicts itself, or describes other hosts and ranks."""

    exit_code = 2


class CheckpointError(WeftError):
    """A checkpoint or a folder with weights is missing, incomplete or damaged."""

    exit_code = 2


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read at the moment: it is neither damaged nor missing, and no other takes its place."""

    exit_code = 1


class NumericError(WeftError):
    """Loss or gradients are no longer finite; a restart would not help."""

    exit_code = 2


class RankFailure(WeftError):
    """A rank or a host failed while the job ran; the message names it.

    Args:
        rank: global rank that failed; None if unknown.

    Attributes:
        is_told: another host of a large job prints it, so that this host prints nothing.
    """

    def __init__(self, what: str, *, rank: int | None = None, **parts: str | None):
        super().__init__(what, **parts)
        self.rank, self.is_told = rank, False


class Stopped(WeftError):
    """A signal ended the command. This is not a failure: the exit code is 128 + the signal number, as shells expect.

    Args:
        signal_number: number of the signal.
    """

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number


@dataclass(frozen=True)
class Refusal:
    """Reason why a model, a plan or a job does not support something: an error that has not been raised.

    Attributes as of `WeftError`. A check returns it or None, so that callers can raise it, show it or try something else.
    """

    what: str
    where: str | None
    rule: str
    fix: str
    error: type[WeftError] = PlanError
    """Class of the error."""


def raise_if_refused(found: T | Refusal) -> T:
    """Raise the error of a refusal; return any other value."""
    if isinstance(found, Refusal):
        raise found.error(found.what, where=found.where, rule=found.rule, fix=found.fix)
    return found


def refuse_hub_id(path: str | Path, where: str) -> None:
    """Refuse a path that does not exist and reads as the id of a model on the Hugging Face Hub, such as Qwen/Qwen3-0.6B.

    Args:
        path: path that a user has given for a folder.
        where: key, option or argument that has it.

    Raises:
        ModelError: names the command that downloads the model.
    """
    owner, _, name = str(path).partition("/")
    reads_as_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)) and not name.endswith(".json")
    if reads_as_id and not Path(owner).exists():  # a path with a typing error begins with a folder that exists
        raise ModelError(
            f"there is no folder {path}; it looks like a Hub id",
            where=where,
            rule="Weft does not download: a model is a folder on this machine",
            fix=f"run `hf download {path} --local-dir models/{name}`, and name models/{name}",
        )
