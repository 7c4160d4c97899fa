"""Launchers know who is there, who failed and why, who has left, and who cannot be reached."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
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
from weft.launch.store import SocketStore, StoreServer
from weft.launch.tunnel import LOOPBACK, TunnelClient, TunnelServer

ROOT = Path(__file__).parents[2]
INTERVAL = 0.05


class Meeting:
    """A store, and boards that join it as if each were on a host of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.store = path, SocketStore(path)
        self.boards: list[MembershipStore] = []

    def join(self, host: int, number: int, **options: Any) -> MembershipStore:
        store = SocketStore(self.path)
        options = {"ranks": 2, "timeout": 10, "interval": INTERVAL, "silence_seconds": 5} | options
        board = MembershipStore.join(store, host=host, hosts=number, **options)
        self.boards.append(board)
        return board

    def all(self, number: int, **options: Any) -> list[MembershipStore]:
        return together([lambda host=host: self.join(host, number, **options) for host in range(number)])


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run each in a thread; the results in order, or the exception of the first that raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def rendezvous() -> Iterator[Meeting]:
    with scratch_folder() as folder, StoreServer(folder / "store") as server:
        rendezvous = Meeting(server.path)
        yield rendezvous
        for board in reversed(rendezvous.boards):
            board.leave(timeout=0)


def statuses(board: MembershipStore) -> list[str]:
    return [state.status for state in board.look()]


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_all_hosts_see_each_other(rendezvous: Meeting) -> None:
    boards = together([lambda host=host: rendezvous.join(host, 3, ranks=host + 1) for host in (2, 1, 0)])[::-1]
    for board in boards:
        states = board.look()
        assert [(state.host, state.ranks, state.attempt, state.status) for state in states] == [
            *((0, 1, 0, "here"), (1, 2, 0, "here"), (2, 3, 0, "here"))
        ]
        assert {(state.name, state.pid) for state in states} == {(os.uname().nodename, os.getpid())}
        assert all(state.silent_seconds < 5 for state in states)
    assert [board.layout() for board in boards] == [(0, 6), (1, 6), (3, 6)]


def test_a_host_that_does_not_come_is_named(rendezvous: Meeting) -> None:
    calls = [lambda host=host: rendezvous.join(host, 4, timeout=0.5) for host in (0, 2)]
    with pytest.raises(RendezvousError) as caught:
        together(calls)
    assert caught.value.what == (
        "the job cannot begin: host 1 did not come within 0.5 s, host 3 did not come within 0.5 s"
    )


def test_nobody_waits_for_a_host_that_gave_up(rendezvous: Meeting) -> None:
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(rendezvous.join, 0, 3, timeout=60)
        with pytest.raises(RendezvousError, match=r"host 2 did not come within 0\.5 s"):
            rendezvous.join(1, 3, timeout=0.5)
        with pytest.raises(RendezvousError, match="the job cannot begin: host 1 has left"):
            patient.result(timeout=10)


def test_without_host_0(rendezvous: Meeting) -> None:
    with pytest.raises(RendezvousError, match=r"host 0 did not come within 0\.3 s"):
        rendezvous.join(1, 2, timeout=0.3)


@pytest.mark.parametrize(("host", "number"), [(1, 3), (2, 2), (-1, 2)])
def test_numbers_must_agree(host: int, number: int, rendezvous: Meeting) -> None:
    rendezvous.all(2)
    with pytest.raises(RendezvousError, match=f"this is host {host} of {number}, and host 0 speaks of 2 hosts"):
        rendezvous.join(host, number)
    assert statuses(rendezvous.boards[0]) == ["here", "here"]


def test_a_number_is_taken_once(rendezvous: Meeting) -> None:
    rendezvous.all(2)
    with pytest.raises(RendezvousError, match=rf"host number 1 is taken by .+ \(process {os.getpid()}\)"):
        rendezvous.join(1, 2)
    assert statuses(rendezvous.boards[0]) == ["here", "here"]


