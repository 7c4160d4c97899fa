"""Launcher: ranks are started, monitored and stopped; a failure is reported once, for the rank that failed first."""

import json
import os
import platform
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import chdir, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.lab.commands import python
from tests.lab.script_rank import launch_script, script
from weft.device.accelerator import Accelerator
from weft.device.cpu import Cpu
from weft.errors import DeviceError, RankFailure, Stopped
from weft.launch import agent as agent_module
from weft.launch.environment import LOOPBACK_INTERFACE
from weft.launch.forkserver import ForkServer
from weft.launch.launcher import RANK_ENVIRONMENT, default_ranks, launch, thread_variables
from weft.launch.rank_entry import connect
from weft.launch.watchdog import Timeouts, process_state

# Listening sockets of some processes, as hexadecimal addresses of /proc/net/tcp and tcp6.
LISTENING = """
import os

def listening(pids):
    entries = [entry.path for pid in pids for entry in os.scandir(f"/proc/{pid}/fd")]
    sockets = {os.readlink(path) for path in entries if os.path.lexists(path)}
    rows = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/net/{table}").readlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.02)


def test_environment_arguments_and_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "EXTRA")
    code = f"print(rank, sys.argv[1:], [os.environ[name] for name in {names}]); print('warned', file=sys.stderr)"
    launch(
        [*script(tmp_path, code), "${local_rank} $x"], ranks=2, log_dir=tmp_path / "logs", environment={"EXTRA": "x"}
    )
    out, err = capfd.readouterr()
    assert out == "0 ['${local_rank} $x'] ['0', '2', '0', '1', 'PASSIVE', '1', 'x']\n"
    assert err == "warned\n"
    assert (
        tmp_path / "logs/rank-1.out"
    ).read_text() == "1 ['${local_rank} $x'] ['1', '2', '1', '1', 'PASSIVE', '1', 'x']\n"
    assert (tmp_path / "logs/rank-1.err").read_text() == "warned\n"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank-1.err", "rank-1.out"]
    assert "EXTRA" not in os.environ


@pytest.mark.parametrize("code", [0, 7])
def test_files_of_ranks_that_wrote_nothing_are_removed(code: int, tmp_path: Path) -> None:
    """Of eight ranks, one prints, and one fails after that in the second case."""
    text = f"""
if rank == 3:
    print("done", len(os.listdir("logs")), flush=True)
