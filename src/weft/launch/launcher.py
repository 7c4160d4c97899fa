"""Start the ranks of this host, on torch's elastic agent, watch them, start them again, and say clearly how they ended.

    launch([sys.executable, "-m", "package.of.the.rank"], ranks=2, log_dir=Path("runs/first/logs"))   # in the launcher
    rank_main(main)                                                                                   # in each rank
    rank, world_size, local_rank = connect(device)                                                    # inside main

Rank 0 keeps the terminal; the output of the others goes to files. On one host nothing listens on an address that others reach.
What is wrong with a rank while it runs is the business of `watchdog`; what several hosts say to each other, of `coordinator`.
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
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads of one rank take the cores from the others
    "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Segments of an accelerator's memory that grow, where a cache of blocks falls into pieces; a setting of the user counts.
ALLOCATOR = {f"PYTORCH_{device}_ALLOC_CONF": "expandable_segments:True" for device in ("CUDA", "NPU")}
SECONDS_TO_END = 60  # after a signal: time to finish a step and to save, for ranks whose pulse does not show progress
SECONDS_TO_END_A_BROKEN_JOB = 5  # without one of the ranks no step can be finished
LONGEST_WAIT = 60  # seconds between two attempts
POLL_SECONDS = 0.1
ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
ATTEMPT_VARIABLE, HANG_TIMEOUT_VARIABLE = "WEFT_ATTEMPT", "WEFT_PATIENCE"  # in the environment of the ranks
DEFAULT_GROUP_TIMEOUT = 1800.0  # of torch
EXIT_SECONDS = 10  # for the agents of other hosts, when all ranks have ended well
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # those the elastic agent takes over


def default_ranks(device: Device) -> int:
    """One rank an accelerator; on cpu two, or one where there is one core."""
    return min(2, os.cpu_count() or 1) if device.type == "cpu" else device.count


def launch(
    argv: list[str],
    *,
    ranks: int,
    log_dir: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    limits: Timeouts = Timeouts(),  # noqa: B008 - it is frozen
    max_restarts: int = 0,
    again: list[str] | None = None,
    resize: Callable[[RankFailure, int], int] | None = None,
    coordinator: JobCoordinator | None = None,
    warm: bool = False,
    forkserver: ForkServer | None = None,
) -> None:
    """Run a command as `ranks` processes of one job on this host, and wait until all have ended well.

    Rank 0 inherits stdout and stderr, and with them the terminal. Rank n > 0 writes `rank-n.out` and `rank-n.err` in
    `log_dir`; the traceback of a failed rank is kept in `rank-n.traceback`. Call it in the main thread, which handles signals.

    SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks, which have 60 s to end by themselves, or longer, as long as
    their pulses show progress. A second signal kills the ranks.

    A rank that died or stands still is named on stderr at once. After a death the others have 5 s to end.

    After a failure that is not refused input, all ranks are started again, in 1, 2, 4 ... 60 s. An attempt that came no further
    than those before it counts towards `max_restarts`; one that did starts the count anew. The ranks find the number of the
    attempt in WEFT_ATTEMPT, from 0; those of attempt n > 0 log in `log_dir/attempt-n`.

    Args:
        argv: the command, its executable first.
        ranks: those of this host.
        environment: variables of the ranks, on top of this process's own and of `RANK_ENVIRONMENT`.
        limits: when the watchdog speaks, and when it ends a job that stands still.
        max_restarts: restarts in a row without progress. Of several hosts, host 0 decides.
        again: the command of the attempts after the first, if it is another.
        resize: called with the failure and the number of ranks there can be, of all hosts; how many the next attempt has. It
            raises the failure if that is no number to go on with. Of several hosts, only host 0 calls it.
        coordinator: the hosts of the job, if there are several; their ranks are numbered host after host.
        warm: the command is `python -m MODULE ...`, and MODULE has a function `main` for `rank_main`: ranks are forks of
            one process that has imported it (`forkserver`). Where the device bears that.
        forkserver: that process, if there is one already; see `early_forkserver`.

    Raises:
        RankFailure: a rank failed, or none made progress, or a host was lost; it names the one to blame, the same on every
            host. If that rank ended by a `WeftError` inside `rank_main`, it carries the same text and exit code.
        RendezvousError: the hosts did not meet.
        Stopped: a signal came; the ranks have ended.
    """
    remove_leftovers()
    log_dir = log_dir.resolve()  # ranks may change their folder
    furthest, restarts, attempt = -1, 0, 0
    memory = {} if any(name.endswith("ALLOC_CONF") for name in os.environ) else ALLOCATOR
    common = {**RANK_ENVIRONMENT, **memory, LAUNCHER_VARIABLE: str(os.getpid()), **environment}
    with (
        _signals_raise(),
        nullcontext(forkserver)
        if forkserver or not warm
        else ForkServer(argv[2], {**os.environ, **common}) as forkserver,
    ):
        if coordinator:
            attempt, ranks = coordinator.begin()
        while True:
            folder = log_dir / f"attempt-{attempt}" if attempt else log_dir
            own = {ATTEMPT_VARIABLE: str(attempt), HANG_TIMEOUT_VARIABLE: str(limits.patience)}
            command = again if attempt and again else argv
            with scratch_folder() as pulses:
                watchdog = Watchdog(_log_folder(folder, pulses), pulses, limits, _say, coordinator)
                try:
                    return _run(command, ranks, watchdog, {**own, **common}, coordinator, forkserver)
                except RankFailure as failure:
                    cause = failure
            if coordinator and coordinator.host:
                attempt, ranks, seconds = coordinator.wait_for_attempt(cause)
                _say(f"{_first_line(cause)}: attempt {attempt} starts {ranks} ranks on this host in {seconds:g} s")
            else:
                if watchdog.furthest > furthest:
                    furthest, restarts = watchdog.furthest, 0
                if cause.exit_code == REFUSED or restarts == max_restarts:
                    raise cause
                restarts, attempt = restarts + 1, attempt + 1
                seconds = min(2 ** (restarts - 1), LONGEST_WAIT)
                available = coordinator.wait_for_hosts(attempt, _say) if coordinator else {0: ranks}
                total = resize(cause, sum(available.values())) if resize else sum(available.values())
                _say(
                    f"{_first_line(cause)}: attempt {attempt} starts {total} ranks in {seconds} s, "
                    f"restart {restarts} of {max_restarts}"
                )
                shares = assign_ranks(available, total, coordinator.host_of(cause.rank) if coordinator else None)
                ranks = coordinator.go_on(attempt, shares, seconds) if coordinator else total
            time.sleep(seconds)


def early_forkserver(module: str, device: Device) -> AbstractContextManager[ForkServer | None]:
    """A forkserver for `launch`, forked from this process: to be called before anything is computed, or a thread is started.

    Args:
        module: of the ranks.
        device: of the ranks; None is the result where its libraries cannot be forked.
    """
    if not device.supports_fork:
        return nullcontext()
    return ForkServer(module, {**os.environ, **RANK_ENVIRONMENT}, fork=True)


def _log_folder(folder: Path, pulses: Path) -> Path:
    """Make the folder that ranks log in; beside their pulses where the disk has no room, so that they can start."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"-")
    except OSError as error:
        _say(f"{folder} cannot be written: {error.strerror}; the output of ranks other than 0 is not kept")
        folder = pulses / "logs"
        folder.mkdir()
    return folder


