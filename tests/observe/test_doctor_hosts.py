"""`weft doctor` on emulated hosts: a healthy pair, and one planted fault for each check that this machine can make fail."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kill import process_of
from tests.lab.hosts import Host, hosts, limit_rate
from tests.lab.jobs import write_job
from weft.launch.rendezvous import new_token

ROOT = Path(__file__).parents[2]
MOUNT = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'  # a memory file system of this host alone
SECONDS = 280


class Doctor:
    """`weft doctor` on two emulated hosts with a job."""

    def __init__(self, pair: list[Host], folder: Path):
        self.hosts, self.folder = pair, folder
        self.job: Path | None = write_job(folder)

    def run(
        self,
        *options: str,
        prefix: dict[int, Sequence[str]] | None = None,
        own: dict[int, Sequence[str]] | None = None,
        variables: dict[int, dict[str, str]] | None = None,
        mount: str = MOUNT,
    ) -> tuple[dict[str, Any], list[str]]:
        """Run it on both hosts; return the JSON of host 0 and the outputs.

        Args:
            options: options of both hosts.
            prefix: words before the command of a host, such as faketime.
            own: further options of a host.
            variables: further environment variables of a host.
            mount: shell line that prepares the file systems of a host and then becomes the command.
        """
        token, result = new_token(), self.folder / "doctor.json"
        processes = []
        for index, host in enumerate(self.hosts):
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "WEFT_TOKEN": token,
                **(variables or {}).get(index, {}),
            }
            command = [*(prefix or {}).get(index, []), sys.executable, "-m", "weft", "doctor"]
            command += [str(self.job)] if self.job else []
            command += ["--nproc-per-node", "1", "--nnodes", "2", "--node-rank", str(index), *options]
            command += ["--rdzv-endpoint", f"{self.hosts[0].address}:29400", *(own or {}).get(index, [])]
            command += ["--json", str(result)] if index == 0 else []
            shell = ["unshare", "-m", "sh", "-c", mount.replace("INDEX", str(index)), "sh", *command]
            processes.append(
                host.start(shell, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
        assert result.exists(), "\n".join(printed)
        found = json.loads(result.read_text())
        assert [process.returncode for process in processes] == 2 * [found["exit_code"]], "\n".join(printed)
        return found, printed


@pytest.fixture
def doctor(tmp_path: Path) -> Iterator[Doctor]:
    with hosts(2) as pair:
        yield Doctor(pair, tmp_path)


def red(found: dict[str, Any]) -> list[str]:
    """Names and texts of the red findings."""
    return [f"{finding['check']}: {finding['text']}" for finding in found["findings"] if finding["level"] == "red"]


def texts(found: dict[str, Any], check: str, level: str = "red") -> list[str]:
    return [f["text"] for f in found["findings"] if f["check"] == check and f["level"] == level]


@pytest.mark.exclusive("the doctor measures rates, which tests beside it lower")
def test_a_healthy_pair_has_no_red_line(doctor: Doctor) -> None:
    found, printed = doctor.run()
    assert red(found) == []
    assert found["exit_code"] == 0
    green = {finding["check"] for finding in found["findings"] if finding["level"] == "green"}
    assert green >= {"clock", "version", "job", "path", "folder", "limits", "memory"}
    assert len(found["hosts"][0]["ranks"]) == 2
    assert found["hosts"][0]["needs"]["peak_bytes"] > 0
    assert "2 hosts examined: 0 red" in printed[0]
    assert printed[1].strip().splitlines()[-1].startswith("host 1: 0 red")
    assert not list(doctor.folder.glob(".weft-doctor-*"))
    assert not (doctor.folder / "run").exists()


FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


@pytest.mark.skipif(FAKETIME is None, reason="a wrong clock needs libfaketime (package faketime)")
def test_a_wrong_and_drifting_clock_is_named(doctor: Doctor) -> None:
    """The clock of host 1 is 30 s behind and 5 % too fast."""
    wrong = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "-30s x1.05"}
    found, _ = doctor.run("--quick", variables={1: wrong})
    (text,) = texts(found, "clock")
    assert text.startswith("host 1 (")
    assert "behind host 0" in text
    (drift,) = texts(found, "clock drift")
    assert 30_000 < float(drift.split("drifts by ")[1].split()[0]) < 70_000
    assert {finding.partition(":")[0] for finding in red(found)} == {"clock", "clock drift"}


def test_a_path_that_drops_long_packets_is_named_and_ranks_are_not_started(doctor: Doctor) -> None:
    """The switch drops packets of more than 1400 bytes without a message, as one without jumbo frames does."""
    host = doctor.hosts[1]
    subprocess.run(["ip", "-n", host.bridge, "link", "set", host.port, "mtu", "1400"], check=True)
    found, _ = doctor.run()
    named = texts(found, "path MTU")
    assert len(named) == 2  # both directions
    for text in named:
        passes = re.search(r"packets of (\d+) bytes pass, and eth0 sends 1500", text)
        assert 1400 <= int(passes[1]) <= 1404, text  # the kernel allows for the four bytes of a VLAN tag
    assert {finding.partition(":")[0] for finding in red(found)} == {"path MTU"}
    assert "ranks cannot run together" in texts(found, "speed", "skipped")[0]


def test_a_run_folder_that_is_not_shared_is_named(doctor: Doctor) -> None:
    shared = doctor.folder / "shared"
    shared.mkdir()
    own = f'{MOUNT.partition("&&")[0]} && [ INDEX = 0 ] || mount -t tmpfs tmpfs {shared}; exec "$@"'
    found, _ = doctor.run("--quick", "--set", f"out={shared / 'run'}", mount=own)
    (text,) = texts(found, "shared folder")
    assert text.startswith(f"run folder {shared / 'run'} on host 1 (")
    assert len(red(found)) == 1
    assert not list(shared.iterdir())


def test_hosts_that_differ_are_named(doctor: Doctor) -> None:
    """Host 1 has another version of Weft with a changed file, another job, another text, another loss and another setting."""
    changed, code = doctor.folder / "changed", doctor.folder / "code"
    shutil.copytree(ROOT / "src" / "weft", changed / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    with (changed / "weft" / "own_code.py").open("a") as file:
        file.write("# changed\n")
    (changed / "weft_train-9.9.dist-info").mkdir()
    (changed / "weft_train-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: weft-train\nVersion: 9.9\n"
    )
    for name, body in (("0", "return logits.float().sum()"), ("1", "return logits.float().mean()")):
        (code / name).mkdir(parents=True)
        (code / name / "own_loss.py").write_text(f"def loss(logits, targets):\n    {body}\n")
    other = doctor.folder / "other"
    shutil.copytree(doctor.folder / "text", other)
    (other / "7.txt").write_text("stale")
    own = f'{MOUNT.partition("&&")[0]} && [ INDEX = 0 ] || mount --bind {other} {doctor.folder / "text"}; exec "$@"'
    paths = {0: [code / "0", ROOT / "src"], 1: [code / "1", changed]}
    variables = {index: {"PYTHONPATH": os.pathsep.join(map(str, path))} for index, path in paths.items()}
    variables[1]["NCCL_ALGO"] = "Ring"
    found, _ = doctor.run(
        "--set", "train.loss=own_loss:loss", own={1: ["--set", "train.steps=7"]}, variables=variables, mount=own
    )
    assert any(text.startswith("weft: ") and "9.9 on host 1" in text for text in texts(found, "version"))
    assert any(text.startswith("code of Weft: ") for text in texts(found, "version"))
    (text,) = texts(found, "job")
    assert text.startswith("train.steps: ")
    assert "7 on host 1" in text
    assert texts(found, "tokens and inputs")[0].startswith("data: digest ")
    assert texts(found, "code")[0].startswith("train.loss: digest ")
    assert texts(found, "environment", "yellow") == [
        text for text in texts(found, "environment", "yellow") if text.startswith("NCCL_ALGO: ")
    ]
    assert "ranks cannot run together: " in texts(found, "links", "skipped")[0]


def test_a_small_disk_small_shared_memory_and_few_files_are_named(tmp_path: Path) -> None:
    """One host; its run folder has 200 KiB, /dev/shm has 500 KiB, and a process may open 512 files."""
    small = tmp_path / "small"
    small.mkdir()
    job, result = write_job(tmp_path), tmp_path / "doctor.json"
    mounts = f"mount -t tmpfs -o size=200k tmpfs {small} && mount -t tmpfs -o size=500k tmpfs /dev/shm"
    command = ["prlimit", "--nofile=512", sys.executable, "-m", "weft", "doctor", str(job), "--quick"]
    command += ["--set", f"out={small / 'run'}", "--set", "checkpoint.every=1", "--set", "checkpoint.memory_every=1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    shell = ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh", *command, "--json", str(result)]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert [finding.partition(":")[0] for finding in red(found)] == ["space", "open files", "shared memory"]


@pytest.mark.exclusive("the doctor measures rates, which tests beside it lower")
def test_a_slow_rank_is_named(doctor: Doctor) -> None:
    """The rank of host 1 is stopped for most of the time."""
    doctor.job = None
    with throttled(doctor.hosts[1]):
        found, _ = doctor.run()
    named = texts(found, "slow device")
    assert named
    assert all(text.startswith("rank 1 on host 1 (") for text in named)


THROTTLE = """
import os, signal, sys, time
while True:
    for number, seconds in ((signal.SIGSTOP, 0.045), (signal.SIGCONT, 0.005)):
        os.kill(int(sys.argv[1]), number)  # fails when the rank has ended
        time.sleep(seconds)
"""


@contextmanager
def throttled(host: Host) -> Iterator[None]:
    """Stop the rank of a host for nine tenths of the time, by a process that other processes do not delay."""
    ended = threading.Event()

    def throttle() -> None:
        while not (ranks := ranks_on(host)):
            if ended.wait(0.2):
                return
        command = ["nice", "-n", "-25", sys.executable, "-c", THROTTLE, str(ranks[0])]
        subprocess.run(command, stderr=subprocess.DEVNULL)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def ranks_on(host: Host) -> list[int]:
    """Processes of ranks in the namespace of a host."""
    listed = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout
    named = [(int(pid), process_of(int(pid))) for pid in listed.split()]
    return [pid for pid, found in named if found and found[1].startswith("weft-rank")]


def test_a_slow_link_is_named(doctor: Doctor) -> None:
    """Host 1 sends with 30 Mbit/s and receives without a limit."""
    doctor.job = None
    limit_rate(doctor.hosts[1].namespace, "eth0", 30_000_000)
    found, _ = doctor.run()
    (text,) = texts(found, "slow link")
    assert text.startswith("the link from host ")
    names = [name for name, _ in found["hosts"][0]["links"]["hosts"]]
    assert f"from host {names[1]} to host {names[0]} is slow" in text
