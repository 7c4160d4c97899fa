"""Launchers of a host for `rendezvous_spike.py`: torch's dynamic rendezvous over Weft's tunnel, and Weft's own; their ranks.

torch's rendezvous unpickles what it reads. Its TCPStore therefore listens at the loopback of host 0 alone, and other hosts
reach it through the authenticated tunnel of Weft: TCP - Unix socket - tunnel - Unix socket - TCP.
"""

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from weft.device.cpu import Cpu
from weft.errors import WeftError
from weft.launch.coordinator import MAX_RESTARTS, JobCoordinator
from weft.launch.environment import ATTEMPT_VARIABLE
from weft.launch.follow import closing, follow_host_0
from weft.launch.heartbeat import Heartbeat
from weft.launch.launcher import early_forkserver, launch
from weft.launch.rank_entry import connect
from weft.launch.rendezvous import RendezvousConfig
from weft.launch.scratch import scratch_folder
from weft.launch.store import STORE_VARIABLE, listen_at
from weft.launch.tcp_proxy import Streams, TcpProxy, forward
from weft.launch.tunnel import LOOPBACK, TunnelClient, TunnelServer

MODULE = "benchmarks.rendezvous_agents"
TUNNEL_PORT, STORE_PORT = 29400, 29500
FOLDER, HOST = "SPIKE_FOLDER", "SPIKE_HOST"  # environment variables of ranks
SILENCE_SECONDS = 15.0  # without a heartbeat: torch's 3 keep-alives of 5 s, and Weft's heartbeat timeout
RESTARTS = 3


# Ranks


def main() -> None:
    """Rank: an all-reduce in a loop; rank 0 writes the steps. SIGUSR1 makes it raise."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torch's agent, of which this is a fork, has its own
    folder, attempt, store = Path(os.environ[FOLDER]), os.environ[ATTEMPT_VARIABLE], None
    if STORE_VARIABLE not in os.environ:
        _close_sockets()
        client = dist.TCPStore(LOOPBACK, STORE_PORT, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(f"round-{attempt}", client)
    rank, ranks, _ = connect(Cpu(), store)
    heartbeat = Heartbeat.open()
    (folder / f"pid-{os.environ[HOST]}").write_text(str(os.getpid()))
    signal.signal(signal.SIGUSR1, _fail)
    total, step = torch.ones(1), 0
    while True:
        step += 1
        heartbeat.phase("step", step)
        dist.all_reduce(total.fill_(1.0))
        assert total.item() == ranks
        if rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{time.monotonic()} {attempt} {ranks}\n")
        time.sleep(0.1)


def _close_sockets() -> None:
    """Close the copies of the sockets of the agent, of which this process is a fork, so that they can end."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.close(int(name))


def _fail(*_: object) -> None:
    raise RuntimeError("a planted error")


# torch's rendezvous


class Bridge(TcpProxy):
    """Forwards each connection of a listener to another address, between TCP and a Unix socket."""

    def __init__(self, listener: socket.socket, connect_on: Callable[[], Awaitable[Streams]]):
        self._connect_on = connect_on
        super().__init__(listener)

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        start: Any = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
        server: asyncio.Server = await start(lambda *streams: self._start(self._serve(streams)), sock=listener)
        return server

    async def _serve(self, streams: Streams) -> None:
        try:
            await forward(streams, await self._connect_on())
        except OSError:
            streams[1].close()


@contextmanager
def served_store(number: int, address: str, token: str) -> Iterator[dist.Store]:
    """Client of the TCPStore of host 0, at the same loopback port on every host."""
    with scratch_folder() as folder:
        path = folder / "store"
        if number == 0:
            fd = socket.create_server((LOOPBACK, STORE_PORT)).detach()
            store = dist.TCPStore(LOOPBACK, STORE_PORT, is_master=True, wait_for_workers=False, master_listen_fd=fd)
            server = TunnelServer(address, TUNNEL_PORT, token)
            with server, Bridge(listen_at(path), lambda: asyncio.open_connection(LOOPBACK, STORE_PORT)):
                server.add_store("torch", path)
                yield store
        else:
            listener = socket.create_server((LOOPBACK, STORE_PORT))
            tunnel = TunnelClient(address, TUNNEL_PORT, token, "torch", path)
            with tunnel, Bridge(listener, lambda: asyncio.open_unix_connection(path)):
                yield dist.TCPStore(LOOPBACK, STORE_PORT, is_master=False, wait_for_workers=False)


class LoopbackRendezvous(DynamicRendezvousHandler):
    """Dynamic rendezvous whose ranks use the store at the loopback of their host, with a prefix for each round."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; ranks read its number in their environment."""
        info = super().next_rendezvous()
        os.environ[ATTEMPT_VARIABLE] = str(self._state_holder.state.round)
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(LOOPBACK, STORE_PORT))


