"""Launcher of the ranks of this host, on top of torch's elastic agent, with failure detection and restarts.

    launch([sys.executable, "-m", "package.of.the.rank"], ranks=2, log_dir=Path("runs/first/logs"))   # in the launcher

A rank begins with `rank_main` and `connect` of `rank_entry.py`; the agent that starts and ends the ranks is in `agent.py`.
Rank 0 keeps the terminal; the output of the other ranks goes to files. On a single host, no process listens on an address that
other hosts can reach. Failure detection is in `watchdog`, coordination between hosts in `coordinator`.
"""

import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from weft.device.device import Device
from weft.errors import RankFailure, Stopped
from weft.files import make_folder, open_file
from weft.launch.agent import SECONDS_TO_END, SIGNALS, RankLogsSpecs, WatchedAgent
from weft.launch.attempt import assign_ranks
from weft.launch.coordinator import JobCoordinator
from weft.launch.environment import (
    ALLOCATOR,
    ATTEMPT_VARIABLE,
    HANG_TIMEOUT_VARIABLE,
    LOOPBACK,
    RANK_ENVIRONMENT,
    explain_allocation,
    has_allocator,
)
from weft.launch.forkserver import ForkServer
from weft.launch.job_state import StateFile
from weft.launch.log import log
from weft.launch.parent_death import LAUNCHER_VARIABLE
from weft.launch.scratch import remove_leftovers, scratch_folder
from weft.launch.store import STORE_VARIABLE, StoreRendezvous, StoreServer
from weft.launch.watchdog import REFUSED, Timeouts, Watchdog

MAX_DELAY_SECONDS = 60  # between two attempts
AGENT_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # environment variable that torch's elastic agent reads


def default_ranks(device: Device) -> int:
    """Default number of ranks of this host: one per accelerator; on CPU two, or one on a single core."""
    return min(2, os.cpu_count() or 1) if device.type == "cpu" else device.count


