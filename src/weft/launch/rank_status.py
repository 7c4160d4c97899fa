"""Heartbeat file of a rank, as its reader sees it: the launcher, or the watchdog of a node. Imports no torch.

    create_heartbeat(path)                    # before the rank starts
    status = read_status(path)                # at any time, even after the rank was killed

Each kind of record has one writer (`heartbeat.py`) and two slots, which the writer fills in turn. A slot holds a sequence
number and a checksum, so that a reader takes the newest complete record, whenever the writer was interrupted or killed.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from weft.group_progress import GroupProgress

HEARTBEAT_VARIABLE = "WEFT_HEARTBEAT"  # environment variable of a rank: path of its heartbeat file
SLOT_BYTES = 2048
HEADER = Struct("qII")  # sequence number, bytes of text, checksum
PHASE, COLLECTIVE, SAMPLE, GROUPS = 0, 2, 4, 6  # first of the two slots of each kind of record
FINISHED = 8 * SLOT_BYTES  # offset of the number of finished collectives; a multiple of 8 bytes
HEARTBEAT_BYTES = 9 * SLOT_BYTES


@dataclass(frozen=True)
class RankStatus:
    """Last status of a rank. Times are seconds of CLOCK_MONOTONIC, which all processes of a host share."""

    pid: int = 0
    """Process number; 0 until the rank has opened its heartbeat."""
    phase: str = "starting"
    step: int | None = None
    phase_start: float = 0.0
    """Time at which the phase began."""
    step_seconds: float = 0.0
    """Median duration of the last steps; 0 before the first two steps have ended."""
    collectives: int = 0
    """Number of collectives called through shared memory."""
    last_collective: str = ""
    """Last collective called through shared memory: operation, bytes, dtype and group."""
    in_collective: bool = False
    """True if the rank had not returned from the last collective."""
    groups: tuple[GroupProgress, ...] = ()
    """Progress in the collectives of each process group of the device at the last sample, if its backend counts them."""
    location: str = ""
    """Location of the main thread at the last sample: "FILE:LINE FUNCTION", outside torch and the standard library."""
    communication: str = ""
    """Communication call of the main thread at the last sample, for example "all_reduce"; "" in other code."""
    sampled_at: float = 0.0
    """Time of the last sample; 0 before the first."""

    @property
    def issued(self) -> int:
        """Number of collectives issued to the groups of the device."""
        return sum(group.issued for group in self.groups)

    @property
    def pending(self) -> str:
        """Oldest collective that the accelerator has not completed, with its group; "" if none is known."""
        waiting = [group for group in self.groups if group.pending]
        return f"{waiting[0].pending} of group {waiting[0].description} on the device" if waiting else ""

    @property
    def waits_in(self) -> str:
        """The collective or communication call that the rank was in, or that its accelerator has not completed; or ""."""
        return self.last_collective if self.in_collective else self.communication or self.pending


def create_heartbeat(path: Path) -> None:
    """Create the heartbeat file of a rank that has not started; called by the launcher."""
    # Written in full: a write to a hole of a sparse file would kill the rank by SIGBUS when no space is left.
    path.write_bytes(bytes(HEARTBEAT_BYTES))


def read_status(path: Path) -> RankStatus:
    """Read the last status of a rank from its heartbeat file."""
    for _ in range(3):  # a writer may overtake a reader once, but not three times in a row
        data = path.read_bytes().ljust(HEARTBEAT_BYTES, b"\0")  # shorter while it is being created
        _, phase = _newest(data, PHASE)
        collectives, last_collective = _newest(data, COLLECTIVE)
        _, sample = _newest(data, SAMPLE)
        _, groups = _newest(data, GROUPS)
        if phase:
            break
    else:
        return RankStatus()
    pid, phase_start, median, step, name = phase.split("\n", 4)
    sampled_at, communication, location = sample.split("\n", 2) if sample else ("0", "", "")
    (finished,) = memoryview(data)[FINISHED : FINISHED + 8].cast("q")
    return RankStatus(
        pid=int(pid),
        phase=name,
        step=int(step) if step else None,
        phase_start=float(phase_start),
        step_seconds=float(median),
        collectives=collectives,
        last_collective=last_collective,
        in_collective=finished < collectives,
        groups=decode_groups(groups),
        location=location,
        communication=communication,
        sampled_at=float(sampled_at),
    )


def _newest(data: bytes, kind: int) -> tuple[int, str]:
    """Sequence number and text of the newest complete record of a kind; (0, "") if there is none."""
    newest, text = 0, ""
    for start in (kind * SLOT_BYTES, (kind + 1) * SLOT_BYTES):
        sequence, size, checksum = HEADER.unpack_from(data, start)
        body = data[start + HEADER.size : start + HEADER.size + size]
        if sequence > newest and zlib.crc32(body, sequence) == checksum:
            newest, text = sequence, body.decode(errors="replace")
    return newest, text


def encode_groups(groups: list[GroupProgress]) -> str:
    """Text of the progress of groups, a line each: a truncated text loses its last groups."""
    return "".join("\t".join(map(str, group)).replace("\n", " ") + "\n" for group in groups)


def decode_groups(text: str) -> tuple[GroupProgress, ...]:
    """Inverse of `encode_groups`, without an incomplete last line."""
    lines = [line.split("\t") for line in text.split("\n")[:-1]]
    return tuple(GroupProgress(name, about, int(n), pending, int(m)) for name, about, n, pending, m in lines)
