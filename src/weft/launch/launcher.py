"""Launcher of the ranks of this host, on top of torch's elastic agent, with failure detection and restarts.

    launch([sys.executable, "-m", "package.of.the.rank"], ranks=2, log_dir=Path("runs/first/logs"))   # in the launcher
    rank_main(main)                                                                                   # in each rank
    rank, world_size, local_rank = connect(device)                                                    # inside main

Rank 0 keeps the terminal; the output of the other ranks goes to files. On a single host, no process listens on an address that
other hosts can reach. Failure detection is in `watchdog`, coordination between hosts in `coordinator`.
"""

import atexit
import faulthandler
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from weft.device.device import Device
from weft.errors import DeviceError, RankFailure, Stopped, WeftError
from weft.launch.coordinator import JobCoordinator, assign_ranks
from weft.launch.environment import rank_variables
from weft.launch.forkserver import ForkServer, ForkServerContext
from weft.launch.heartbeat import HEARTBEAT_VARIABLE, create_heartbeat
from weft.launch.parent_death import LAUNCHER_VARIABLE, end_with_launcher
from weft.launch.scratch import remove_leftovers, scratch_folder
from weft.launch.store import STORE_VARIABLE, SocketStore, StoreRendezvous, StoreServer
from weft.launch.watchdog import REFUSED, Timeouts, Watchdog

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads of one rank take cores from the other ranks
    "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Expandable segments avoid fragmentation of the accelerator's memory. A setting of the user takes precedence.
ALLOCATOR = {f"PYTORCH_{device}_ALLOC_CONF": "expandable_segments:True" for device in ("CUDA", "NPU")}
SECONDS_TO_END = 60  # after a signal: minimum time for ranks to finish a step and save; longer while they make progress
SECONDS_TO_END_AFTER_FAILURE = 5  # without one of the ranks no step can be finished
MAX_DELAY_SECONDS = 60  # between two attempts
POLL_SECONDS = 0.1
ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
ATTEMPT_VARIABLE, HANG_TIMEOUT_VARIABLE = "WEFT_ATTEMPT", "WEFT_HANG_TIMEOUT"  # in the environment of the ranks
DEFAULT_GROUP_TIMEOUT = 1800.0  # default of torch
EXIT_SECONDS = 10  # for the agents of other hosts, when all ranks have exited with code 0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # also handled by the elastic agent


def default_ranks(device: Device) -> int:
    """Default number of ranks of this host: one per accelerator; on CPU two, or one on a single core."""
    return min(2, os.cpu_count() or 1) if device.type == "cpu" else device.count


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
    `log_dir`. The traceback of a failed rank is in `rank-n.traceback`.

    Signals: SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks. The ranks then have 60 s to end by themselves, or
    longer as long as their heartbeats show progress. A second signal kills the ranks.

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
    log_dir = log_dir.resolve()  # ranks may change their working directory
    furthest_step, restarts, attempt = -1, 0, 0
    allocator = {} if any(name.endswith("ALLOC_CONF") for name in os.environ) else ALLOCATOR
    common = {**RANK_ENVIRONMENT, **allocator, LAUNCHER_VARIABLE: str(os.getpid()), **environment}
    with (
        _raise_on_signal(),
        nullcontext(forkserver)
        if forkserver or not use_forkserver
        else ForkServer(argv[2], {**os.environ, **common}) as forkserver,
    ):
        if coordinator:
            attempt, ranks = coordinator.start()
        while True:
            folder = log_dir / f"attempt-{attempt}" if attempt else log_dir
            own = {ATTEMPT_VARIABLE: str(attempt), HANG_TIMEOUT_VARIABLE: str(timeouts.hang)}
            command = restart_argv if attempt and restart_argv else argv
            with scratch_folder() as heartbeat_dir:
                watchdog = Watchdog(_log_folder(folder, heartbeat_dir), heartbeat_dir, timeouts, _log, coordinator)
                try:
                    return _run_attempt(command, ranks, watchdog, {**own, **common}, coordinator, forkserver)
                except RankFailure as failure:
                    cause = failure
            if coordinator and coordinator.host:
                attempt, ranks, seconds = coordinator.wait_for_attempt(cause)
                _log(f"{_first_line(cause)}: attempt {attempt} starts {ranks} ranks on this host in {seconds:g} s")
            else:
                if watchdog.furthest_step > furthest_step:
                    furthest_step, restarts = watchdog.furthest_step, 0
                if cause.exit_code == REFUSED or restarts == max_restarts:
                    raise cause
                restarts, attempt = restarts + 1, attempt + 1
                seconds = min(2 ** (restarts - 1), MAX_DELAY_SECONDS)
                available = coordinator.wait_for_hosts(attempt, _log) if coordinator else {0: ranks}
                total = resize(cause, sum(available.values())) if resize else sum(available.values())
                _log(
                    f"{_first_line(cause)}: attempt {attempt} starts {total} ranks in {seconds} s, "
                    f"restart {restarts} of {max_restarts}"
                )
                assignment = assign_ranks(available, total, coordinator.host_of(cause.rank) if coordinator else None)
                ranks = coordinator.start_attempt(attempt, assignment, seconds) if coordinator else total
            time.sleep(seconds)


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
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"-")
    except OSError as error:
        _log(f"{folder} cannot be written: {error.strerror}; the output of all ranks except rank 0 will be lost")
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
    with _elastic_log(watchdog.log_dir / name), _attempt_rendezvous(coordinator, store_path) as rendezvous:
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
        agent = WatchedAgent(
            spec, RankLogsSpecs(watchdog.log_dir, watchdog.heartbeat_dir, environment), watchdog, forkserver
        )
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