def thread_variables(device: Device, ranks: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables for the threads of ranks on accelerators: the cores of this host, divided by its ranks.

    On accelerators, only work on the host uses them: new weights, data, checkpoints. Ranks on CPU have one thread each.

    Args:
        device: device of the ranks.
        ranks: number of ranks of this host.
        environment: environment of this process; a setting of the user takes precedence.
    """
    if device.type == "cpu":
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(max(1, cores // ranks)))}


def launch(
    argv: list[str],
    *,
    ranks: int,
    log_dir: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    timeouts: Timeouts = Timeouts(),  # noqa: B008 - it is frozen
    max_restarts: int = 0,
    restart_argv: list[str] | None = None,
    resize: Callable[[RankFailure, int], int] | None = None,
    coordinator: JobCoordinator | None = None,
    use_forkserver: bool = False,
    forkserver: ForkServer | None = None,
) -> None:
    """Run a command as `ranks` processes on this host, and wait until all of them have exited with code 0.

    Must be called in the main thread, because it handles signals.

    Output: rank 0 inherits stdout and stderr, and with them the terminal. Rank n > 0 writes `rank-n.out` and `rank-n.err` in
    `log_dir`, of which those that stay empty are removed at the end. The traceback of a failed rank is in `rank-n.traceback`.

    Signals: those of `SIGNALS` are passed on to the ranks. The ranks then have 60 s to end by themselves, or
    longer as long as their heartbeats show progress. A second signal kills the ranks, except SIGHUP.

    Failures: a rank that died or is stalled is reported on stderr at once. After the death of a rank, the other ranks have 5 s
    to end.

    Restarts: after a failure, except refused input, all ranks are restarted after 1, 2, 4 ... 60 s. Progress beyond all earlier
    attempts resets the count of restarts. The variable WEFT_ATTEMPT of the ranks contains the number of the attempt, from 0.
    The ranks of attempt n > 0 log to `log_dir/attempt-n`.

    Args:
        argv: command, starting with the executable.
        ranks: number of ranks of this host.
        environment: additional environment variables of the ranks; they override those of this process and `RANK_ENVIRONMENT`.
        timeouts: timeouts of the watchdog.
        max_restarts: maximum number of consecutive restarts without progress. In a multi-host job the value of host 0 counts.
        restart_argv: command of all attempts after the first; by default `argv`.
        resize: returns the number of ranks of the next attempt, given the failure and the number of available ranks of all
            hosts. It raises the failure if the job cannot continue. In a multi-host job only host 0 calls it.
        coordinator: connection to the other hosts, in a multi-host job. Ranks are numbered host by host.
        use_forkserver: fork the ranks from one process that has imported their module (see `forkserver`). Needs a command
            `python -m MODULE ...` whose module has a function `main` for `rank_main`, and a device that supports fork.
        forkserver: existing forkserver to use; see `early_forkserver`.

    Raises:
        RankFailure: a rank failed, no rank made progress, or a host was lost. The error names the rank or host that caused the
            failure, the same on every host. If the rank ended by a `WeftError` inside `rank_main`, the error has the text and
            exit code of the `WeftError`.
        RendezvousError: the hosts could not connect.
        Stopped: a signal arrived; the ranks have ended.
    """
    remove_leftovers()
    if coordinator is None and (line := explain_allocation(os.environ)):
        log(line)
    log_dir = log_dir.resolve()  # ranks may change their working directory
    allocator = {} if has_allocator(os.environ) else ALLOCATOR
    own = {LAUNCHER_VARIABLE: str(os.getpid()), HANG_TIMEOUT_VARIABLE: str(timeouts.hang)}
    common = {**RANK_ENVIRONMENT, **allocator, **own, **environment}
    with (
        raise_on_signal(),
        nullcontext(forkserver)
        if forkserver or not use_forkserver
        else ForkServer(argv[2], {**os.environ, **common}) as forkserver,
    ):
        cause, history = None, AttemptHistory()
        if coordinator and (state := coordinator.lost_host_0()):
            cause, history = _lost_host_0(state)
        elif coordinator:
            history.attempt, ranks = coordinator.start()
        while True:
            if cause is None:
                attempt = history.attempt
                folder = log_dir / f"attempt-{attempt}" if attempt else log_dir
                command = restart_argv if attempt and restart_argv else argv
                variables = {ATTEMPT_VARIABLE: str(attempt), **common}
                with scratch_folder() as heartbeat_dir:
                    watchdog = Watchdog(_log_folder(folder, heartbeat_dir), heartbeat_dir, timeouts, log, coordinator)
                    try:
                        return _run_attempt(command, ranks, watchdog, variables, coordinator, forkserver)
                    except RankFailure as failure:
                        cause, history.reached_step = failure, watchdog.furthest_step
            if coordinator and coordinator.host:
                history.attempt, ranks, seconds = coordinator.wait_for_attempt(cause)
                attempt = history.attempt
                if coordinator.tells:
                    log(f"{_first_line(cause)}: attempt {attempt} starts {ranks} ranks on this host in {seconds:g} s")
            else:
                ranks, seconds = _restart(history, cause, ranks, max_restarts, resize, coordinator)
            time.sleep(seconds)
            cause = None


@dataclass
class AttemptHistory:
    """Attempts of a job so far, on the host that decides about its restarts."""

    attempt: int = 0
    restarts: int = 0
    """Restarts without progress."""
    furthest_step: int = -1
    """Last step of all attempts before the last one."""
    reached_step: int = -1
    """Last step of the last attempt."""


def _lost_host_0(state: StateFile) -> tuple[RankFailure, AttemptHistory]:
    """Failure and history of a job whose lost host 0 this host replaces."""
    lost = state.state
    cause = RankFailure(
        f"host 0 was lost in attempt {lost.attempt}",
        where=f"{lost.launcher}, which replaces it",
        fix="see the output of the lost host 0; --max-restarts limits restarts without progress",
    )
    log(f"{cause.what}: this host replaces it, and waits for the other hosts")
    return cause, AttemptHistory(lost.attempt, lost.restarts, lost.furthest_step, state.reached_step)


def _restart(
    history: AttemptHistory,
    cause: RankFailure,
    ranks: int,
    max_restarts: int,
    resize: Callable[[RankFailure, int], int] | None,
    coordinator: JobCoordinator | None,
) -> tuple[int, float]:
    """Decide about the next attempt, on host 0 or the only host; return its ranks of this host, and its delay in seconds.

    Raises:
        RankFailure: `cause`, after which the job does not restart.
    """
    if history.reached_step > history.furthest_step:
        history.furthest_step, history.restarts = history.reached_step, 0
    grows = coordinator is not None and coordinator.grows
    if not grows and (cause.exit_code == REFUSED or history.restarts == max_restarts):
        raise cause
    history.restarts, history.attempt = history.restarts + (not grows), history.attempt + 1
    attempt, restarts = history.attempt, history.restarts
    seconds = min(2 ** max(restarts - 1, 0), MAX_DELAY_SECONDS)
    available = coordinator.wait_for_hosts(attempt) if coordinator else {0: ranks}
    total = resize(cause, sum(available.values())) if resize else sum(available.values())
    count = "" if grows else f", restart {restarts} of {max_restarts}"
    log(f"{_first_line(cause)}: attempt {attempt} starts {total} ranks in {seconds} s{count}")
    if coordinator is None:
        return total, seconds
    assignment = assign_ranks(available, total, coordinator.host_of(cause.rank))
    return coordinator.start_attempt(attempt, assignment, seconds, restarts, history.furthest_step), seconds


def early_forkserver(module: str, device: Device) -> AbstractContextManager[ForkServer | None]:
    """Create a forkserver for `launch` by forking this process. Call it before any computation and before threads start.

    Args:
        module: module of the ranks.
        device: device of the ranks. The result is None if its libraries do not support fork.
    """
    if not device.supports_fork:
        return nullcontext()
    return ForkServer(module, {**os.environ, **RANK_ENVIRONMENT}, fork=True)


def _log_folder(folder: Path, heartbeat_dir: Path) -> Path:
    """Create the log folder of the ranks. If it cannot be written, use the heartbeat folder, so that the ranks can start."""
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"-")
    except OSError as error:
        log(f"{folder} cannot be written: {error.strerror}; the output of all ranks except rank 0 will be lost")
        folder = heartbeat_dir / "logs"
        folder.mkdir()
    return folder


def _first_line(failure: RankFailure) -> str:
    return failure.what.splitlines()[0]


def _run_attempt(
    argv: list[str],
    ranks: int,
    watchdog: Watchdog,
    environment: Mapping[str, str],
    coordinator: JobCoordinator | None,
    forkserver: ForkServer | None,
) -> None:
    executable, *arguments = [argument.replace("$", "$$") for argument in argv]  # the agent expands ${local_rank}
    name = f"launcher-{coordinator.host}.log" if coordinator else "launcher.log"
    store_path = watchdog.heartbeat_dir / "store"
    with _elasticlog(watchdog.log_dir / name), _attempt_rendezvous(coordinator, store_path) as rendezvous:
        environment = {**environment, STORE_VARIABLE: str(rendezvous.path)}
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=rendezvous,
            entrypoint=executable,
            args=tuple(arguments),
            max_restarts=0,
            local_addr=LOOPBACK,
        )
        logs_specs = RankLogsSpecs(watchdog.log_dir, watchdog.heartbeat_dir, environment)
        agent = WatchedAgent(spec, logs_specs, watchdog, forkserver)
        try:
            agent.run()
        except dist.DistError as error:  # agents use the store to agree on ranks before the ranks start
            reason = str(error).partition("\n")[0]
            failure = RankFailure(
                f"the rendezvous of the hosts failed: {reason}",
                where=watchdog.host,
                fix="see the output of the other hosts",
            )
            if coordinator:
                coordinator.report_failure(failure, is_cause=False, log_line="")
            raise failure from None
        finally:
            logs_specs.remove_empty()


@contextmanager
def _attempt_rendezvous(coordinator: JobCoordinator | None, path: Path) -> Iterator[StoreRendezvous]:
    """Rendezvous of the current attempt; on a single host it uses a new store at `path`."""
    if coordinator:
        yield coordinator.attempt_rendezvous()
    else:
        with StoreServer(path):
            yield StoreRendezvous(path, 0, 1, SECONDS_TO_END)


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise Stopped on a signal, also before the agent installs its handlers; restore the handlers at the end.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """

    def stop(number: int, frame: object) -> None:
        raise SignalException(f"signal {number}", signal.Signals(number))

    handled = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    os.environ[AGENT_SIGNALS] = ",".join(number.name for number in handled)
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    except SignalException as stopped:
        raise Stopped(stopped.sigval) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _elasticlog(path: Path) -> Iterator[None]:
    """Redirect the log of the elastic agent to a file, which is created at the first message."""
    logger, handler = logging.getLogger("torch.distributed.elastic"), _QuietFileHandler(path, "w", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
        with suppress(OSError):  # a failing flush would hide the exception that ends the block
            handler.close()


class _QuietFileHandler(logging.FileHandler):
    """File handler that drops its messages when the disk is full, and follows no links."""

    def _open(self) -> Any:
        return open(open_file(Path(self.baseFilename), os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message; ignore a file that cannot be created."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore write errors."""
