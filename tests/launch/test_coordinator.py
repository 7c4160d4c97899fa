"""Hosts meet, follow host 0, hear of each other's failures, and replace one that is gone."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_membership import together, until
from weft.errors import JobError, RankFailure, RendezvousError, WeftError
from weft.launch import coordinator as team_module
from weft.launch.coordinator import FailureRecord, JobCoordinator, assign_ranks
from weft.launch.launcher import LOOPBACK_INTERFACE
from weft.launch.rendezvous import RendezvousConfig, new_token, parse_rendezvous
from weft.launch.tunnel import LOOPBACK, TunnelClient

FAILURE = RankFailure("rank 3 was killed by SIGKILL", rank=3, where="its log", fix="see dmesg")


class Hall:
    """Where teams meet: threads of this process stand for hosts."""

    def __init__(self, port: int):
        self.port, self.token, self.teams = port, new_token(), list[JobCoordinator]()

    def join(self, host: int, hosts: int, encrypt: bool = False, **options: Any) -> JobCoordinator:
        rendezvous = RendezvousConfig(host, hosts, LOOPBACK, self.port, self.token, encrypt=encrypt)
        options = {"node_rejoin_seconds": 10.0, "interval": 0.05, "silence_seconds": 1.0, "timeout": 10.0} | options
        coordinator = JobCoordinator.join(rendezvous, 2, **options)
        self.teams.append(coordinator)
        return coordinator

    def all(self, hosts: int, **options: Any) -> list[JobCoordinator]:
        return together([lambda host=host: self.join(host, hosts, **options) for host in range(hosts)])

    def begin(self, hosts: int, **options: Any) -> list[JobCoordinator]:
        """Teams whose first attempt is under way."""
        teams = self.all(hosts, **options)
        teams[0].announce({"word": "weft"})
        assert together([coordinator.facts for coordinator in teams[1:]]) == [{"word": "weft"}] * (hosts - 1)
        assert together([coordinator.begin for coordinator in teams]) == [(0, 2)] * hosts
        return teams


@pytest.fixture
def hall(free_port: int) -> Iterator[Hall]:
    hall = Hall(free_port)
    yield hall
    for coordinator in sorted(hall.teams, key=lambda coordinator: -coordinator.host):  # host 0 waits for the others
        coordinator.end(None)


@pytest.fixture
def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


def found(look: Callable[[], FailureRecord | None]) -> FailureRecord:
    until(lambda: look() is not None)
    failure = look()
    assert failure is not None
    return failure


def test_ranks_are_numbered_host_by_host(hall: Hall) -> None:
    teams = hall.begin(3)
    assert [coordinator.all_ranks() for coordinator in teams] == [6, 6, 6]
    assert [teams[0].host_of(rank) for rank in (0, 1, 2, 5, 6, None)] == [0, 0, 1, 2, None, None]
    assert [coordinator.interface for coordinator in teams] == [LOOPBACK_INTERFACE] * 3
    meetings = together([coordinator.meet for coordinator in teams])
    infos = together([rendezvous.next_rendezvous for rendezvous in meetings])
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    infos[2].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"


def test_a_cause_is_told_from_a_consequence(hall: Hall) -> None:
    teams = hall.begin(3)
    teams[2].report(RankFailure("Connection closed by peer", rank=5), own=False, line="a consequence")
    until(lambda: teams[0].board.look()[2].status == "failed")
    assert teams[0].trouble() is None
    assert teams[0].last_words() is None  # host 0 speaks for all, if there is no cause
    teams[1].report(FAILURE, own=True, line="the cause")
    for coordinator in (teams[0], teams[2]):
        trouble = found(coordinator.trouble)
        assert (trouble.line, str(trouble.error()), trouble.error().rank) == ("the cause", str(FAILURE), 3)
    assert teams[1].trouble() is None
    assert found(teams[2].last_words).line == "the cause"


def test_nobody_is_blamed_before_others_could_speak(hall: Hall) -> None:
    teams = hall.begin(2, silence_seconds=5.0)
    assert not teams[0].has_heard(1.0)
    assert teams[0].has_heard(2.5)
    teams[1].board._ended = True  # its heart stops
    time.sleep(3)
    assert not teams[0].has_heard(2.5)


def test_all_follow_host_0(hall: Hall) -> None:
    teams = hall.begin(3)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(coordinator.wait_for_attempt, FAILURE) for coordinator in teams[1:]]
        assert teams[0].wait_for_hosts(1, print) == {0: 2, 1: 2, 2: 2}
        assert teams[0].go_on(1, {0: 2, 1: 1, 2: 2}, seconds=4.0) == 2
        assert [future.result() for future in waiting] == [(1, 1, 4.0), (1, 2, 4.0)]
        assert [coordinator.host_of(3) for coordinator in teams] == [2, 2, 2]

        waiting = [pool.submit(coordinator.wait_for_attempt, FAILURE) for coordinator in teams[1:]]
        assert teams[0].wait_for_hosts(2, print) == {0: 2, 1: 1, 2: 2}  # who was left out stays out
        ending = pool.submit(teams[0].end, JobError("it is over", fix="none"))
        for future in waiting:
            with pytest.raises(RankFailure, match="it is over") as caught:
                future.result()
            assert (caught.value.exit_code, caught.value.fix) == (2, "none")
        for coordinator in teams[1:]:
            coordinator.end(None)
        ending.result()


def test_a_lost_host_is_replaced_or_left_out(hall: Hall) -> None:
    teams = hall.begin(2, node_rejoin_seconds=4.0)
    said: list[str] = []
    teams[1].board._ended = True
    trouble = found(teams[0].trouble)
    assert trouble.what.startswith("host 1 (")
    assert "is unreachable: nothing heard for 1 s; its ranks 2, 3 did not report a crash" in trouble.what
    with ThreadPoolExecutor(2) as pool:
        gathering = pool.submit(teams[0].wait_for_hosts, 1, said.append)
        until(lambda: [state.host for state in teams[0].board.look()] == [0])
        new = hall.join(1, 2)
        assert new.facts() == {"word": "weft"}
        beginning = pool.submit(new.begin)
        assert gathering.result() == {0: 2, 1: 2}
        teams[0].go_on(1, {0: 2, 1: 2}, seconds=0.0)
        assert beginning.result() == (1, 2)
    assert said == ["host 1 may come back, or be replaced, within 4 s: start it anew"]
    new.board._ended = True
    found(teams[0].trouble)
    began = time.monotonic()
    assert teams[0].wait_for_hosts(2, said.append) == {0: 2}
    assert time.monotonic() - began >= 4


def test_a_host_that_leaves(hall: Hall) -> None:
    teams = hall.begin(2)
    teams[1].end(None)
    assert "host 1 (" in found(teams[0].last_words).what
    assert teams[0].trouble() is None  # its ranks may have ended well
    assert teams[0].all_done()


def test_without_host_0_the_others_end(hall: Hall) -> None:
    teams = hall.begin(2)
    teams[0].board._ended = True
    trouble = found(teams[1].trouble)
    assert "start all hosts again with --resume auto" in str(trouble.error())
    with pytest.raises(RankFailure, match=r"host 0 \(.+\) is unreachable"):
        teams[1].wait_for_attempt(FAILURE)


def test_a_host_that_ends_before_the_job_begins(hall: Hall) -> None:
    teams = hall.all(2)
    teams[0].announce({"word": "weft"})
    teams[1].end(None)
    with pytest.raises(RendezvousError, match=r"host 1 \(.+\) has ended before the job began"):
        teams[0].begin()


def test_who_stands_still_is_known_everywhere(hall: Hall) -> None:
    teams = hall.begin(2)
    teams[1].say_standing("rank 3 stands still")
    until(lambda: teams[0].standing() == "rank 3 stands still")
    assert teams[1].standing() is None
    teams[1].say_standing(None)
    until(lambda: teams[0].standing() is None)


def test_nobody_is_done_before_all_are(hall: Hall) -> None:
    teams = hall.begin(2)
    assert not teams[0].all_done()
    teams[1].all_done()
    until(teams[0].all_done)


def test_hosts_that_encrypt_meet_and_begin_an_attempt(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    doors: list[bool] = []
    monkeypatch.setattr(
        team_module,
        "TunnelClient",
        lambda *a, **options: doors.append(options["encrypt"]) or TunnelClient(*a, **options),
    )
    teams = hall.begin(2, encrypt=True)
    meetings = together([coordinator.meet for coordinator in teams])
    assert [info.world_size for info in together([rendezvous.next_rendezvous for rendezvous in meetings])] == [2, 2]
    assert doors == [True, True]  # to the board, and to the store of the attempt


def test_a_host_that_does_not_encrypt_is_refused_by_its_own_launcher(hall: Hall) -> None:
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(hall.join, 0, 2, encrypt=True)
        with pytest.raises(RendezvousError, match=r"cluster\.encrypt = false, host 0 has true") as caught:
            hall.join(1, 2)
        assert "set cluster.encrypt to the same on all hosts" in str(caught.value)
        hall.join(1, 2, encrypt=True)
        leader.result()


@pytest.mark.parametrize(
    ("total", "blamed", "shares"),
    [
        (6, None, {0: 2, 1: 2, 2: 2}),
        (5, None, {0: 2, 1: 2, 2: 1}),
        (5, 1, {0: 2, 1: 1, 2: 2}),
        (3, 1, {0: 2, 1: 0, 2: 1}),
        (4, 0, {0: 1, 1: 2, 2: 1}),
        (1, 0, {0: 1, 1: 0, 2: 0}),
    ],
)
def test_who_gives_up_ranks(total: int, blamed: int | None, shares: dict[int, int]) -> None:
    assert assign_ranks({0: 2, 1: 2, 2: 2}, total, blamed) == shares


def test_a_meeting_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse_rendezvous(0, 1, None, None, None) is None
    token = new_token()
    monkeypatch.setenv("WEFT_TOKEN", token)
    assert parse_rendezvous(1, 2, "10.0.0.1:29400", None, "eth1") == RendezvousConfig(
        1, 2, "10.0.0.1", 29400, token, "eth1"
    )
    assert "WEFT_TOKEN" not in os.environ
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(0o600)
    planned = parse_rendezvous(0, 2, "10.0.0.1:29400", file, None)
    assert planned is not None
    assert planned.token == token
    for host, hosts, meet in ((0, 2, None), (2, 2, "10.0.0.1:29400"), (1, 1, None)):
        with pytest.raises(WeftError, match=f"host {host} of {hosts}"):
            parse_rendezvous(host, hosts, meet, file, None)