def _first_line(failure: RankFailure) -> str:
    return failure.what.splitlines()[0]


def _run(
    argv: list[str],
    ranks: int,
    watchdog: Watchdog,
    environment: Mapping[str, str],
    coordinator: JobCoordinator | None,
    forkserver: ForkServer | None,
) -> None:
    """One attempt."""
    executable, *arguments = [argument.replace("$", "$$") for argument in argv]  # the agent expands ${local_rank}
    name = f"launcher-{coordinator.host}.log" if coordinator else "launcher.log"
    with _elastic_log(watchdog.log_dir / name), _meeting_point(coordinator, watchdog.pulses / "store") as meeting_point:
        environment = {**environment, STORE_VARIABLE: str(meeting_point.path)}
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=meeting_point,
            entrypoint=executable,
            args=tuple(arguments),
            max_restarts=0,
            local_addr=LOOPBACK,
        )
        agent = GuardedAgent(spec, RankFiles(watchdog.log_dir, watchdog.pulses, environment), watchdog, forkserver)
        try:
            agent.run()
        except dist.DistError as error:  # before there are ranks, agents talk through the store
            words = str(error).partition("\n")[0]
            failure = RankFailure(f"the hosts did not meet: {words}", where=watchdog.host, fix="see the other hosts")
            if coordinator:
                coordinator.report(failure, own=False, line="")
            raise failure from None


@contextmanager
def _meeting_point(coordinator: JobCoordinator | None, path: Path) -> Iterator[StoreRendezvous]:
    """The rendezvous of an attempt; of one host, with a store of its own at this path."""
    if coordinator:
        yield coordinator.meet()
    else:
        with StoreServer(path):
            yield StoreRendezvous(path, 0, 1, SECONDS_TO_END)


