"""Progress of a rank in the collectives of a process group, as its heartbeat records it. Imports no torch."""

from typing import NamedTuple


class GroupProgress(NamedTuple):
    """Progress of this rank in the collectives of one process group."""

    name: str
    """The same on all ranks of the group, and different from those of other groups."""
    description: str
    issued: int
    """Number of collectives issued; the calls may return before the collectives complete."""
    pending: str = ""
    """Oldest collective that is not complete, for example "nccl:all_reduce"; "" if it is not known or there is none."""
    started: int = -1
    """Number of collectives that the device has started; -1 if it is not known."""