@contextmanager
def _attempt_rendezvous(coordinator: JobCoordinator | None, path: Path) -> Iterator[StoreRendezvous]:
    """Rendezvous of the current attempt; on a single host it uses a new store at `path`."""
    if coordinator:
        yield coordinator.attempt_rendezvous()
    else:
        with StoreServer(path):
            yield StoreRendezvous(path, 0, 1, SECONDS_TO_END)


def _log(line: str) -> None:
    """Print a line, replacing the current line of a terminal, which may contain a progress bar."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}weft: {line}", file=sys.stderr, flush=True)


def rank_main(main: Callable[[], None]) -> None:
    """Run the main function of a rank, then end the process. An error is reported to the launcher and sets the exit code.

    Without a launcher, errors propagate to the caller.
    """
    report = os.environ.get(ERROR_VARIABLE)
    if not report:
        return main()
    end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: until the rank handles signals it has nothing to save
    faulthandler.enable()  # a crash in native code leaves a traceback in the rank's stderr
    try:
        main()
    except WeftError as error:
        fields = {"what": error.what, "where": error.where, "rule": error.rule, "fix": error.fix}
        _write_report(Path(report), error, error.exit_code, fields)
        _exit(error.exit_code)
    except Exception as error:
        _write_report(Path(report), error, 1, None)
        _exit(1)
    except SystemExit as system_exit:
        if isinstance(system_exit.code, str):
            print(system_exit.code, file=sys.stderr)
        _exit(system_exit.code if isinstance(system_exit.code, int) else int(system_exit.code is not None))
    _exit(0)


def connect(device: Device) -> tuple[int, int, int]:
    """Join the process group of the job and make the device of this rank the current one.

    Reads the environment variables that `launch`, torchrun, srun or mpirun set (`environment.py`). Ranks of `launch` use its
    store, other ranks use torch's store. Without these variables, the process forms a group of size one that other hosts
    cannot reach.

    Returns:
        rank: global rank.
        world_size: number of ranks.
        local_rank: rank on this host.

    Raises:
        DeviceError: this host has fewer accelerators than ranks.
    """
    os.environ.update(rank_variables(os.environ))
    if "RANK" not in os.environ:
        device.use(0)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)  # gloo listens even in a group of size one
        dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
        return 0, 1, 0
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if device.type != "cpu" and local_rank >= device.count:
        raise DeviceError(
            f"rank {rank} has local rank {local_rank}, but this host has {device.count} {device.type} devices",
            where=f"rank {rank}",
            rule="each rank needs its own accelerator; local ranks start at 0",
            fix=f"start at most {device.count} ranks on this host",
        )
    device.use(local_rank)
    hang_timeout = float(os.environ.get(HANG_TIMEOUT_VARIABLE, Timeouts.hang))
    # The watchdog, which knows the cause, must report before process groups time out.
    timeout = timedelta(seconds=max(DEFAULT_GROUP_TIMEOUT, 2 * hang_timeout))
    if path := os.environ.get(STORE_VARIABLE):
        store = SocketStore(Path(path))
        # Keeps the Python object alive: torch holds only its C++ part, but calls its Python methods.
        atexit.register(store.close)
        prefixed = dist.PrefixStore("ranks", store)
        dist.init_process_group(device.backend, timeout=timeout, store=prefixed, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(device.backend, timeout=timeout)
    return rank, world_size, local_rank


class WatchedAgent(LocalElasticAgent):
    """Elastic agent that leaves failure detection to the watchdog and controls how long ranks have to end."""

    def __init__(
        self, spec: WorkerSpec, logs_specs: "RankLogsSpecs", watchdog: Watchdog, forkserver: ForkServer | None
    ):
        super().__init__(spec, logs_specs, exit_barrier_timeout=EXIT_SECONDS)
        self.logs_specs, self.watchdog, self.forkserver = logs_specs, watchdog, forkserver

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks as the base class does, but from the forkserver if there is one."""
        if self.forkserver is None:
            return super()._start_workers(worker_group)
        spec, workers = worker_group.spec, worker_group.workers
        _, _, *arguments = spec.args  # -m MODULE
        self._pcontext = ForkServerContext(
            self.forkserver,
            name=spec.role,
            args={worker.local_rank: tuple(arguments) for worker in workers},
            envs={
                worker.local_rank: {
                    "RANK": str(worker.global_rank),
                    "LOCAL_RANK": str(worker.local_rank),
                    "LOCAL_WORLD_SIZE": str(spec.local_world_size),
                    "WORLD_SIZE": str(worker.world_size),
                    "MASTER_ADDR": str(worker_group.master_addr),
                    "MASTER_PORT": str(worker_group.master_port),
                    "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
                    "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
                }
                for worker in workers
            },
            logs_specs=self.logs_specs,
        )
        self._pcontext.start()
        return self._pcontext.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Poll the watchdog; called ten times a second.

        The base class must not see a failure: it would wait for the other ranks before it reports the failure.
        """
        context: Any = self._pcontext
        workers = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
        processes = {rank: context.subprocess_handlers[local_rank].proc for rank, local_rank in workers.items()}
        if failure := self.watchdog.poll(processes):
            context.close(signal.SIGTERM, SECONDS_TO_END_AFTER_FAILURE)
            raise failure
        coordinator = self.watchdog.coordinator
        if all(process.returncode == 0 for process in processes.values()) and (
            coordinator is None or coordinator.all_hosts_done()
        ):
            return super()._monitor_workers(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SECONDS_TO_END) -> None:
        """Let the running ranks finish their step; a second signal kills them."""
        context: Any = self._pcontext
        if context is None:
            return
        workers = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        handlers = {rank: context.subprocess_handlers.get(local_rank) for rank, local_rank in workers.items()}
        running = {rank: handler for rank, handler in handlers.items() if handler and handler.proc.poll() is None}
        if running:
            second_signals: list[
                int
            ] = []  # recorded, not raised: an exception may get lost in code that the signal interrupts
            for signal_number in SIGNALS:
                signal.signal(signal_number, lambda number, _: second_signals.append(number))
            if work := self.watchdog.unfinished_work():
                action = "press again" if death_sig == signal.SIGINT else f"send {death_sig.name} again"
                _log(f"{work}, {action} to stop now")
            for handler in running.values():
                handler.close(death_sig)
            self._wait_for_end({rank: handler.proc for rank, handler in running.items()}, second_signals)
        context.close(signal.SIGKILL, SECONDS_TO_END_AFTER_FAILURE)

    def _wait_for_end(self, processes: Mapping[int, Any], second_signals: list[int]) -> None:
        """Wait until the ranks have ended, their time is over, or a second signal arrives."""
        end = time.monotonic() + SECONDS_TO_END
        while any(process.poll() is None for process in processes.values()):
            now, failed = time.monotonic(), any(process.returncode for process in processes.values())
            if second_signals:
                return _log("stopping now")
            if failed:  # the other ranks wait for the failed rank and cannot finish
                end = min(end, now + SECONDS_TO_END_AFTER_FAILURE)
            if now > end and (failed or not self.watchdog.shows_progress(processes)):
                return
            time.sleep(POLL_SECONDS)


class RankLogsSpecs(LogsSpecs):
    """Log files, environment variables and heartbeat files of the ranks, for the elastic agent."""

    def __init__(self, log_dir: Path, heartbeat_dir: Path, environment: Mapping[str, str]):
        super().__init__(str(log_dir))
        self.log_dir, self.heartbeat_dir, self.environment = log_dir, heartbeat_dir, environment

    @property
    def root_log_dir(self) -> str:
        return str(self.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the environment of each rank of this host and return its log files. Called before the ranks start."""
        ranks = {local_rank: environment["RANK"] for local_rank, environment in envs.items()}
        for local_rank, rank in ranks.items():
            for suffix in ("error", "traceback"):
                (self.log_dir / f"rank-{rank}.{suffix}").unlink(missing_ok=True)  # of an earlier launch
            create_heartbeat(self.heartbeat_dir / rank)
            own = {
                HEARTBEAT_VARIABLE: str(self.heartbeat_dir / rank),
                ERROR_VARIABLE: str(self.log_dir / f"rank-{rank}.error"),
            }
            envs[local_rank].update(self.environment, **own)

        def files(suffix: str) -> dict[int, str]:
            return {
                local_rank: "" if rank == "0" else str(self._create(f"rank-{rank}.{suffix}"))
                for local_rank, rank in ranks.items()
            }

        return LogsDest(
            files("out"),
            files("err"),
            error_files={local_rank: envs[local_rank][ERROR_VARIABLE] for local_rank in envs},
        )

    def _create(self, name: str) -> Path:
        """Create a file for the output of a rank; in the heartbeat folder if the log folder cannot be written."""
        path = self.log_dir / name
        try:
            path.touch()
        except OSError as error:
            _log(f"{path} cannot be written: {error.strerror}; this output will be lost")
            path = self.heartbeat_dir / name
        return path