def test_a_report_reaches_all_and_belongs_to_its_attempt(rendezvous: Meeting) -> None:
    first, second, third = rendezvous.all(3)
    second.report("rank 3 was killed by SIGKILL at step 17")
    for board in (first, second, third):
        until(lambda board=board: statuses(board) == ["here", "failed", "here"])
        assert [state.report for state in board.look()] == [None, "rank 3 was killed by SIGKILL at step 17", None]

    for board in (first, second):
        board.note(attempt=1, ranks=4)
    until(lambda: [state.attempt for state in third.look()] == [1, 1, 0])
    assert statuses(third) == ["here", "failed", "here"]  # who is late still sees why
    third.note(attempt=1, ranks=1)
    for board in (first, second, third):
        until(lambda board=board: [state.attempt for state in board.look()] == [1, 1, 1])
        assert [(state.status, state.report) for state in board.look()] == [("here", None)] * 3
    assert [board.layout() for board in (first, second, third)] == [(0, 9), (4, 9), (8, 9)]

    third.report("again")
    until(lambda: [state.report for state in first.look()] == [None, None, "again"])


def test_who_leaves_is_not_missed(rendezvous: Meeting) -> None:
    first, second = rendezvous.all(2, silence_seconds=0.5)
    second.leave()
    until(lambda: statuses(first) == ["here", "left"])
    time.sleep(1)
    assert statuses(first) == ["here", "left"]


def test_all_read_the_notice_of_host_0(rendezvous: Meeting) -> None:
    first, second, third = rendezvous.all(3)
    assert [board.notice() for board in (first, second, third)] == [None, None, None]
    for text in ("one", "two"):
        first.post(text)
        for board in (first, second, third):
            until(lambda board=board, text=text: board.notice() == text)


def test_a_host_that_is_gone_is_replaced(rendezvous: Meeting) -> None:
    first, second, third = rendezvous.all(3, interval=0.2, silence_seconds=1)
    first.post("the job is under way")
    until(lambda: third.notice() is not None)
    with pytest.raises(RendezvousError, match="host number 2 is taken"):
        rendezvous.join(2, 3)
    old = third.look()[2].entry

    def is_free() -> bool:
        first.free(2)  # does nothing to a host that has spoken since it was last heard, as this one may: once more then
        return [state.host for state in second.look()] == [0, 1]

    until(is_free)
    new = rendezvous.join(2, 3)  # does not wait for anybody
    assert new.notice() == "the job is under way"
    until(lambda: second.look()[-1].entry.id == new.look()[2].entry.id != old.id)
    # The old launcher finds that it has been replaced, and writes nothing more.
    until(lambda: [state.gone for state in third.look()] == [True, True, False])
    third.leave()
    time.sleep(1)
    assert statuses(second) == ["here", "here", "here"]


def test_host_0_leaves_last(rendezvous: Meeting) -> None:
    first, second = rendezvous.all(2)
    leaving = threading.Thread(target=first.leave)
    leaving.start()
    until(lambda: statuses(second) == ["left", "here"])
    assert leaving.is_alive()
    second.leave()
    leaving.join(5)
    assert not leaving.is_alive()
    first.leave()  # a second time does nothing


def test_a_record_with_more_fields_is_read(rendezvous: Meeting) -> None:
    """As a version of tomorrow may write it."""
    first, second = rendezvous.all(2)
    second.leave()
    record = json.loads(rendezvous.store.get("host-1")) | {"left": False, "colour": "green", "ranks": 7}
    rendezvous.store.set("host-1", json.dumps(record))
    until(lambda: first.look()[1].ranks == 7)
    assert statuses(first) == ["here", "here"]