time.sleep(1.0)
sys.exit({code} * (rank == 5))
"""
    failed = pytest.raises(RankFailure, match="rank 5 exited with code 7") if code else nullcontext()
    with failed as caught, chdir(tmp_path):
        launch(script(tmp_path, text), ranks=8, log_dir=tmp_path / "logs")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-3.out"]
    assert (tmp_path / "logs" / "rank-3.out").read_text() == "done 14\n"
    if caught:
        assert caught.value.where == f"rank 5 on {os.uname().nodename}, which wrote nothing to stderr"


def test_ranks_of_accelerators_share_the_cores_and_find_each_other_through_the_loopback_interface() -> None:
    cores = len(os.sched_getaffinity(0))
    device = Accelerator("npu", SimpleNamespace(accelerator=SimpleNamespace(device_count=lambda: 8)))
    assert thread_variables(device, 1, {}) == {"OMP_NUM_THREADS": str(cores)}
    assert thread_variables(device, 10 * cores, {}) == {"OMP_NUM_THREADS": "1"}
    assert thread_variables(device, 1, {"OMP_NUM_THREADS": "3"}) == {"OMP_NUM_THREADS": "3"}
    assert thread_variables(Cpu(), 1, {}) == {}, "ranks on CPU keep one thread"
    assert {RANK_ENVIRONMENT[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL", "HCCL")} == {LOOPBACK_INTERFACE}


def test_a_failed_rank_is_named_with_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "if rank == 1: print('reason', file=sys.stderr); sys.exit(3)\ntime.sleep(60)"
    with pytest.raises(RankFailure, match="rank 1 exited with code 3") as caught:
        launch(script(tmp_path, code), ranks=2, log_dir=tmp_path)
    assert caught.value.what.splitlines()[1:] == ["  | reason"]
    assert caught.value.where == str(tmp_path / "rank-1.err")
    assert caught.value.exit_code == 1
    name = f"weft: rank 1 on {platform.node()} exited with code 3; log {tmp_path / 'rank-1.err'}\n"
    assert capfd.readouterr() == ("", name)


def test_the_signal_that_killed_a_rank_is_named(tmp_path: Path) -> None:
    code = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL") as caught:
        launch(script(tmp_path, code), ranks=2, log_dir=tmp_path)
    assert "memory" in caught.value.fix


@pytest.mark.parametrize(
    ("code", "text", "exit_code"),
    [
        # rank 0 fails as soon as rank 1 has
        (
            "while rank == 0 and not os.path.exists(REPORT_OF_1): time.sleep(0.001)\nraise ValueError(f'boom {rank}')",
            "ValueError: boom 1",
            1,
        ),
        # rank 0 reports its lost peer before rank 1 is seen to fail
        (
            "if rank == 0: raise RuntimeError('Connection closed by peer')\ntime.sleep(0.03)\nraise ValueError('boom')",
            "ValueError: boom",
            1,
        ),
        ("raise DataError('no text', where='train.txt', rule='text is needed', fix='add some')", None, 2),
    ],
)
def test_the_first_error_is_reported_once(
    code: str,
    text: str | None,
    exit_code: int,
    tmp_path: Path,
    scripts: ForkServer,
    capfd: pytest.CaptureFixture[str],
) -> None:
    body = "\n".join(f"    {line}" for line in code.splitlines())
    wait_for_both = (  # wait until both ranks have finished their imports
        "    open(f'{os.path.dirname(__file__)}/here-{rank}', 'w')\n"
        "    while not os.path.exists(f'{os.path.dirname(__file__)}/here-{1 - rank}'): time.sleep(0.001)\n"
    )
    head = "from weft.launch.rank_entry import rank_main\nfrom weft.errors import DataError\n"
    head += f"REPORT_OF_1 = {str(tmp_path / 'logs' / 'rank-1.error')!r}\ndef main():\n"
    with pytest.raises(RankFailure) as caught:
        launch_script(
            scripts, tmp_path, f"{head}{wait_for_both}{body}\nrank_main(main)", ranks=2, log_dir=tmp_path / "logs"
        )
    error = caught.value
    assert error.exit_code == exit_code
    if text is None:
        assert str(error) == "no text\n  where: train.txt\n  rule:  text is needed\n  fix:   add some"
    else:
        assert error.what.splitlines()[0] == "rank 1 exited with code 1"
        assert error.what.endswith(text)
        assert error.where == str(tmp_path / "logs/rank-1.traceback")
        assert text in Path(error.where).read_text()
    out, err = capfd.readouterr()
    assert out == ""
    if text is None:  # refused input is reported once, by the command
        assert err == ""
    else:
        assert err == f"weft: rank 1 on {platform.node()} exited with code 1 ({text}); log {error.where}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_receive_the_signal_and_end_by_themselves(number: signal.Signals, tmp_path: Path, capfd) -> None:
    code = """
def stop(number, frame):
    time.sleep(0.2)
    open(f"{sys.argv[1]}/ended-{rank}", "w").write(str(number))
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
open(f"{sys.argv[1]}/ready-{rank}", "w")
for _ in range(600):  # a signal just before a sleep is handled after it: short sleeps
    time.sleep(0.1)
"""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)]

    def press() -> None:
        wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(Stopped, match=f"stopped by {number.name}") as caught:
        launch([*script(tmp_path, code), str(tmp_path)], ranks=2, log_dir=tmp_path / "logs")
    thread.join()
    assert caught.value.exit_code == 128 + number
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)] == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("presses", [1, 2])
def test_ranks_that_do_not_end_are_killed_after_a_timeout_or_by_a_second_signal(
    presses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
signal.signal(signal.SIGINT, lambda *_: open(f"{sys.argv[1]}/pressed-{rank}", "w"))
open(f"{sys.argv[1]}/ready-{rank}", "w").write(str(os.getpid()))
while True:
    time.sleep(0.1)
"""
    monkeypatch.setattr(agent_module, "SECONDS_TO_END", 1 if presses == 1 else 1000)

    def press() -> None:
        for name in ("ready", "pressed")[:presses]:
            wait_for(tmp_path / f"{name}-0", tmp_path / f"{name}-1")
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(Stopped, match="stopped by SIGINT"):
        launch([*script(tmp_path, code), str(tmp_path)], ranks=2, log_dir=tmp_path / "logs")
    thread.join()
    assert [process_state(int((tmp_path / f"ready-{rank}").read_text())) for rank in (0, 1)] == ["", ""]
    assert capfd.readouterr() == ("", "weft: stopping now\n" if presses == 2 else "")


