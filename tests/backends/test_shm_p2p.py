"""Point-to-point messages arrive intact and in order, mismatches are errors, and memory is reused."""

import gc
import multiprocessing
import os
import random
import time
import weakref
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lab.pool import run_ranks
from weft.backends import shm_p2p as channel
from weft.backends.hierarchical import register_backend
from weft.backends.shared_memory import DTYPES, SharedMemoryGroup
from weft.backends.shm_p2p import ALL_DTYPES, RECORDS, _Allocator, wait_until
from weft.errors import CommunicationError

OTHER_DTYPES = (torch.complex64, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


def make_group(seconds: float = 60) -> Any:
    group = dist.new_group(backend=register_backend(), timeout=timedelta(seconds=seconds))
    assert isinstance(group, SharedMemoryGroup)
    return group


def content(seed: int, count: int, dtype: torch.dtype, steps: int = 1) -> Tensor:
    """Random bytes viewed as a dtype; a view of every `steps`-th element of a longer tensor."""
    generator = torch.Generator().manual_seed(seed)
    size = count * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    values = torch.empty(count * steps, dtype=dtype)[::steps]
    return values.copy_(data.view(dtype))


def same_bits(a: Tensor, b: Tensor) -> bool:
    first, second = (x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(first, second)


# Schedules


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[tuple[str, tuple[int, int, int], int]], list[tuple[int, int, int]]]:
    """Number of ranks; events (kind, channel, index within the channel) in the order of all ranks; (count, dtype, steps) of
    each message.

    A wait comes after its send and its receive, so that no order can deadlock.
    """
    ranks = draw(st.integers(2, 3))
    rank = st.integers(0, ranks - 1)
    channels = draw(st.lists(st.tuples(rank, rank, st.integers(0, 1)), min_size=1, max_size=20))
    sizes = st.sampled_from([0, 1, 5, 1000, 20_000])
    kinds = st.tuples(sizes, st.integers(0, len(DTYPES) - 1), st.integers(1, 2))
    messages = draw(st.lists(kinds, min_size=len(channels), max_size=len(channels)))
    found: dict[Any, int] = defaultdict(int)
    events, late = [], []
    happened: set[Any] = set()
    for what, message in draw(
        st.permutations([(w, m) for w in ("send", "want", "wait") for m in range(len(channels))])
    ):
        channel = channels[message]
        event = (what, channel, found[what, channel])
        found[what, channel] += 1
        ready = what != "wait" or {("send", *event[1:]), ("want", *event[1:])} <= happened
        (events if ready else late).append(event)
        happened.add(event)
    return ranks, events + late, messages


def follow(rank: int, ranks: int, events: list[Any], messages: list[Any], polls: bool) -> int:
    group, wanted, checked = make_group(), {}, 0
    for what, route, index in events:
        source, destination, tag = route
        key = index + 100 * (tag + 10 * (destination + 10 * source))
        count, dtype, steps = messages[key % len(messages)]
        if what == "send" and source == rank:
            x = content(key, count, DTYPES[dtype], steps)
            assert dist.isend(x, group=group, group_dst=destination, tag=tag).is_completed()
            x.zero_()
        elif what == "want" and destination == rank:
            x = torch.zeros(count * steps, dtype=DTYPES[dtype])[::steps]
            wanted[route, index] = x, dist.irecv(x, group=group, group_src=source, tag=tag)
        elif what == "wait" and destination == rank:
            x, work = wanted[route, index]
            assert work.wait()
            assert same_bits(x, content(key, count, DTYPES[dtype]))
            checked += 1
        if polls:
            for _, work in wanted.values():
                work.is_completed()
    dist.barrier(group)
    dist.destroy_process_group(group)
    return checked


@settings(max_examples=60, deadline=None)
@given(schedules(), st.booleans())
def test_random_schedules(schedule: Any, polls: bool) -> None:
    ranks, events, messages = schedule
    assert sum(run_ranks(ranks, follow, events, messages, polls)) == len(messages)


def choose(rank: int, ranks: int) -> None:
    """Messages that arrive before their receive are kept and matched by tag."""
    group = make_group()
    if rank == 0:
        for number in range(8):
            dist.send(torch.tensor([number]), group=group, group_dst=1, tag=number % 4)
        return
    for tag, expected in [(3, 3), (1, 1), (2, 2), (1, 5), (3, 7), (0, 0), (2, 6), (0, 4)]:
        x = torch.zeros(1, dtype=torch.int64)
        work = dist.irecv(x, group=group, group_src=0, tag=tag)
        assert wait_until(work.is_completed, 60)
        assert x.item() == expected


def test_messages_are_matched_by_tag() -> None:
    run_ranks(2, choose)


def exchange_all(rank: int, ranks: int) -> None:
    """All ranks send all dtypes to all ranks, themselves included, and wait in reverse order."""
    group = make_group()
    counts = [0, 1, 3, 40_001]
    for peer in range(ranks):
        for tag, dtype in enumerate((*DTYPES, *OTHER_DTYPES)):
            for count in counts:
                group.send([content(rank + 10 * tag + count, count, dtype, 1 + tag % 2)], peer, tag)
    wanted = []
    for peer in range(ranks):
        for tag, dtype in enumerate((*DTYPES, *OTHER_DTYPES)):
            for count in counts:
                x = torch.zeros(2 * count, dtype=dtype)[::2]
                wanted.append((x, group.recv([x], peer, tag), content(peer + 10 * tag + count, count, dtype)))
    for x, work, expected in reversed(wanted):
        work.wait()
        assert same_bits(x, expected)
    dist.barrier(group)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_dtypes(ranks: int) -> None:
    run_ranks(ranks, exchange_all)


def use_torch(rank: int, ranks: int) -> None:
    """The functions of torch.distributed with global ranks, in a group with other group ranks."""
    if rank == 0:
        dist.new_group([1, 2], backend=register_backend())
        return
    group = dist.new_group([1, 2], backend=register_backend())
    peer = 3 - rank
    mine, theirs = torch.arange(6.0).view(2, 3).T * rank, torch.empty(3, 2)
    if rank == 1:
        dist.send(mine, peer, group)
        assert dist.recv(theirs, peer, group, tag=5) == peer
    else:
        assert dist.recv(theirs, group=group, group_src=0) == peer
        dist.send(mine, group=group, group_dst=1 - group.rank(), tag=5)
    assert torch.equal(theirs, mine / rank * peer)
    number, other = torch.tensor([rank + 1j]), torch.empty(1, dtype=torch.complex64)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, other, peer, group, tag=7), dist.P2POp(dist.isend, number, peer, group, tag=7)]
    )
    for request in requests:
        assert request.wait(timedelta(seconds=30))
        assert request.is_completed()
        assert request.is_success()
    assert other.item() == peer + 1j
    with pytest.raises(CommunicationError, match="any rank"):
        dist.recv(theirs, group=group)


