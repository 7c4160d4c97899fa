"""Job coordinator: rendezvous, failure reports between hosts, restarts, and replacement of lost hosts."""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_membership import together, until
from weft.errors import JobError, RankFailure, RendezvousError, WeftError
from weft.launch import coordinator as coordinator_module
from weft.launch.attempt import FailureRecord, assign_ranks
from weft.launch.coordinator import JobCoordinator
from weft.launch.environment import LOOPBACK_INTERFACE
from weft.launch.log import log
from weft.launch.membership import EMPTY
from weft.launch.newcomers import Newcomers
from weft.launch.rendezvous import RendezvousConfig, new_token, parse_hosts, parse_rendezvous
from weft.launch.tunnel import LOOPBACK, TunnelClient
from weft.launch.watchdog import Timeouts, Watchdog

FAILURE = RankFailure("rank 3 was killed by SIGKILL", rank=3, where="its log", fix="see dmesg")


class Cluster:
    """Coordinators of one job; threads of this process play the role of hosts."""

    def __init__(self, port: int):
        self.port, self.token, self.coordinators = port, new_token(), list[JobCoordinator]()

    def join(self, host: int, hosts: int, encrypt: bool = False, min_hosts: int = 0, **options: Any) -> JobCoordinator:
        rendezvous = RendezvousConfig(
            host, hosts, LOOPBACK, self.port, self.token, encrypt=encrypt, min_hosts=min_hosts
        )
        options = {"node_rejoin_seconds": 10.0, "interval": 0.05, "heartbeat_timeout": 1.0, "timeout": 10.0} | options
        coordinator = JobCoordinator.join(rendezvous, 2, **options)
        self.coordinators.append(coordinator)
        return coordinator

    def join_all(self, hosts: int, **options: Any) -> list[JobCoordinator]:
        return together([lambda host=host: self.join(host, hosts, **options) for host in range(hosts)])

    def start(self, hosts: int, **options: Any) -> list[JobCoordinator]:
        """Coordinators whose first attempt is under way."""
        coordinators = self.join_all(hosts, **options)
        coordinators[0].publish_config({"word": "weft"})
        assert together([coordinator.wait_for_config for coordinator in coordinators[1:]]) == [{"word": "weft"}] * (
            hosts - 1
        )
        assert together([coordinator.start for coordinator in coordinators]) == [(0, 2)] * hosts
        return coordinators


@pytest.fixture
def cluster(free_port: int) -> Iterator[Cluster]:
    cluster = Cluster(free_port)
    yield cluster
    # Host 0 comes last: it waits for the other hosts.
    for coordinator in sorted(cluster.coordinators, key=lambda coordinator: -coordinator.host):
        coordinator.close(None)


@pytest.fixture
def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(look: Callable[[], FailureRecord | None]) -> FailureRecord:
    until(lambda: look() is not None)
    failure = look()
    assert failure is not None
    return failure


def test_ranks_are_numbered_host_by_host(cluster: Cluster) -> None:
    coordinators = cluster.start(3)
    assert [coordinator.world_size() for coordinator in coordinators] == [6, 6, 6]
    assert [coordinators[0].host_of(rank) for rank in (0, 1, 2, 5, 6, None)] == [0, 0, 1, 2, None, None]
    assert [coordinator.interface for coordinator in coordinators] == [LOOPBACK_INTERFACE] * 3
    agents_rendezvous = together([coordinator.attempt_rendezvous for coordinator in coordinators])
    infos = together([rendezvous.next_rendezvous for rendezvous in agents_rendezvous])
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    infos[2].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"


def test_hosts_share_another_store(cluster: Cluster) -> None:
    coordinators = cluster.start(2)
    first, second = together([lambda c=c: c.open_store("facts") for c in coordinators])
    second.set("facts/1", "read")
    assert first.get("facts/1") == b"read"