@contextmanager
def _raise_on_signal() -> Iterator[None]:
    """Raise Stopped on a signal, also before the agent installs its handlers; restore the handlers at the end."""

    def stop(number: int, frame: object) -> None:
        raise SignalException(f"signal {number}", signal.Signals(number))

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    except SignalException as stopped:
        raise Stopped(stopped.sigval) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _elastic_log(path: Path) -> Iterator[None]:
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
    """File handler that drops its messages when the disk is full."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message; ignore a file that cannot be created."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore write errors."""


def _exit(code: int) -> NoReturn:
    """Exit without interpreter teardown.

    All work is done or lost, and all files are closed. In an ordinary exit, gloo's threads outlive the interpreter, and gloo
    sometimes aborts the process ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_report(path: Path, error: Exception, exit_code: int, fields: dict[str, str | None] | None) -> None:
    """Write the error of this rank for the watchdog, in torchrun's format with additional keys, and its traceback for the user.

    The report contains the exit code because the launcher may end this rank by SIGTERM before the rank has exited.
    """
    now, stack = time.time(), traceback.format_exc()
    message = {"message": str(error), "extraInfo": {"py_callstack": stack, "timestamp": str(int(now))}}
    report = {"message": message, "seconds": now, "traceback": stack, "exit_code": exit_code, "fields": fields}
    heartbeats = [os.environ.get(HEARTBEAT_VARIABLE)]
    paths = [path, *(Path(heartbeat).with_name(path.name) for heartbeat in heartbeats if heartbeat)]
    for target in paths:  # the heartbeat folder is in shared memory and may have space when the disk is full
        try:
            target.with_suffix(".traceback").write_text(stack, encoding="utf-8")
            target.with_suffix(".draft").write_text(json.dumps(report), encoding="utf-8")
            target.with_suffix(".draft").replace(target)  # atomic: the watchdog may read at any time
            return
        except OSError:
            continue
    print(stack, file=sys.stderr)
