"""Benchmark of latency and bandwidth between the ranks of the default process group, in a few seconds.

The pairs of ranks are measured in rounds. No host takes part twice in a round, so that no link is shared. One rank of a pair
sends and the other echoes an empty message; then they swap roles.

    latency     half of the round-trip time of an empty message, median of several
    bandwidth   messages grow until one takes long enough; then the difference in bytes divided by the difference in time
                between that size and a quarter of it, which excludes latency and the initial burst of a rate-limited link

Finally all ranks send to the next host at the same time, which measures the uplinks that the ranks of a host share. Ranks of
one host communicate like a mesh axis inside the host, on cpu through shared memory. Ranks of different hosts communicate
through the default group.
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
from weft.topology.measurement import LOOPBACK, MEMORY, NETWORK, Measurement, cache_path, read_cached, write_cache

SECONDS = 5.0
FIRST_BYTES, LAST_BYTES = 2**16, 2**26
MAX_SECONDS, MIN_SECONDS = 30e-3, 2e-3  # bounds of the time of the message that measures bandwidth
MESSAGES_PER_PAIR = 26  # total time of a pair, both directions, in multiples of that time
WARM_PINGS, PINGS = 2, 9
REPEATS = 5
END = -1  # size that ends the messages of a sender
DAY = 86400.0
Pair = tuple[int, int]


def measure(
    device: Device,
    torch_device: torch.device,
    *,
    seconds: float = SECONDS,
    cache: Path | None = None,
    max_age_seconds: float = DAY,
) -> tuple[Measurement, str]:
    """Measure all links. All ranks call it and get the same result.

    Args:
        device: device of the ranks.
        seconds: time budget; no round begins after it, and pairs that were not measured stay None.
        cache: folder of rank 0 for measurements; a cached measurement of the same hosts, ranks and devices is reused.
        max_age_seconds: maximum age of a reused measurement.

    Returns:
        The measurement, and a text with its source.

    Raises:
        TopologyError: the ranks of a host are not consecutive.
    """
    rank = dist.get_rank()
    facts = all_gather_json([host_id(), platform.node(), f"{device.type} {device.name}"])
    hosts = name_hosts([(tuple(key), name) for key, name, _ in facts])
    devices = ", ".join(dict.fromkeys(name for _, _, name in facts))
    text, reason = None, ""
    if cache is not None:
        path = cache_path(cache, hosts, devices)
        if rank == 0:
            cached, reason = read_cached(path, hosts, devices, max_age_seconds)
            text = cached.model_dump_json() if cached else None
        text, reason = broadcast_json([text, reason])
    if text is not None:
        return Measurement.model_validate_json(text), reason
    measured = _measure(device, torch_device, hosts, devices, seconds)
    if cache is not None and rank == 0:
        write_cache(measured, path)
    return measured, f"measured in {measured.seconds:.1f} s" + (f"; {reason}" if reason else "")


def name_hosts(ranks: Sequence[tuple[tuple[str, ...], str]]) -> list[tuple[str, int]]:
    """List the name and number of ranks of each host; hosts with the same name get a numeric suffix.

    Args:
        ranks: identity and name of the host of each rank.

    Raises:
        TopologyError: the ranks of a host are not consecutive.
    """
    keys = [key for rank, (key, _) in enumerate(ranks) if rank == 0 or ranks[rank - 1][0] != key]
    names = [next(name for other, name in ranks if other == key) for key in keys]
    if len(set(keys)) < len(keys):
        again = next(name for key, name in zip(keys, names, strict=True) if keys.count(key) > 1)
        raise TopologyError(
            f"the ranks of host {again} are not consecutive",
            rule="ranks are numbered host after host, so that inner axes of a mesh stay inside a host",
            fix="start the ranks with `weft`, with torchrun, or with srun --distribution=block",
        )
    counts = Counter(key for key, _ in ranks)
    unique = [name if names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(names)]
    return [(name, counts[key]) for name, key in zip(unique, keys, strict=True)]


def schedule(sizes: Sequence[int]) -> list[list[Pair]]:
    """Schedule all pairs of ranks in rounds with no host twice in a round: pairs inside hosts, then pairs between hosts.

    Every pair of hosts is measured once before any is measured again with other ranks, so that a benchmark that stops early
    knows all hosts. Pairs with the same local rank come first, since they share a rail if there are rails.

    Args:
        sizes: number of ranks of each host.
    """
    starts = [0, *accumulate(sizes)]
    inside = [list(combinations(range(start, start + size), 2)) for start, size in zip(starts, sizes, strict=False)]
    rounds = [
        [pairs[turn] for pairs in inside if turn < len(pairs)] for turn in range(max(len(pairs) for pairs in inside))
    ]
    most = max(sizes)
    locals_ = sorted(product(range(most), repeat=2), key=lambda pair: ((pair[1] - pair[0]) % most, pair[0]))
    matchings = round_robin(len(sizes))
    for turn in range(len(locals_)):
        for index, matching in enumerate(matchings):
            one, other = locals_[(turn + index) % len(locals_)]
            pairs = [(starts[a] + one, starts[b] + other) for a, b in matching if one < sizes[a] and other < sizes[b]]
            rounds += [pairs] if pairs else []
    return rounds


def round_robin(count: int) -> list[list[Pair]]:
    """Rounds in which each item is paired with every other once, by the circle method: one item is fixed, the others rotate."""
    circle = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


class _PeerMessages:
    """Timed messages of this rank with its peers."""

    def __init__(self, device: Device, torch_device: torch.device, host: range, inside: Any):
        self.device, self.host, self.inside = device, host, inside
        self.header = torch.zeros(1, dtype=torch.int64, device=torch_device)
        self.payload = torch.zeros(LAST_BYTES, dtype=torch.uint8, device=torch_device)

    def round_trip(self, peer: int, size: int) -> float:
        """Send a header and `size` bytes, and return the seconds until the peer has acknowledged them."""
        group = self._group(peer)
        begin = time.perf_counter()
        self.header.fill_(size)
        dist.send(self.header, peer, group)
        if size > 0:
            dist.send(self.payload[:size], peer, group)
        dist.recv(self.header, peer, group)
        self.device.synchronize()
        return time.perf_counter() - begin

    def echo(self, peer: int) -> None:
        """Receive and acknowledge the messages of a peer until its size is `END`."""
        group, size = self._group(peer), 0
        while size != END:
            dist.recv(self.header, peer, group)
            size = int(self.header)
            if size > 0:
                dist.recv(self.payload[:size], peer, group)
            dist.send(self.header, peer, group)

    def exchange(self, destination: int, source: int, send_bytes: int, receive_bytes: int) -> float:
        """Send to one peer and receive from another at the same time, and return the seconds."""
        sent, received = self.payload[: LAST_BYTES // 2], self.payload[LAST_BYTES // 2 :]
        begin = time.perf_counter()
        operations = [
            dist.P2POp(dist.isend, sent[:send_bytes], destination),
            dist.P2POp(dist.irecv, received[:receive_bytes], source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self.device.synchronize()
        return time.perf_counter() - begin

    def _group(self, peer: int) -> Any:
        return self.inside if peer in self.host else None


def _measure(
    device: Device, torch_device: torch.device, hosts: list[tuple[str, int]], devices: str, seconds: float
) -> Measurement:
    """Run the rounds and gather the results of all ranks on every rank."""
    began, rank = time.perf_counter(), dist.get_rank()
    sizes = [ranks for _, ranks in hosts]
    bounds = [0, *accumulate(sizes)]
    host = next(range(*bounds[n : n + 2]) for n in range(len(hosts)) if bounds[n] <= rank < bounds[n + 1])
    inside = _group_of_host(device, hosts, host)
    peers, rounds = _PeerMessages(device, torch_device, host, inside), schedule(sizes)
    target_seconds = min(max(seconds / (MESSAGES_PER_PAIR * max(len(rounds), 1)), MIN_SECONDS), MAX_SECONDS)
    results: dict[str, tuple[float, float]] = {}
    done = 0
    for pairs in rounds:
        if _agreed_seconds(began) > seconds:  # also a barrier before each round
            break
        done += 1
        peer = next((a if rank == b else b for a, b in pairs if rank in (a, b)), rank)
        for sender in sorted({rank, peer}) if peer != rank else ():
            if rank == sender:
                results[str(peer)] = _measure_pair(peers, peer, target_seconds)
            else:
                peers.echo(sender)
    gathered: list[dict[str, tuple[float, float]]] = all_gather_json(results)
    together: list[float | None] = [None] * len(hosts)
    if len(hosts) > 1 and _agreed_seconds(began) <= seconds:
        together = _measure_uplinks(peers, hosts, gathered, target_seconds)
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


def _measure_pair(peers: _PeerMessages, peer: int, target_seconds: float) -> tuple[float, float]:
    """Measure the latency in seconds and the bandwidth in bytes/s to a peer that echoes.

    Args:
        peers: messages of this rank.
        peer: rank of the peer.
        target_seconds: minimum time of the message that measures bandwidth.
    """
    for _ in range(WARM_PINGS):
        peers.round_trip(peer, 0)
    latency = median(peers.round_trip(peer, 0) for _ in range(PINGS)) / 2
    size = FIRST_BYTES
    while size < LAST_BYTES and any(  # two messages, since a single one may be delayed by chance
        peers.round_trip(peer, size) < target_seconds for _ in range(2)
    ):
        size *= 2
    large = min(peers.round_trip(peer, size) for _ in range(REPEATS))
    small = min(peers.round_trip(peer, size // 4) for _ in range(REPEATS))
    peers.round_trip(peer, END)
    least = size / large
    slope = (size - size // 4) / (large - small) if large > small else least
    return latency, min(max(slope, least), 2 * least)  # bounds, since the slope between two noisy times is unreliable


def _measure_uplinks(
    peers: _PeerMessages,
    hosts: list[tuple[str, int]],
    gathered: list[dict[str, tuple[float, float]]],
    target_seconds: float,
) -> list[float | None]:
    """Measure the bytes/s of each host while every rank sends to the rank with its local rank on the next host.

    Either host may limit the traffic from one host to the next, so that the better of the rates to the next host and from the
    previous one counts. The size of a message is proportional to the bandwidth of its link, so that all messages overlap the
    whole time and the initial burst of a rate-limited link is small in comparison.
    """
    rank = dist.get_rank()
    host_of_rank = [index for index, (_, ranks) in enumerate(hosts) for _ in range(ranks)]
    starts = [0, *accumulate(ranks for _, ranks in hosts)]
    common = min(ranks for _, ranks in hosts)

    def size_from(host: int) -> int:
        """Bytes of each rank's message from a host to the next."""
        one, other = starts[host], starts[(host + 1) % len(hosts)]
        _, rate = gathered[one].get(str(other), (0.0, 0.0))
        return int(min(max(4 * target_seconds * rate / common, FIRST_BYTES), LAST_BYTES // 2))

    host, local = host_of_rank[rank], rank - starts[host_of_rank[rank]]
    destination, source = (starts[(host + step) % len(hosts)] + local for step in (1, -1))
    sizes = [size_from(index - 1 if index else len(hosts) - 1) for index in range(len(hosts))]  # received by each host
    best = [0.0] * len(hosts)  # bytes/s received by each host
    for _ in range(REPEATS):
        send_bytes = sizes[(host + 1) % len(hosts)]
        taken = peers.exchange(destination, source, send_bytes, sizes[host]) if local < common else 0.0
        times = all_gather_json(taken)
        slowest = [max(times[starts[n] : starts[n + 1]]) for n in range(len(hosts))]
        best = [max(known, common * size / took) for known, size, took in zip(best, sizes, slowest, strict=True)]
    return [max(best[n], best[(n + 1) % len(hosts)]) for n in range(len(hosts))]


def _agreed_seconds(began: float) -> float:
    """Seconds since `began`, the maximum over all ranks; also a barrier."""
    passed = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device="cpu")
    dist.all_reduce(passed, dist.ReduceOp.MAX)
    return float(passed)


def _group_of_host(device: Device, hosts: list[tuple[str, int]], host: range) -> Any:
    """Create the group of the ranks of this host, like a mesh axis inside the host; None for the default group.

    All ranks create the groups of all hosts. A group created by its members alone would be named after its members, and the
    next group of that name would read stale keys from the store.
    """
    starts, own = [0, *accumulate(ranks for _, ranks in hosts)], None
    for start, (_, ranks) in zip(starts, hosts, strict=False):
        if device.type == "cpu" and ranks > 1:
            group = dist.new_group(list(range(start, start + ranks)), backend=register_backend())
            own = group if start == host.start else own
    return own


def _kinds(device: Device, hosts: list[tuple[str, int]], inside: Any) -> list[list[str]]:
    """Kind of link of each pair of ranks, [world_size, world_size]."""
    own: list[list[str]] | None = None
    default = "device"
    if device.type == "cpu":
        default = MEMORY if isinstance(inside, SharedMemoryGroup) else LOOPBACK
    elif int(os.environ.get("LOCAL_RANK", "0")) == 0:
        own = read_device_links(device.type)
    gathered = all_gather_json([own, default])
    starts = [0, *accumulate(ranks for _, ranks in hosts)]
    kinds = [[NETWORK] * starts[-1] for _ in range(starts[-1])]
    for start, (_, ranks) in zip(starts, hosts, strict=False):
        table, default = gathered[start]
        for a, b in product(range(ranks), repeat=2):
            known = table is not None and max(a, b) < len(table)
            kinds[start + a][start + b] = "" if a == b else table[a][b] if known else default
    return kinds