def test_torch_distributed_functions() -> None:
    run_ranks(3, use_torch)


def receive_into_leaf(rank: int, ranks: int) -> None:
    group = make_group()
    if rank == 0:
        dist.send(torch.ones(3, requires_grad=True) * 2, group=group, group_dst=1)
    else:
        x = torch.zeros(3, requires_grad=True)
        dist.recv(x, group=group, group_src=0)
        assert x.tolist() == [2, 2, 2]
        assert x.is_leaf


def test_receive_into_a_leaf_tensor() -> None:
    run_ranks(2, receive_into_leaf)


# Errors


def disagree(rank: int, ranks: int, kind: str) -> str:
    group = make_group(seconds=1)
    if rank == 0:
        if kind != "missing":
            dist.send(
                torch.ones(4, dtype=torch.float64 if kind == "dtype" else torch.float32), group=group, group_dst=1
            )
            dist.send(torch.full((2,), 7.0), group=group, group_dst=1)
        return ""
    first = dist.irecv(torch.empty(4 - (kind == "size")), group=group, group_src=0)
    second = dist.irecv(torch.empty(2), group=group, group_src=0)
    if kind != "missing":  # the next message is still matched with the next receive
        assert second.wait()
    with pytest.raises(CommunicationError) as error:
        first.wait()
    assert not first.is_success()
    assert first.is_completed() == (kind != "missing")
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("size", "rank 1 receives 3 elements of torch.float32; rank 0 sent 4 elements of torch.float32"),
        ("dtype", "rank 1 receives 4 elements of torch.float32; rank 0 sent 4 elements of torch.float64"),
        ("missing", "no message from rank 0 arrived within 1 s"),
    ],
)
def test_mismatched_message_is_an_error_of_the_receive(kind: str, words: str) -> None:
    text = run_ranks(2, disagree, kind)[1]
    assert words in text
    assert "fix:" in text


def come_late(rank: int, ranks: int) -> None:
    group = make_group()
    if rank == 0:
        time.sleep(0.3)
        dist.send(torch.ones(1), group=group, group_dst=1)
        return
    x = torch.zeros(1)
    work = dist.irecv(x, group=group, group_src=0)
    with pytest.raises(CommunicationError, match=r"within 0\.01 s"):
        work.wait(timedelta(milliseconds=10))
    work.wait()  # the receive is still posted
    assert x.item() == 1


def test_wait_can_be_repeated_after_a_timeout() -> None:
    run_ranks(2, come_late)


def fill(rank: int, ranks: int, taken: bool) -> str:
    group = make_group(seconds=20 if taken else 1)
    x = torch.zeros(1, dtype=torch.int64)
    if rank == 1:
        time.sleep(0.5 if taken else 0)
        for number in range(RECORDS + 10 if taken else 0):
            dist.recv(x, group=group, group_src=0)
            assert x.item() == number
        return ""
    for number in range(RECORDS):
        dist.send(x.fill_(number), group=group, group_dst=1)
    try:
        for number in range(RECORDS, RECORDS + 10):
            dist.send(x.fill_(number), group=group, group_dst=1)
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("taken", "words"), [(True, "no error"), (False, "did not receive its messages within 1 s")])
def test_send_blocks_while_the_ring_is_full(taken: bool, words: str) -> None:
    assert words in run_ranks(2, fill, taken)[0]


