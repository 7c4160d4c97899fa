"""Membership: launchers detect hosts that are alive, failed, left or unreachable."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.lab.hosts import Host, hosts
from weft.errors import RendezvousError
from weft.launch.membership import MembershipStore
from weft.launch.rendezvous import new_token
from weft.launch.scratch import scratch_folder
from weft.launch.store import CHANGES, COMPARE_SET, SocketStore, StoreServer
from weft.launch.tunnel import LOOPBACK, TunnelClient, TunnelServer

ROOT = Path(__file__).parents[2]
INTERVAL = 0.05


class CountingServer(StoreServer):
    """Store that counts requests by operation."""

    def __init__(self, path: Path) -> None:
        self.requests: Counter[int] = Counter()
        super().__init__(path)

    async def _respond(self, operation: int, fields: list[bytes]) -> list[bytes]:
        self.requests[operation] += 1
        return await super()._respond(operation, fields)


class Cluster:
    """A store, and membership objects that join it as if each were on another host."""

    def __init__(self, server: "CountingServer") -> None:
        self.server, self.path, self.store = server, server.path, SocketStore(server.path)
        self.memberships: list[MembershipStore] = []

    def join(self, host: int, hosts: int, **options: Any) -> MembershipStore:
        store = SocketStore(self.path)
        options = {"ranks": 2, "timeout": 10, "interval": INTERVAL, "heartbeat_timeout": 5} | options
        membership = MembershipStore.join(store, host=host, hosts=hosts, **options)
        self.memberships.append(membership)
        return membership

    def join_all(self, hosts: int, **options: Any) -> list[MembershipStore]:
        return together([lambda host=host: self.join(host, hosts, **options) for host in range(hosts)])


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run each call in a thread; returns the results in order, or raises the first exception."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with scratch_folder() as folder, CountingServer(folder / "store") as server:
        cluster = Cluster(server)
        yield cluster
        for membership in reversed(cluster.memberships):
            membership.leave(timeout=0)


def statuses(membership: MembershipStore) -> list[str]:
    return [state.status for state in membership.host_states()]


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_hosts_see_each_other(cluster: Cluster) -> None:
    memberships = together([lambda host=host: cluster.join(host, 3, ranks=host + 1) for host in (2, 1, 0)])[::-1]
    for membership in memberships:
        states = membership.host_states()
        assert [(state.host, state.ranks, state.attempt, state.status) for state in states] == [
            *((0, 1, 0, "alive"), (1, 2, 0, "alive"), (2, 3, 0, "alive"))
        ]
        assert {(state.name, state.pid) for state in states} == {(os.uname().nodename, os.getpid())}
        assert all(state.silent_seconds < 5 for state in states)


def test_a_missing_host_is_named(cluster: Cluster) -> None:
    calls = [lambda: cluster.join(0, 4, timeout=2.5), lambda: cluster.join(2, 4, timeout=30.0)]
    with pytest.raises(RendezvousError) as caught:
        together(calls)
    assert caught.value.what == (
        "the job cannot start: host 1 did not connect within 2.5 s, host 3 did not connect within 2.5 s"
    )


def test_hosts_do_not_wait_for_a_host_that_left(cluster: Cluster) -> None:
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(cluster.join, 0, 3, timeout=60)
        with pytest.raises(RendezvousError, match=r"host 2 did not connect within 0\.5 s"):
            cluster.join(1, 3, timeout=0.5)
        with pytest.raises(RendezvousError, match="the job cannot start: host 1 has left"):
            patient.result(timeout=10)


def test_a_missing_host_0_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(RendezvousError, match=r"host 0 did not connect within 0\.3 s"):
        cluster.join(1, 2, timeout=0.3)


@pytest.mark.parametrize(("host", "hosts"), [(1, 3), (2, 2), (-1, 2)])
def test_hosts_must_agree_on_the_number_of_hosts(host: int, hosts: int, cluster: Cluster) -> None:
    cluster.join_all(2)
    with pytest.raises(RendezvousError, match=f"was started as host {host} of {hosts}, but host 0 expects 2 hosts"):
        cluster.join(host, hosts)
    assert statuses(cluster.memberships[0]) == ["alive", "alive"]


def test_a_host_number_in_use_is_refused(cluster: Cluster) -> None:
    cluster.join_all(2)
    with pytest.raises(RendezvousError, match=rf"host number 1 is in use by .+ \(process {os.getpid()}\)"):
        cluster.join(1, 2)
    assert statuses(cluster.memberships[0]) == ["alive", "alive"]


def test_a_failure_report_reaches_all_hosts_and_belongs_to_its_attempt(cluster: Cluster) -> None:
    first, second, third = cluster.join_all(3)
    second.report_failure("rank 3 was killed by SIGKILL at step 17")
    for membership in (first, second, third):
        until(lambda membership=membership: statuses(membership) == ["alive", "failed", "alive"])
        assert [state.report for state in membership.host_states()] == [
            None,
            "rank 3 was killed by SIGKILL at step 17",
            None,
        ]

    for membership in (first, second):
        membership.update(attempt=1, ranks=4)
    until(lambda: [state.attempt for state in third.host_states()] == [1, 1, 0])
    assert statuses(third) == ["alive", "failed", "alive"]  # an observer in the earlier attempt still sees the report
    third.update(attempt=1, ranks=1)
    for membership in (first, second, third):
        until(lambda membership=membership: [state.attempt for state in membership.host_states()] == [1, 1, 1])
        assert [(state.status, state.report) for state in membership.host_states()] == [("alive", None)] * 3
        assert [state.ranks for state in membership.host_states()] == [4, 4, 1]

    third.report_failure("again")
    until(lambda: [state.report for state in first.host_states()] == [None, None, "again"])


def test_a_host_that_left_never_becomes_unreachable(cluster: Cluster) -> None:
    first, second = cluster.join_all(2, heartbeat_timeout=0.5)
    second.leave()
    until(lambda: statuses(first) == ["alive", "left"])
    time.sleep(1)
    assert statuses(first) == ["alive", "left"]


def test_all_hosts_read_the_announcement_of_host_0(cluster: Cluster) -> None:
    first, second, third = cluster.join_all(3)
    assert [membership.announcement() for membership in (first, second, third)] == [None, None, None]
    for text in ("one", "two"):
        first.announce(text)
        for membership in (first, second, third):
            until(lambda membership=membership, text=text: membership.announcement() == text)


def test_a_gone_host_is_replaced(cluster: Cluster) -> None:
    first, second, third = cluster.join_all(3, interval=0.2, heartbeat_timeout=1)
    first.announce("the job is under way")
    until(lambda: third.announcement() is not None)
    with pytest.raises(RendezvousError, match="host number 2 is in use"):
        cluster.join(2, 3)
    old = third.host_states()[2].record

    def is_free() -> bool:
        first.release(2)  # has no effect if the host has written a newer record: repeat until it has
        return statuses(second) == ["alive", "alive", "unreachable"]  # although its heartbeats are not late

    until(is_free)
    new = cluster.join(2, 3)  # does not wait for other hosts
    assert new.announcement() == "the job is under way"
    until(lambda: second.host_states()[-1].record.id == new.host_states()[2].record.id != old.id)
    # The replaced launcher notices it and writes no more records.
    until(lambda: [state.gone for state in third.host_states()] == [True, True, False])
    third.leave()
    time.sleep(1)
    assert statuses(second) == ["alive", "alive", "alive"]


def test_host_0_leaves_last(cluster: Cluster) -> None:
    first, second = cluster.join_all(2)
    leaving = threading.Thread(target=first.leave)
    leaving.start()
    until(lambda: statuses(second) == ["left", "alive"])
    assert leaving.is_alive()
    second.leave()
    leaving.join(5)
    assert not leaving.is_alive()
    first.leave()  # a second time does nothing


def test_unknown_fields_of_a_record_are_ignored(cluster: Cluster) -> None:
    """A later version of Weft may write additional fields."""
    first, second = cluster.join_all(2)
    second.leave()
    record = json.loads(cluster.store.get("host-1")) | {"left": False, "colour": "green", "ranks": 7}
    cluster.store.set("host-1", json.dumps(record))
    until(lambda: first.host_states()[1].ranks == 7)
    assert statuses(first) == ["alive", "alive"]


def test_an_error_names_both_versions(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("epoch", "0"), ("version", "9.9.9"), ("hosts", "2")):
        cluster.store.set(key, value)
    with pytest.raises(
        RendezvousError, match=rf"host 0 has Weft 9\.9\.9, this host has Weft {re.escape(weft.__version__)}"
    ):
        cluster.join(1, 2)
    for key in ("announcement", "host-0", "host-1"):
        cluster.store.set(key, "null")
    with pytest.raises(RendezvousError, match="the job cannot start: host 0 did not connect"):  # it is accepted
        cluster.join(1, 2, same_version=False, timeout=0.5)


def test_all_other_hosts_are_unreachable_without_the_store() -> None:
    token = new_token()
    with (
        scratch_folder() as folder,
        StoreServer(folder / "store") as store_server,
        TunnelServer(LOOPBACK, 0, token) as server,
    ):
        server.add_store("membership", store_server.path)
        with TunnelClient(LOOPBACK, server.port, token, "membership", folder / "client") as client:
            store, remote_store = SocketStore(store_server.path), SocketStore(client.path)
            options = {"hosts": 2, "ranks": 1, "interval": INTERVAL}
            first, second = together(
                [
                    lambda: MembershipStore.join(store, host=0, heartbeat_timeout=2, **options),
                    lambda: MembershipStore.join(remote_store, host=1, heartbeat_timeout=60, **options),
                ]
            )
            server.close()
            until(lambda: statuses(second) == ["unreachable", "alive"])  # at once, before the heartbeat timeout
            until(lambda: statuses(first) == ["alive", "unreachable"])
            second.report_failure("not delivered")
            second.leave()
            first.leave()


# Membership part of a launcher: prints the host states when they change, and executes commands from stdin.
LAUNCHER = """
import json, queue, sys, threading, time
from pathlib import Path
from tempfile import mkdtemp
from weft.launch.tunnel import TunnelClient, TunnelServer
from weft.launch.membership import MembershipStore
from weft.launch.rendezvous import read_token
from weft.launch.store import SocketStore, StoreServer
path = Path(mkdtemp(), "store")
host, hosts, address, silence = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
if host == 0:
    store_server = StoreServer(path)
    server = TunnelServer(address, 29400, read_token(), keepalive_timeout=silence)
    server.add_store("membership", path)