def _say(line: str) -> None:
    """Print a line, over a bar of progress if there is one."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}weft: {line}", file=sys.stderr, flush=True)


def rank_main(main: Callable[[], None]) -> None:
    """Run the main function of a rank, then end the process; an error is reported to the launcher, and decides the exit code.

    Without a launcher the error goes on to the caller.
    """
    report = os.environ.get(ERROR_VARIABLE)
    if not report:
        return main()
    end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the rank handles signals it has nothing to save: no traceback
    faulthandler.enable()  # a crash in native code leaves a traceback in the rank's stderr
    try:
        main()
    except WeftError as error:
        fields = {"what": error.what, "where": error.where, "rule": error.rule, "fix": error.fix}
        _write_report(Path(report), error, error.exit_code, fields)
        _leave(error.exit_code)
    except Exception as error:
        _write_report(Path(report), error, 1, None)
        _leave(1)
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        _leave(left.code if isinstance(left.code, int) else int(left.code is not None))
    _leave(0)


def connect(device: Device) -> tuple[int, int, int]:
    """Join the process group of the job: rank, number of ranks, and rank on this host.

    Reads the environment that `launch` or torchrun set (RANK, WORLD_SIZE, LOCAL_RANK). Without it this process is a
    group of its own, out of reach of other hosts. The device of this rank becomes the current one. Ranks of `launch` meet at
    its store, those of torchrun at torch's.

    Raises:
        DeviceError: this host has fewer accelerators than ranks.
    """
    if "RANK" not in os.environ:
        device.use(0)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)  # gloo listens even when it is alone
        dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
        return 0, 1, 0
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if device.type != "cpu" and local_rank >= device.count:
        raise DeviceError(
            f"rank {rank} is number {local_rank} on this host, which has {device.count} {device.type} devices",
            where=f"rank {rank}",
            rule="every rank has an accelerator of its own; numbers start at 0",
            fix=f"start at most {device.count} ranks on this host",
        )
    device.use(local_rank)
    patience = float(os.environ.get(HANG_TIMEOUT_VARIABLE, Timeouts.patience))
    timeout = timedelta(
        seconds=max(DEFAULT_GROUP_TIMEOUT, 2 * patience)
    )  # the watchdog, who knows the culprit, speaks first
    if path := os.environ.get(STORE_VARIABLE):
        store = SocketStore(Path(path))
        atexit.register(store.close)  # torch holds the part of it that is C++, not this object, whose methods it calls
        prefixed = dist.PrefixStore("ranks", store)
        dist.init_process_group(device.backend, timeout=timeout, store=prefixed, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(device.backend, timeout=timeout)
    return rank, world_size, local_rank


class GuardedAgent(LocalElasticAgent):
    """Leaves the verdict on the ranks to the watchdog, and decides itself how long they have to end."""

    def __init__(self, spec: WorkerSpec, files: "RankFiles", watchdog: Watchdog, forkserver: ForkServer | None):
        super().__init__(spec, files, exit_barrier_timeout=EXIT_SECONDS)
        self.files, self.watchdog, self.forkserver = files, watchdog, forkserver

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """As torch's own does, but for where processes come from."""
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
            logs_specs=self.files,
        )
        self._pcontext.start()
        return self._pcontext.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Called ten times a second. The agent's own answer to a failure is to wait for the other ranks before it is told."""
        context: Any = self._pcontext
        workers = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
        processes = {rank: context.subprocess_handlers[number].proc for rank, number in workers.items()}
        if failure := self.watchdog.poll(processes):
            context.close(signal.SIGTERM, SECONDS_TO_END_A_BROKEN_JOB)
            raise failure
        coordinator = self.watchdog.coordinator
        if all(process.returncode == 0 for process in processes.values()) and (
            coordinator is None or coordinator.all_done()
        ):
            return super()._monitor_workers(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SECONDS_TO_END) -> None:
        """Let the ranks that are left finish their step; a second signal kills them."""
        context: Any = self._pcontext
        if context is None:
            return
        workers = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        handlers = {rank: context.subprocess_handlers.get(number) for rank, number in workers.items()}
        living = {rank: handler for rank, handler in handlers.items() if handler and handler.proc.poll() is None}
        if living:
            again: list[int] = []  # noted, not raised: an exception may get lost wherever the signal comes
            for number in HANDLED:
                signal.signal(number, lambda number, _: again.append(number))
            if work := self.watchdog.unfinished_work():
                words = "press again" if death_sig == signal.SIGINT else f"send {death_sig.name} again"
                _say(f"{work}, {words} to stop now")
            for handler in living.values():
                handler.close(death_sig)
            self._await_end({rank: handler.proc for rank, handler in living.items()}, again)
        context.close(signal.SIGKILL, SECONDS_TO_END_A_BROKEN_JOB)

    def _await_end(self, processes: Mapping[int, Any], again: list[int]) -> None:
        """Return when the ranks have ended, when no more is to be expected of them, or when a second signal comes."""
        end = time.monotonic() + SECONDS_TO_END
        while any(process.poll() is None for process in processes.values()):
            now, failed = time.monotonic(), any(process.returncode for process in processes.values())
            if again:
                return _say("stopping now")
            if failed:  # the others wait for that rank in vain
                end = min(end, now + SECONDS_TO_END_A_BROKEN_JOB)
            if now > end and (failed or not self.watchdog.shows_progress(processes)):
                return
            time.sleep(POLL_SECONDS)