def test_hosts_of_two_versions_name_both(rendezvous: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous.store.set("version", "9.9.9")
    rendezvous.store.set("hosts", "2")
    with pytest.raises(
        RendezvousError, match=rf"host 0 has Weft 9\.9\.9, this host has Weft {re.escape(weft.__version__)}"
    ):
        rendezvous.join(1, 2)


def test_without_the_store_all_others_are_out_of_reach() -> None:
    token = new_token()
    with scratch_folder() as folder, StoreServer(folder / "store") as server, TunnelServer(LOOPBACK, 0, token) as gate:
        gate.open("board", server.path)
        with TunnelClient(LOOPBACK, gate.port, token, "board", folder / "door") as door:
            store, client = SocketStore(server.path), SocketStore(door.path)
            options = {"hosts": 2, "ranks": 1, "interval": INTERVAL}
            first, second = together(
                [
                    lambda: MembershipStore.join(store, host=0, silence_seconds=2, **options),
                    lambda: MembershipStore.join(client, host=1, silence_seconds=60, **options),
                ]
            )
            gate.close()
            until(lambda: statuses(second) == ["unreachable", "here"])  # it need not wait for the silence
            until(lambda: statuses(first) == ["here", "unreachable"])
            second.report("nobody will know")
            second.leave()
            first.leave()


# The launcher of a host, as far as the board goes: prints what it sees, whenever it changes, and takes orders.
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
    server = StoreServer(path)
    gate = TunnelServer(address, 29400, read_token(), silence_seconds=silence)
    gate.open("board", path)
else:
    door = TunnelClient(address, 29400, read_token(), "board", path, silence_seconds=silence)
board = MembershipStore.join(SocketStore(path), host=host, hosts=hosts, ranks=2, interval=0.2, silence_seconds=silence)
orders = queue.Queue()
threading.Thread(target=lambda: [orders.put(line.strip()) for line in sys.stdin], daemon=True).start()
seen = None
while True:
    start = time.monotonic()
    states = {state.host: [state.status, state.report] for state in board.look()}
    assert time.monotonic() - start < 0.5  # whatever the network does
    if states != seen:
        seen = states
        print(json.dumps([time.monotonic(), *states.values()]), flush=True)
    time.sleep(0.05)
    if not orders.empty():
        order = orders.get()
        if order == "leave":
            board.leave()
            break
        board.report(order)
"""
SILENCE_SECONDS = 5.0


class Launcher:
    """A launcher on an emulated host."""

    def __init__(self, host: Host, number: int, total: int, meet: str, token: str):
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "WEFT_TOKEN": token}
        argv = [sys.executable, "-c", LAUNCHER, *map(str, (number, total, meet, SILENCE_SECONDS))]
        self.host, self.pipes = host, {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = host.start(argv, env=environment, text=True, **self.pipes)
        self.lines: list[list[Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def order(self, text: str) -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def sees(self, *statuses: str, seconds: float = 15) -> float:
        """Wait until this is what it sees last; the time at which it did."""
        until(lambda: bool(self.lines) and [status for status, _ in self.lines[-1][1:]] == list(statuses), seconds)
        return self.lines[-1][0]


@pytest.fixture
def launchers() -> Iterator[list[Launcher]]:
    with hosts(3) as made:
        token = new_token()
        started = [Launcher(host, number, 3, made[0].address, token) for number, host in enumerate(made)]
        for launcher in started:
            launcher.sees("here", "here", "here", seconds=60)
        yield started


def test_launchers_that_fail_die_and_leave(launchers: list[Launcher]) -> None:
    first, second, third = launchers
    third.order("rank 5 was killed by SIGKILL at step 17")
    for launcher in launchers:
        launcher.sees("here", "here", "failed")
        assert launcher.lines[-1][3] == ["failed", "rank 5 was killed by SIGKILL at step 17"]
    second.process.kill()
    killed = time.monotonic()
    for launcher in (first, third):
        assert launcher.sees("here", "unreachable", "failed") - killed > SILENCE_SECONDS - 1
    third.order("leave")
    first.sees("here", "unreachable", "left")
    first.order("leave")
    assert [launcher.process.wait(15) for launcher in (first, third)] == [0, 0]
    assert second.process.wait(5) == -signal.SIGKILL


@pytest.mark.sweep
def test_a_link_breaks_for_a_second_and_for_good(launchers: list[Launcher]) -> None:
    first, second, third = launchers
    third.host.unplug()
    time.sleep(1)
    third.host.plug()
    time.sleep(SILENCE_SECONDS + 1)
    assert [len(launcher.lines) for launcher in launchers] == [1, 1, 1]  # nothing happened
    third.host.unplug()
    first.sees("here", "here", "unreachable")
    second.sees("here", "here", "unreachable")
    third.sees("unreachable", "unreachable", "here")
    third.order("it cannot say why")
    third.order("leave")
    first.order("leave")
    second.order("leave")
    assert [launcher.process.wait(30) for launcher in launchers] == [0, 0, 0]


def test_what_is_read_late_was_written_before(rendezvous: Meeting) -> None:
    """A host is lost just after a heartbeat that nobody has read yet: reading it says nothing of how the host is now."""
    late, lost = together(
        [lambda: rendezvous.join(0, 2, interval=0.5), lambda: rendezvous.join(1, 2)],
    )
    until(lambda: late.look()[1].silent_seconds < 0.05)  # it has just looked, and does so again in 0.5 s
    time.sleep(0.2)
    with lost._news:
        lost._ended = True  # as a power failure does: without a word
    lost._thread.join()
    end = time.monotonic()
    until(lambda: late.look()[1].silent_seconds < time.monotonic() - end)  # its last heartbeat has been read
    assert late.look()[1].spoke_seconds >= time.monotonic() - end
