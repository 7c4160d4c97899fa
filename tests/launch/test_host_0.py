"""Replacement of a lost host 0: its state in the run folder, the hosts that rejoin, and the refusal of a second host 0."""

import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_coordinator import FAILURE, Cluster, cluster, free_port  # noqa: F401 - fixtures
from tests.launch.test_membership import until
from tests.training.test_run_folder import end, in_a_fork
from weft.errors import JobError, RankFailure, RendezvousError, WeftError
from weft.job import Job
from weft.launch import job_state, launcher
from weft.launch import rendezvous as rendezvous_module
from weft.launch.coordinator import JobCoordinator
from weft.launch.follow import follow_host_0
from weft.launch.host_reports import MAX_RESTARTS, HostZeroLost
from weft.launch.job_state import STATE, JobState, StateFile, read_state
from weft.launch.launcher import launch
from weft.launch.rendezvous import RendezvousConfig, new_token, own_address
from weft.launch.scratch import scratch_folder
from weft.launch.store import StoreServer
from weft.launch.tunnel import LOOPBACK, TunnelServer
from weft.training import run_folder
from weft.training.claim import claim_run
from weft.training.run_folder import join_folders

FAST = {"node_rejoin_seconds": 10.0, "interval": 0.05, "heartbeat_timeout": 1.0}
RENDEZVOUS = RendezvousConfig(0, 2, LOOPBACK, 29400, new_token())


def begun(out: Path, rendezvous: RendezvousConfig = RENDEZVOUS, **changes: Any) -> StateFile:
    """State of a job whose second attempt is under way."""
    out.mkdir(exist_ok=True)
    state = StateFile(out, rendezvous)
    state.write(**{"attempt": 1, "assignment": [(0, 2), (1, 2)], "ranks": [2, 2], "restarts": 1} | changes)
    return state


def test_each_host_0_of_a_run_folder_has_a_higher_epoch(tmp_path: Path) -> None:
    first = begun(tmp_path)
    assert read_state(tmp_path) == replace(first.state, assignment=[[0, 2], [1, 2]])
    second = StateFile(tmp_path, RENDEZVOUS, read_state(tmp_path))
    assert (first.state.epoch, second.state.epoch) == (1, 2)
    assert (second.state.attempt, second.state.restarts, second.state.ranks) == (1, 1, [2, 2])
    assert first.replacement(fresh=True) is None  # the second one has written nothing yet
    second.write()
    other = first.replacement(fresh=True)
    assert other is not None
    assert other.id == second.state.id
    with pytest.raises(RendezvousError, match=r"another host 0 has replaced this one: process \d+ on host .+, epoch 2"):
        first.write(attempt=2)
    assert second.replacement(fresh=True) is None
    assert [path.name for path in tmp_path.iterdir()] == [STATE]
    assert new_token() not in (tmp_path / STATE).read_text()
    assert RENDEZVOUS.token not in (tmp_path / STATE).read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"id": 1}', None])
def test_a_damaged_state_counts_as_none(text: str | None, tmp_path: Path) -> None:
    if text is None:
        begun(tmp_path, attempt="1")
    else:
        (tmp_path / STATE).write_text(text)
    assert read_state(tmp_path) is None


def test_a_state_belongs_to_one_job(tmp_path: Path) -> None:
    state = begun(tmp_path).state
    assert state.is_of(RENDEZVOUS)
    assert not state.is_of(replace(RENDEZVOUS, token=new_token()))
    assert not state.is_of(replace(RENDEZVOUS, hosts=3))
    assert not replace(state, ended=True).is_of(RENDEZVOUS)
    assert not replace(state, attempt=-1).is_of(RENDEZVOUS)


