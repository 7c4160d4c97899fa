"""Jobs on emulated hosts whose host 0 is lost: a new host 0 continues them, and no job ever has two."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.test_hosts import HOST_0, LONG, Lab, Launcher, shorten_silence
from tests.lab.hosts import hosts
from weft.launch.job_state import STATE, read_state
from weft.launch.rendezvous import new_token
from weft.training.run_folder import LAUNCHER_LOCK

OPTIONS = ("--nproc-per-node", "1", "--max-restarts", "2")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    shorten_silence(monkeypatch)
    with hosts(3) as emulated:
        yield Lab(emulated, tmp_path)


def start_by_name(lab: Lab) -> tuple[Launcher, Launcher]:
    return lab.start(0, *OPTIONS, endpoint=HOST_0), lab.start(1, *OPTIONS, endpoint=HOST_0)


@pytest.mark.must("fault: Host 0 is lost", case="disk")
@pytest.mark.must("fault: A host cannot be reached", case="disk")
@pytest.mark.slow("hosts start three times, and host 0 is silent until it counts as lost")
@pytest.mark.parametrize("checkpoint", [{"every": 5}, {"memory_every": 1}], ids=["disk", "memory"])
def test_host_0_restarted_with_the_same_command_continues_the_job(checkpoint: dict[str, int], lab: Lab) -> None:
    """The launcher and the ranks of the other host are not lost; losses are those of an undisturbed run."""
    lab.write(train=LONG | {"steps": 30}, checkpoint=checkpoint)
    first, second = lab.start_all(*OPTIONS)
    lab.reach(12, first, saved=checkpoint.get("every", 0))
    first.kill()
    again = lab.start(0, *OPTIONS)
    printed = again.wait_for_exit(0)
    assert "weft: host 0 was lost in attempt 0: attempt 1 starts 2 ranks in 1 s, restart 1 of 2" in printed
    resumed = re.search(r"resuming after step (\d+)", printed)
    assert resumed
    assert int(resumed[1]) >= (5 if "every" in checkpoint else 10)
    printed = second.wait_for_exit(0)
    assert re.search(r"weft: host 0 \(.+\) is unreachable.+\nwaiting 60 s for a new host 0", printed)
    assert "attempt 1 starts" not in printed  # it joins the new host 0 as another host does
    assert lab.losses() == lab.losses_without_a_fault(2)
    assert (lab.out / "report.html").exists()


def test_host_0_moves_to_another_host_and_the_old_one_is_refused(lab: Lab) -> None:
    """The name of host 0 moves to a third host, as that of a pod does. A start of the old host 0 after that is refused."""
    lab.write(train=LONG | {"steps": 250}, checkpoint={"every": 10})
    first, second = start_by_name(lab)
    lab.reach(15, first, saved=10)
    first.kill()
    lab.hosts[0].unplug()
    second.wait_for_output("waiting 60 s for a new host 0 at host-0:29400")
    lab.name_host_0(lab.hosts[2])
    third = lab.start(0, *OPTIONS, host=lab.hosts[2], endpoint=HOST_0)
    third.wait_for_output("this host replaces it, and waits for the other hosts", 120)
    lab.hosts[0].plug()
    late = lab.start(0, *OPTIONS)
    assert f"host 0 of this job is alive: process {third.process.pid} on host" in late.wait_for_exit(2)
    third.wait_for_exit(0)
    second.wait_for_exit(0)
    assert lab.losses() == lab.losses_without_a_fault(2)


def test_host_0_that_was_suspended_ends_after_its_replacement(lab: Lab) -> None:
    """Its file server has given its lock away, and the new host 0 has a higher epoch."""
    lab.write(train=LONG | {"steps": 100}, checkpoint={"every": 10})
    first, second = start_by_name(lab)
    lab.reach(15, first, saved=10)
    ranks = first.ranks()
    for pid in [first.process.pid, *ranks]:
        os.kill(pid, signal.SIGSTOP)
    (lab.out / LAUNCHER_LOCK).unlink()
    second.wait_for_output("waiting 60 s for a new host 0 at host-0:29400")
    lab.name_host_0(lab.hosts[2])
    third = lab.start(0, *OPTIONS, host=lab.hosts[2], endpoint=HOST_0)
    third.wait_for_output("attempt 1 starts 2 ranks", 120)
    for pid in [*ranks, first.process.pid]:
        os.kill(pid, signal.SIGCONT)
    printed = first.wait_for_exit(2)
    assert f"another host 0 has replaced this one: process {third.process.pid} on host" in printed
    third.wait_for_exit(0)
    second.wait_for_exit(0)
    assert lab.losses() == lab.losses_without_a_fault(2)
    state = read_state(lab.out)
    assert state is not None
    assert (state.epoch, state.attempt, state.ended) == (2, 1, True)


@pytest.mark.parametrize("how", ["limit", "signal"])
def test_without_a_new_host_0_the_other_hosts_end(how: str, lab: Lab) -> None:
    lab.write(checkpoint={"every": 10}, guard={"node_rejoin_seconds": 4.0 if how == "limit" else 60.0})
    first, second = lab.start_all(*OPTIONS)
    lab.reach(15, first)
    first.kill()
    if how == "signal":  # of a scheduler that replaces all hosts
        second.wait_for_output("waiting 60 s for a new host 0")
        second.process.send_signal(signal.SIGTERM)
        assert "stopped by SIGTERM" in second.wait_for_exit(128 + signal.SIGTERM)
        return
    began = time.monotonic()
    printed = second.wait_for_exit(1)
    assert 3 < time.monotonic() - began < 40  # it does not begin a last try that would end after the limit
    assert "no new host 0 within 4 s: host 0 could not be reached" in printed
    assert "start all hosts, host 0 too, with --resume auto" in printed
    state = read_state(lab.out)
    assert state is not None
    assert not state.ended


def test_host_0_with_another_token_is_refused(lab: Lab) -> None:
    """The job continues with the right one."""
    lab.write(train=LONG | {"steps": 60}, checkpoint={"every": 10})
    first, second = lab.start_all(*OPTIONS)
    lab.reach(15, first)
    first.kill()
    printed = lab.start(0, *OPTIONS, token=new_token()).wait_for_exit(2)
    assert "is in use by ranks of a run whose launcher has ended: process" in printed
    assert "their job has another token" in printed
    lab.start(0, *OPTIONS).wait_for_exit(0)
    second.wait_for_exit(0)
    assert (lab.out / STATE).exists()
    assert lab.losses() == lab.losses_without_a_fault(2)
