"""Start ranks on this host, on torch's elastic agent, and say once and clearly how they ended.

    launch([sys.executable, "-m", "package.of.the.rank"], ranks=2, log_dir=Path("runs/first/logs"))   # in the launcher
    rank_main(main)                                                                                   # in each rank
    rank, world_size, local_rank = connect(device)                                                    # inside main

Rank 0 keeps the terminal; the output of the others goes to files. Nothing listens on an address that other hosts reach.
"""

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from weft.cluster.device import Device
from weft.errors import DeviceError, RankFailure, WeftError

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
SECONDS_TO_END = 60
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # those the elastic agent takes over
TAIL_LINES = 12

# How a rank speaks of a peer that is gone: the consequence of another rank's failure, not the failure.
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "remote process exited",
)


class Stopped(WeftError):
    """The job was stopped by a signal to the launcher; the ranks have ended."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def default_ranks(device: Device) -> int:
    """One rank an accelerator; on cpu two, or one where there is one core."""
    return min(2, os.cpu_count() or 1) if device.type == "cpu" else device.count


def launch(
    argv: list[str], *, ranks: int, log_dir: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Run a command as `ranks` processes of one job on this host, and wait until all have ended well.

    Rank 0 inherits stdout and stderr, and with them the terminal. Rank n > 0 writes `rank-n.out` and `rank-n.err` in
    `log_dir`; the traceback of a failed rank is kept in `rank-n.traceback`. SIGINT, SIGTERM, SIGHUP and SIGQUIT are
    passed on to the ranks, which have 60 s to end by themselves. Call it in the main thread, which handles signals.

    Args:
        argv: the command, its executable first.
        environment: variables of the ranks, on top of this process's own and of `RANK_ENVIRONMENT`.

    Raises:
        RankFailure: a rank failed; it names the one that failed first. If that rank ended by a `WeftError` inside
            `rank_main`, it carries the same text and exit code.
        Stopped: a signal came.
    """
    log_dir = log_dir.resolve()  # ranks may change their folder
    log_dir.mkdir(parents=True, exist_ok=True)
    executable, *arguments = [argument.replace("$", "$$") for argument in argv]  # the agent expands ${local_rank}
    files = RankFiles(log_dir, {**RANK_ENVIRONMENT, **environment})
    try:
        with _signals_raise(), _elastic_log(log_dir / "launcher.log"):
            spec = WorkerSpec(
                role="rank",
                local_world_size=ranks,
                rdzv_handler=LoopbackRendezvous(),
                entrypoint=executable,
                args=tuple(arguments),
                max_restarts=0,
                local_addr=LOOPBACK,
            )
            result = PatientAgent(spec, files).run()
    except SignalException as stop:
        raise Stopped(stop.sigval) from None
    if result.is_failed():
        raise _first_failure(result.failures, log_dir)


def rank_main(main: Callable[[], None]) -> None:
    """Run the main function of a rank, then end the process; an error is reported to the launcher, and decides the exit code.

    Without a launcher the error goes on to the caller.
    """
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not report:
        return main()
    faulthandler.enable()  # a crash in native code leaves a traceback in the rank's stderr
    try:
        main()
    except WeftError as error:
        fields = {"what": error.what, "where": error.where, "rule": error.rule, "fix": error.fix}
        _write_report(Path(report), error, error.exit_code, fields)
        sys.exit(error.exit_code)
    except Exception as error:
        _write_report(Path(report), error, 1, None)
        sys.exit(1)
    # Now and then gloo aborts a process that ends the ordinary way ("terminate called without an active exception"): its
    # threads outlive the interpreter. All work is done and all files are closed: leave without taking things apart.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def connect(device: Device) -> tuple[int, int, int]:
    """Join the process group of the job: rank, number of ranks, and rank on this host.

    Reads the environment that `launch` or torchrun set (RANK, WORLD_SIZE, LOCAL_RANK). Without it this process is a
    group of its own, out of reach of other hosts. The device of this rank becomes the current one.

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
    dist.init_process_group(device.backend)
    return rank, world_size, local_rank


class PatientAgent(LocalElasticAgent):
    """Gives ranks the time to finish a step before it kills them; torch 2.11 has no parameter for that."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SECONDS_TO_END) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, SECONDS_TO_END)


