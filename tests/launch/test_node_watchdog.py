"""The watchdog of ranks that another launcher has started: names of culprits, and its own end. The ranks here need no torch."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft.launch.causes import UNKNOWN_SIGNAL
from weft.launch.environment import RAY
from weft.launch.node_member import announce_end, node_folder
from weft.launch.node_watchdog import RankProcess, hold_folder
from weft.launch.oom_kills import resident_bytes

RANK = """
import os, sys, time
from weft.launch.environment import StartedRank
from weft.launch.node_member import join_node
rank, job, world_size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
member = join_node(StartedRank(sys.argv[4], rank, world_size, rank, 2, job=job))
print("joined", flush=True)
code = int(sys.stdin.readline())
member.leave(code, is_failure=0 < code < 128)
time.sleep(60 * (sys.argv[4] == "Ray Train"))
os._exit(code)
"""
MAX_BYTES = 2**26  # of memory of the watchdog


class Node:
    """Two ranks on this host, whose watchdog writes to the stderr of local rank 0."""

    def __init__(self, folder: Path, world_size: int, launcher: str):
        self.job, self.log = secrets.token_hex(8), folder / "stderr"
        self.folder = node_folder(self.job)
        with self.log.open("w") as errors:
            self.ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(rank), self.job, str(world_size), launcher],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                for rank in range(2)
            ]
        for rank in self.ranks:
            assert rank.stdout
            assert rank.stdout.readline() == "joined\n", self.log.read_text()

    def end(self, rank: int, code: int) -> None:
        stdin = self.ranks[rank].stdin
        assert stdin
        stdin.write(f"{code}\n")
        stdin.flush()

    def printed(self) -> str:
        """Output of the watchdog, when it has ended."""
        deadline = time.monotonic() + 20
        while self.folder.exists():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return self.log.read_text()


@contextmanager
def node(folder: Path, world_size: int = 2, launcher: str = "a test") -> Iterator[Node]:
    made = Node(folder, world_size, launcher)
    try:
        yield made
    finally:
        for rank in made.ranks:
            rank.kill()
            rank.wait()


def test_the_watchdog_is_small_and_ends_with_the_ranks(tmp_path: Path) -> None:
    with node(tmp_path) as host:
        (child,) = subprocess.run(["pgrep", "-f", str(host.folder)], capture_output=True, text=True).stdout.split()
        assert resident_bytes(int(child)) < MAX_BYTES
        for rank in range(2):
            host.end(rank, 0)
        assert [rank.wait() for rank in host.ranks] == [0, 0]
        assert host.printed() == ""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_the_other_is_ended(tmp_path: Path, victim: int) -> None:
    with node(tmp_path) as host:
        began = time.monotonic()
        host.ranks[victim].kill()
        assert host.ranks[1 - victim].wait() == -signal.SIGTERM
        assert time.monotonic() - began < 5
        assert f"weft: rank {victim} on {os.uname().nodename} was killed by SIGKILL" in host.printed()
        assert "error: RankFailure" in host.printed()


def test_a_rank_whose_process_ray_keeps_ends_with_its_exit_code(tmp_path: Path) -> None:
    with node(tmp_path, launcher=RAY) as host:
        for rank in range(2):
            host.end(rank, 0)
        assert host.printed() == "", "the watchdog has ended"
        assert [rank.poll() for rank in host.ranks] == [None, None]
    with node(tmp_path, launcher=RAY) as host:
        host.end(1, 3)
        assert host.ranks[0].wait(10) == -signal.SIGKILL, "a worker of Ray handles no signals"
        assert f"weft: rank 1 on {os.uname().nodename} exited with code 3" in host.printed()
        assert host.ranks[1].poll() is None


def test_ranks_that_their_launcher_ends_have_not_failed(tmp_path: Path) -> None:
    with node(tmp_path) as host:
        announce_end(host.folder / "0")
        for rank in host.ranks:
            rank.kill()
        assert host.printed() == ""
    announce_end(host.folder / "0")  # there is no watchdog any more


def test_ranks_that_a_signal_ended_in_order_have_not_failed(tmp_path: Path) -> None:
    with node(tmp_path) as host:
        for rank in range(2):
            host.end(rank, 128 + signal.SIGTERM)
        assert [rank.wait() for rank in host.ranks] == [143, 143]
        assert host.printed() == ""


def test_ranks_that_were_ended_because_of_another_host_are_not_blamed(tmp_path: Path) -> None:
    with node(tmp_path, world_size=4) as host:
        for rank in host.ranks:
            rank.terminate()
        assert f"no rank on {os.uname().nodename} failed first" in host.printed()


def test_exit_codes_of_processes_of_others() -> None:
    """Also of a process that its parent has collected; kernels before Linux 6.15 do not know its signal."""
    for code, expected in (("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9), ("raise SystemExit(3)", 3)):
        child = subprocess.Popen([sys.executable, "-S", "-c", f"input()\n{code}"], stdin=subprocess.PIPE)
        seen = RankProcess(child.pid, is_kept=False)
        assert seen.poll() is None
        child.communicate(b"\n")
        assert seen.poll() in (expected, UNKNOWN_SIGNAL)


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="open to other users"):
        hold_folder(tmp_path / "open")
    lock = hold_folder(tmp_path / "own")
    (tmp_path / "own" / "0").write_text("of a watchdog that was killed")
    lock.release()
    hold_folder(tmp_path / "own").release()
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["lock"]
