"""Forkserver: ranks are children of the launcher with the given arguments, environment and files, and end when they should."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.commands import python
from weft.errors import RankFailure, Stopped
from weft.launch.forkserver import ForkServer
from weft.launch.launcher import launch
from weft.launch.rounds import ERROR_VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs child subreapers, a feature of Linux")

MODULE = """
import json, os, signal, sys, threading, time

loaded_in = os.getpid()

def main():
    seen = {"arguments": sys.argv[1:], "word": os.environ["WORD"], "group": os.getpgrp()}
    seen |= {"loaded here": loaded_in == os.getpid(), "threads": threading.active_count(), "pid": os.getpid()}
    print(json.dumps(seen))
    print("an error", file=sys.stderr)
    what = sys.argv[1]
    if what == "sleep":
        sys.stdout.flush()
        time.sleep(60)
    if what == "fail":
        raise ValueError("boom")
    sys.exit(int(what))
"""


@pytest.fixture(scope="module")
def forkserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "small_rank.py").write_text(MODULE)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with ForkServer("small_rank", {**os.environ, "PYTHONPATH": path}) as made:
        yield made


def start(
    forkserver: ForkServer, folder: Path, what: str, rank: int = 3
) -> tuple["subprocess.Popen[bytes]", Path, Path]:
    out, err = folder / "out", folder / "err"
    variables = {"WORD": "given", "RANK": str(rank), ERROR_VARIABLE: str(folder / "error")}
    process = forkserver.start([what], variables, str(out), str(err))
    return process, out, err  # type: ignore[return-value]


def test_a_rank_gets_its_arguments_environment_and_files(forkserver: ForkServer, tmp_path: Path) -> None:
    process, out, err = start(forkserver, tmp_path, "7")
    assert process.poll() is None or process.poll() == 7
    assert process.wait(20) == 7
    assert process.poll() == process.returncode == 7
    seen = json.loads(out.read_text())
    assert (seen["arguments"], seen["word"], seen["threads"]) == (["7"], "given", 1)
    assert seen["pid"] == seen["group"] == process.pid
    assert not seen["loaded here"]
    assert err.read_text() == "an error\n"


FORKING = """
import json, os, subprocess, sys, threading

sys.path.insert(0, "")
from weft.launch.forkserver import ForkedProcess, ForkServer

if sys.argv[1] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
os.environ["WORD"] = "the launcher's"
rank = {"WORD": "given", "RANK": "3", "OMP_NUM_THREADS": "1"}
with ForkServer("small_rank", dict(os.environ), fork=True) as forkserver:
    print(isinstance(forkserver.process, ForkedProcess), os.getpid(), forkserver.process.pid)
    forkserver.start(["0"], rank, "out", "err").wait(60)
    forkserver.process.kill()
    forkserver.process.wait()
    print(forkserver.start(["7"], rank, "again", "err").wait(60), isinstance(forkserver.process, subprocess.Popen))
"""


@pytest.mark.parametrize("threads", ["one", "threads"])
def test_the_forkserver_is_a_fork_of_a_launcher_with_one_thread(tmp_path: Path, threads: str) -> None:
    """If the launcher has more threads, or after the forkserver was killed, the forkserver is a new process."""
    (tmp_path / "small_rank.py").write_text(MODULE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = python(FORKING, threads, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("True" if threads == "one" else "False")
    assert lines[1] == "7 True"
    seen = json.loads((tmp_path / "out").read_text())
    assert (seen["arguments"], seen["word"], seen["threads"]) == (["0"], "given", 1)
    assert not Path(f"/proc/{lines[0].split()[2]}").exists()


INTERRUPTED = """
import os, signal

from weft.launch.forkserver import ForkServer

def interrupt():  # what Python runs in the launcher at the end of a fork; an exception in it is ignored
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(1000))

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores it
os.register_at_fork(after_in_parent=interrupt)
try:
    with ForkServer("small_rank", dict(os.environ), fork=True):
        print("lost")
except KeyboardInterrupt:
    print("stopped")
