"""Measures latency and bandwidth between the ranks of the default process group, in a few seconds.

Pairs of ranks take turns in rounds. In a round no host takes part twice, so that no link is shared: what a pair sees, it has
for itself. One of the two sends and the other answers with an empty message; then they change places.

    latency     half the time of an empty message there and back, median of some
    bandwidth   messages grow until one takes a time that counts; then bytes by time between that size and a quarter of it,
                which leaves out latency, and what a limited link lets pass at once

At last all ranks send to the next host at once: what then leaves a host, or arrives there, all its ranks share. Ranks of one
host communicate as those of a mesh axis inside it do, on cpu through shared memory; ranks of different hosts through the
default group.
"""

import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, combinations, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from weft.backends.hierarchical import host_id, register_backend
from weft.backends.shared_memory import SharedMemoryGroup
from weft.comm.objects import all_gather_json, broadcast_json
from weft.device.device import Device
from weft.device.links import read_device_links
from weft.errors import TopologyError
from weft.topology.measurement import LOOPBACK, MEMORY, NETWORK, Measurement, cache_path, recall, remember

SECONDS = 5.0
FIRST_BYTES, LAST_BYTES = 2**16, 2**26
LONGEST_SECONDS, SHORTEST_SECONDS = 30e-3, 2e-3  # of the message by which bandwidth is measured
COSTS = 26  # how often that time a pair takes in all, both directions
WARM_PINGS, PINGS = 2, 9
REPEATS = 5
END = -1  # instead of a size: no more messages
DAY = 86400.0
Pair = tuple[int, int]


def measure(
    device: Device,
    place: torch.device,
    *,
    seconds: float = SECONDS,
    cache: Path | None = None,
    max_age_seconds: float = DAY,
) -> tuple[Measurement, str]:
    """Measure all links, the same result on all ranks, which all call it. Beside it: where it comes from.

    Args:
        device: what the ranks compute on.
        place: this rank's own.
        seconds: after so many no new round begins; what was not measured then stays None.
        cache: folder of rank 0 for measurements. One of the same hosts, ranks and devices is taken instead of a new one.
        max_age_seconds: unless it is older.

    Raises:
        TopologyError: ranks of one host are not numbered in a row.
    """
    rank = dist.get_rank()
    said = all_gather_json([host_id(), platform.node(), f"{device.type} {device.name}"])
    hosts = name_hosts([(tuple(key), name) for key, name, _ in said])
    devices = ", ".join(dict.fromkeys(name for _, _, name in said))
    text, reason = None, ""
    if cache is not None:
        path = cache_path(cache, hosts, devices)
        if rank == 0:
            found, reason = recall(path, hosts, devices, max_age_seconds)
            text = found.model_dump_json() if found else None
        text, reason = broadcast_json([text, reason])
    if text is not None:
        return Measurement.model_validate_json(text), reason
    measured = _measure(device, place, hosts, devices, seconds)
    if cache is not None and rank == 0:
        remember(measured, path)
    return measured, f"measured in {measured.seconds:.1f} s" + (f"; {reason}" if reason else "")


def name_hosts(ranks: Sequence[tuple[tuple[str, ...], str]]) -> list[tuple[str, int]]:
    """Name and number of ranks of each host; hosts of the same name get a number.

    Args:
        ranks: of each rank what tells its host from others, and the host's name.

    Raises:
        TopologyError: ranks of one host are not numbered in a row.
    """
    keys = [key for place, (key, _) in enumerate(ranks) if place == 0 or ranks[place - 1][0] != key]
    names = [next(name for other, name in ranks if other == key) for key in keys]
    if len(set(keys)) < len(keys):
        again = next(name for key, name in zip(keys, names, strict=True) if keys.count(key) > 1)
        raise TopologyError(
            f"ranks of host {again} are not numbered in a row",
            rule="ranks are numbered host after host, so that inner axes of a mesh stay inside a host",
            fix="start them with `weft`, with torchrun, or with --distribution=block",
        )
    counts = Counter(key for key, _ in ranks)
    unique = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)]
    return [(name, counts[key]) for name, key in zip(unique, keys, strict=True)]