class LoopbackRendezvous(StaticTCPRendezvous):
    """The meeting point of one host. Its store listens on loopback only, where torch's own listens on every address."""

    def __init__(self) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        super().__init__(LOOPBACK, port, rank=0, world_size=1, run_id="weft", timeout=SECONDS_TO_END)
        self._store = dist.TCPStore(LOOPBACK, port, is_master=True, master_listen_fd=listener.detach())


class RankFiles(LogsSpecs):
    """Tells the elastic agent where the ranks write, and gives them their environment."""

    def __init__(self, log_dir: Path, environment: Mapping[str, str]):
        super().__init__(str(log_dir))
        self.log_dir, self.environment = log_dir, environment

    @property
    def root_log_dir(self) -> str:
        return str(self.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent with the environment of each rank, before it starts them."""
        errors = {rank: self.log_dir / f"rank-{rank}.error" for rank in envs}
        for rank, error in errors.items():
            error.unlink(missing_ok=True)  # of an earlier launch
            envs[rank].update(self.environment, TORCHELASTIC_ERROR_FILE=str(error))

        def files(suffix: str) -> dict[int, str]:
            return {rank: str(self.log_dir / f"rank-{rank}.{suffix}") if rank else "" for rank in envs}

        return LogsDest(files("out"), files("err"), error_files={rank: str(error) for rank, error in errors.items()})


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let signals raise SignalException, also before the agent takes them over, and restore their handlers."""

    def stop(number: int, frame: object) -> None:
        raise SignalException(f"signal {number}", signal.Signals(number))

    before = {number: signal.signal(number, stop) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _elastic_log(path: Path) -> Iterator[None]:
    """Send what the elastic agent logs to a file, which exists only if there is something to say."""
    logger, handler = logging.getLogger("torch.distributed.elastic"), logging.FileHandler(path, "w", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
        handler.close()


def _write_report(path: Path, error: Exception, exit_code: int, fields: dict[str, str | None] | None) -> None:
    """Write an error as the elastic agent expects it, and beside it what `_first_failure` needs.

    The exit code stands in it because the agent may end the rank by SIGTERM before it has left by itself.
    """
    now, stack = time.time(), traceback.format_exc()
    message = {"message": str(error), "extraInfo": {"py_callstack": stack, "timestamp": str(int(now))}}
    ours = {"seconds": now, "traceback": stack, "exit_code": exit_code, "fields": fields}
    path.write_text(json.dumps({"message": message, **ours}))


def _first_failure(failures: dict[int, ProcessFailure], log_dir: Path) -> RankFailure:
    """The error of the rank that failed first; the traceback of every failed rank is written beside its log."""
    for rank, failure in failures.items():
        if "traceback" in failure.error_file_data:
            (log_dir / f"rank-{rank}.traceback").write_text(failure.error_file_data["traceback"])
    rank = min(failures, key=lambda rank: _order(failures[rank]))
    report = failures[rank].error_file_data
    code = report.get("exit_code", failures[rank].exitcode)
    if fields := report.get("fields"):
        error = RankFailure(**fields | {"where": fields["where"] or f"rank {rank}"})
        error.exit_code = code
        return error
    log = log_dir / f"rank-{rank}.{'traceback' if 'traceback' in report else 'err'}"
    lines = log.read_text().rstrip().splitlines()[-TAIL_LINES:] if log.exists() else []
    how = f"was killed by {failures[rank].signal_name()}" if code < 0 else f"left with exit code {code}"
    return RankFailure(
        "\n".join([f"rank {rank} {how}", *(f"  | {line}" for line in lines)]),
        where=str(log) if log.exists() else "its output is above",
    )


def _order(failure: ProcessFailure) -> tuple[bool, float]:
    """Sort key: what happened by itself, then what followed from a lost peer or from the agent's SIGTERM; by time."""
    report = failure.error_file_data
    if "traceback" in report:
        return any(mark in report["traceback"] for mark in CONSEQUENCES), report["seconds"]
    return failure.exitcode == -signal.SIGTERM, failure.timestamp
