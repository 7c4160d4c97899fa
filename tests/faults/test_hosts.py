"""Jobs of several hosts, whose links break and whose ranks and launchers are killed: every host names the same culprit, and
what goes on has the losses of a run without a fault.

Hosts are emulated: each has a network and a memory file system of its own. The run folder is shared.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kill import processes
from tests.lab.hosts import Host, hosts
from tests.lab.jobs import write_job
from weft.launch.rendezvous import new_token
from weft.launch.tunnel import MAGIC, MAGIC_TLS
from weft.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SILENCE_SECONDS = 15.0  # of the board: as long as that a link may be down
LONG = {"steps": 200, "global_batch_size": 4}  # long enough for a fault to meet it
MOUNT = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'  # a memory file system that other hosts do not see


class Launcher:
    """`weft train` on an emulated host."""

    def __init__(self, host: Host, number: int, meet: str, token: str, job: Path, log: Path, options: Sequence[str]):
        self.host, self.log = host, log
        command = [sys.executable, "-c", "from weft.cli import main; main()", "train", str(job), *options]
        command += ["--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"{meet}:29400"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "WEFT_TOKEN": token}
        with log.open("w") as file:
            self.process = host.start(
                ["unshare", "-m", "sh", "-c", MOUNT, "sh", *command],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, pattern: str, seconds: float = 60) -> float:
        """Wait until it has printed something; the seconds that took."""
        began = time.monotonic()
        until(lambda: bool(re.search(pattern, self.printed())), seconds, self.printed)
        return time.monotonic() - began

    def ranks(self) -> list[int]:
        """Processes of its ranks."""
        return [pid for pid, parent, name in processes() if parent == self.process.pid and name.startswith("weft-rank")]

    def ends(self, code: int, seconds: float = 120) -> str:
        """Wait for its end; what it printed."""
        try:
            assert self.process.wait(seconds) == code, self.printed()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:g} s:\n{self.printed()}") from None
        return self.printed()

    def kill(self) -> None:
        """End it and its ranks at once, as a power failure does."""
        for pid in [self.process.pid, *self.ranks()]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Lab:
    """Two hosts and a job."""

    def __init__(self, made: list[Host], folder: Path):
        self.hosts, self.folder, self.token = made, folder, new_token()
        self.out = folder / "run"
        self.logs = 0

    def write(self, **tables: dict[str, Any]) -> None:
        self.job = write_job(self.folder, **{"train": LONG} | tables)

    def start(self, number: int, *options: str, token: str | None = None) -> Launcher:
        self.logs += 1
        log = self.folder / f"printed-{self.logs}-host-{number}"
        options = options or ("--nproc-per-node", "1")
        return Launcher(self.hosts[number], number, self.hosts[0].address, token or self.token, self.job, log, options)

    def start_all(self, *options: str) -> tuple[Launcher, Launcher]:
        return self.start(0, *options), self.start(1, *options)

    def steps(self) -> int:
        path = self.out / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def reach(self, step: int, launcher: Launcher) -> None:
        """Wait until training has come to a step."""

        def there() -> bool:
            assert launcher.process.poll() is None, launcher.printed()
            return self.steps() >= step

        until(there, 120, launcher.printed)

    def losses(self) -> list[float]:
        return [row.loss for row in read_metrics(self.out / "metrics.jsonl")]

    def losses_without_a_fault(self, ranks: int) -> list[float]:
        """Of the same job with as many ranks on one host, in processes of their own: ranks of the pool have a past."""
        out = self.folder / "reference"
        command = [sys.executable, "-c", "from weft.cli import main; main()", "train", str(self.job)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        subprocess.run(
            [*command, "--nproc-per-node", str(ranks), "--out", str(out)],
            env=environment,
            check=True,
            capture_output=True,
        )
        return [row.loss for row in read_metrics(out / "metrics.jsonl")]

    def step_seconds(self) -> float:
        return statistics.median(row.step_seconds for row in read_metrics(self.out / "metrics.jsonl"))


def until(condition: Callable[[], bool], seconds: float, words: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s:\n{words()}"
        time.sleep(0.05)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with hosts(2) as made:
        yield Lab(made, tmp_path)


def test_a_wrong_token_is_refused(lab: Lab) -> None:
    lab.write()
    right, wrong = lab.start(0), lab.start(1, token=new_token())
    printed = wrong.ends(2)
    assert "the gate of host 0 refused the token of this host" in printed
    assert "give every host the same WEFT_TOKEN or token file" in printed
    assert lab.token not in printed + right.printed()
    assert not (lab.out / "job.toml").exists()  # host 0 waits for a host that knows it


@pytest.mark.sweep
def test_a_rank_killed_on_another_host(lab: Lab) -> None:
    """Host 0 names it before anything else; all start again, and the losses are those of a run without a fault."""
    lab.write(train=LONG | {"steps": 80}, checkpoint={"every": 10})
    first, second = lab.start_all("--nproc-per-node", "1", "--max-restarts", "2")
    lab.reach(15, first)
    (victim,) = second.ranks()
    os.kill(victim, signal.SIGKILL)
    for launcher in (first, second):
        printed = launcher.ends(0)
        said = [line for line in printed.splitlines() if line.startswith("weft: ")]
        assert re.match(r"weft: rank 1 on host 1 \(.+\) was killed by SIGKILL; (step|saving|checking)", said[0]), (
            printed
        )
        assert "attempt 1 starts" in said[1]
        assert len(said) == 2
    assert "going on after step" in first.printed()
    assert lab.losses() == lab.losses_without_a_fault(2)


@pytest.mark.sweep
def test_two_hosts_train_as_one(lab: Lab) -> None:
    lab.write(
        train={"steps": 6, "global_batch_size": 4}, plan={"parallel": {"tp": 2}, "precision": {"param_dtype": "fp32"}}
    )
    first, second = lab.start_all("--nproc-per-node", "2")
    printed = first.ends(0)
    assert "the quick brown" in printed.lower()  # a sample
    assert "tp 2: inside a host\ndp_shard 2: between hosts\n" in printed
    assert "host 1" in second.ends(0)
    assert (lab.out / "report.html").exists()
    assert (lab.out / "export/model.safetensors").exists()
    assert lab.losses() == pytest.approx(lab.losses_without_a_fault(4), rel=1e-6)
    assert {path.name for path in (lab.out / "logs").iterdir()} >= {"rank-1.out", "rank-2.out", "rank-3.err"}


SNIFFER = """
import socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
with open(sys.argv[1], "wb") as file:
    print("ready", flush=True)
    while True:
        file.write(packets.recv(65536))
        file.flush()