def send_huge(rank: int, ranks: int) -> None:
    group = make_group()
    if rank == 0:
        with pytest.raises(CommunicationError, match=r"a message of 32\.0 GB"):
            dist.send(torch.empty(1).expand(2**33), group=group, group_dst=1)


def test_message_longer_than_a_channel_is_refused() -> None:
    run_ranks(2, send_huge)


def outlive(rank: int, folder: Path) -> None:
    """Rank 0 sends and exits; rank 1 receives after the exit."""
    gc.freeze()  # as the ranks of the pool do
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    group, x = make_group(), torch.zeros(2**20)
    if rank == 0:
        dist.send(torch.ones(2**20), group=group, group_dst=1)
    else:
        dist.send(x, group=group, group_dst=0)  # never received
        assert wait_until((folder / "gone").exists, 60)
        dist.recv(x, group=group, group_src=0)
    os._exit(0 if rank == 0 or x.sum() == 2**20 else 1)


def test_message_outlives_its_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    fork = multiprocessing.get_context("fork")
    first, second = (fork.Process(target=outlive, args=(rank, tmp_path), daemon=True) for rank in range(2))
    first.start()
    second.start()
    first.join(60)
    assert first.exitcode == 0
    (tmp_path / "gone").touch()
    second.join(60)
    assert second.exitcode == 0


# Memory


def converse(rank: int, ranks: int) -> int:
    """Exchange up to five messages at a time, of several lengths, and return the peak of the allocated memory."""
    group, order = make_group(), random.Random(0)
    highest = 0
    for round_ in range(300):
        sizes = [order.choice([1, 1000, 50_000]) for _ in range(order.randrange(1, 6))]
        wanted = []
        for tag, size in enumerate(sizes):
            dist.isend(torch.full((size,), float(round_)), group=group, group_dst=1 - rank, tag=tag)
            x = torch.empty(size)
            wanted.append((x, dist.irecv(x, group=group, group_src=1 - rank, tag=tag)))
        highest = max(highest, *group.channel.allocator.stops.values())
        for x, work in reversed(wanted):
            work.wait()
            assert x.eq(round_).all()
        dist.barrier(group)
    dist.send(torch.empty(0), group=group, group_dst=1 - rank)  # frees acknowledged messages
    assert len(group.channel.allocator.stops) == 1
    assert not any(group.channel.posted)
    assert not any(group.channel.unexpected)
    return highest - group.channel.allocator.start


def test_memory_is_reused() -> None:
    assert max(run_ranks(2, converse)) <= 5 * 200_064


def forget(rank: int, ranks: int) -> bool:
    group = make_group()
    x = torch.ones(1000)
    storage = weakref.ref(x.untyped_storage())
    work = dist.isend(x, group=group, group_dst=1 - rank)
    del x
    gone = storage() is None
    work.wait()
    dist.recv(torch.empty(1000), group=group, group_src=1 - rank)
    return gone


def test_send_keeps_no_reference_to_the_tensor() -> None:
    assert run_ranks(2, forget) == [True, True]


def no_gloo(rank: int, ranks: int) -> bool:
    group = make_group()
    dist.send(torch.ones(1), group=group, group_dst=1 - rank)
    dist.recv(torch.empty(1), group=group, group_src=1 - rank)
    return "gloo" in vars(group)


def test_no_gloo_connections_are_made() -> None:
    assert run_ranks(2, no_gloo) == [False, False]


def dumped(rank: int, ranks: int) -> list[bool]:
    make_group()
    with open("/proc/self/smaps") as maps:
        regions = maps.read().split("memfd:weft")[1:]
    return [" dd" not in next(line for line in region.splitlines() if line.startswith("VmFlags")) for region in regions]


def test_slabs_are_excluded_from_core_dumps() -> None:
    for regions in run_ranks(2, dumped):
        assert regions
        assert not any(regions)


@given(st.lists(st.integers(1, 40), max_size=60), st.randoms(use_true_random=False))
def test_allocator(sizes: list[int], order: random.Random) -> None:
    """Allocated ranges never overlap, and all memory is one gap after they are freed."""
    allocator, used = _Allocator(64, 600), {}
    for size in sizes:
        start = allocator.reserve(size)
        if start is None:
            assert all(stop - start < size for start, stop in allocator.gaps)
        else:
            assert 64 <= start <= 600 - size
            assert all(start + size <= other or other + length <= start for other, length in used.items())
            used[start] = size
        if used and order.random() < 0.4:
            start = order.choice(list(used))
            del used[start]
            allocator.free(start)
    for start in used:
        allocator.free(start)
    assert allocator.gaps == [(64, 600)]


def test_wait_until_returns_the_result_or_times_out() -> None:
    assert wait_until(lambda: 5, 0) == 5
    assert wait_until(lambda: None, 0.01) is None
    answers = iter([0] * (channel.SPINS + 20))
    with mock.patch.object(time, "sleep") as sleep:
        assert wait_until(lambda: next(answers, 3), 10) == 3
    assert sleep.call_count < 20


def test_every_dtype_has_an_index() -> None:
    assert set(DTYPES) < set(ALL_DTYPES)
