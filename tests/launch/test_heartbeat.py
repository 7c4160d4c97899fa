"""What a rank notes can be read at any moment, whole, also after it was killed; the place of a thread is one its user knows."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.lab.pool import run_ranks
from weft.backends.hierarchical import register_backend
from weft.launch.heartbeat import COLLECTIVE, PLACE_BYTES, PULSE_BYTES, Heartbeat, create_heartbeat, locate, read_status


def mapped(path: Path) -> mmap.mmap:
    create_heartbeat(path)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), PULSE_BYTES)


def test_notes_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    memory = mapped(path)
    assert read_status(path).pid == 0
    pulse = Heartbeat(memory)
    begin = time.monotonic()
    pulse.phase("step", 17)
    record = read_status(path)
    assert (record.pid, record.phase, record.step) == (os.getpid(), "step", 17)
    assert begin <= record.began <= time.monotonic()
    assert (record.collectives, record.inside, record.heartbeat) == (0, False, 0.0)
    pulse.phase("saving")
    assert (read_status(path).phase, read_status(path).step) == ("saving", None)


def test_the_time_of_a_step_is_known_after_two(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    pulse = Heartbeat(mapped(path))
    for step, seconds in enumerate((0.5, 0.05, 0.05)):
        pulse.phase("step", step)
        assert (read_status(path).step_seconds > 0) == (step == 2)
        time.sleep(seconds)
        pulse.phase("evaluating", step)
        time.sleep(0.2)
    assert 0.05 <= read_status(path).step_seconds < 0.2


def test_a_torn_note_gives_way_to_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    memory = mapped(path)
    pulse = Heartbeat(memory)
    note = pulse._notes[COLLECTIVE]
    note.write("first")
    note.write("second")
    assert read_status(path).collective == "second"
    newest = (COLLECTIVE + 2 % 2) * PLACE_BYTES
    memory[newest + 16] ^= 1
    record = read_status(path)
    assert (record.collective, record.collectives) == ("first", 1)


def test_a_long_note_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    Heartbeat(mapped(path)).phase("é" * PLACE_BYTES, 3)
    record = read_status(path)
    assert record.step == 3
    assert PLACE_BYTES // 4 < len(record.phase) < PLACE_BYTES


def test_every_reading_is_whole_while_a_rank_writes_and_after_it_is_killed(tmp_path: Path) -> None:
    """The rank writes names whose length tells the step, as fast as it can."""
    path = tmp_path / "pulse"
    create_heartbeat(path)
    code = """
from itertools import count
from weft.launch.heartbeat import Heartbeat
pulse = Heartbeat.open()
for step in count():
    pulse.phase("x" * (step % 1000), step)
"""
    environment = dict(os.environ, WEFT_PULSE=str(path))
    writer = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        steps = set()
        deadline = time.monotonic() + 60
        while len(steps) < 2000:
            assert time.monotonic() < deadline, f"{len(steps)} steps were seen"
            record = read_status(path)
            if record.step is not None:
                assert record.phase == "x" * (record.step % 1000)
                assert record.pid == writer.pid
                steps.add(record.step)
        assert 0 < record.heartbeat <= time.monotonic()
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    record = read_status(path)
    assert record.step is not None
    assert record.step >= max(steps)
    assert record.phase == "x" * (record.step % 1000)


@pytest.mark.exclusive("measures microseconds")
def test_a_note_costs_microseconds(tmp_path: Path) -> None:
    pulse, group = Heartbeat(mapped(tmp_path / "pulse")), dist.ProcessGroup(0, 1)
    begin = time.perf_counter()
    for _ in range(20_000):
        pulse._enter(group, "all_reduce", 4096, torch.float32)
        pulse._leave()
    assert (time.perf_counter() - begin) / 20_000 < 50e-6  # 1.4 microseconds where nobody else uses the core


def test_nothing_is_noted_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_PULSE", raising=False)
    threads = threading.active_count()
    Heartbeat.open().phase("step", 1)
    assert threading.active_count() == threads


# Where a thread is


def places(action: Callable[[], object], seconds: float = 0.3) -> tuple[str, str]:
    """What `locate` says of this thread while it is in the action."""
    found, this = [], threading.get_ident()

    def look() -> None:
        time.sleep(seconds)
        found.append(locate(sys._current_frames()[this]))

    thread = threading.Thread(target=look)
    thread.start()
    action()
    thread.join()
    return found[0]


def test_the_place_of_a_thread_is_outside_the_standard_library() -> None:
    where, call = places(lambda: threading.Event().wait(0.6))
    file, _, function = where.rpartition(" ")
    assert file.startswith(f"{__file__}:")
    assert function == "<lambda>"
    assert call == ""


def late(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Where rank 0 is while rank 1 comes late to each collective."""
    shared = dist.new_group(backend=register_backend())
    ones = torch.ones(4)
    actions = [
        lambda: dist.all_reduce(ones),
        lambda: dist.barrier(),
        lambda: dist.all_reduce(ones, async_op=True).wait(),
        lambda: dist.all_reduce(ones, group=shared),
        lambda: dist.recv(ones, 1) if rank == 0 else dist.send(ones, 0),
        lambda: dist.recv(ones, 1, group=shared) if rank == 0 else dist.send(ones, 0, group=shared),
    ]
    found = []
    for action in actions:
        if rank == 0:
            found.append(places(action))
        else:
            time.sleep(0.6)
            action()
    return found


def test_the_communication_that_a_rank_waits_in_is_named() -> None:
    found = run_ranks(2, late)[0]
    assert [call for _, call in found] == ["all_reduce", "barrier", "wait", "all_reduce", "recv", "recv"]
    assert {where.rpartition(":")[0] for where, _ in found} == {__file__}