def test_root_causes_are_separated_from_consequences(cluster: Cluster) -> None:
    coordinators = cluster.start(3)
    coordinators[2].report_failure(
        RankFailure("Connection closed by peer", rank=5), is_cause=False, log_line="a consequence"
    )
    until(lambda: coordinators[0].membership.host_states()[2].status == "failed")
    assert coordinators[0].remote_failure() is None
    assert coordinators[0].fallback_failure() is None  # without a cause, the failure of the first host counts
    coordinators[1].report_failure(FAILURE, is_cause=True, log_line="the cause")
    for coordinator in (coordinators[0], coordinators[2]):
        remote = wait_for(coordinator.remote_failure)
        assert (remote.log_line, str(remote.to_error()), remote.to_error().rank) == ("the cause", str(FAILURE), 3)
    assert coordinators[1].remote_failure() is None
    assert wait_for(coordinators[2].fallback_failure).log_line == "the cause"


def test_no_rank_is_blamed_before_other_hosts_had_time_to_report(cluster: Cluster) -> None:
    coordinators = cluster.start(2, heartbeat_timeout=5.0)
    assert not coordinators[0].reports_are_complete(1.0)
    assert coordinators[0].reports_are_complete(2.5)
    coordinators[1].membership._stopped = True  # its heartbeats stop
    time.sleep(3)
    assert not coordinators[0].reports_are_complete(2.5)


def test_all_hosts_take_part_in_the_attempts_of_host_0(cluster: Cluster) -> None:
    coordinators = cluster.start(3)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(coordinator.wait_for_attempt, FAILURE) for coordinator in coordinators[1:]]
        assert coordinators[0].wait_for_hosts(1) == {0: 2, 1: 2, 2: 2}
        assert coordinators[0].start_attempt(1, {0: 2, 1: 1, 2: 2}, delay_seconds=4.0) == 2
        assert [future.result() for future in waiting] == [(1, 1, 4.0), (1, 2, 4.0)]
        assert [coordinator.host_of(3) for coordinator in coordinators] == [2, 2, 2]

        waiting = [pool.submit(coordinator.wait_for_attempt, FAILURE) for coordinator in coordinators[1:]]
        # Host 1 keeps its reduced number of ranks.
        assert coordinators[0].wait_for_hosts(2) == {0: 2, 1: 1, 2: 2}
        ending = pool.submit(coordinators[0].close, JobError("it is over", fix="none"))
        for future in waiting:
            with pytest.raises(RankFailure, match="it is over") as caught:
                future.result()
            assert (caught.value.exit_code, caught.value.fix) == (2, "none")
        for coordinator in coordinators[1:]:
            coordinator.close(None)
        ending.result()