HEARTBEATS = """
from weft.launch.rank_entry import rank_main
from weft.launch.heartbeat import Heartbeat
def main():
    heartbeat, stopped = Heartbeat.open(), []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(time.monotonic()))
    heartbeat.phase("step", 7)
    open(f"{sys.argv[1]}/ready-{rank}", "w")
    while not stopped:
        time.sleep(0.05)
    for number in range(20):
        time.sleep(0.1)
        if not %s:
            heartbeat.phase("saving", 7)
    while %s:
        time.sleep(60)
    open(f"{sys.argv[1]}/saved-{rank}", "w")
rank_main(main)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_ranks_have_time_to_save_as_long_as_they_make_progress(
    hangs: bool,
    tmp_path: Path,
    scripts: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(agent_module, "SECONDS_TO_END", 0.2)

    def press() -> None:
        wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
        time.sleep(0.5)  # the launcher looks ten times a second
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(Stopped):
        launch_script(
            scripts,
            tmp_path,
            HEARTBEATS % (hangs, hangs),
            str(tmp_path),
            ranks=2,
            log_dir=tmp_path / "logs",
            timeouts=Timeouts(hang=1.0),
        )
    thread.join()
    assert (tmp_path / "saved-0").exists() != hangs
    assert capfd.readouterr().err == "weft: finishing step 7, press again to stop now\n"


def test_ctrl_c_in_a_terminal_stops_once_and_rank_0_has_the_terminal(tmp_path: Path) -> None:
    """A launcher in a new terminal: rank 0 has the terminal, Ctrl-C reaches it, nothing else is printed."""
    code = """
def stop(number, frame):
    print("finished the step", flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
print("terminal", sys.stdout.isatty(), flush=True)
for _ in range(600):
    time.sleep(0.1)
"""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(f"""
import fcntl, sys, termios
from pathlib import Path
from weft.launch.launcher import launch
from weft.errors import Stopped
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
try:
    launch({script(tmp_path, code)!r}, ranks=2, log_dir=Path({str(tmp_path)!r}))
except Stopped as stopped:
    sys.exit(stopped.exit_code)
""")
    parent_fd, child_fd = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(launcher)], stdin=child_fd, stdout=child_fd, stderr=child_fd, start_new_session=True
    )
    os.close(child_fd)
    seen = b""
    while b"\n" not in seen:
        seen += os.read(parent_fd, 1000)
    wait_for(tmp_path / "rank-1.out")
    while b"terminal" not in (tmp_path / "rank-1.out").read_bytes():
        time.sleep(0.02)
    os.write(parent_fd, b"\x03")
    assert process.wait(30) == 130
    seen += os.read(parent_fd, 1000)
    os.close(parent_fd)
    assert seen.replace(b"^C", b"").split(b"\r\n") == [b"terminal True", b"finished the step", b""]
    assert (tmp_path / "rank-1.out").read_text() == "terminal False\nfinished the step\n"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_connected_ranks_listen_on_loopback_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = f"""{LISTENING}
import json
import torch.distributed as dist
from weft.device.cpu import Cpu
from weft.launch.rank_entry import connect, rank_main

def main():
    ranks = connect(Cpu())
    gathered = [None, None]
    dist.all_gather_object(gathered, (ranks, os.getpid()))
    if ranks[0] == 0:
        pids = [os.getppid(), *(pid for _, pid in gathered)]
        print(json.dumps([[ranks for ranks, _ in gathered], [listening([pid]) for pid in pids]]))
    dist.barrier()
    dist.destroy_process_group()

rank_main(main)
"""
    launch(script(tmp_path, code), ranks=2, log_dir=tmp_path)
    out, err = capfd.readouterr()
    ranks, addresses = json.loads(out)
    assert ranks == [[0, 2, 0], [1, 2, 1]]
    launcher, first, second = addresses
    assert launcher == []  # its store is a Unix socket
    assert first  # gloo
    assert second
    assert {*launcher, *first, *second} <= LOOPBACK
    assert err == ""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_a_single_process_is_a_group_of_size_one(tmp_path: Path) -> None:
    code = f"""{LISTENING}
import torch, torch.distributed as dist
from weft.device.cpu import Cpu
from weft.launch.rank_entry import connect
print(connect(Cpu()))
x = torch.ones(2)
dist.all_reduce(x)
print(x.tolist(), dist.get_world_size(), set(listening([os.getpid()])) <= {LOOPBACK})
"""
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = python(code, env=environment)
    assert done.stdout == "(0, 1, 0)\n[1.0, 1.0] 1 True\n"
    assert done.stderr == ""


def two_accelerators() -> Accelerator:
    return Accelerator("cuda", SimpleNamespace(accelerator=SimpleNamespace(device_count=lambda: 2)))


def test_more_ranks_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "6"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match="rank 6 has local rank 2, but this host has 2 cuda devices") as caught:
        connect(two_accelerators())
    assert caught.value.fix == "start at most 2 ranks on this host"
    assert not torch.distributed.is_initialized()


def test_default_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_ranks(two_accelerators()) == 2
    for cores, ranks in ((1, 1), (2, 2), (64, 2), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert default_ranks(Cpu()) == ranks
