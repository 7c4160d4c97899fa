"""Watchdog and restarts: the rank that caused a failure is named first and at once; hung jobs end; failed jobs restart."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.script_rank import launch_script, script
from tests.launch.test_launcher import wait_for
from weft.errors import RankFailure, Stopped
from weft.group_progress import GroupProgress
from weft.launch import agent
from weft.launch import launcher as launcher_module
from weft.launch.forkserver import ForkServer
from weft.launch.launcher import launch
from weft.launch.rank_status import RankStatus
from weft.launch.straggler import RankTrack, find_behind, find_straggler
from weft.launch.watchdog import Timeouts, process_state

LOOP = """
import torch, torch.distributed as dist
from weft.device.cpu import Cpu
from weft.launch.rank_entry import connect, rank_main
from weft.launch.heartbeat import Heartbeat
from weft.backends.hierarchical import register_backend
here, shared = os.path.dirname(__file__), {shared}
attempt = int(os.environ["WEFT_ATTEMPT"])

def note(name, value):
    open(f"{{here}}/{{name}}.draft-{{rank}}", "w").write(str(value))
    os.rename(f"{{here}}/{{name}}.draft-{{rank}}", f"{{here}}/{{name}}")

def fault(step):
    note("begin", time.monotonic())
    {fault}

