"""Jobs on two emulated hosts with broken links and killed ranks and launchers: every host names the same cause.

A job that continues has the losses of an undisturbed run. Each emulated host has its own network and memory file system; the
run folder is shared.
"""

import os
import re
import shutil
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
from tests.lab.commands import weft
from tests.lab.hosts import Host, hosts
from tests.lab.jobs import write_job
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.cli import main
from weft.launch.membership import MembershipStore
from weft.launch.rendezvous import new_token
from weft.launch.tunnel import MAGIC, MAGIC_TLS
from weft.training.metrics import read_metrics

SILENCE_SECONDS = 4.0  # heartbeat timeout of the membership instead of 15 s: time in which a link may be down
LONG = {"steps": 200, "global_batch_size": 4}  # long enough for a fault to happen during training
HOST_0 = "host-0"  # name of host 0 on all hosts


class Launcher:
    """`weft train` on an emulated host, in a fork of the test process."""

    def __init__(
        self, host: Host, names: Path, token: str, arguments: Sequence[str], disk: dict[str, Path] | None = None
    ):
        import weft.training.rank  # noqa: F401  # once for all forks

        environment = os.environ | {"WEFT_TOKEN": token}
        command, files = ["weft", "train", *arguments], {"/etc/hosts": names} | (disk or {})
        self.process = host.fork(command, main, env=environment, files=files, merge=True)

    def printed(self) -> str:
        return self.process.output

    def wait_for_output(self, pattern: str, seconds: float = 60) -> float:
        """Wait until its output matches a pattern; return the seconds waited."""
        began = time.monotonic()
        until(lambda: bool(re.search(pattern, self.printed())), seconds, self.printed)
        return time.monotonic() - began

    def ranks(self) -> list[int]:
        """Process ids of its ranks."""
        return [pid for pid, parent, name in processes() if parent == self.process.pid and name.startswith("weft-rank")]

    def wait_for_exit(self, code: int, seconds: float = 120) -> str:
        """Wait until it exits with a code; return its output."""
        try:
            assert self.process.wait(seconds) == code, self.printed()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:g} s:\n{self.printed()}") from None
        return self.printed()

    def kill(self) -> None:
        """Kill it and its ranks at once, like a power failure."""
        for pid in [self.process.pid, *self.ranks()]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Lab:
    """Two hosts or more, and a job on two of them."""

    def __init__(self, emulated: list[Host], folder: Path):
        self.hosts, self.folder, self.token = emulated, folder, new_token()
        self.out, self.names = folder / "run", folder / "hosts"
        self.nnodes = "2"
        self.disk: Path | None = None
        """Folder that is another disk on each host, `disk-N`; None: all hosts share all files."""
        self.name_host_0(emulated[0])

    def name_host_0(self, host: Host) -> None:
        """Let all hosts resolve the name of host 0 to a host."""
        self.names.write_text(f"127.0.0.1 localhost\n{host.address} {HOST_0}\n")

    def write(self, **tables: dict[str, Any]) -> None:
        self.job = write_job(self.folder, **{"train": LONG} | tables)

    def start(
        self, index: int, *options: str, token: str | None = None, host: Host | None = None, endpoint: str | None = None
    ) -> Launcher:
        """Start `weft train` for a host of the job, on the emulated host with that number unless `host` is another one."""
        arguments = [str(self.job), *(options or ("--nproc-per-node", "1"))]
        arguments += ["--nnodes", self.nnodes, "--node-rank", str(index)]
        arguments += ["--rdzv-endpoint", f"{endpoint or self.hosts[0].address}:29400"]
        disk = {str(self.disk): self.folder / f"disk-{index}"} if self.disk else None
        return Launcher(host or self.hosts[index], self.names, token or self.token, arguments, disk)

    def start_all(self, *options: str) -> tuple[Launcher, Launcher]:
        return self.start(0, *options), self.start(1, *options)

    def steps(self) -> int:
        path = self.out / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def reach(self, step: int, launcher: Launcher, saved: int = 0) -> None:
        """Wait until training has reached a step, and the checkpoint of step `saved` or a later one is complete.

        Checkpoints are written in the background: on a busy disk, training is many steps ahead of them.
        """

        def reached() -> bool:
            assert launcher.process.poll() is None, launcher.printed()
            return self.steps() >= step and max(map(step_of, list_checkpoints(self.out)), default=0) >= saved

        until(reached, 120, launcher.printed)

    def losses(self) -> list[float]:
        return [row.loss for row in read_metrics(self.out / "metrics.jsonl")]

    def losses_without_a_fault(self, ranks: int) -> list[float]:
        """Losses of the same job with the same number of ranks on one host."""
        out = self.folder / "reference"
        done = weft("train", self.job, "--nproc-per-node", ranks, "--out", out)
        assert done.returncode == 0, done.stderr
        return [row.loss for row in read_metrics(out / "metrics.jsonl")]

    def step_seconds(self) -> float:
        return statistics.median(row.step_seconds for row in read_metrics(self.out / "metrics.jsonl"))


