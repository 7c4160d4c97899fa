"""Effects of the table cluster, and of the keys of several hosts, on a run of `weft train`."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.lab.jobs import write_job
from tests.lab.runs import observe
from weft.device.energy import open_meters
from weft.errors import RankFailure, RendezvousError
from weft.job import Job
from weft.launch.coordinator import JobCoordinator
from weft.launch.host_reports import MAX_RESTARTS, HostZeroLost
from weft.launch.rendezvous import RendezvousConfig, new_token
from weft.launch.tunnel import LOOPBACK, TunnelServer
from weft.planner import train as train_module
from weft.training import energy, work
from weft.training.metrics import read_history
from weft.training.session import Session
from weft.training.shared_folders import NONCE, write_nonce

WATTS, PRICE, EMISSION = 7.0, 36_000.0, 400.0


def without_counters(session: Session) -> None:
    energy.open_meters = lambda *_: []  # type: ignore[assignment]


def with_counters(session: Session) -> None:
    energy.open_meters = open_meters


@pytest.mark.effect("cluster.watts", "joules of each step, and the source of the energy in attempts.jsonl")
@pytest.mark.effect(
    "cluster.dollars_per_hour", "dollars of each step, beside the joules of the same seconds; printed price"
)
@pytest.mark.effect("cluster.grams_co2_per_kwh", "grams of each step, beside its joules")
def test_steps_have_their_energy_price_and_emission(tmp_path: Path) -> None:
    cluster = {"watts": WATTS, "dollars_per_hour": PRICE, "grams_co2_per_kwh": EMISSION}
    found = observe(Job.load(write_job(tmp_path, cluster=cluster)), 1, fault=without_counters, probe=with_counters)
    for row in found.metrics:
        assert row.joules is not None
        assert row.dollars is not None
        assert row.joules >= WATTS * row.step_seconds / 2
        assert row.dollars / PRICE * 3600 == pytest.approx(row.joules / WATTS)
        assert row.grams_co2 == pytest.approx(row.joules / 3.6e6 * EMISSION)
    attempts, _ = read_history(found.folder)
    assert [attempt.energy for attempt in attempts] == ["7 W per device by cluster.watts, not measured"]
    assert "tokens/J" in found.printed[0]
    assert "$" in found.printed[0]


@pytest.fixture
def port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


def host(index: int, port: int, token: str) -> RendezvousConfig:
    """Host of a job of two hosts."""
    return RendezvousConfig(index, 2, LOOPBACK, port, token)


@pytest.mark.effect("cluster.encrypt", "refusal by a host 0 that encrypts, without the key")
def test_a_host_without_encryption_is_refused(port: int, tmp_path: Path) -> None:
    token = new_token()
    with TunnelServer(LOOPBACK, port, token, encrypt=True), pytest.raises(RendezvousError) as caught:
        train_module.train(Job.load(write_job(tmp_path)), ranks=1, rendezvous=host(1, port, token))
    assert caught.value.what == "this host has cluster.encrypt = false, host 0 has true"


@pytest.mark.effect("cluster.encrypt", "a host that joins a host 0 that encrypts")
@pytest.mark.effect("guard.node_rejoin_seconds", "time for which a host waits for a new host 0")
def test_a_host_with_encryption_joins_and_waits_for_a_new_host_0(port: int, tmp_path: Path) -> None:
    """Host 0 is a thread of this test, and is lost when host 1 starts its ranks."""
    settings = {"cluster": {"encrypt": True}, "guard": {"node_rejoin_seconds": 0.6}}
    job, token, lines, lost_at = Job.load(write_job(tmp_path, **settings)), new_token(), list[str](), list[float]()
    Path(job.out).mkdir()
    nonce = write_nonce({job.out: "out"})

    def lead() -> JobCoordinator:
        rendezvous = replace(host(0, port, token), encrypt=True)
        host_0 = JobCoordinator.join(rendezvous, 1, interval=0.05, timeout=20.0)
        host_0.publish_config({NONCE: nonce, work.SOURCES: "", MAX_RESTARTS: "1"})
        return host_0

    def lose_host_0(argv: list[str], **options: Any) -> None:
        host_0 = leader.result()
        host_0.membership._stopped = True
        host_0._resources.close()  # as the end of its process does
        lost_at.append(time.monotonic())
        raise HostZeroLost("host 0 is lost")

    with (
        ThreadPoolExecutor(1) as pool,
        mock.patch.object(work, "launch", lose_host_0),
        mock.patch.object(work, "early_forkserver", return_value=nullcontext()),
    ):
        leader = pool.submit(lead)
        with pytest.raises(RankFailure, match=r"host 0 is lost; no new host 0 within 0\.6 s"):
            train_module.train(job, ranks=1, rendezvous=host(1, port, token), log=lines.append)
    assert lines[-1] == f"waiting 0.6 s for a new host 0 at {LOOPBACK}:{port}"
    assert 0.1 < time.monotonic() - lost_at[0] < 30
