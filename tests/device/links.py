"""Synthetic topologies and measurements for tests."""

import itertools
from collections.abc import Callable, Sequence

from weft.topology.measurement import Measurement
from weft.topology.topology import Host, Link, Topology

FAST = Link(name="memory", latency_seconds=1e-6, bytes_per_second=1e9)
SLOW = Link(name="network", latency_seconds=1e-4, bytes_per_second=1e8)


def two_level_topology(*ranks: int, uplink: float | None = None) -> Topology:
    """Topology of hosts with the given rank counts: `FAST` links inside a host, `SLOW` between hosts."""
    hosts = tuple(Host(name=f"node{n}", ranks=count, bytes_per_second=uplink) for n, count in enumerate(ranks))
    return Topology(hosts=hosts, links=(FAST, SLOW), inside_host="memory", between_hosts="network")


def measurement(
    ranks: Sequence[int],
    rate: Callable[[int, int], float | None],
    kind: Callable[[int, int], str] | None = None,
    latency: float = 1e-4,
) -> Measurement:
    """Measurement with the bandwidth `rate(source, destination)`; by default the links inside a host are nvlink."""
    host_of_rank = [index for index, count in enumerate(ranks) for _ in range(count)]
    world = range(len(host_of_rank))

    def default_kind(a: int, b: int) -> str:
        return "nvlink" if host_of_rank[a] == host_of_rank[b] else "network"

    rates = [[None if a == b else rate(a, b) for b in world] for a in world]
    return Measurement(
        hosts=tuple((f"node{index}", count) for index, count in enumerate(ranks)),
        device="cuda test",
        kinds=tuple(tuple("" if a == b else (kind or default_kind)(a, b) for b in world) for a in world),
        latency_seconds=tuple(tuple(None if cell is None else latency for cell in row) for row in rates),
        bytes_per_second=tuple(map(tuple, rates)),
        together=tuple(itertools.repeat(None, len(ranks))),
        rounds=1,
        all_rounds=1,
        seconds=1.0,
        written=0.0,
    )