else:
    client = TunnelClient(address, 29400, read_token(), "membership", path, keepalive_timeout=silence)
membership = MembershipStore.join(SocketStore(path), host=host, hosts=hosts, ranks=2, interval=0.2, heartbeat_timeout=silence)
commands = queue.Queue()
threading.Thread(target=lambda: [commands.put(line.strip()) for line in sys.stdin], daemon=True).start()
seen = None
while True:
    start = time.monotonic()
    states = {state.host: [state.status, state.report] for state in membership.host_states()}
    assert time.monotonic() - start < 0.5  # independent of the network
    if states != seen:
        seen = states
        print(json.dumps([time.monotonic(), *states.values()]), flush=True)
    time.sleep(0.05)
    if not commands.empty():
        command = commands.get()
        if command == "leave":
            membership.leave()
            break
        membership.report_failure(command)
"""
HEARTBEAT_TIMEOUT = 5.0


class Launcher:
    """A launcher on an emulated host."""

    def __init__(self, host: Host, index: int, total: int, address: str, token: str):
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "WEFT_TOKEN": token}
        argv = [sys.executable, "-c", LAUNCHER, *map(str, (index, total, address, HEARTBEAT_TIMEOUT))]
        self.host, self.pipes = host, {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = host.start(argv, env=environment, text=True, **self.pipes)
        self.lines: list[list[Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def command(self, text: str) -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def sees(self, *statuses: str, seconds: float = 15) -> float:
        """Wait until these are the newest statuses that the launcher sees; returns the time of the change."""
        until(lambda: bool(self.lines) and [status for status, _ in self.lines[-1][1:]] == list(statuses), seconds)
        return self.lines[-1][0]


@pytest.fixture
def launchers() -> Iterator[list[Launcher]]:
    with hosts(3) as made:
        token = new_token()
        started = [Launcher(host, index, 3, made[0].address, token) for index, host in enumerate(made)]
        for launcher in started:
            launcher.sees("alive", "alive", "alive", seconds=60)
        yield started


def test_failed_killed_and_leaving_launchers_are_detected(launchers: list[Launcher]) -> None:
    first, second, third = launchers
    third.command("rank 5 was killed by SIGKILL at step 17")
    for launcher in launchers:
        launcher.sees("alive", "alive", "failed")
        assert launcher.lines[-1][3] == ["failed", "rank 5 was killed by SIGKILL at step 17"]
    second.process.kill()
    killed = time.monotonic()
    for launcher in (first, third):
        assert launcher.sees("alive", "unreachable", "failed") - killed > HEARTBEAT_TIMEOUT - 1
    third.command("leave")
    first.sees("alive", "unreachable", "left")
    first.command("leave")
    assert [launcher.process.wait(15) for launcher in (first, third)] == [0, 0]
    assert second.process.wait(5) == -signal.SIGKILL


@pytest.mark.slow("waits for the silence of a host twice")
def test_a_short_network_interruption_is_ignored_and_a_long_one_detected(launchers: list[Launcher]) -> None:
    first, second, third = launchers
    third.host.unplug()
    time.sleep(1)
    third.host.plug()
    time.sleep(HEARTBEAT_TIMEOUT + 1)
    assert [len(launcher.lines) for launcher in launchers] == [1, 1, 1]  # nothing happened
    third.host.unplug()
    first.sees("alive", "alive", "unreachable")
    second.sees("alive", "alive", "unreachable")
    third.sees("unreachable", "unreachable", "alive")
    third.command("not delivered")
    third.command("leave")
    first.command("leave")
    second.command("leave")
    assert [launcher.process.wait(30) for launcher in launchers] == [0, 0, 0]


def test_record_age_counts_from_the_last_sign_of_life(cluster: Cluster) -> None:
    """A host is lost just after a heartbeat: that others hear of it later is no sign of life."""
    watching, lost = together([lambda: cluster.join(0, 2, interval=0.5), lambda: cluster.join(1, 2)])
    lost._stopped = True  # like a power failure: without a last record
    for thread in lost._threads[:1]:
        thread.join()
    end = time.monotonic()
    while time.monotonic() < end + 3:
        before = time.monotonic()
        assert watching.host_states()[1].max_record_age >= before - end
        time.sleep(0.02)
    assert watching.host_states()[1].silent_seconds > 1.5
    assert statuses(watching) == ["alive", "alive"]


def test_hosts_ask_rarely_and_hear_of_changes_at_once(cluster: Cluster) -> None:
    first, second, third = cluster.join_all(3, interval=30.0, heartbeat_timeout=100.0)
    time.sleep(0.3)
    before = dict(cluster.server.requests)
    begin = time.monotonic()
    second.report_failure("rank 3 was killed")
    for membership in (first, third):
        until(lambda membership=membership: statuses(membership) == ["alive", "failed", "alive"])
    assert time.monotonic() - begin < 10
    time.sleep(0.3)
    made = {n: count - before.get(n, 0) for n, count in cluster.server.requests.items()}
    assert made == {**dict.fromkeys(made, 0), COMPARE_SET: 1, CHANGES: 3}  # each host has heard of it, and asks again
