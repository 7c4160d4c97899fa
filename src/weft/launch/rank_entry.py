"""Entry point of a rank: error reports, exit without teardown, and the process group.

rank_main(main)                                     # in the process of a rank
rank, world_size, local_rank = connect(device)      # inside main
"""

import atexit
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist

from weft.device.device import Device
from weft.errors import DeviceError, Stopped, WeftError
from weft.files import replace_file
from weft.launch.environment import (
    HANG_TIMEOUT_VARIABLE,
    INTERFACE_VARIABLES,
    LOOPBACK_INTERFACE,
    StartedRank,
    rank_variables,
    started_rank,
)
from weft.launch.log import print_error
from weft.launch.node_member import NodeMember
from weft.launch.output import keep_output
from weft.launch.parent_death import end_with_launcher
from weft.launch.rank_status import HEARTBEAT_VARIABLE
from weft.launch.rendezvous import interface_towards
from weft.launch.rounds import ERROR_VARIABLE
from weft.launch.store import STORE_VARIABLE, SocketStore
from weft.launch.watchdog import Timeouts

DEFAULT_GROUP_TIMEOUT = 1800.0  # default of torch
GLOO_INTERFACE = INTERFACE_VARIABLES[0]  # NCCL and HCCL leave the loopback interface out by themselves
LAZY_GLOO, LAZY_RANKS = "TORCH_GLOO_LAZY_INIT", 32
"""Variable of torch. Without it each rank connects to all others of each group, by two requests to the store for each."""
NCCL_CHECK_VARIABLE, NCCL_CHECKS = "TORCH_NCCL_COORD_CHECK_MILSEC", 512
"""Variable of torch: the interval in which NCCL's monitor of each rank asks the store whether another one has failed. With its
second, the store would serve nothing else in a job of 10,000 ranks: all ranks together ask this number of times a second."""
T = TypeVar("T")


def rank_main(main: Callable[[], None]) -> None:
    """Run the main function of a rank, then end the process. An error is reported to the launcher and sets the exit code.

    Without a launcher, errors propagate to the caller.
    """
    report = os.environ.get(ERROR_VARIABLE)
    if not report:
        return main()
    end_with_launcher()
    keep_output(Path(report).with_suffix(".err"))
    code, _ = _run(main, lambda: (Path(report), Path(report)))
    _exit(code)


def started_rank_main(main: Callable[[], None], started: StartedRank, member: NodeMember) -> NoReturn:
    """Run the main function of a rank that another launcher has started, then end the process.

    An error is reported to the watchdog of this host, which prints it once, and to torchrun. A rank that a signal has ended in
    order (`Stopped`) exits with code 128 + the signal number.

    Args:
        main: main function.
        started: this rank.
        member: connection to the watchdog.
    """
    keep_output()
    name, of_torchrun = f"rank-{started.rank}.error", os.environ.get(ERROR_VARIABLE)
    report = member.heartbeat.with_name(name)
    os.environ[HEARTBEAT_VARIABLE] = str(member.heartbeat)
    code, error = _run(main, lambda: (report, member.log_dir / name))
    if error:
        ignore_signals()
    if error and of_torchrun:
        _write_report(Path(of_torchrun), Path(of_torchrun), error, code)
    if not member.leave(code, is_failure=bool(code) and not isinstance(error, Stopped)) and error:
        print_error(error) if isinstance(error, WeftError) else traceback.print_exception(error)
    _exit(code)


def ignore_signals() -> None:
    """Ignore signals from now on: a launcher ends the other ranks when the first exits, and each has its exit code to set."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def started_rank_call(main: Callable[[], T], started: StartedRank, member: NodeMember) -> T:
    """Run the main function of a rank in a process that its launcher keeps, as Ray does, and return its value.

    An error is reported to the watchdog of this host, which prints it once, and raised.

    Args:
        main: main function.
        started: this rank.
        member: connection to the watchdog.
    """
    name = f"rank-{started.rank}.error"
    os.environ[HEARTBEAT_VARIABLE] = str(member.heartbeat)
    try:
        value = main()
    except Exception as error:
        code = error.exit_code if isinstance(error, WeftError) else 1
        _write_report(member.heartbeat.with_name(name), member.log_dir / name, error, code)
        member.leave(code, is_failure=True)
        raise
    member.leave(0, is_failure=False)
    return value


def _run(main: Callable[[], None], report: Callable[[], tuple[Path, Path]]) -> tuple[int, Exception | None]:
    """Run the main function of a rank; return its exit code, and its error, which has been reported.

    Args:
        main: main function.
        report: returns the path for the report of an error, and that of its traceback without its suffix.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: until the rank handles signals it has nothing to save
    faulthandler.enable()  # a crash in native code leaves a traceback in the rank's stderr
    try:
        main()
    except Stopped as stopped:
        return stopped.exit_code, stopped
    except Exception as error:
        code = error.exit_code if isinstance(error, WeftError) else 1
        _write_report(*report(), error, code)
        return code, error
    except SystemExit as system_exit:
        if isinstance(system_exit.code, str):
            print(system_exit.code, file=sys.stderr)
        return system_exit.code if isinstance(system_exit.code, int) else int(system_exit.code is not None), None
    return 0, None


