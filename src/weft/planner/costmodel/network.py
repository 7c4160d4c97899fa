"""How long messages of a layout take: which axis crosses hosts, and alpha-beta times of collectives on two levels.

Ranks are placed tp, then cp, then dp, then pp, the first the nearest; experts are shared by neighbours (ep counts along
tp x cp x dp). So a group is known by its size and its stride, and each rank drives its own share of the links between hosts.
Formulas as in `weft.topology.collective_time` (Thakur, Rabenseifner and Gropp, 2005), of a bandwidth that grows with the message
(`Wire.ramp`), where rings inside and between hosts run at once, as NCCL's do: the slower of the two decides.
"""

import math
from dataclasses import dataclass

from weft.planner.costmodel.hardware import ClusterSpec, Wire


@dataclass(frozen=True)
class RankGroup:
    """Ranks that speak with each other."""

    size: int
    inside: int
    """Of them on one host."""
    wire: Wire
    """Inside a host."""
    out: Wire
    """Between hosts, of one rank."""

    @property
    def hosts(self) -> int:
        """Hosts over which it goes."""
        return -(-self.size // self.inside)

    @property
    def slowest(self) -> Wire:
        """Of its links."""
        return self.wire if self.hosts == 1 else self.out


def group(cluster: ClusterSpec, size: int, stride: int) -> RankGroup:
    """Ranks `stride` apart.

    Args:
        size: ranks.
        stride: 1 for neighbours.
    """
    inside = max(1, min(size, cluster.per_host // stride))
    return RankGroup(size, inside, cluster.device.inside, cluster.device.between)


def all_reduce(ranks: RankGroup, num_bytes: float) -> float:
    """Seconds: 2 (n - 1) / n x bytes around the ring; latency of a ring inside and of a tree between hosts."""
    if ranks.size == 1:
        return 0.0
    return 2 * _gather(ranks, num_bytes, tree=True)


def all_gather(ranks: RankGroup, num_bytes: float) -> float:
    """Seconds; `num_bytes` of the gathered tensor, around a ring. Reduce-scatter takes as long."""
    return _gather(ranks, num_bytes) if ranks.size > 1 else 0.0


def _gather(ranks: RankGroup, num_bytes: float, tree: bool = False) -> float:
    far = _steps(ranks.hosts) if tree else ranks.hosts - 1.0
    latency = (ranks.inside - 1) * ranks.wire.latency + far * ranks.out.latency
    moved = (ranks.size - 1) / ranks.size * num_bytes
    inside = _transfer(ranks.wire, moved, ranks.wire.bandwidth) if ranks.inside > 1 else 0.0
    if ranks.hosts == 1:
        return latency + inside
    return latency + max(inside, _transfer(ranks.out, moved, ranks.out.bandwidth * ranks.inside))


def _steps(hosts: int) -> float:
    return math.log2(hosts) if hosts > 1 else 0.0


def _transfer(wire: Wire, num_bytes: float, bandwidth: float) -> float:
    """Bytes at a bandwidth that they do not reach when they are few."""
    return (num_bytes + math.sqrt(num_bytes * wire.ramp)) / bandwidth if num_bytes else 0.0


def all_to_all(
    ranks: RankGroup, num_bytes: float, once: float = 1.0, near_rate: float = 1.0, far_rate: float = 1.0
) -> float:
    """Seconds of an exchange in which each rank has `num_bytes`, its own share included.

    Args:
        once: of the bytes for other hosts, the part that is sent: less than 1 where a token that several experts of one
            host want travels once.
        near_rate: share of the bandwidth inside a host that is reached.
        far_rate: the same between hosts.
    """
    if ranks.size == 1:
        return 0.0
    near = num_bytes * (ranks.inside - 1) / ranks.size
    far = num_bytes * (ranks.size - ranks.inside) / ranks.size * once
    latency = ranks.wire.latency * (ranks.inside > 1) * 4 + ranks.out.latency * min(8.0, float(ranks.hosts - 1))
    inside = _transfer(ranks.wire, near, ranks.wire.bandwidth * near_rate)
    return latency + max(inside, _transfer(ranks.out, far, ranks.out.bandwidth * far_rate))


def point_to_point(ranks: RankGroup, num_bytes: float) -> float:
    """Seconds from one rank to the next of its group, over its slowest link."""
    if ranks.size == 1:
        return 0.0
    wire = ranks.slowest
    return wire.latency + _transfer(wire, num_bytes, wire.bandwidth)


def exposed(messages: float, beside: float, slowdown: float) -> float:
    """Seconds that messages add to the computation beside which they run, both slowed by each other.

    Args:
        messages: seconds alone.
        beside: seconds of computation that can hide them.
        slowdown: of the computation while messages run, 1 or more (they take memory bandwidth and processors).
    """
    hidden = min(messages, beside)
    return messages - hidden + hidden * (slowdown - 1)
