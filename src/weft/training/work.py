"""One launch for all kinds of jobs: what a job needs around its ranks, from the locks of its folders to its end.

    launch_work(TrainWork(job), ranks=2, resume="auto", max_restarts=3)

A kind of job is a `Work`: how it is checked, prepared and finished, and the module of its ranks. `lead` launches it on host 0
or the only host, `join` on other hosts, and `weft.training.inside` in ranks that another launcher has started.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from weft.checkpoint.folders import list_checkpoints, step_of
from weft.device.detect import detect_for_launcher
from weft.device.device import Device
from weft.errors import JobError, Refusal, Stopped, UnreadableError, raise_if_refused
from weft.evaluation.harness import HARNESS_ENVIRONMENT
from weft.job import Job
from weft.launch.coordinator import JobCoordinator
from weft.launch.follow import follow_host_0, joined
from weft.launch.forkserver import ForkServer
from weft.launch.host_reports import MAX_RESTARTS, JobEnded
from weft.launch.launcher import default_ranks, early_forkserver, launch, raise_on_signal, thread_variables
from weft.launch.newcomers import Newcomers
from weft.launch.rendezvous import RendezvousConfig
from weft.launch.rounds import resume_sources, round_of, write_round
from weft.launch.tls import GLOO_TRANSPORT
from weft.launch.watchdog import Timeouts
from weft.training.checkpoints import checkpoint_folder
from weft.training.claim import claim_run
from weft.training.resize import Resize
from weft.training.run_folder import HeldFolders, check_writable, join_folders
from weft.training.shared_folders import share_with_launchers, shared_folders, write_nonce

SOURCES = "sources"  # key under which host 0 publishes the checkpoints to resume from
NO_ENCRYPTION = {"cuda": "NCCL", "npu": "HCCL"}


class Work(Protocol):
    """Kind of job, such as `TrainWork` of `weft train` or `TrainerWork` of a trainer of TRL."""

    module: str
    """Module of a rank: python -m MODULE RUN_FOLDER [SOURCE...], with the sources to resume from in order of preference, each
    "auto" or a checkpoint folder."""
    forks: bool
    """True if ranks are forks of a process that has imported the module; False if they are new processes."""
    replaces_hosts: bool
    """True if lost hosts, also host 0, may be replaced within `guard.node_rejoin_seconds`."""
    timeouts: Timeouts
    job: Job
    """Folders, guard and cluster of the job."""
    log: Callable[[str], None]
    """Prints a progress line."""

    def check(self, device: Device) -> None:
        """Refuse what the device of this host does not support; on each host that starts ranks.

        Raises:
            WeftError: a subclass, see `weft.errors`.
        """

    def prepare(
        self, folders: HeldFolders, ranks_by_host: Sequence[int], device: Device, resume: str | None
    ) -> Resize | None:
        """Check the job, prepare its run folder, and print the startup screen; once, on host 0.

        Args:
            folders: locked folders of the run.
            ranks_by_host: number of ranks of each host.
            device: device of this host.
            resume: checkpoint folder, "auto", or None for a new run, which moves an earlier run in its folder aside.

        Returns:
            Function that chooses the number of ranks of a restart; None: all that are available.

        Raises:
            WeftError: a subclass, see `weft.errors`.
        """

    def finish(self, succeeded: bool) -> None:
        """Complete the run folder when the ranks have ended, also after a signal or a failure; on host 0."""


@dataclass(frozen=True)
class Launch:
    """Launch of a job on this host."""

    work: Work
    ranks: int
    """Number of ranks of this host."""
    device: Device
    forkserver: ForkServer | None

    def start(
        self,
        sources: Sequence[str],
        coordinator: JobCoordinator | None,
        max_restarts: int = 0,
        resize: Resize | None = None,
    ) -> None:
        """Start the ranks of this host, and wait until they have ended; see `weft.launch.launcher.launch`.

        Args:
            sources: sources to resume from, in order of preference.
            coordinator: connection to the other hosts; None for one host.
            max_restarts: maximum consecutive restarts without progress, on host 0.
            resize: chooses the number of ranks of a restart, on host 0.
        """
        out = Path(self.work.job.out)
        command = [sys.executable, *["-u"] * (not self.work.forks), "-m", self.work.module, str(out)]
        threads = thread_variables(self.device, self.ranks)
        launch(
            [*command, *sources],
            ranks=self.ranks,
            log_dir=out / "logs",
            environment=HARNESS_ENVIRONMENT | threads | _network(coordinator, self.device, self.work.log),
            timeouts=self.work.timeouts,
            max_restarts=max_restarts,
            restart_argv=[*command, "auto", *sources],
            resize=resize,
            coordinator=coordinator,
            forkserver=self.forkserver,
        )


def launch_work(
    work: Work,
    *,
    ranks: int | None = None,
    resume: str | None = None,
    max_restarts: int = 0,
    rendezvous: RendezvousConfig | None = None,
) -> Path:
    """Launch a job on the devices of this machine, or of several hosts together, and wait for its end.

    Args:
        work: job.
        ranks: number of ranks on this host; default: one per accelerator, or two on CPU.
        resume: checkpoint folder, "auto" for the newest one of the run, or None for a new run.
        max_restarts: maximum consecutive restarts without progress, each from the newest checkpoint.
        rendezvous: rendezvous of several hosts; None for one host. Only `resume` and `max_restarts` of host 0 apply.

    Returns:
        Run folder.

    Raises:
        WeftError: a subclass, see `weft.errors`; `Stopped` after a signal, when the ranks have ended.
    """
    sources = resume_sources(round_of(os.environ), Path(work.job.out), resume)
    check_writable(work.job, new=not sources, alone=rendezvous is None)
    device = detect_for_launcher()
    seconds = work.job.guard.node_rejoin_seconds if work.replaces_hosts else 0.0
    forking = early_forkserver(work.module, device) if work.forks else nullcontext()
    if rendezvous:
        raise_if_refused(_no_joining(work, rendezvous))
    with forking as forkserver, ExitStack() as stack:
        work.check(device)
        here = Launch(work, ranks or default_ranks(device), device, forkserver)
        rendezvous = rendezvous and replace(rendezvous, encrypt=work.job.cluster.encrypt)
        if rendezvous and rendezvous.host:
            stack.enter_context(raise_on_signal())  # also while it waits for a new host 0
            return follow_host_0(rendezvous, here.ranks, partial(join, here), work.log, node_rejoin_seconds=seconds)
        replaceable = rendezvous if work.replaces_hosts else None
        folders, state = stack.enter_context(claim_run(work.job, replaceable, next(iter(sources), None)))
        together = joined(rendezvous, here.ranks, node_rejoin_seconds=seconds, state=state)
        coordinator = stack.enter_context(together)
        return lead(here, folders, sources, max_restarts, coordinator)


def lead(
    here: Launch, folders: HeldFolders, sources: Sequence[str], max_restarts: int, coordinator: JobCoordinator | None
) -> Path:
    """Prepare a run, start the ranks of this host, and finish the run; on host 0 or the only host.

    Args:
        here: launch on this host.
        folders: locked folders of the run.
        sources: sources to resume from, in order of preference.
        max_restarts: maximum consecutive restarts without progress.
        coordinator: connection to the other hosts; None for one host.
    """
    work, out, resume = here.work, Path(here.work.job.out), next(iter(sources), None)
    shared, ranks_by_host, nonce = shared_folders(work.job), [here.ranks], ""
    if coordinator:
        ranks_by_host = coordinator.ranks_by_host()
        nonce = share_with_launchers(coordinator, shared)
        if state := coordinator.lost_host_0():
            resume, ranks_by_host = "auto", state.state.ranks
    resize = work.prepare(folders, ranks_by_host, here.device, resume)
    write_round(out, round_of(os.environ))
    if coordinator:
        write_nonce(shared, nonce)  # an earlier run, now aside, has the first one
        coordinator.publish_config({SOURCES: "\n".join(sources), MAX_RESTARTS: str(max_restarts)})
        if resize and work.job.checkpoint.every:
            coordinator.newcomers = Newcomers(partial(_newest_step, checkpoint_folder(work.job)), resize.usable)
    succeeded = False
    try:
        here.start(sources, coordinator, max_restarts, resize)
        succeeded = True
    finally:
        try:
            if coordinator is None or coordinator.leads():
                work.finish(succeeded)
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT) from None
    return out


def join(here: Launch, coordinator: JobCoordinator) -> Path:
    """Start the ranks of this host after host 0 has prepared the run; on hosts other than 0."""
    job, out = here.work.job, Path(here.work.job.out)
    share_with_launchers(coordinator, shared_folders(job))
    sources = coordinator.wait_for_config(SOURCES)[SOURCES].splitlines()
    join_folders(job, out)
    here.work.log(f"{coordinator.host_label} has {here.ranks} ranks of the job, output in {out}")
    try:
        here.start(sources, coordinator)
    except JobEnded as error:
        here.work.log(f"{error.what}: the job has ended without it")
    return out


def _newest_step(folder: Path) -> int | None:
    """Step of the newest checkpoint in a folder, -1 without one; None if the folder cannot be read."""
    try:
        return step_of(newest) if (newest := next(iter(list_checkpoints(folder)), None)) else -1
    except UnreadableError:
        return None


def _no_joining(work: Work, rendezvous: RendezvousConfig) -> Refusal | None:
    """Reason why no host can join the job while it runs, if the command asks for it."""
    reason, fix = "", "--nnodes with one number"
    if not work.replaces_hosts:
        reason = "a job with a trainer keeps the hosts with which it starts"
    elif not work.job.checkpoint.every:
        reason = "hosts join after a checkpoint on the disk, and the job writes none before its end"
        fix = f"--set checkpoint.every=500, or {fix}"
    if not reason or not rendezvous.min_hosts:
        return None
    return Refusal(f"--nnodes {rendezvous.min_hosts}:{rendezvous.hosts}", "command line", reason, fix, JobError)


def _network(coordinator: JobCoordinator | None, device: Device, log: Callable[[str], None]) -> dict[str, str]:
    """Environment variables for connections between ranks of several hosts; logs connections that are not encrypted."""
    if coordinator is None:
        return {}
    variables = coordinator.network_environment()
    unencrypted = [NO_ENCRYPTION[device.type]] if device.type in NO_ENCRYPTION else []
    unencrypted += [] if GLOO_TRANSPORT in variables else ["gloo of this PyTorch"]
    if coordinator.rendezvous.encrypt and unencrypted:
        log(f"connections between ranks are not encrypted: no TLS in {' and '.join(unencrypted)}; use WireGuard")
    return variables