def schedule(sizes: Sequence[int]) -> list[list[Pair]]:
    """All pairs of ranks in rounds, no host twice in one: pairs inside hosts, then those between.

    Between hosts, each host first meets every other one, then again with other ranks: who has to stop early knows something of
    all hosts. Ranks of the same number meet first, as they share a rail where there are rails.

    Args:
        sizes: ranks of each host.
    """
    starts = [0, *accumulate(sizes)]
    inside = [list(combinations(range(start, start + size), 2)) for start, size in zip(starts, sizes, strict=False)]
    rounds = [
        [pairs[turn] for pairs in inside if turn < len(pairs)] for turn in range(max(len(pairs) for pairs in inside))
    ]
    most = max(sizes)
    locals_ = sorted(product(range(most), repeat=2), key=lambda pair: ((pair[1] - pair[0]) % most, pair[0]))
    matchings = tournament(len(sizes))
    for turn in range(len(locals_)):
        for number, matching in enumerate(matchings):
            one, other = locals_[(turn + number) % len(locals_)]
            met = [(starts[a] + one, starts[b] + other) for a, b in matching if one < sizes[a] and other < sizes[b]]
            rounds += [met] if met else []
    return rounds


def tournament(players: int) -> list[list[Pair]]:
    """Rounds in which each player meets every other once: the circle method, one player stays and the others turn."""
    seats = [*range(players), *([None] if players % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


class _Wire:
    """Messages of this rank, to and from others."""

    def __init__(self, device: Device, place: torch.device, host: range, inside: Any):
        self.device, self.place, self.host, self.inside = device, place, host, inside
        self.head = torch.zeros(1, dtype=torch.int64, device=place)
        self.payload = torch.zeros(LAST_BYTES, dtype=torch.uint8, device=place)

    def ask(self, peer: int, size: int) -> float:
        """Send so many bytes, after their number; the seconds until the peer has said that they are there."""
        group = self._group(peer)
        begin = time.perf_counter()
        self.head.fill_(size)
        dist.send(self.head, peer, group)
        if size > 0:
            dist.send(self.payload[:size], peer, group)
        dist.recv(self.head, peer, group)
        self.device.synchronize()
        return time.perf_counter() - begin

    def answer(self, peer: int) -> None:
        """Take what a peer sends, until it sends no more."""
        group, size = self._group(peer), 0
        while size != END:
            dist.recv(self.head, peer, group)
            size = int(self.head)
            if size > 0:
                dist.recv(self.payload[:size], peer, group)
            dist.send(self.head, peer, group)

    def exchange(self, to: int, source: int, size: int, size_there: int) -> float:
        """Send so many bytes to one peer and receive so many from another at once; the seconds that takes."""
        sent, received = self.payload[: LAST_BYTES // 2], self.payload[LAST_BYTES // 2 :]
        begin = time.perf_counter()
        operations = [
            dist.P2POp(dist.isend, sent[:size], to),
            dist.P2POp(dist.irecv, received[:size_there], source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self.device.synchronize()
        return time.perf_counter() - begin

    def _group(self, peer: int) -> Any:
        return self.inside if peer in self.host else None


def _measure(
    device: Device, place: torch.device, hosts: list[tuple[str, int]], devices: str, seconds: float
) -> Measurement:
    """Run the rounds, and put together on every rank what all have seen."""
    began, rank = time.perf_counter(), dist.get_rank()
    sizes = [ranks for _, ranks in hosts]
    ends = [0, *accumulate(sizes)]
    host = next(range(*ends[n : n + 2]) for n in range(len(hosts)) if ends[n] <= rank < ends[n + 1])
    inside = _group_of_host(device, hosts, host)
    wire, rounds = _Wire(device, place, host, inside), schedule(sizes)
    counts = min(max(seconds / (COSTS * max(len(rounds), 1)), SHORTEST_SECONDS), LONGEST_SECONDS)
    mine: dict[str, tuple[float, float]] = {}
    done = 0
    for pairs in rounds:
        if _agreed_seconds(began) > seconds:  # all ranks come together before a round begins
            break
        done += 1
        peer = next((a if rank == b else b for a, b in pairs if rank in (a, b)), rank)
        for asks in sorted({rank, peer}) if peer != rank else ():
            if rank == asks:
                mine[str(peer)] = _drive(wire, peer, counts)
            else:
                wire.answer(asks)
    gathered: list[dict[str, tuple[float, float]]] = all_gather_json(mine)
    together: list[float | None] = [None] * len(hosts)
    if len(hosts) > 1 and _agreed_seconds(began) <= seconds:
        together = _measure_together(wire, hosts, gathered, counts)
    kinds = _kinds(device, hosts, inside)
    if inside is not None:
        dist.destroy_process_group(inside)
    world = range(len(gathered))
    cells = [[row.get(str(peer), (None, None)) for peer in world] for row in gathered]
    return Measurement(
        hosts=tuple(hosts),
        device=devices,
        kinds=tuple(tuple(row) for row in kinds),
        latency_seconds=tuple(tuple(cell[0] for cell in row) for row in cells),
        bytes_per_second=tuple(tuple(cell[1] for cell in row) for row in cells),
        together=tuple(together),
        rounds=done,
        all_rounds=len(rounds),
        seconds=_agreed_seconds(began),
        written=broadcast_json(time.time()),
    )


def _drive(wire: _Wire, peer: int, counts: float) -> tuple[float, float]:
    """Latency in seconds and bytes/s to a peer that answers.

    Args:
        counts: seconds that a message takes by which bandwidth is measured.
    """
    for _ in range(WARM_PINGS):
        wire.ask(peer, 0)
    latency = median(wire.ask(peer, 0) for _ in range(PINGS)) / 2
    size = FIRST_BYTES
    while size < LAST_BYTES and any(wire.ask(peer, size) < counts for _ in range(2)):  # one late message says nothing
        size *= 2
    large = min(wire.ask(peer, size) for _ in range(REPEATS))
    small = min(wire.ask(peer, size // 4) for _ in range(REPEATS))
    wire.ask(peer, END)
    least = size / large
    slope = (size - size // 4) / (large - small) if large > small else least
    return latency, min(max(slope, least), 2 * least)  # a slope between noisy times may be anything


def _measure_together(
    wire: _Wire, hosts: list[tuple[str, int]], gathered: list[dict[str, tuple[float, float]]], counts: float
) -> list[float | None]:
    """Bytes/s of each host when every rank sends to the rank of its number on the next host.

    What passes from one host to the next may be held up on either side: the better of both neighbours counts. Messages are as
    long as their link is fast, so that all are under way all the time, and what a limited link lets pass at once is little.
    """
    rank = dist.get_rank()
    numbers = [number for number, (_, ranks) in enumerate(hosts) for _ in range(ranks)]
    starts = [0, *accumulate(ranks for _, ranks in hosts)]
    common = min(ranks for _, ranks in hosts)

    def size_from(host: int) -> int:
        """Bytes of each rank's message from a host to the next."""
        one, other = starts[host], starts[(host + 1) % len(hosts)]
        _, rate = gathered[one].get(str(other), (0.0, 0.0))
        return int(min(max(4 * counts * rate / common, FIRST_BYTES), LAST_BYTES // 2))

    number, local = numbers[rank], rank - starts[numbers[rank]]
    to, source = (starts[(number + step) % len(hosts)] + local for step in (1, -1))
    sizes = [size_from(host - 1 if host else len(hosts) - 1) for host in range(len(hosts))]  # that arrive there
    best = [0.0] * len(hosts)  # what arrives there
    for _ in range(REPEATS):
        following = sizes[(number + 1) % len(hosts)]
        taken = wire.exchange(to, source, following, sizes[number]) if local < common else 0.0
        times = all_gather_json(taken)
        slowest = [max(times[starts[n] : starts[n + 1]]) for n in range(len(hosts))]
        best = [max(known, common * size / took) for known, size, took in zip(best, sizes, slowest, strict=True)]
    return [max(best[n], best[(n + 1) % len(hosts)]) for n in range(len(hosts))]


def _agreed_seconds(began: float) -> float:
    """Seconds since a moment, the largest of all ranks; they come together here."""
    passed = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device="cpu")
    dist.all_reduce(passed, dist.ReduceOp.MAX)
    return float(passed)


def _group_of_host(device: Device, hosts: list[tuple[str, int]], host: range) -> Any:
    """A group of the ranks of this host as a mesh axis inside it has it; None stands for the default group.

    All ranks make the groups of all hosts: a group made by its members alone is named after them, and the next of that name
    would read what the one before has left in the store.
    """
    starts, mine = [0, *accumulate(ranks for _, ranks in hosts)], None
    for start, (_, ranks) in zip(starts, hosts, strict=False):
        if device.type == "cpu" and ranks > 1:
            group = dist.new_group(list(range(start, start + ranks)), backend=register_backend())
            mine = group if start == host.start else mine
    return mine


def _kinds(device: Device, hosts: list[tuple[str, int]], inside: Any) -> list[list[str]]:
    """What each pair of ranks is joined by, [world_size, world_size]."""
    own: list[list[str]] | None = None
    usual = "device"
    if device.type == "cpu":
        usual = MEMORY if isinstance(inside, SharedMemoryGroup) else LOOPBACK
    elif int(os.environ.get("LOCAL_RANK", "0")) == 0:
        own = read_device_links(device.type)
    found = all_gather_json([own, usual])
    starts = [0, *accumulate(ranks for _, ranks in hosts)]
    kinds = [[NETWORK] * starts[-1] for _ in range(starts[-1])]
    for start, (_, ranks) in zip(starts, hosts, strict=False):
        table, usual = found[start]
        for a, b in product(range(ranks), repeat=2):
            known = table is not None and max(a, b) < len(table)
            kinds[start + a][start + b] = "" if a == b else table[a][b] if known else usual
    return kinds