"""


def test_a_signal_during_the_fork_is_not_lost() -> None:
    done = python(INTERRUPTED, timeout=60)
    assert done.stdout == "stopped\n", done.stderr


def test_a_rank_can_be_killed_and_waited_for_and_has_a_process_name(forkserver: ForkServer, tmp_path: Path) -> None:
    process, out, _ = start(forkserver, tmp_path, "sleep")
    deadline = time.monotonic() + 20
    while not out.exists() or not out.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.poll() is None
    assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
    assert Path(f"/proc/{process.pid}/comm").read_text() == "weft-rank-3\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(5) == -signal.SIGKILL


def test_ranks_after_the_first_start_at_once(forkserver: ForkServer, tmp_path: Path) -> None:
    start(forkserver, tmp_path, "0")[0].wait(60)
    begin = time.monotonic()
    processes = [start(forkserver, tmp_path, "0", rank)[0] for rank in range(8)]
    assert [process.wait(20) for process in processes] == [0] * 8
    assert time.monotonic() - begin < 10  # an interpreter with torch takes seconds each


def test_a_module_that_cannot_be_imported_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        ForkServer("no_such_module_here", dict(os.environ)) as forkserver,
        pytest.raises(RankFailure, match="the forkserver of no_such_module_here exited with code 1"),
    ):
        start(forkserver, tmp_path, "0")
    assert "No module named 'no_such_module_here'" in capfd.readouterr().err


@pytest.mark.must("fault: The fork server is killed")
def test_a_killed_forkserver_is_restarted(forkserver: ForkServer, tmp_path: Path) -> None:
    assert start(forkserver, tmp_path, "7")[0].wait(20) == 7
    before = forkserver.process
    assert before is not None
    before.kill()
    before.wait()
    assert start(forkserver, tmp_path, "7")[0].wait(60) == 7
    assert forkserver.process is not before


def test_no_rank_starts_if_the_forkserver_is_killed_during_a_request(tmp_path: Path) -> None:
    (tmp_path / "slow_rank.py").write_text(SLOW_MODULE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with ForkServer("slow_rank", {**os.environ, "PYTHONPATH": path}) as forkserver:
        assert forkserver.process is not None
        threading.Timer(1.0, forkserver.process.kill).start()
        with pytest.raises(RankFailure, match="the forkserver of slow_rank was killed by SIGKILL"):
            start(forkserver, tmp_path, "0")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("answered", [False, True])
def test_a_connection_that_closes_early_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], answered: bool
) -> None:
    """A launcher that was interrupted has read no answer, or none yet."""
    (tmp_path / "small_rank.py").write_text(MODULE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with ForkServer("small_rank", {**os.environ, "PYTHONPATH": path}) as forkserver:
        assert forkserver.process is not None
        assert forkserver.connection is not None
        start_read, start_write = os.pipe()
        socket.send_fds(forkserver.connection, [b"{}"], [start_read])
        if answered:
            select.select([forkserver.connection], [], [], 60)
        forkserver.connection.close()
        assert forkserver.process.wait(60) == 0
        os.close(start_read)
        os.close(start_write)
    assert capfd.readouterr().err == ""


def test_the_forkserver_ends_with_its_launcher(tmp_path: Path) -> None:
    code = """
        import os
        from weft.launch.forkserver import ForkServer
        forkserver = ForkServer("json", dict(os.environ)).__enter__()
        print(forkserver.process.pid, flush=True)
        os._exit(1)
    """
    done = python(textwrap.dedent(code))
    path, deadline = Path(f"/proc/{done.stdout.strip()}"), time.monotonic() + 30
    while path.exists() and "Z" not in (path / "stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def launch_here(tmp_path: Path, what: str, **settings: int) -> None:
    (tmp_path / "small_rank.py").write_text(MODULE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path, "WORD": "given"}
    command = [sys.executable, "-m", "small_rank", what]
    launch(command, ranks=2, log_dir=tmp_path / "logs", environment=environment, use_forkserver=True, **settings)


def test_launch_with_a_forkserver(tmp_path: Path) -> None:
    launch_here(tmp_path, "0")
    assert '"word": "given"' in (tmp_path / "logs" / "rank-1.out").read_text()


def test_errors_are_reported_and_attempts_share_a_forkserver(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="ValueError: boom") as caught:
        launch_here(tmp_path, "fail", max_restarts=1)
    assert caught.value.exit_code == 1
    assert (tmp_path / "logs" / "attempt-1" / "rank-1.traceback").exists()


SLOW_MODULE = """
import os, pathlib, time

folder = pathlib.Path(__file__).parent
(folder / "importing").touch()
time.sleep(1.5)

def main():
    (folder / "started").touch()
"""


def test_no_rank_starts_after_a_signal_during_the_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_rank.py").write_text(SLOW_MODULE)

    def press() -> None:
        while not (tmp_path / "importing").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    with pytest.raises(Stopped):
        launch(
            [sys.executable, "-m", "slow_rank"],
            ranks=2,
            log_dir=tmp_path / "logs",
            environment=environment,
            use_forkserver=True,
        )
    time.sleep(2)  # longer than the import
    assert not (tmp_path / "started").exists()