class TwoHosts:
    """Job of two hosts: host 0 by `cluster`, host 1 by `follow_host_0` in a thread."""

    def __init__(self, cluster: Cluster, out: Path, max_restarts: str = "2", **options: Any):  # noqa: F811
        self.cluster, self.out, self.max_restarts = cluster, out, max_restarts
        self.options, self.lines, self.attempts = FAST | options, list[str](), list[int]()
        self.pool = ThreadPoolExecutor(1)
        self.follower = self.pool.submit(self.follow)
        self.host_0 = self.join_as_host_0(None)
        assert self.host_0.start() == (0, 2)
        until(lambda: self.attempts == [0])

    def rendezvous(self, host: int) -> RendezvousConfig:
        return RendezvousConfig(host, 2, LOOPBACK, self.cluster.port, self.cluster.token)

    def follow(self) -> int:
        return follow_host_0(self.rendezvous(1), 2, self.take_part, self.lines.append, **self.options)

    def take_part(self, coordinator: JobCoordinator) -> int:
        """Attempt 0 fails, and attempt 1 succeeds."""
        assert MAX_RESTARTS in coordinator.wait_for_config()
        attempt = coordinator.start()[0]
        self.attempts.append(attempt)
        if attempt == 0:
            coordinator.wait_for_attempt(FAILURE)
        return attempt

    def join_as_host_0(self, lost: JobState | None, **options: Any) -> JobCoordinator:
        state = StateFile(self.out, self.rendezvous(0), lost)
        host_0 = self.cluster.join(0, 2, state=state, **options)
        host_0.publish_config({MAX_RESTARTS: self.max_restarts})
        return host_0

    def lose_host_0(self) -> None:
        """End the connections of host 0 as the end of its process does."""
        self.host_0.membership._stopped = True
        self.host_0._resources.close()
        self.cluster.coordinators.remove(self.host_0)


