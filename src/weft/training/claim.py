"""Claim of a run folder by host 0 of several hosts: it begins a run there, or replaces a host 0 that was lost."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import JobError
from weft.job import Job
from weft.launch.job_state import JobState, StateFile, read_state
from weft.launch.rendezvous import RendezvousConfig
from weft.lock import read_holder
from weft.training.run_folder import LAUNCHER_LOCK, HeldFolders, ranks_alive_error

TAIL_BYTES = 2**16  # more than one line of metrics


@contextmanager
def claim_run(
    job: Job, rendezvous: RendezvousConfig | None, resume: str | None
) -> Iterator[tuple[HeldFolders, StateFile | None]]:
    """Lock the folders of a run on host 0, and decide whether this host 0 replaces a lost one.

    It does if the state in the run folder is that of an unfinished job of the same hosts and token, and if other hosts of that
    job wait for it. They hold a shared lock; on a file system without locks, `resume` must be "auto" instead.

    Yields:
        folders: locked folders.
        state: state of the job, with the state of the lost host 0 if there is one; None without `rendezvous`.

    Raises:
        RendezvousError: the host 0 of the job is alive.
        JobError: another run uses a folder, or its hosts belong to another job.
    """
    if rendezvous is None:
        with HeldFolders(job) as folders:
            yield folders, None
        return
    out = Path(job.out)
    found = _unfinished(out, rendezvous)
    if found:
        found.check_ended(rendezvous)
    last_holder = read_holder(out / LAUNCHER_LOCK)
    wait_seconds = job.guard.node_rejoin_seconds if found else 0.0
    with HeldFolders(job, beside_ranks=True, wait_seconds=wait_seconds) as folders:
        found = _unfinished(out, rendezvous)  # the host 0 that held the lock until now may have changed it
        if folders.in_use and not found:
            error = ranks_alive_error(out, "out", last_holder)
            raise JobError(
                f"{error.what}; {_reason(out, rendezvous)}", where=error.where, rule=error.rule, fix=error.fix
            )
        is_waited_for = folders.in_use if folders.has_locks else resume == "auto"
        lost = found if is_waited_for else None
        yield folders, StateFile(out, rendezvous, lost, _reached_step(out))


def _unfinished(out: Path, rendezvous: RendezvousConfig) -> JobState | None:
    """State of this job, if host 0 was lost before the end."""
    state = read_state(out)
    return state if state and state.is_of(rendezvous) else None


def _reason(out: Path, rendezvous: RendezvousConfig) -> str:
    """Reason why the hosts that use a run folder do not belong to this host 0."""
    state = read_state(out)
    if state is None:
        return "their host 0 has left no state of its job there"
    if state.hosts != rendezvous.hosts:
        return f"their job has {state.hosts} hosts, this one has {rendezvous.hosts}"
    if state.ended or state.attempt < 0:
        return "their job has ended"
    return "their job has another token"


def _reached_step(out: Path) -> int:
    """Step of the last complete line of `metrics.jsonl`; -1 without one."""
    try:
        with (out / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return -1