def main():
    heartbeat = Heartbeat.open()
    connect(Cpu())
    note(f"pid-{{rank}}", os.getpid())
    note("timeout", dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    group = dist.new_group(backend=register_backend()) if shared else None
    for step in range(8):
        heartbeat.phase("step", step)
        dist.all_reduce(torch.ones(16), group=group)
        if rank == 1 and step == 5:
            fault(step)
        dist.all_reduce(torch.ones(8), group=group)
        heartbeat.phase("evaluating", step)
    heartbeat.phase("exporting")

rank_main(main)
"""


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """Lines that the launcher logs, with their times; they are printed as well."""
    lines: list[tuple[float, str]] = []
    log = launcher_module.log

    def stamp(line: str) -> None:
        log(line)
        lines.append((time.monotonic(), line))

    monkeypatch.setattr(launcher_module, "log", stamp)
    return lines


Loop = Callable[..., None]


@pytest.fixture
def loop(scripts: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """Function that runs two ranks; rank 1 has the fault in step 5 and records its time."""
    monkeypatch.setattr(agent, "SECONDS_TO_END_AFTER_FAILURE", 1)  # a stopped rank uses all of it

    def run(
        folder: Path,
        fault: str,
        *,
        shared: bool = True,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - it is frozen
        **options: Any,
    ) -> None:
        code, log_dir = LOOP.format(fault=fault, shared=shared), folder / "logs"
        launch_script(scripts, folder, code, ranks=2, log_dir=log_dir, timeouts=timeouts, **options)

    return run


def seconds_until(line: tuple[float, str], folder: Path) -> float:
    """Seconds from the beginning of the fault to a line."""
    return line[0] - float((folder / "begin").read_text())


def assert_ended(folder: Path) -> None:
    for rank in (0, 1):
        assert process_state(int((folder / f"pid-{rank}").read_text())) == ""


# Dead ranks


@pytest.mark.exclusive("a rank is named within a second")
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize(
    ("fault", "what", "log"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", ""),
        ("os.abort()", "was killed by SIGABRT", "err"),
        ("sys.exit(3)", "exited with code 3", ""),
        ("os._exit(0)", "exited with code 0 while other ranks were still running", ""),
        ("raise ValueError('boom')", "exited with code 1 (ValueError: boom)", "traceback"),
    ],
)
def test_the_rank_that_died_is_named_first_and_within_a_second(
    fault: str,
    what: str,
    log: str,
    shared: bool,
    tmp_path: Path,
    loop: Loop,
    log_lines: list[tuple[float, str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    begin = time.monotonic()
    if shared and "_exit(0)" in fault:
        pytest.skip("other ranks notice it only after a timeout: see the tests of stalled ranks")
    with pytest.raises(RankFailure, match=re.escape(f"rank 1 {what.partition(' (')[0]}")) as caught:
        loop(tmp_path, fault, shared=shared)
    first = capfd.readouterr().err.splitlines()[0]
    assert first == f"weft: {log_lines[0][1]}"
    assert first.startswith(f"weft: rank 1 on {os.uname().nodename} {what}; step 5")
    reference = f"; log {tmp_path / 'logs' / f'rank-1.{log}'}"
    assert first.endswith(reference) if log else "; log" not in first  # it wrote nothing
    assert (", after all_reduce of 64 bytes of torch.float32 in group" in first) == shared
    assert seconds_until(log_lines[0], tmp_path) < 1
    assert time.monotonic() - begin < 60
    assert len(log_lines) == 1
    if "boom" in fault:
        assert "ValueError: boom" in caught.value.what
    assert_ended(tmp_path)


def test_the_collective_of_a_killed_rank_is_named(
    tmp_path: Path, loop: Loop, log_lines: list[tuple[float, str]]
) -> None:
    """Another process kills the rank, as the kernel does when memory runs out; the other ranks wait for the rank."""

    def kill() -> None:
        wait_for(tmp_path / "begin")
        time.sleep(0.5)
        os.kill(int((tmp_path / "pid-0").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(RankFailure, match="rank 0 was killed by SIGKILL"):
        loop(tmp_path, "time.sleep(60)")
    thread.join()
    assert "; step 5, inside all_reduce of 32 bytes of torch.float32 in group" in log_lines[0][1]
    assert "(collective 12)" in log_lines[0][1]
    assert_ended(tmp_path)


# Stalled ranks


def stop_rank_1(folder: Path, seconds: float) -> threading.Thread:
    """Start a thread that continues rank 1 `seconds` after the rank has stopped itself."""

    def work() -> None:
        wait_for(folder / "begin")
        pid = int((folder / "pid-1").read_text())
        while process_state(pid) != "T":
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


def test_a_short_stop_is_not_reported(tmp_path: Path, loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    thread = stop_rank_1(tmp_path, 1.0)
    loop(tmp_path, STOP, timeouts=Timeouts(hang=2000.0))
    thread.join()
    assert float((tmp_path / "timeout").read_text()) > 2000  # timeout of the process group: the watchdog reports first
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_stops_and_continues_is_reported_twice(
    tmp_path: Path, loop: Loop, log_lines: list[tuple[float, str]]
) -> None:
    thread = stop_rank_1(tmp_path, 2.0)
    loop(tmp_path, STOP, timeouts=Timeouts(stopped=0.5, slow_step=1.0))
    thread.join()
    (named, continues) = (line for _, line in log_lines)
    assert f"rank 1 on {os.uname().nodename} has been stalled in step 5 for " in named
    assert f"stopped by a signal at {tmp_path / 'rank.py'}:" in named
    assert ", while rank 0 waits in all_reduce of 32 bytes of torch.float32 in group" in named
    assert continues.startswith("rank 1 continues after 2 s")


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(True, id="shared memory", marks=pytest.mark.must("fault: A rank is stopped, or hangs")),
        pytest.param(False, id="gloo"),
    ],
)
def test_a_stopped_rank_is_reported_in_time_and_ends_the_job_after_the_hang_timeout(
    shared: bool, tmp_path: Path, loop: Loop, log_lines: list[tuple[float, str]]
) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 made no progress for 3 s in step 5: stopped by a signal") as caught:
        loop(tmp_path, STOP, shared=shared, timeouts=Timeouts(stopped=0.5, hang=3.0))
    assert caught.value.exit_code == 1
    assert "3 s" in caught.value.rule
    assert 0.5 < seconds_until(log_lines[0], tmp_path) < 1.5
    assert len(log_lines) == 1
    assert_ended(tmp_path)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
def test_a_sleeping_rank_is_named_with_its_source_line(
    shared: bool, tmp_path: Path, loop: Loop, log_lines: list[tuple[float, str]]
) -> None:
    with pytest.raises(RankFailure, match="rank 1 made no progress") as caught:
        loop(tmp_path, "time.sleep(60)", shared=shared, timeouts=Timeouts(slow_step=1.0, hang=3.0))
    lines = (tmp_path / "rank.py").read_text().splitlines()
    line_number = next(index for index, line in enumerate(lines, start=1) if "time.sleep(60)" in line)
    for text in (log_lines[0][1], caught.value.what):
        assert f"its main thread is at {tmp_path / 'rank.py'}:{line_number} fault, not in a collective" in text
        assert "while rank 0 waits in all_reduce" in text
    assert 0.9 < seconds_until(log_lines[0], tmp_path) < 2.0
    assert len(log_lines) == 1
    assert_ended(tmp_path)


def test_an_early_exit_while_others_wait_ends_the_job(
    tmp_path: Path, loop: Loop, log_lines: list[tuple[float, str]]
) -> None:
    with pytest.raises(
        RankFailure, match=r"^rank 1 made no progress .*: it exited with code 0, while rank 0 waits in all_reduce"
    ):
        loop(tmp_path, "os._exit(0)", timeouts=Timeouts(slow_step=1.0, hang=6.0))
    assert "rank 1" in log_lines[0][1]
    assert "rank 0 waits in all_reduce of 32 bytes" in log_lines[0][1]
    assert_ended(tmp_path)


def test_long_phases_and_first_steps_are_not_reported(
    tmp_path: Path, scripts: ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """The timeouts are shorter than the time before the first step, the second step, and an evaluation."""
    code = """
from weft.launch.heartbeat import Heartbeat
heartbeat = Heartbeat.open()
for item in range(5):
    time.sleep(0.3)  # a loop that moves from
    time.sleep(0.3)  # line to line
for step in range(12):
    heartbeat.phase("step", step)
    time.sleep(1.2 if step == 1 else 0.2)
    heartbeat.phase("evaluating", step)
    if step == 8: time.sleep(1.2)
"""
    launch_script(scripts, tmp_path, code, ranks=1, log_dir=tmp_path, timeouts=Timeouts(slow_step=0.5, other=2.0))
    assert capfd.readouterr() == ("", "")


def test_ranks_without_a_heartbeat_are_monitored_only_for_their_end(tmp_path: Path) -> None:
    timeouts = Timeouts(stopped=0.2, slow_step=0.2, other=0.2, hang=0.2)
    launch(script(tmp_path, "time.sleep(1)"), ranks=2, log_dir=tmp_path, timeouts=timeouts)


def track(**fields: Any) -> RankTrack:
    stop_reason = fields.pop("stop_reason", "")
    now = {"sampled_at": 100.0, "pid": 1, "phase": "step", "step": 3} | fields
    status = RankStatus(**now)
    return RankTrack(status, 90.0, 90.0, stop_reason=stop_reason, stopped_at=91.0 if stop_reason else 0.0)


@pytest.mark.parametrize(
    ("rank_2", "word"),
    [
        ({"stop_reason": "stopped by a signal", "in_collective": True}, "stopped by a signal"),
        ({"sampled_at": 94.0, "in_collective": True}, "its heartbeat ended 6 s ago"),
        ({"location": "train.py:7 load"}, "its main thread is at train.py:7 load, not in a collective"),
        ({"communication": "wait", "collectives": 8}, "no rank has called fewer collectives (8)"),
    ],
)
def test_find_straggler(rank_2: dict[str, Any], word: str) -> None:
    waiting = {"last_collective": "all_reduce of 4 bytes", "in_collective": True, "collectives": 9}
    tracks = {
        0: track(**waiting),
        1: track(**waiting),
        2: track(**{"last_collective": "x", "collectives": 9} | rank_2),
    }
    rank, reason, waits = find_straggler(tracks, now=100.0)
    assert (rank, waits) == (2, "communication" in rank_2)
    assert word in reason


def progress(issued: int, pending: str = "", started: int = -1, group: str = "tp") -> GroupProgress:
    return GroupProgress(f"name of {group}", f"mesh_{group}", issued, pending, started)


def test_find_straggler_on_accelerators() -> None:
    """Ranks that wait for an accelerator are in no call of torch.distributed; they have issued more collectives."""
    waiting = {"location": "step.py:161 compute_gradients", "groups": (progress(43),)}
    late = track(location="batches.py:7 load", groups=(progress(41),))
    rank, reason, waits = find_straggler({0: track(**waiting), 1: late, 2: track(**waiting)}, now=100.0)
    assert (rank, waits) == (1, False)
    assert reason == (
        "its main thread is at batches.py:7 load, not in a collective; "
        "in group mesh_tp it has issued 41 collectives, and ranks 0, 2 have issued 43"
    )


def test_ranks_are_compared_within_a_group() -> None:
    """The first stage of a pipeline issues fewer collectives in all, but a rank of the second stage is behind in its group."""
    at = {"location": "step.py:161 compute_gradients"}
    first = {"groups": (progress(10, group="tp of stage 0"), progress(5, group="all"))}
    second = [{"groups": (progress(number, group="tp of stage 1"), progress(5, group="all"))} for number in (90, 89)]
    tracks = {rank: track(**at, **groups) for rank, groups in enumerate([first, first, *second])}
    rank, reason, _ = find_straggler(tracks, now=100.0)
    assert rank == 3
    assert "in group mesh_tp of stage 1 it has issued 89 collectives, and rank 2 has issued 90" in reason


def test_the_rank_that_does_not_wait_itself_is_behind() -> None:
    """Rank 1 is behind in dp because it waits for rank 2 in tp."""
    groups = {
        0: (progress(7, group="dp"),),
        1: (progress(6, group="dp"), progress(40)),
        2: (progress(39),),
    }
    found = find_behind({rank: RankStatus(pid=1, groups=found) for rank, found in groups.items()})
    assert list(found) == [2]
    crossed = {0: (progress(7, group="dp"), progress(3)), 1: (progress(6, group="dp"), progress(4))}
    assert sorted(find_behind({rank: RankStatus(groups=found) for rank, found in crossed.items()})) == [0, 1]


def test_a_device_that_has_not_started_a_collective_is_behind() -> None:
    """All ranks have issued it and wait in the same line; the kernel before it does not end on one of them."""
    at = {"location": "step.py:161 compute_gradients"}
    waiting, late = progress(43, "nccl:all_reduce", 43), progress(43, "nccl:all_reduce", 42)
    tracks = {rank: track(**at, groups=(late if rank == 1 else waiting,)) for rank in range(3)}
    rank, reason, waits = find_straggler(tracks, now=100.0)
    assert (rank, waits) == (1, True)
    assert reason == (
        "all ranks wait, and it is behind: in group mesh_tp it has started on its device 42 collectives, and ranks 0, 2 have "
        "started 43; it is in nccl:all_reduce of group mesh_tp on the device at step.py:161 compute_gradients"
    )


def test_collectives_in_different_orders_are_reported_for_both_ranks() -> None:
    at = {"location": "step.py:161 compute_gradients"}
    first = track(**at, groups=(progress(7, "nccl:all_reduce", 7, "dp"), progress(3, "", 3)))
    second = track(**at, groups=(progress(6, "", 6, "dp"), progress(4, "nccl:all_gather", 4)))
    _, reason, waits = find_straggler({0: first, 1: second}, now=100.0)
    assert waits
    assert "in group mesh_tp it has issued 3 collectives, and rank 1 has issued 4" in reason
    assert "rank 1 is behind as well: in group mesh_dp it has issued 6 collectives, and rank 0 has issued 7" in reason


SKIPS = """
import torch, torch.distributed as dist
from weft.backends.hierarchical import register_backend
from weft.device.cpu import Cpu
from weft.launch.rank_entry import connect, rank_main
from weft.launch.heartbeat import Heartbeat

def wait_for_the_device(works):
    while not all(work.is_completed() for work in works):
        time.sleep(0.05)

def main():
    heartbeat = Heartbeat.open()
    connect(Cpu())
    pairs = [dist.new_group([first, first + 1], backend="gloo", group_desc=f"mesh_tp") for first in (0, 2)]
    for step in range(8):
        heartbeat.phase("step", step)
        works = [dist.all_reduce(torch.ones(16), async_op=True)]
        for _ in range(3 if rank < 2 else 5):  # the ranks of a pipeline stage issue more than those of another
            if rank != 2 or step < 5:
                works.append(dist.all_reduce(torch.ones(8), group=pairs[rank // 2], async_op=True))
        wait_for_the_device(works)
    heartbeat.phase("exporting")

rank_main(main)
"""


def test_the_rank_that_is_behind_in_a_group_is_named_where_all_ranks_wait_in_the_same_line(
    tmp_path: Path, scripts: ForkServer, log_lines: list[tuple[float, str]]
) -> None:
    """Asynchronous collectives of gloo stand in for those of an accelerator, whose ranks wait in one line of code."""
    timeouts = Timeouts(slow_step=0.5, hang=1.5)
    with pytest.raises(RankFailure, match="rank 2 made no progress") as caught:
        launch_script(scripts, tmp_path, SKIPS, ranks=4, log_dir=tmp_path, timeouts=timeouts)
    for text in (log_lines[0][1], caught.value.what):
        assert "in group mesh_tp it has issued 25 collectives, and rank 3 has issued 30" in text


def test_ranks_whose_devices_wait_for_another_host_are_not_blamed() -> None:
    waiting = {"location": "step.py:161 compute_gradients", "groups": (progress(43, "nccl:all_reduce", 43),)}
    _, reason, waits = find_straggler({0: track(**waiting), 1: track(**waiting)}, now=100.0)
    assert waits, "the rank may be on another host"
    assert "no rank has called fewer collectives (43): it is in nccl:all_reduce of group mesh_tp" in reason
    busy = track(location="batches.py:7 load", groups=(progress(43, "", 43),))
    assert find_straggler({0: track(**waiting), 1: busy}, now=100.0)[::2] == (1, False)


# Restarts


def test_restarts_without_progress_are_counted(tmp_path: Path, loop: Loop, log_lines: list[tuple[float, str]]) -> None:
    with pytest.raises(RankFailure, match="ValueError: attempt 1"):
        loop(tmp_path, "raise ValueError(f'attempt {attempt}')", max_restarts=1)
    texts = [text for _, text in log_lines]
    assert [text.split()[:2] for text in texts] == [["rank", "1"], ["rank", "1"], ["rank", "1"]]
    assert "attempt 1 starts 2 ranks in 1 s, restart 1 of 1" in texts[1]
    assert "attempt 0" in (tmp_path / "logs/rank-1.traceback").read_text()
    assert "attempt 1" in (tmp_path / "logs/attempt-1/rank-1.traceback").read_text()


def test_progress_resets_the_count_of_restarts(
    tmp_path: Path, scripts: ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
from weft.launch.heartbeat import Heartbeat
attempt = int(os.environ["WEFT_ATTEMPT"])
Heartbeat.open().phase("step", [3, 4, 4, 20][attempt])
time.sleep(0.3)
sys.exit(5)
"""
    with pytest.raises(RankFailure, match="rank 0 exited with code 5"):
        launch_script(scripts, tmp_path, code, ranks=1, log_dir=tmp_path, max_restarts=1)
    assert capfd.readouterr().err.count("restart 1 of 1") == 2  # after steps 3 and 4; the second 4 is no progress
    assert (tmp_path / "attempt-2").is_dir()
    assert not (tmp_path / "attempt-3").exists()


@pytest.mark.must("fault: A file of logs cannot be read or written")
def test_files_of_logs_that_cannot_be_read_or_written_end_no_run(
    tmp_path: Path, scripts: ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Folders with the names of the files, in which a read, a write and a removal fail also for root."""
    for name in ("rank-0.error", "rank-0.traceback", "rank-1.traceback", "rank-1.out", "rank-1.err", "launcher.log"):
        (tmp_path / name / "inside").mkdir(parents=True)
    code = """
print("printed", flush=True)
if rank == 1 and os.environ["WEFT_ATTEMPT"] == "0":
    sys.exit(7)
time.sleep(0.3)
"""
    launch_script(scripts, tmp_path, code, ranks=2, log_dir=tmp_path, max_restarts=1)
    printed = capfd.readouterr().err
    assert "rank-1.out cannot be written: Is a directory; this output will be lost" in printed
    assert "rank-0.error cannot be removed: Is a directory; it may be of an earlier launch" in printed
    assert "rank 1 exited with code 7: attempt 1 starts 2 ranks" in printed


def test_an_unreadable_log_is_named_in_the_failure(tmp_path: Path, scripts: ForkServer) -> None:
    (tmp_path / "rank-1.err" / "inside").mkdir(parents=True)
    with pytest.raises(RankFailure, match="rank 1 exited with code 7") as caught:
        launch_script(scripts, tmp_path, "sys.exit(7 * rank)", ranks=2, log_dir=tmp_path)
    assert "rank-1.err cannot be read: Is a directory" in caught.value.what


def test_a_restart_can_change_the_number_of_ranks_and_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
print(rank, os.environ["WORLD_SIZE"], os.environ["WEFT_ATTEMPT"], sys.argv[1:], flush=True)
if len(sys.argv) == 1:
    time.sleep(0.2)
    sys.exit(rank)
"""
    failures = []

    def fewer(failure: RankFailure, available: int) -> int:
        failures.append((failure.what, failure.rank, available))
        return 1

    restart_argv = [*script(tmp_path, code), "--resume"]
    launch(script(tmp_path, code), ranks=2, log_dir=tmp_path, max_restarts=1, restart_argv=restart_argv, resize=fewer)
    assert failures == [("rank 1 exited with code 1", 1, 2)]
    assert capfd.readouterr().out == "0 2 0 []\n0 1 1 ['--resume']\n"


def test_refused_input_is_not_restarted(tmp_path: Path, scripts: ForkServer) -> None:
    code = """
from weft.launch.rank_entry import rank_main
from weft.errors import DataError
def main():
    raise DataError("no text")
rank_main(main)
"""
    with pytest.raises(RankFailure, match="no text") as caught:
        launch_script(scripts, tmp_path, code, ranks=1, log_dir=tmp_path, max_restarts=3)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "attempt-1").exists()


def test_a_signal_ends_the_delay_before_the_next_attempt(tmp_path: Path, log_lines: list[tuple[float, str]]) -> None:
    def press() -> None:
        while not any("starts" in text for _, text in log_lines):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    with pytest.raises(Stopped, match="SIGINT"):
        launch(script(tmp_path, "sys.exit(1)"), ranks=1, log_dir=tmp_path, max_restarts=1)
    thread.join()
    assert not (tmp_path / "attempt-1" / "launcher.log").exists()