def until(condition: Callable[[], bool], seconds: float, output: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s:\n{output()}"
        time.sleep(0.02)


def shorten_silence(monkeypatch: pytest.MonkeyPatch, seconds: float = SILENCE_SECONDS) -> None:
    """Let forks of this process take a host for lost after some seconds."""
    monkeypatch.setitem(MembershipStore.join.__kwdefaults__, "heartbeat_timeout", seconds)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    shorten_silence(monkeypatch)
    with hosts(2) as emulated:
        yield Lab(emulated, tmp_path)


def test_a_wrong_token_is_refused(lab: Lab) -> None:
    lab.write()
    right, wrong = lab.start(0), lab.start(1, token=new_token())
    printed = wrong.wait_for_exit(2)
    assert "host 0 refused the token of this host" in printed
    assert "give every host the same WEFT_TOKEN or token file" in printed
    assert lab.token not in printed + right.printed()
    assert not (lab.out / "job.toml").exists()  # host 0 waits for a host with the right token


def test_a_rank_killed_on_another_host_is_named_and_the_job_restarts(lab: Lab) -> None:
    """Host 0 names it first; all ranks restart, and the losses are those of an undisturbed run."""
    lab.write(train=LONG | {"steps": 80}, checkpoint={"every": 10})
    first, second = lab.start_all("--nproc-per-node", "1", "--max-restarts", "2")
    lab.reach(15, first, saved=10)
    (victim,) = second.ranks()
    os.kill(victim, signal.SIGKILL)
    for launcher in (first, second):
        printed = launcher.wait_for_exit(0)
        messages = [
            line for line in printed.splitlines() if re.match("weft: (?!train: )", line)
        ]  # no lines of progress
        assert re.match(r"weft: rank 1 on host 1 \(.+\) was killed by SIGKILL; (step|saving|checking)", messages[0]), (
            printed
        )
        assert "attempt 1 starts" in messages[1]
        assert len(messages) == 2
    assert "resuming after step" in first.printed()
    assert lab.losses() == lab.losses_without_a_fault(2)


def test_two_hosts_train_as_one(lab: Lab) -> None:
    lab.write(
        train={"steps": 6, "global_batch_size": 4}, plan={"parallel": {"tp": 2}, "precision": {"param_dtype": "fp32"}}
    )
    first, second = lab.start_all("--nproc-per-node", "2")
    printed = first.wait_for_exit(0)
    assert "the quick brown" in printed.lower()  # a sample
    assert "tp 2: inside a host\ndp_replicate 2: between hosts\n" in printed
    assert "host 1" in second.wait_for_exit(0)
    assert (lab.out / "report.html").exists()
    assert (lab.out / "export/model.safetensors").exists()
    assert lab.losses() == pytest.approx(lab.losses_without_a_fault(4), rel=1e-6)
    logs = {path.name for path in (lab.out / "logs").iterdir()}  # ranks 1 to 3 wrote nothing
    assert logs == {"times-host-00000.jsonl", "times-host-00001.jsonl"}


SNIFFER = """
import socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
with open(sys.argv[1], "wb") as file:
    print("ready", flush=True)
    while True:
        file.write(packets.recv(65536))
        file.flush()
"""


@pytest.mark.effect("cluster.encrypt", "captured packets of the launchers: no text of theirs with encryption")
@pytest.mark.parametrize("encrypt", [False, True])
def test_encrypt_hides_the_launchers_traffic(encrypt: bool, lab: Lab) -> None:
    """A packet capture on host 1 contains the membership record of host 0 only without encryption."""
    lab.write(train={"steps": 3, "global_batch_size": 4}, cluster={"encrypt": encrypt})
    captured = lab.folder / "packets"
    sniffer = lab.hosts[1].start([sys.executable, "-c", SNIFFER, str(captured)], stdout=subprocess.PIPE)
    assert sniffer.stdout.readline()
    first, second = lab.start_all("--nproc-per-node", "1")
    printed = [first.wait_for_exit(0), second.wait_for_exit(0)]
    sniffer.kill()
    packets = captured.read_bytes()
    assert (MAGIC_TLS if encrypt else MAGIC) in packets
    assert (b'"failed_attempt": -1' in packets) is not encrypt
    for text in printed:
        assert text.count("connections between ranks are not encrypted: no TLS in gloo of this PyTorch") == encrypt


def test_a_link_interrupted_for_a_second_has_no_effect(lab: Lab) -> None:
    lab.write()
    first, second = lab.start_all()
    lab.reach(20, first)
    lab.hosts[1].unplug()
    time.sleep(1)
    steps = lab.steps()
    lab.hosts[1].plug()
    assert steps < LONG["steps"]
    for launcher in (first, second):
        assert "unreachable" not in launcher.wait_for_exit(0)
    assert lab.losses() == lab.losses_without_a_fault(2)


def test_a_broken_link_is_reported_as_an_unreachable_host(lab: Lab) -> None:
    """Both hosts report an unreachable host, not a crash."""
    lab.write(train=LONG | {"steps": 2000})
    first, second = lab.start_all()
    lab.reach(20, first)
    lab.hosts[1].unplug()
    cut = time.monotonic()
    # A step of more than 10 s is late; a host is lost only after SILENCE_SECONDS, as links may recover.
    limit = max(3 * lab.step_seconds(), 10) + SILENCE_SECONDS
    for launcher, other, rank in ((first, 1, 1), (second, 0, 0)):
        launcher.wait_for_output(
            rf"weft: host {other} \(.+\) is unreachable: .+; its rank {rank} did not report a crash",
            limit - (time.monotonic() - cut),
        )
    for launcher in (first, second):
        assert not re.search("was killed|exited with code|been stalled|frame #", launcher.wait_for_exit(1))
    assert "--resume auto" in second.printed()


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_host_is_replaced(how: str, lab: Lab) -> None:
    """There is no checkpoint on disk, and the replacement has an empty memory."""
    lab.write(train=LONG | {"steps": 150}, checkpoint={"memory_every": 1})
    first, second = lab.start_all("--nproc-per-node", "1", "--max-restarts", "2")
    lab.reach(15, first)
    if how == "killed":
        second.kill()
    else:
        lab.hosts[1].unplug()
    first.wait_for_output(r"weft: host 1 may rejoin or be replaced within 60 s")
    assert re.search(r"host 1 \(.+\) is unreachable", first.printed())
    reached = lab.steps()
    if how == "cut off":  # it rejoins by itself
        second.wait_for_output(r"weft: host 0 \(.+\) is unreachable.+\nwaiting 60 s for a new host 0")
        lab.hosts[1].plug()
    third = lab.start(1, "--nproc-per-node", "1", "--max-restarts", "2") if how == "killed" else second
    third.wait_for_exit(0)
    printed = first.wait_for_exit(0)
    assert f"resuming after step {resumed_step(printed)}, from the memory of 2 hosts" in printed
    assert reached - 2 <= resumed_step(printed) <= reached + 1
    assert lab.losses() == lab.losses_without_a_fault(2)


@pytest.mark.effect("guard.node_rejoin_seconds", "restart without a killed host after one second")
def test_the_job_continues_without_a_lost_host(lab: Lab) -> None:
    """Fewer ranks continue from the memory of host 0, which has a copy of host 1's state."""
    lab.write(train=LONG | {"steps": 60}, checkpoint={"memory_every": 1}, guard={"node_rejoin_seconds": 1.0})
    first, second = lab.start_all("--nproc-per-node", "1", "--max-restarts", "2")
    lab.reach(15, first)
    second.kill()
    printed = first.wait_for_exit(0)
    assert "attempt 1 starts 1 ranks" in printed
    step = resumed_step(printed)
    assert step >= 15 - 2  # as above: the state of a step is copied while the next one runs, and confirmed after it
    expected = lab.losses_without_a_fault(2)
    assert lab.losses()[:step] == expected[:step]
    assert lab.losses() == pytest.approx(expected, rel=1e-5)  # another layout sums in another order


GROWING = """
import time
from pathlib import Path
import torch.distributed as dist

class Pace:
    def __init__(self, folder):
        self.folder = folder

    def on_step(self, metrics):
        if dist.get_rank() == 0:
            with (self.folder / "sizes").open("a") as file:
                file.write(f"{dist.get_world_size()} ")
        if not (self.folder / "hurry").exists():  # until the last change of hosts
            time.sleep(0.1)

def pace(job):
    return Pace(Path(job.out).parent)
"""


@pytest.mark.timeout(300)
@pytest.mark.slow("four hosts that join and leave")
def test_hosts_join_and_leave_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, then four, then three: all steps once, and the losses of a run without the changes.

    A fifth launcher with the number of a host that trains is refused, and a host that joins with another token as well.
    """
    shorten_silence(monkeypatch, 8.0)  # four hosts start at once on a few cores
    monkeypatch.setitem(MembershipStore.join.__kwdefaults__, "last_call", 1.0)
    (tmp_path / "own_growth.py").write_text(GROWING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with hosts(4) as emulated:
        lab = Lab(emulated, tmp_path)
        lab.nnodes = "2:4"
        train = {"steps": 120, "global_batch_size": 12, "micro_batch_size": 1}
        lab.write(train=train | {"callbacks": ["own_growth:pace"]}, checkpoint={"every": 5})
        options = ["--nproc-per-node", "1", "--max-restarts", "2"]
        first, second = lab.start_all(*options)
        lab.reach(8, first)
        late = [lab.start(index, *options) for index in (2, 3)]
        twice = lab.start(1, *options, host=emulated[2])
        first.wait_for_output(r"host \d \(.+\) joins?: attempt \d starts 4 ranks in 1 s\n")
        assert "host number 1 is in use" in twice.wait_for_exit(2)
        until(lambda: (tmp_path / "sizes").read_text().count("4") > 8, 60, first.printed)
        late[1].kill()
        (tmp_path / "hurry").touch()
        printed = first.wait_for_exit(0)
        assert "starts 3 ranks in 1 s, restart 1 of 2" in printed
        for launcher in (second, late[0]):
            launcher.wait_for_exit(0)
    sizes = (tmp_path / "sizes").read_text().split()
    assert list(dict.fromkeys(sizes)) in (["2", "4", "3"], ["2", "3", "4"])  # both hosts joined at once, or one by one
    assert sizes[-1] == "3"
    assert [row.step for row in read_metrics(lab.out / "metrics.jsonl")] == list(range(1, train["steps"] + 1))
    lab.write(train=train)
    assert lab.losses() == pytest.approx(lab.losses_without_a_fault(1), rel=1e-5)
    assert not list(tmp_path.glob("run.*"))


def test_a_hung_rank_is_named_on_every_host(lab: Lab) -> None:
    lab.write()
    first, second = lab.start_all()
    lab.reach(20, first)
    (victim,) = second.ranks()
    os.kill(victim, signal.SIGSTOP)
    for launcher in (second, first):
        launcher.wait_for_output(r"weft: rank 1 on host 1 \(.+\) has been stalled in .+: stopped by a signal", 30)
    os.kill(victim, signal.SIGCONT)
    for launcher in (first, second):
        printed = launcher.wait_for_exit(0)
        assert printed.count("has been stalled") == printed.count("continues after") == 1
    assert lab.losses() == lab.losses_without_a_fault(2)


@pytest.mark.parametrize("index", [0, 1])
def test_a_signal_to_one_host_ends_the_job_cleanly(index: int, lab: Lab) -> None:
    lab.write(train=LONG | {"steps": 100_000}, checkpoint={"every": 100_000})
    both = lab.start_all()
    lab.reach(10, both[0])
    both[index].process.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in both[index].wait_for_exit(128 + signal.SIGTERM)
    both[1 - index].wait_for_exit(0)
    steps = len(lab.losses())
    assert (lab.out / f"step-{steps:08d}").is_dir()
    assert (lab.out / "export/model.safetensors").exists()


def test_the_job_resumes_after_the_loss_of_host_0(lab: Lab) -> None:
    """Without restarts the job ends, and continues when all hosts are started again."""
    lab.write(train=LONG | {"steps": 60}, checkpoint={"every": 10})
    first, second = lab.start_all()
    lab.reach(25, first, saved=20)
    first.kill()
    printed = second.wait_for_exit(1)
    assert re.search(r"weft: host 0 \(.+\) is unreachable", printed)
    assert "start all hosts, host 0 too, with --resume auto" in printed
    newest = step_of(list_checkpoints(lab.out)[0])
    assert newest >= 20
    first, second = lab.start_all("--nproc-per-node", "1", "--resume", "auto")
    second.wait_for_exit(0)
    assert f"resuming after step {newest}" in first.wait_for_exit(0)
    assert lab.losses() == lab.losses_without_a_fault(2)


def test_a_refusal_on_one_host_ends_the_job_on_all_hosts(lab: Lab) -> None:
    lab.write(train=LONG, plan={"parallel": {"tp": 3}})
    first, second = lab.start_all()
    for launcher in (first, second):
        assert "2 ranks cannot be divided by dp_replicate 1 x tp 3" in launcher.wait_for_exit(2)
    lab.write()
    other_folder = ("--nproc-per-node", "1", "--out", str(lab.folder / "elsewhere"))
    for launcher in (lab.start(0), lab.start(1, *other_folder)):
        refused = launcher.wait_for_exit(2)
        assert f"the hosts do not share this folder: {lab.folder / 'elsewhere'} on " in refused
        assert "checkpoint.per_host = true" in refused


def test_hosts_without_a_shared_file_system(lab: Lab) -> None:
    """Refused on both hosts before data is prepared; with checkpoint.per_host the run resumes where its files are."""
    lab.disk, steps = lab.folder / "disk", {"steps": 6, "global_batch_size": 4}
    for folder in (lab.disk, lab.folder / "disk-0", lab.folder / "disk-1"):
        folder.mkdir()
    out, data = str(lab.disk / "run"), {"cache": str(lab.disk / "cache")}
    options = ("--nproc-per-node", "1", "--out", out)
    lab.write(train=steps, checkpoint={"every": 2}, data=data)
    for launcher in lab.start_all(*options):
        assert f"the hosts do not share this folder: {out} on " in launcher.wait_for_exit(2)
    assert not list((lab.folder / "disk-0").iterdir())
    lab.write(train=steps, checkpoint={"every": 2, "per_host": True}, data=data)
    for launcher in lab.start_all(*options):
        launcher.wait_for_exit(0)
    runs = [lab.folder / f"disk-{index}/run" for index in range(2)]
    for index, run in enumerate(runs):
        assert [path.name for path in run.glob("step-*/shard-*")] == [f"shard-0000{index}.safetensors"] * 2
        assert (run / "export").exists() is not bool(index)
    losses = [row.loss for row in read_metrics(runs[0] / "metrics.jsonl")]
    for run in runs:
        shutil.rmtree(run / "step-00000006")
    first, second = lab.start_all(*options, "--resume", "auto")
    second.wait_for_exit(0)
    assert "resuming after step 4" in first.wait_for_exit(0)
    assert [row.loss for row in read_metrics(runs[0] / "metrics.jsonl")] == losses
    lab.disk = None
    assert losses == lab.losses_without_a_fault(2)
    lab.disk = lab.folder / "disk"
    shutil.rmtree(runs[1])
    shutil.rmtree(runs[0] / "step-00000004")  # it has received the file of the other host
    for launcher in lab.start_all(*options, "--resume", "auto"):
        printed = launcher.wait_for_exit(2)
        assert "do not have all files of step-00000006 together" in printed


def resumed_step(printed: str) -> int:
    found = re.findall(r"resuming after step (\d+), from the memory of", printed)
    assert found, printed
    return int(found[-1])