class RankFiles(LogsSpecs):
    """Tells the elastic agent where the ranks write, and gives them their environment and a pulse."""

    def __init__(self, log_dir: Path, pulses: Path, environment: Mapping[str, str]):
        super().__init__(str(log_dir))
        self.log_dir, self.pulses, self.environment = log_dir, pulses, environment

    @property
    def root_log_dir(self) -> str:
        return str(self.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent with the environment of each rank of this host, before it starts them."""
        ranks = {number: environment["RANK"] for number, environment in envs.items()}
        for number, rank in ranks.items():
            for suffix in ("error", "traceback"):
                (self.log_dir / f"rank-{rank}.{suffix}").unlink(missing_ok=True)  # of an earlier launch
            create_heartbeat(self.pulses / rank)
            own = {
                HEARTBEAT_VARIABLE: str(self.pulses / rank),
                ERROR_VARIABLE: str(self.log_dir / f"rank-{rank}.error"),
            }
            envs[number].update(self.environment, **own)

        def files(suffix: str) -> dict[int, str]:
            return {
                number: "" if rank == "0" else str(self._make(f"rank-{rank}.{suffix}"))
                for number, rank in ranks.items()
            }

        return LogsDest(
            files("out"), files("err"), error_files={number: envs[number][ERROR_VARIABLE] for number in envs}
        )

    def _make(self, name: str) -> Path:
        """An empty file for the output of a rank; beside its pulse where the disk has no room for another file."""
        path = self.log_dir / name
        try:
            path.touch()
        except OSError as error:
            _say(f"{path} cannot be written: {error.strerror}; what it would hold is not kept")
            path = self.pulses / name
        return path


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let signals end the block with Stopped, also before the agent takes them over, and restore their handlers."""

    def stop(number: int, frame: object) -> None:
        raise SignalException(f"signal {number}", signal.Signals(number))

    before = {number: signal.signal(number, stop) for number in HANDLED}
    try:
        yield
    except SignalException as stopped:
        raise Stopped(stopped.sigval) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _elastic_log(path: Path) -> Iterator[None]:
    """Send what the elastic agent logs to a file, which exists only if there is something to say."""
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
        with suppress(OSError):  # of what is left in its buffer: it would hide why the block ends
            handler.close()


class _QuietFileHandler(logging.FileHandler):
    """On a full disk it loses its lines, which nobody needs to go on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, if that can be."""
        with suppress(OSError):  # where the file cannot be made
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Where it cannot be written, say nothing."""


def _leave(code: int) -> NoReturn:
    """End this process without taking things apart: all work is done, or lost, and all files are closed.

    Now and then gloo aborts a process that ends the ordinary way ("terminate called without an active exception"): its threads
    outlive the interpreter.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_report(path: Path, error: Exception, exit_code: int, fields: dict[str, str | None] | None) -> None:
    """Leave the error of this rank for the watchdog, and its traceback for the user. torchrun finds in it what it expects.

    The exit code stands in it because the rank may be ended by SIGTERM before it has left by itself.
    """
    now, stack = time.time(), traceback.format_exc()
    message = {"message": str(error), "extraInfo": {"py_callstack": stack, "timestamp": str(int(now))}}
    report = {"message": message, "seconds": now, "traceback": stack, "exit_code": exit_code, "fields": fields}
    places = [path, *(Path(pulse).with_name(path.name) for pulse in [os.environ.get(HEARTBEAT_VARIABLE)] if pulse)]
    for place in places:  # where the disk is full there is room beside the pulse
        try:
            place.with_suffix(".traceback").write_text(stack, encoding="utf-8")
            place.with_suffix(".draft").write_text(json.dumps(report), encoding="utf-8")
            place.with_suffix(".draft").replace(place)  # the watchdog may look at any moment
            return
        except OSError:
            continue
    print(stack, file=sys.stderr)