def test_hosts_rejoin_a_new_host_0(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    job = TwoHosts(cluster, tmp_path)
    job.lose_host_0()
    until(lambda: bool(job.lines))
    new = job.join_as_host_0(read_state(tmp_path))
    assert (new.epoch, new.lost_host_0() is not None) == (2, True)
    assert new.wait_for_hosts(1) == {0: 2, 1: 2}
    assert new.start_attempt(1, {0: 2, 1: 2}, 0.0, 1, 17) == 2
    assert job.follower.result(10) == 1
    assert job.attempts == [0, 1]
    endpoint = f"{LOOPBACK}:{cluster.port}"
    assert job.lines == [f"waiting 10 s for a new host 0 at {endpoint}", f"host 0 is back at {endpoint}"]
    state = read_state(tmp_path)
    assert state is not None
    assert (state.epoch, state.attempt, state.restarts, state.furthest_step, state.ranks) == (2, 1, 1, 17, [2, 2])
    new.close(None)
    assert read_state(tmp_path) == replace(state, ended=True)


def test_hosts_wait_for_a_new_host_0_for_a_limited_time(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    job = TwoHosts(cluster, tmp_path, node_rejoin_seconds=0.6)
    job.lose_host_0()
    with pytest.raises(
        RankFailure, match=r"host 0 .+ is unreachable.+; no new host 0 within 0\.6 s: host 0 could not"
    ) as caught:
        job.follower.result(10)
    assert caught.value.exit_code == 1
    new = job.join_as_host_0(read_state(tmp_path), node_rejoin_seconds=0.2)
    assert new.wait_for_hosts(1) == {0: 2}  # it may continue without host 1
    assert "start all hosts, host 0 too, with --resume auto" in str(caught.value)


def test_without_restarts_the_loss_of_host_0_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    job = TwoHosts(cluster, tmp_path, max_restarts="0")
    job.lose_host_0()
    with pytest.raises(HostZeroLost, match=r"host 0 .+ is unreachable"):
        job.follower.result(10)
    assert job.lines == []


def test_a_host_0_that_was_replaced_is_not_followed(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    """It has the right token and a lower epoch."""
    (tmp_path / "new").mkdir()
    job = TwoHosts(cluster, begun(tmp_path, attempt=0).path.parent, node_rejoin_seconds=1.0)
    assert job.host_0.epoch == 2
    job.lose_host_0()
    job.out = tmp_path / "new"
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(cluster.join, 0, 2, state=StateFile(job.out, job.rendezvous(0)), timeout=1.5)
        with pytest.raises(RankFailure, match="no new host 0 within 1 s: the host 0 at this address has epoch 1"):
            job.follower.result(10)
        with pytest.raises(RendezvousError, match="host 1 did not connect"):
            old.result()


def test_a_replaced_host_0_ends_alone(
    cluster: Cluster,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its other hosts do not end: they wait for the new host 0."""
    monkeypatch.setattr(job_state, "CHECK_SECONDS", 0.1)
    job = TwoHosts(cluster, tmp_path)
    assert job.host_0.leads()
    assert job.host_0.remote_failure() is None
    StateFile(tmp_path, job.rendezvous(0), read_state(tmp_path)).write()
    until(lambda: job.host_0.remote_failure() is not None)
    failure = job.host_0.remote_failure()
    assert failure is not None
    assert "another host 0 has replaced this one" in failure.log_line
    assert (failure.exit_code, job.host_0.leads()) == (2, False)
    with pytest.raises(RendezvousError, match="another host 0 has replaced this one"):
        job.host_0.start_attempt(1, {0: 2, 1: 2}, 0.0)
    closing = threading.Thread(target=job.host_0.close, args=(failure.to_error(),))
    closing.start()
    until(lambda: bool(job.lines))
    closing.join()
    new = job.join_as_host_0(read_state(tmp_path))
    assert new.wait_for_hosts(1) == {0: 2, 1: 2}
    new.start_attempt(1, {0: 2, 1: 2}, 0.0)
    assert job.follower.result(10) == 1


@pytest.mark.parametrize(("max_restarts", "reached_step", "restarts"), [(2, -1, 2), (1, -1, None), (1, 9, 1)])
def test_a_loss_of_host_0_counts_as_a_restart(
    max_restarts: int,
    reached_step: int,
    restarts: int | None,
    free_port: int,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Progress of the lost attempt resets the count."""
    monkeypatch.setattr(launcher, "MAX_DELAY_SECONDS", 0)
    rendezvous = RendezvousConfig(0, 1, LOOPBACK, free_port, new_token())
    earlier = begun(tmp_path, rendezvous, assignment=[(0, 1)], ranks=[1], furthest_step=8)
    state = StateFile(tmp_path, rendezvous, earlier.state, reached_step)
    coordinator = JobCoordinator.join(rendezvous, 1, state=state, **FAST)
    coordinator.publish_config({MAX_RESTARTS: str(max_restarts)})
    command = [sys.executable, "-c", "import os; open('attempt', 'w').write(os.environ['WEFT_ATTEMPT'])"]
    failure: WeftError | None = None
    try:
        launch(
            ["/usr/bin/env", "-C", str(tmp_path), *command],
            ranks=1,
            log_dir=tmp_path / "logs",
            max_restarts=max_restarts,
            coordinator=coordinator,
        )
    except RankFailure as error:
        failure = error
    coordinator.close(failure)
    found = read_state(tmp_path)
    assert found is not None
    assert found.ended
    if restarts is None:
        assert "host 0 was lost in attempt 1" in str(failure)
        return
    assert failure is None
    assert (tmp_path / "attempt").read_text() == "2"
    assert (found.attempt, found.restarts, found.furthest_step) == (2, restarts, max(reached_step, 8))


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Job whose host 0 was lost."""
    monkeypatch.setattr(run_folder, "RANK_EXIT_SECONDS", 0.1)
    monkeypatch.setattr(job_state, "PROBE_SECONDS", 0.2)
    job = Job(out=str(tmp_path / "run"), guard={"node_rejoin_seconds": 0.2})
    begun(Path(job.out))
    return job


@pytest.fixture
def waiting(lost: Job) -> Iterator[Job]:
    """Job whose host 0 was lost, and whose host 1 holds its lock on the run folder."""
    job = lost
    (Path(job.out) / "metrics.jsonl").write_text('{"step": 16}\n{"step": 17}\n{"step"')
    host = in_a_fork(lambda: join_folders(job, Path(job.out)))
    yield job
    end(host)


def test_a_lost_host_0_is_replaced_only_while_its_hosts_wait(waiting: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with claim_run(waiting, RENDEZVOUS, None) as (folders, state):
        assert state.lost == read_state(Path(waiting.out))
        assert (state.state.epoch, state.reached_step) == (2, 17)
        assert folders.in_use
        with pytest.raises(JobError, match=r"is in use by process \d+ on host"), claim_run(waiting, RENDEZVOUS, "auto"):
            pass
    for other, reason in (
        (replace(RENDEZVOUS, token=new_token()), "their job has another token"),
        (replace(RENDEZVOUS, hosts=3), "their job has 2 hosts, this one has 3"),
    ):
        text = f"in use by ranks of a run whose launcher has ended.+{reason}"
        with pytest.raises(JobError, match=text), claim_run(waiting, other, "auto"):
            pass
    begun(Path(waiting.out), ended=True)
    with pytest.raises(JobError, match="their job has ended"), claim_run(waiting, RENDEZVOUS, "auto"):
        pass
    (Path(waiting.out) / STATE).unlink()
    with pytest.raises(JobError, match="has left no state of its job there"), claim_run(waiting, RENDEZVOUS, "auto"):
        pass


def test_all_hosts_started_again_begin_with_new_restarts(lost: Job) -> None:
    with claim_run(lost, RENDEZVOUS, "auto") as (folders, state):
        assert (folders.in_use, state.lost, state.state.epoch, state.state.restarts) == (False, None, 2, 0)


@pytest.mark.parametrize("resume", [None, "auto"])
def test_without_locks_a_resumed_job_replaces_host_0(
    resume: str | None, lost: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_lock_folder", lambda *arguments: (None, False))
    with claim_run(lost, RENDEZVOUS, resume) as (_, state):
        assert (state.lost is not None) == (resume == "auto")


def test_a_host_0_that_answers_is_not_replaced(waiting: Job, free_port: int) -> None:  # noqa: F811
    rendezvous = replace(RENDEZVOUS, port=free_port)
    begun(Path(waiting.out), rendezvous)
    with (
        scratch_folder() as folder,
        StoreServer(folder / "store") as store,
        TunnelServer(LOOPBACK, free_port, rendezvous.token) as server,
    ):
        server.add_store("membership", store.path)
        text = r"host 0 of this job is alive: process \d+ on host .+, at 127"
        with pytest.raises(RendezvousError, match=text), claim_run(waiting, rendezvous, "auto"):
            pass
    with claim_run(waiting, rendezvous, "auto") as (_, state):
        assert state.lost


def test_host_0_waits_until_its_name_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may still name the host 0 that was lost."""
    assert own_address(replace(RENDEZVOUS, address="localhost")) == LOOPBACK
    named = replace(RENDEZVOUS, address="node-0.job")
    monkeypatch.setattr(rendezvous_module, "_interfaces", lambda: {"eth0": "10.0.0.2"})
    answers = ["10.0.0.1", "10.0.0.2"]
    monkeypatch.setattr(socket, "gethostbyname", lambda name: answers.pop(0))
    assert own_address(named) == "10.0.0.2"
    monkeypatch.setattr(rendezvous_module, "NAME_SECONDS", 0.0)
    for address in ("127.0.1.1", "10.0.0.1"):
        monkeypatch.setattr(socket, "gethostbyname", lambda name, address=address: address)
        with pytest.raises(RendezvousError, match=rf"node-0\.job resolves to {address} on host 0"):
            own_address(named)

    def fail(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", fail)
    with pytest.raises(RendezvousError, match=r"host 0 cannot resolve node-0\.job: Name or service not known"):
        own_address(named)