class Watcher(threading.Thread):
    """Reads the state of the rendezvous once a second, names hosts without a heartbeat, and prints reports of other hosts."""

    def __init__(self, store: dist.TCPStore, address: str):
        super().__init__(daemon=True)
        self.address, self.is_lost, self._store = address, threading.Event(), store

    def run(self) -> None:
        """Watch until the store is gone. Silence is measured with the clock of this host."""
        seen, printed, backend = dict[Any, tuple[Any, float]](), 1, C10dRendezvousBackend(self._store, "spike")
        while True:
            time.sleep(1.0)
            try:
                found = backend.get_state()
                while self._store.check([f"report-{printed}"]):
                    log(f"report: {self._store.get(f'report-{printed}').decode()}")
                    printed += 1
            except Exception as error:  # of the rendezvous or of the store
                return log(f"host 0 is unreachable: {error}")
            now = time.monotonic()
            for node, beat in pickle.loads(found[0]).last_heartbeats.items() if found else ():
                if seen.get(node, (None,))[0] != beat:
                    seen[node] = beat, now
            for node, (_, when) in list(seen.items()):
                if now - when > SILENCE_SECONDS:
                    del seen[node]
                    log(f"{node.addr} is unreachable: no heartbeat for {now - when:.0f} s")
                    self.is_lost.set()

    def report(self, text: str) -> None:
        """Report a failure of this host to all hosts."""
        number = self._store.add("reports", 1)
        self._store.set(f"report-{number}", text)


class NamingAgent(LocalElasticAgent):
    """Elastic agent that restarts its ranks when a host is lost, and reports their failures."""

    watcher: Watcher

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        self.watcher.is_lost.clear()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            rank, failure = next(iter(result.failures.items()))
            if "by peer" not in str(failure.message):  # else a consequence
                self.watcher.report(f"rank {rank} on {self.watcher.address}: {failure.signal_name()} {failure.message}")
        elif result.state == WorkerState.HEALTHY and self.watcher.is_lost.is_set():
            return RunResult(state=WorkerState.UNHEALTHY)
        return result


def torch_agent(number: int, own: str, address: str, token: str, folder: Path, fewer: float, named: bool) -> None:
    """Launcher of a host with torch's dynamic rendezvous."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.INFO)
    for name in ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.INFO)
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    os.environ |= environment | {FOLDER: str(folder), HOST: str(number)}
    timeout = RendezvousTimeout(last_call=timedelta(seconds=fewer))
    with served_store(number, address, token) as store:
        backend = C10dRendezvousBackend(store, "spike")
        handler = LoopbackRendezvous.from_backend("spike", store, backend, 2, 3, own, timeout)
        spec = WorkerSpec("rank", 1, handler, entrypoint=main, max_restarts=RESTARTS, local_addr=own)
        spec.monitor_interval = 0.1
        kind = NamingAgent if named else LocalElasticAgent
        agent = kind(spec, DefaultLogsSpecs(tempfile.mkdtemp(dir=folder)), start_method="fork")
        if isinstance(agent, NamingAgent):
            client = dist.TCPStore(LOOPBACK, STORE_PORT, is_master=False, wait_for_workers=False)
            agent.watcher = Watcher(client, own)
            agent.watcher.start()
        try:
            result = agent.run()
            log(f"ended: {result and result.failures}")
        finally:
            handler.shutdown()  # as torchrun does


def weft_agent(number: int, own: str, address: str, token: str, folder: Path, fewer: float) -> None:
    """Launcher of a host with Weft's membership."""
    os.environ |= {FOLDER: str(folder), HOST: str(number)}
    rendezvous = RendezvousConfig(number, 3, address, TUNNEL_PORT, token)
    with early_forkserver(MODULE, Cpu()) as forkserver:

        def take_part(coordinator: JobCoordinator) -> None:
            if number:
                coordinator.wait_for_config()
            else:
                coordinator.publish_config({MAX_RESTARTS: str(RESTARTS)})
            variables, folder_of_logs = coordinator.network_environment(), folder / "logs"
            options = {"max_restarts": RESTARTS, "coordinator": coordinator, "forkserver": forkserver}
            argv = [sys.executable, "-m", MODULE]
            launch(argv, ranks=1, log_dir=folder_of_logs, environment=variables, **options)

        try:
            if number:
                return follow_host_0(rendezvous, 1, take_part, log, node_rejoin_seconds=fewer)
            with closing(JobCoordinator.join(rendezvous, 1, node_rejoin_seconds=fewer)) as coordinator:
                take_part(coordinator)
        except WeftError as error:
            log(f"ended: {error}")


def log(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)