"""


@pytest.mark.sweep
@pytest.mark.parametrize("encrypt", [False, True])
def test_launchers_encrypt_what_they_say(encrypt: bool, lab: Lab) -> None:
    """A packet capture on host 1 shows the record that host 0 has of itself, or does not."""
    lab.write(train={"steps": 3, "global_batch_size": 4}, cluster={"encrypt": encrypt})
    captured = lab.folder / "packets"
    sniffer = lab.hosts[1].start([sys.executable, "-c", SNIFFER, str(captured)], stdout=subprocess.PIPE)
    assert sniffer.stdout.readline()
    first, second = lab.start_all("--nproc-per-node", "1")
    printed = [first.ends(0), second.ends(0)]
    sniffer.kill()
    packets = captured.read_bytes()
    assert (MAGIC_TLS if encrypt else MAGIC) in packets
    assert (b'"failed_attempt": -1' in packets) is not encrypt
    for text in printed:
        assert text.count("connections between ranks are not encrypted: no TLS in gloo of this PyTorch") == encrypt


@pytest.mark.sweep
def test_a_link_that_is_down_for_a_second(lab: Lab) -> None:
    lab.write()
    first, second = lab.start_all()
    lab.reach(20, first)
    lab.hosts[1].unplug()
    time.sleep(1)
    steps = lab.steps()
    lab.hosts[1].plug()
    assert steps < LONG["steps"]
    for launcher in (first, second):
        assert "unreachable" not in launcher.ends(0)
    assert lab.losses() == lab.losses_without_a_fault(2)


@pytest.mark.sweep
def test_a_link_that_is_down_for_good(lab: Lab) -> None:
    """Both sides speak of an unreachable host, not of a crash."""
    lab.write(train=LONG | {"steps": 2000})
    first, second = lab.start_all()
    lab.reach(20, first)
    lab.hosts[1].unplug()
    cut = time.monotonic()
    # A step that takes 10 s is late; a host that is silent for 15 s is lost, no sooner, as links break and come back.
    limit = max(3 * lab.step_seconds(), 10) + SILENCE_SECONDS
    for launcher, other, rank in ((first, 1, 1), (second, 0, 0)):
        launcher.says(
            rf"weft: host {other} \(.+\) is unreachable: .+; its rank {rank} did not report a crash",
            limit - (time.monotonic() - cut),
        )
    for launcher in (first, second):
        assert not re.search("was killed|left with exit code|stands still|frame #", launcher.ends(1))
    assert "--resume auto" in second.printed()


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_host_is_replaced(how: str, lab: Lab) -> None:
    """There is no checkpoint on the disk; the newcomer has an empty memory."""
    lab.write(train=LONG | {"steps": 150}, checkpoint={"memory_every": 1})
    first, second = lab.start_all("--nproc-per-node", "1", "--max-restarts", "2")
    lab.reach(15, first)
    if how == "killed":
        second.kill()
    else:
        lab.hosts[1].unplug()
    first.says(r"weft: host 1 may come back, or be replaced, within 60 s")
    assert re.search(r"host 1 \(.+\) is unreachable", first.printed())
    reached = lab.steps()
    if how == "cut off":
        assert "host 0" in second.ends(1)
        lab.hosts[1].plug()
    third = lab.start(1, "--nproc-per-node", "1", "--max-restarts", "2")
    third.ends(0)
    printed = first.ends(0)
    assert f"going on after step {went_on(printed)}, from the memory of 2 hosts" in printed
    assert reached - 2 <= went_on(printed) <= reached + 1
    assert lab.losses() == lab.losses_without_a_fault(2)


@pytest.mark.sweep
def test_without_the_lost_host(lab: Lab) -> None:
    """Fewer ranks go on from the memory of host 0, which holds what host 1 held."""
    lab.write(train=LONG | {"steps": 60}, checkpoint={"memory_every": 1}, guard={"node_rejoin_seconds": 1.0})
    first, second = lab.start_all("--nproc-per-node", "1", "--max-restarts", "2")
    lab.reach(15, first)
    second.kill()
    printed = first.ends(0)
    assert "attempt 1 starts 1 ranks" in printed
    step = went_on(printed)
    assert step >= 14
    expected = lab.losses_without_a_fault(2)
    assert lab.losses()[:step] == expected[:step]
    assert lab.losses() == pytest.approx(expected, rel=1e-5)  # another layout sums in another order


@pytest.mark.sweep
def test_a_rank_that_stands_still_is_named_on_every_host(lab: Lab) -> None:
    lab.write()
    first, second = lab.start_all()
    lab.reach(20, first)
    (victim,) = second.ranks()
    os.kill(victim, signal.SIGSTOP)
    for launcher in (second, first):
        launcher.says(r"weft: rank 1 on host 1 \(.+\) stands still in .+: stopped by a signal", 30)
    os.kill(victim, signal.SIGCONT)
    for launcher in (first, second):
        printed = launcher.ends(0)
        assert printed.count("stands still") == printed.count("goes on after") == 1
    assert lab.losses() == lab.losses_without_a_fault(2)


@pytest.mark.sweep
@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_to_one_host_ends_the_job_cleanly(number: int, lab: Lab) -> None:
    lab.write(train=LONG | {"steps": 100_000}, checkpoint={"every": 100_000})
    both = lab.start_all()
    lab.reach(10, both[0])
    both[number].process.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in both[number].ends(128 + signal.SIGTERM)
    both[1 - number].ends(0)
    steps = len(lab.losses())
    assert (lab.out / f"step-{steps:08d}").is_dir()
    assert (lab.out / "export/model.safetensors").exists()


@pytest.mark.sweep
def test_host_0_is_lost(lab: Lab) -> None:
    """The job ends with it, and goes on when all hosts are started again."""
    lab.write(train=LONG | {"steps": 60}, checkpoint={"every": 10})
    first, second = lab.start_all("--nproc-per-node", "1", "--max-restarts", "2")
    lab.reach(25, first)
    first.kill()
    printed = second.ends(1)
    assert re.search(r"weft: host 0 \(.+\) is unreachable", printed)
    assert "start all hosts again with --resume auto" in printed
    first, second = lab.start_all("--nproc-per-node", "1", "--resume", "auto")
    second.ends(0)
    assert "going on after step 20" in first.ends(0)
    assert lab.losses() == lab.losses_without_a_fault(2)


@pytest.mark.sweep
def test_what_is_refused_on_one_host_ends_the_others(lab: Lab) -> None:
    lab.write(train=LONG, plan={"parallel": {"tp": 3}})
    first, second = lab.start_all()
    for launcher in (first, second):
        assert "2 ranks cannot be divided by dp_replicate 1 x tp 3" in launcher.ends(2)
    lab.write()
    elsewhere = ("--nproc-per-node", "1", "--out", str(lab.folder / "elsewhere"))
    first, second = lab.start(0), lab.start(1, *elsewhere)
    assert "is not the run folder of host 0" in second.ends(2)
    assert re.search(r"host 1 \(.+\) has ended before the job began", first.ends(2))


def went_on(printed: str) -> int:
    found = re.findall(r"going on after step (\d+), from the memory of", printed)
    assert found, printed
    return int(found[-1])