def connect(device: Device, store: dist.Store | None = None) -> tuple[int, int, int]:
    """Join the process group of the job and make the device of this rank the current one, unless that was done before.

    Reads the environment variables that `launch`, torchrun, srun or mpirun set (`environment.py`). Ranks of `launch` use its
    store, other ranks use torch's store. Without these variables, the process forms a group of size one that other hosts
    cannot reach.

    Args:
        device: device of this host.
        store: store of ranks that another launcher has started, where they have already met; None: made here.

    Returns:
        rank: global rank.
        world_size: number of ranks.
        local_rank: rank on this host.

    Raises:
        DeviceError: this host has fewer accelerators than ranks.
    """
    os.environ.update(rank_variables(os.environ))
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0"))
    if "RANK" not in os.environ:
        device.use(0)
        os.environ.setdefault(GLOO_INTERFACE, LOOPBACK_INTERFACE)  # gloo listens even in a group of size one
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
    if device.type != "cpu" or world_size >= LAZY_RANKS:  # pairs of ranks connect when they have a message
        os.environ.setdefault(LAZY_GLOO, "1")
    if world_size > NCCL_CHECKS:
        os.environ.setdefault(NCCL_CHECK_VARIABLE, str(1000 * world_size // NCCL_CHECKS))
    if GLOO_INTERFACE not in os.environ and (interface := _interface()):
        os.environ[GLOO_INTERFACE] = interface
    hang_timeout = float(os.environ.get(HANG_TIMEOUT_VARIABLE, Timeouts.hang))
    # The watchdog, which knows the cause, must report before process groups time out.
    timeout = timedelta(seconds=max(DEFAULT_GROUP_TIMEOUT, 2 * hang_timeout))
    if path := os.environ.get(STORE_VARIABLE):
        store = SocketStore(Path(path))
        # Keeps the Python object alive: torch holds only its C++ part, but calls its Python methods.
        atexit.register(store.close)
    if store is not None:
        prefixed = dist.PrefixStore("ranks", store)
        dist.init_process_group(device.backend, timeout=timeout, store=prefixed, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(device.backend, timeout=timeout)
    return rank, world_size, local_rank


def _interface() -> str | None:
    """Network interface for gloo, which would resolve the name of this host."""
    started = started_rank(os.environ)
    if started is None or "MASTER_ADDR" not in os.environ:
        return None
    return interface_towards(os.environ["MASTER_ADDR"], started.local_world_size != started.world_size)


def _exit(code: int) -> NoReturn:
    """Exit without interpreter teardown.

    All work is done or lost, and all files are closed. In an ordinary exit, gloo's threads outlive the interpreter, and gloo
    sometimes aborts the process ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_report(path: Path, traceback_path: Path, error: Exception, exit_code: int) -> None:
    """Write the error of this rank for the watchdog, in torchrun's format with additional keys, and its traceback for the user.

    Both go to the heartbeat folder if they cannot be written: it is in shared memory, and may have space when the disk is full.
    The report contains the exit code because the launcher may end this rank by SIGTERM before the rank has exited.
    """
    fields = None
    if isinstance(error, WeftError):
        fields = {"what": error.what, "where": error.where, "rule": error.rule, "fix": error.fix}
    now, stack = time.time(), "".join(traceback.format_exception(error))
    message = {"message": str(error), "extraInfo": {"py_callstack": stack, "timestamp": str(int(now))}}
    report = {"message": message, "seconds": now, "traceback": stack, "exit_code": exit_code, "fields": fields}
    heartbeats = [os.environ.get(HEARTBEAT_VARIABLE)]
    beside = [Path(heartbeat).with_name(path.name) for heartbeat in heartbeats if heartbeat]
    for target, of_stack in [(path, traceback_path), *((other, other) for other in beside)]:
        try:
            replace_file(of_stack.with_suffix(".traceback"), stack)
            replace_file(target, json.dumps(report))  # atomic: the watchdog may read at any time
            return
        except OSError:
            continue
    print(stack, file=sys.stderr)
