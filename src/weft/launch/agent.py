"""Elastic agent of this host: starts the ranks, polls the watchdog, and ends the ranks."""

import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from weft.files import replace_file
from weft.launch.forkserver import ForkServer, ForkServerContext
from weft.launch.log import log
from weft.launch.rank_status import HEARTBEAT_VARIABLE, create_heartbeat
from weft.launch.rounds import ERROR_VARIABLE
from weft.launch.watchdog import Watchdog

SECONDS_TO_END = 60  # after a signal: minimum time for ranks to finish a step and save; longer while they make progress
SECONDS_TO_END_AFTER_FAILURE = 5  # without one of the ranks no step can be finished
POLL_SECONDS = 0.1
EXIT_SECONDS = 10  # for the agents of other hosts, when all ranks have exited with code 0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a launcher passes on to its ranks; schedulers send USR1 or USR2 before a time limit."""


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
        coordinator = self.watchdog.coordinator
        if failure := self.watchdog.poll(processes):
            # Ranks of an attempt that ends for other hosts are healthy: SIGTERM would let them finish the run.
            grows = coordinator is not None and coordinator.grows
            context.close(signal.SIGKILL if grows else signal.SIGTERM, SECONDS_TO_END_AFTER_FAILURE)
            raise failure
        if all(process.returncode == 0 for process in processes.values()) and (
            coordinator is None or coordinator.all_hosts_done()
        ):
            return super()._monitor_workers(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SECONDS_TO_END) -> None:
        """Let the running ranks finish their step; a second signal kills them. `timeout`, of the base class, is not used."""
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
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal and its shell may both send one
            if work := self.watchdog.unfinished_work():
                action = "press again" if death_sig == signal.SIGINT else f"send {death_sig.name} again"
                log(f"{work}, {action} to stop now")
            for handler in running.values():
                handler.close(death_sig)
            self._wait_for_end({rank: handler.proc for rank, handler in running.items()}, second_signals)
        context.close(signal.SIGKILL, SECONDS_TO_END_AFTER_FAILURE)

    def _wait_for_end(self, processes: Mapping[int, Any], second_signals: list[int]) -> None:
        """Wait until the ranks have ended, their time is over, or a second signal arrives."""
        end = time.monotonic() + SECONDS_TO_END
        # A list, not any(): it polls all ranks, so that each return code is known.
        while None in [process.poll() for process in processes.values()]:
            now, failed = time.monotonic(), any(process.returncode for process in processes.values())
            if second_signals:
                return log("stopping now")
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
        self.created: list[Path] = []
        """Files for the output of the ranks."""

    @property
    def root_log_dir(self) -> str:
        return str(self.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the environment of each rank of this host and return its log files. Called before the ranks start."""
        ranks = {local_rank: environment["RANK"] for local_rank, environment in envs.items()}
        for local_rank, rank in ranks.items():
            for suffix in ("error", "traceback"):
                _forget(self.log_dir / f"rank-{rank}.{suffix}")  # of an earlier launch
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
            replace_file(path, b"")
        except OSError as error:
            log(f"{path} cannot be written: {error.strerror}; this output will be lost")
            path = self.heartbeat_dir / name
        self.created.append(path)
        return path

    def remove_empty(self) -> None:
        """Remove the files of ranks that wrote nothing, when all ranks have ended."""
        for path in self.created:
            with suppress(OSError):  # an empty file is no reason to end a run
                if path.stat().st_size == 0:
                    path.unlink()


def _forget(path: Path) -> None:
    """Remove a file of logs; what cannot be removed is no reason to end a run."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log(f"{path} cannot be removed: {error.strerror}; it may be of an earlier launch")