def test_a_lost_host_is_replaced_or_dropped(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    coordinators = cluster.start(2, node_rejoin_seconds=4.0)
    coordinators[1].membership._stopped = True
    remote = wait_for(coordinators[0].remote_failure)
    assert remote.what.startswith("host 1 (")
    assert "is unreachable: no heartbeat for 1 s; its ranks 2, 3 did not report a crash" in remote.what
    with ThreadPoolExecutor(2) as pool:
        waiting_for_hosts = pool.submit(coordinators[0].wait_for_hosts, 1)
        until(lambda: coordinators[0].membership._texts[1] == EMPTY)
        new = cluster.join(1, 2)
        assert new.wait_for_config() == {"word": "weft"}
        starting = pool.submit(new.start)
        assert waiting_for_hosts.result() == {0: 2, 1: 2}
        coordinators[0].start_attempt(1, {0: 2, 1: 2}, delay_seconds=0.0)
        assert starting.result() == (1, 2)
    assert capsys.readouterr().err == "weft: host 1 may rejoin or be replaced within 4 s: start it again\n"
    new.membership._stopped = True
    wait_for(coordinators[0].remote_failure)
    began = time.monotonic()
    assert coordinators[0].wait_for_hosts(2) == {0: 2}
    assert time.monotonic() - began >= 4


@pytest.mark.must("fault: A host joins a running job, or is lost where enough others are left")
def test_hosts_join_at_a_checkpoint_and_a_lost_one_is_not_waited_for(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two to four hosts, of which three are present, then four, then three, and a newcomer with the number of the lost one."""
    join = partial(cluster.join, hosts=4, min_hosts=2, last_call=1.0)
    first, second = together([lambda: join(0), lambda: join(2)])
    first.publish_config({"word": "weft"})
    assert together([first.start, second.start]) == [(0, 2), (0, 2)]
    steps = {"newest": 5, "fits": 6}
    first.newcomers = Newcomers(lambda: steps["newest"], lambda available: min(available, steps["fits"]))
    with ThreadPoolExecutor(3) as pool:
        third = join(1)
        waiting = pool.submit(third.start)
        until(lambda: first.remote_failure() is None and "host 1" in capsys.readouterr().err)
        assert first.remote_failure() is None  # there is no checkpoint since it joined
        steps["newest"] = 10
        joined = wait_for(first.remote_failure)
        assert re.fullmatch(r"host 1 \(.+\) joins", joined.what)
        assert first.grows
        assert wait_for(second.remote_failure).what == joined.what
        again = pool.submit(second.wait_for_attempt)
        assert first.wait_for_hosts(1) == {0: 2, 1: 2, 2: 2}
        first.start_attempt(1, {0: 2, 1: 2, 2: 2}, delay_seconds=0.0)
        assert (waiting.result(), again.result()[:2], first.grows) == ((1, 2), (1, 2), False)

        fourth = join(3)  # the plan fits no more than six ranks
        waiting = pool.submit(fourth.start)
        steps["newest"] = 15
        until(lambda: first.remote_failure() is None and "if the plan fits more than 6" in capsys.readouterr().err)
        steps["newest"] = 20
        time.sleep(1.5)
        assert first.remote_failure() is None

        second.membership._stopped = True
        lost = wait_for(first.remote_failure)
        assert lost.what.startswith("host 2 (")
        assert not first.grows
        again = pool.submit(third.wait_for_attempt)
        began = time.monotonic()
        until(lambda: fourth.membership.host_states()[1].record.ready_attempt == 2)
        assert first.wait_for_hosts(2) == {0: 2, 1: 2, 3: 2}
        assert time.monotonic() - began < 5  # and not node_rejoin_seconds
        first.start_attempt(2, {0: 2, 1: 2, 3: 2}, delay_seconds=0.0)
        assert (waiting.result(), again.result()[:2]) == ((2, 2), (2, 2))
        assert join(2).membership.host_states()[3].record.attempt == 2  # its number is free again


def test_fewer_hosts_than_the_least_do_not_start(cluster: Cluster) -> None:
    with pytest.raises(RendezvousError, match="1 of at least 2 hosts connected"):
        cluster.join(0, 4, min_hosts=2, timeout=0.2)


@pytest.mark.parametrize(("text", "numbers"), [("4", (0, 4)), ("2:4", (2, 4)), ("4:4", (0, 4)), ("1:2", (1, 2))])
def test_numbers_of_hosts_are_those_of_torchrun(text: str, numbers: tuple[int, int]) -> None:
    assert parse_hosts(text) == numbers


@pytest.mark.parametrize("text", ["0", "3:2", "0:2", "two", "2:", "-1", "1:2:3"])
def test_other_numbers_of_hosts_are_refused(text: str) -> None:
    with pytest.raises(RendezvousError, match=f"--nnodes {text}"):
        parse_hosts(text)


def test_a_host_that_leaves_is_reported_only_if_there_is_no_cause(cluster: Cluster) -> None:
    coordinators = cluster.start(2)
    coordinators[1].close(None)
    assert "host 1 (" in wait_for(coordinators[0].fallback_failure).what
    assert coordinators[0].remote_failure() is None  # its ranks may have exited with code 0
    assert coordinators[0].all_hosts_done()


def test_the_job_ends_on_all_hosts_when_host_0_is_lost(cluster: Cluster) -> None:
    coordinators = cluster.start(2)
    coordinators[0].membership._stopped = True
    remote = wait_for(coordinators[1].remote_failure)
    assert "start all hosts, host 0 too, with --resume auto" in str(remote.to_error())
    with pytest.raises(RankFailure, match=r"host 0 \(.+\) is unreachable"):
        coordinators[1].wait_for_attempt(FAILURE)


def test_a_host_that_ends_before_the_job_starts_is_named(cluster: Cluster) -> None:
    coordinators = cluster.join_all(2)
    coordinators[0].publish_config({"word": "weft"})
    coordinators[1].close(None)
    with pytest.raises(RendezvousError, match=r"host 1 \(.+\) ended before the job started"):
        coordinators[0].start()


def test_a_straggler_is_known_on_all_hosts(cluster: Cluster) -> None:
    coordinators = cluster.start(2)
    coordinators[1].report_straggler("rank 3 has been stalled")
    until(lambda: coordinators[0].remote_straggler() == "rank 3 has been stalled")
    assert coordinators[1].remote_straggler() is None
    coordinators[1].report_straggler(None)
    until(lambda: coordinators[0].remote_straggler() is None)


def test_the_job_is_done_when_all_hosts_are_done(cluster: Cluster) -> None:
    coordinators = cluster.start(2)
    assert not coordinators[0].all_hosts_done()
    coordinators[1].all_hosts_done()
    until(coordinators[0].all_hosts_done)


def test_encrypting_hosts_connect_and_start_an_attempt(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    encrypted: list[bool] = []
    monkeypatch.setattr(
        coordinator_module,
        "TunnelClient",
        lambda *a, **options: encrypted.append(options["encrypt"]) or TunnelClient(*a, **options),
    )
    coordinators = cluster.start(2, encrypt=True)
    agents_rendezvous = together([coordinator.attempt_rendezvous for coordinator in coordinators])
    infos = together([rendezvous.next_rendezvous for rendezvous in agents_rendezvous])
    assert [info.world_size for info in infos] == [2, 2]
    assert encrypted == [True, True]  # to the membership store, and to the store of the attempt


def test_a_host_with_another_encryption_setting_gets_an_error(cluster: Cluster) -> None:
    with ThreadPoolExecutor() as pool:
        host_0 = pool.submit(cluster.join, 0, 2, encrypt=True)
        with pytest.raises(RendezvousError, match=r"cluster\.encrypt = false, host 0 has true") as caught:
            cluster.join(1, 2)
        assert "set cluster.encrypt to the same value on all hosts" in str(caught.value)
        cluster.join(1, 2, encrypt=True)
        host_0.result()


@pytest.mark.parametrize(
    ("total", "blamed", "expected"),
    [
        (6, None, {0: 2, 1: 2, 2: 2}),
        (5, None, {0: 2, 1: 2, 2: 1}),
        (5, 1, {0: 2, 1: 1, 2: 2}),
        (3, 1, {0: 2, 1: 0, 2: 1}),
        (4, 0, {0: 1, 1: 2, 2: 1}),
        (1, 0, {0: 1, 1: 0, 2: 0}),
    ],
)
def test_the_blamed_host_loses_ranks_first(total: int, blamed: int | None, expected: dict[int, int]) -> None:
    assert assign_ranks({0: 2, 1: 2, 2: 2}, total, blamed) == expected


def test_parse_rendezvous_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    parsed = parse_rendezvous(0, 2, "10.0.0.1:29400", file, None)
    assert parsed is not None
    assert parsed.token == token
    for host, hosts, endpoint in ((0, 2, None), (2, 2, "10.0.0.1:29400"), (1, 1, None)):
        with pytest.raises(WeftError, match=f"host {host} of {hosts}"):
            parse_rendezvous(host, hosts, endpoint, file, None)


def test_hosts_of_a_large_job_do_not_all_print_a_failure(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    """Twelve hosts: the one with the failed rank prints it, and host 0, each once."""
    coordinators = cluster.join_all(12, heartbeat_timeout=30.0)
    coordinators[0].start_attempt(0, dict.fromkeys(range(12), 2), 0.0)
    for coordinator in coordinators[1:]:
        coordinator.start()
    watchdogs = [Watchdog(Path(), Path(), Timeouts(), log, coordinator) for coordinator in coordinators]
    coordinators[7].report_failure(FAILURE, True, "rank 15 was killed")
    found = []
    for watchdog, coordinator in zip(watchdogs, coordinators, strict=True):
        if coordinator.host != 7:
            until(lambda watchdog=watchdog: watchdog.coordinator.remote_failure() is not None)
            found.append(watchdog.poll({}))
    assert [str(failure) for failure in found] == [str(FAILURE)] * 11
    assert [failure.is_told for failure in found] == [False, *[True] * 10]
    assert capfd.readouterr().err.count("rank 15 was killed") == 1
