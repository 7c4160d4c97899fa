"""Heartbeat files can be read consistently at any time, even after a kill; thread locations are in user code."""

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.lab.commands import start_python
from tests.lab.pool import run_ranks
from weft.backends.hierarchical import register_backend
from weft.group_progress import GroupProgress
from weft.launch.heartbeat import GroupSampler, Heartbeat, StackReader, locate
from weft.launch.rank_status import (
    COLLECTIVE,
    HEARTBEAT_BYTES,
    SLOT_BYTES,
    create_heartbeat,
    decode_groups,
    encode_groups,
    read_status,
)


def mapped(path: Path) -> mmap.mmap:
    create_heartbeat(path)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), HEARTBEAT_BYTES)


def test_status_roundtrip(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    memory = mapped(path)
    assert read_status(path).pid == 0
    heartbeat = Heartbeat(memory)
    begin = time.monotonic()
    heartbeat.phase("step", 17)
    status = read_status(path)
    assert (status.pid, status.phase, status.step) == (os.getpid(), "step", 17)
    assert begin <= status.phase_start <= time.monotonic()
    assert (status.collectives, status.in_collective, status.sampled_at) == (0, False, 0.0)
    heartbeat.phase("saving")
    assert (read_status(path).phase, read_status(path).step) == ("saving", None)


def test_step_time_is_known_after_two_steps(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    heartbeat = Heartbeat(mapped(path))
    for step, seconds in enumerate((0.5, 0.05, 0.05)):
        heartbeat.phase("step", step)
        assert (read_status(path).step_seconds > 0) == (step == 2)
        time.sleep(seconds)
        heartbeat.phase("evaluating", step)
        time.sleep(0.2)
    assert 0.05 <= read_status(path).step_seconds < 0.2


def test_a_torn_record_is_replaced_by_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    memory = mapped(path)
    heartbeat = Heartbeat(memory)
    buffer = heartbeat._records[COLLECTIVE]
    buffer.write("first")
    buffer.write("second")
    assert read_status(path).last_collective == "second"
    newest = (COLLECTIVE + 2 % 2) * SLOT_BYTES
    memory[newest + 16] ^= 1
    status = read_status(path)
    assert (status.last_collective, status.collectives) == ("first", 1)


def test_a_long_text_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    Heartbeat(mapped(path)).phase("é" * SLOT_BYTES, 3)
    status = read_status(path)
    assert status.step == 3
    assert SLOT_BYTES // 4 < len(status.phase) < SLOT_BYTES


def test_reads_are_consistent_while_a_rank_writes_and_after_it_is_killed(tmp_path: Path) -> None:
    """The rank writes phase names whose length encodes the step, as fast as possible."""
    path = tmp_path / "heartbeat"
    create_heartbeat(path)
    code = """
from itertools import count
from weft.launch.heartbeat import Heartbeat
heartbeat = Heartbeat.open()
for step in count():
    heartbeat.phase("x" * (step % 1000), step)
"""
    environment = dict(os.environ, WEFT_HEARTBEAT=str(path))
    writer = start_python(code, env=environment)
    try:
        steps = set()
        deadline = time.monotonic() + 60
        while len(steps) < 500:
            assert time.monotonic() < deadline, f"{len(steps)} steps were seen"
            status = read_status(path)
            if status.step is not None:
                assert status.phase == "x" * (status.step % 1000)
                assert status.pid == writer.pid
                steps.add(status.step)
        assert 0 < status.sampled_at <= time.monotonic()
    finally:
        writer.kill()
    status = read_status(path)
    assert status.step is not None
    assert status.step >= max(steps)
    assert status.phase == "x" * (status.step % 1000)


@pytest.mark.exclusive("measures microseconds")
def test_an_update_costs_microseconds(tmp_path: Path) -> None:
    heartbeat, group = Heartbeat(mapped(tmp_path / "heartbeat")), dist.ProcessGroup(0, 1)
    begin = time.perf_counter()
    for _ in range(20_000):
        heartbeat._enter(group, "all_reduce", 4096, torch.float32)
        heartbeat._leave()
    assert (time.perf_counter() - begin) / 20_000 < 50e-6  # 1.4 microseconds on an idle core


def test_no_sampling_thread_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_HEARTBEAT", raising=False)
    threads = threading.active_count()
    Heartbeat.open().phase("step", 1)
    assert threading.active_count() == threads


# Location of a thread


def location_during(
    action: Callable[[], object], found: Callable[[tuple[str, str]], bool], end: Callable[[], object]
) -> tuple[str, str]:
    """Result of `locate` for this thread while it runs the action.

    Args:
        action: waits until `end` is called.
        found: whether the thread has come to the place to be located; else it is located again.
        end: called after that.
    """
    locations, this_thread, stacks = [], threading.get_ident(), StackReader()

    def look() -> None:
        deadline = time.monotonic() + 20
        while not locations or (not found(locations[-1]) and time.monotonic() < deadline):
            time.sleep(0.02)
            locations.append(locate(stacks.read(this_thread)))
        end()

    thread = threading.Thread(target=look)
    thread.start()
    action()
    thread.join()
    return locations[-1]


def test_location_is_outside_the_standard_library() -> None:
    event = threading.Event()
    location, communication = location_during(lambda: event.wait(), lambda place: "<lambda>" in place[0], event.set)
    file, _, function = location.rpartition(" ")
    assert file.startswith(f"{__file__}:")
    assert function == "<lambda>"
    assert communication == ""


def late(rank: int, world_size: int, folder: Path) -> list[tuple[str, str]]:
    """Locations of rank 0 while rank 1 comes to each collective after it was located."""
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
    locations = []
    for index, action in enumerate(actions):
        located = folder / str(index)
        if rank == 0:
            locations.append(location_during(action, lambda place: bool(place[1]), located.touch))
        else:
            while not located.exists():
                time.sleep(0.02)
            action()
    return locations


def test_stacks_of_a_thread_that_keeps_running_are_complete() -> None:
    """Code that follows `f_back` finds stacks that end in the middle."""
    outside, switch = sys._getframe().f_code.co_name, sys.getswitchinterval()
    stacks, this_thread, ended = [], threading.get_ident(), threading.Event()

    def sample() -> None:
        reader = StackReader()
        while not ended.is_set():
            stacks.append(reader.read(this_thread))

    def descend(depth: int) -> int:
        return sum(descend(depth - 1) for _ in range(1)) if depth else 0

    sys.setswitchinterval(1e-6)
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        while len(stacks) < 2000:
            descend(10)
    finally:
        ended.set()
        sampler.join()
        sys.setswitchinterval(switch)
    assert all(outside in [line.function for line in stack] for stack in stacks)
    assert max(sum(line.function == "descend" for line in stack) for stack in stacks) > 5


def test_the_communication_call_of_a_waiting_rank_is_found(tmp_path: Path) -> None:
    locations = run_ranks(2, late, tmp_path)[0]
    assert [communication for _, communication in locations] == [
        "all_reduce",
        "barrier",
        "wait",
        "all_reduce",
        "recv",
        "recv",
    ]
    assert {location.rpartition(":")[0] for location, _ in locations} == {__file__}


def sampled(rank: int, ranks: int) -> list[tuple[int, str, int]]:
    """Issued, pending and started collectives of a group in four samples, between which rank 0 issues one, which waits."""
    group = dist.new_group(backend="gloo", group_desc="late")
    store, sampler, found = group.get_group_store(), GroupSampler(torch.device("cpu"), still_samples=2), []

    def sample() -> None:
        by_name = {progress.name: progress for progress in decode_groups(encode_groups(sampler.sample()))}
        found.append(by_name[group.group_name][2:])

    sample()
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True) if rank == 0 else None
    for _ in range(3):
        sample()
    store.set(f"sampled/{rank}", "")
    store.wait([f"sampled/{other}" for other in range(ranks)])
    (work or dist.all_reduce(torch.ones(2), group=group, async_op=True)).wait()
    return found


def test_pending_collectives_are_read_when_none_is_issued_any_more() -> None:
    first, second = run_ranks(2, sampled)
    assert first == [(0, "", -1), (1, "", -1), (1, "", -1), (1, "gloo:all_reduce", 0)]
    assert second == [(0, "", -1), (0, "", -1), (0, "", 0), (0, "", 0)]


def test_a_truncated_list_of_groups_loses_its_end() -> None:
    groups = [GroupProgress(str(index), f"mesh_{index}", index, "nccl:all_reduce", index - 1) for index in range(3)]
    text = encode_groups(groups)
    assert decode_groups(text) == tuple(groups)
    assert decode_groups(text[:-3]) == tuple(groups[:2])
    assert decode_groups("") == ()
