"""Pool of ranks, forked from the test process with its imports: a test on four ranks takes milliseconds, not seconds.

    def share(rank, world_size, x):          # at module level, so that it can be pickled
        dist.all_reduce(x)
        return x

    results = run_ranks(2, share, torch.ones(3))

Ranks stay alive between tests, so a task must not change module globals. They have the modules as of the moment of the fork: a
patch in the test process has no effect on a rank.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.lab import npu

# Errors of a rank about a lost peer: consequences of another rank's failure, not its cause.
SECONDARY = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
GRACE_SECONDS = 0.5
TASKS_OF_A_POOL = 50  # then ranks are forked again, because every process group of a test leaves threads of gloo
START_SECONDS = 60
DEVICE_VARIABLE = "WEFT_LAB_DEVICE"  # "npu": ranks run on the stand-in for an NPU
GROUP_TIMEOUT = timedelta(seconds=120)
STACK_SIGNAL = signal.SIGRTMIN  # runs handle USR1


class RankError(Exception):
    """Failure of a rank; `rank` is the rank at fault, and the text has its traceback, signal or stack."""

    def __init__(self, rank: int, text: str):
        self.rank = rank
        super().__init__(f"rank {rank}: {text}")


class Pool:
    """Processes in one gloo process group, each of which waits for functions to run."""

    def __init__(self, world_size: int):
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        if (device := os.environ.get(DEVICE_VARIABLE, "cpu")) == "cpu":
            fork: Any = multiprocessing.get_context("fork")
        else:  # after a backward, torch's threads for devices are not known to a fork
            fork = multiprocessing.get_context("forkserver")
            fork.set_forkserver_preload([__name__, "transformers", "weft.parallel.parallelize"])
        self.connections, self.processes, self.num_tasks = [], [], 0
        for rank in range(world_size):
            parent_end, child_end = fork.Pipe()
            arguments = (rank, world_size, child_end, Path(self.folder.name), device)
            process = fork.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            child_end.close()
            self.connections.append(parent_end)
            self.processes.append(process)
        try:
            self._answers(START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def run(self, task: bytes, timeout: float) -> list[Any]:
        """Run a pickled (function, arguments) on every rank.

        Raises:
            RankError: a rank raised, died, or did not answer within `timeout` seconds. The pool cannot be used any more.
        """
        self.num_tasks += 1
        for connection in self.connections:
            with suppress(BrokenPipeError):  # a rank that died since its last answer is reported below
                connection.send_bytes(task)
        return self._answers(timeout)

    def _answers(self, timeout: float) -> list[Any]:
        """Wait for one answer of every rank; return the answers by rank."""
        results: dict[int, Any] = {}
        failures: list[tuple[int, str]] = []  # in order of detection
        pending = set(range(len(self.processes)))
        deadline = time.monotonic() + timeout
        while pending and (remaining := deadline - time.monotonic()) > 0:
            handles = [self.connections[rank] for rank in pending] + [self.processes[rank].sentinel for rank in pending]
            wait(handles, remaining)
            for rank in sorted(pending):
                if self.connections[rank].poll():
                    pending.discard(rank)
                    succeeded, value = self._receive(rank)
                    if succeeded:
                        results[rank] = value
                    else:
                        failures.append((rank, value))
                elif not self.processes[rank].is_alive():
                    pending.discard(rank)
                    failures.append((rank, self._death(rank)))
            if failures:  # other ranks may wait for the failed one: collect answers for a moment, and stop
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            # `min` takes the first of equal keys, and False is less than True: the first failure that is not a consequence.
            raise RankError(*min(failures, key=lambda failure: any(mark in failure[1] for mark in SECONDARY)))
        if pending:
            raise RankError(min(pending), self._stacks(pending, timeout))
        return [results[rank] for rank in range(len(self.processes))]

    def kill(self) -> None:
        """Kill every rank."""
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        self.folder.cleanup()

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return False, self._death(rank)

    def _death(self, rank: int) -> str:
        self.processes[rank].join()
        code = self.processes[rank].exitcode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _stacks(self, pending: set[int], timeout: float) -> str:
        for rank in pending:
            os.kill(self.processes[rank].pid, STACK_SIGNAL)
        time.sleep(0.2)  # faulthandler writes from the signal handler, without a signal of completion
        texts = {rank: (Path(self.folder.name) / f"stack-{rank}").read_text() for rank in sorted(pending)}
        stacks = [
            f"rank {rank}\n{text.partition(' in _serve')[0]}" for rank, text in texts.items()
        ]  # without the frames of the fork
        return f"timeout: no answer within {timeout} s from ranks {sorted(pending)}\n" + "\n".join(stacks)


_pools: dict[int, Pool] = {}


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 180) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on every rank of an initialized gloo group; return the results by rank.

    `fn`, the arguments and the results are pickled, so `fn` must be at module level. Each task starts with seeds 0, one thread,
    default dtype float32 and autograd on.

    Raises:
        RankError: a rank raised, died, or did not answer within `timeout` seconds. The next call gets fresh ranks.
    """
    task = pickle.dumps((fn, args))
    start_ranks(world_size)
    try:
        return _pools[world_size].run(task, timeout)
    except BaseException:  # including an interrupt, which leaves ranks in the middle of a task
        _pools.pop(world_size).kill()
        raise


def start_ranks(world_size: int) -> None:
    """Fork the ranks of the next task now, if they are not running or have run enough tasks."""
    if world_size in _pools and _pools[world_size].num_tasks == TASKS_OF_A_POOL:
        _pools.pop(world_size).kill()
    if world_size not in _pools:
        _pools[world_size] = _fork_pool(world_size)


def _fork_pool(world_size: int) -> Pool:
    """Fork a pool, with one retry: a fork of a process with threads dies once in tens of thousands, before any task."""
    try:
        return Pool(world_size)
    except RankError as error:
        warnings.warn(f"a pool of {world_size} ranks did not start and is forked again: {error}", stacklevel=3)
        return Pool(world_size)


def close_pools() -> None:
    """End the ranks of all pools."""
    while _pools:
        _pools.popitem()[1].kill()


def _serve(rank: int, world_size: int, connection: Connection, folder: Path, device: str) -> None:
    """Main loop of a rank: join the group, then run one task after the other."""
    gc.freeze()  # do not collect garbage of the test process: a store's destructor waits for a thread that the fork lacks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process handles Ctrl-C and kills its ranks
    with open(folder / f"stack-{rank}", "w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(folder / "store"), world_size)
        backend, parent = "gloo", multiprocessing.parent_process()
        assert parent is not None
        if device == "npu":
            libraries, backend = npu.install(), "cpu:gloo,npu:hccl"  # noqa: F841  # alive as long as the rank
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
        connection.send_bytes(pickle.dumps((True, None)))  # ready
        while True:
            while not connection.poll(1):
                if not parent.is_alive():  # the test process was killed
                    os._exit(1)
            task = connection.recv_bytes()
            _reset()
            try:
                fn, args = pickle.loads(task)
                answer = pickle.dumps((True, fn(rank, world_size, *args)))
            except BaseException:  # a rank must always answer
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)


def _reset() -> None:
    """Reset global state that an earlier task may have set."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
