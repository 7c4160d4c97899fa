"""Communication model: which axes cross hosts, and alpha-beta times of hierarchical (intra-node and inter-node) collectives.

Ranks are ordered tp, cp, dp, pp, with tp innermost; ep groups are consecutive ranks along tp x cp x dp. A process group is
therefore given by its size and its stride, and each rank uses its own share of the links between hosts. The formulas are those
of `weft.topology.collective_time` (Thakur, Rabenseifner and Gropp, 2005), with a bandwidth that grows with the message size
(`LinkModel.ramp`). Rings inside and between hosts run concurrently, as in NCCL: the slower of the two determines the time.
"""

import math
from dataclasses import dataclass

from weft.planner.costmodel.hardware import ClusterSpec, LinkModel


@dataclass(frozen=True)
class RankGroup:
    """A process group and its links."""

    size: int
    ranks_per_host: int
    """Ranks of the group per host."""
    intra_node: LinkModel
    """Link inside a host."""
    inter_node: LinkModel
    """Link between hosts, per rank."""

    @property
    def hosts(self) -> int:
        """Number of hosts that the group spans."""
        return -(-self.size // self.ranks_per_host)

    @property
    def slowest(self) -> LinkModel:
        """Slowest link of the group."""
        return self.intra_node if self.hosts == 1 else self.inter_node


def group(cluster: ClusterSpec, size: int, stride: int) -> RankGroup:
    """Process group of `size` ranks, `stride` apart.

    Args:
        cluster: cluster on which the ranks are placed.
        size: number of ranks.
        stride: distance between two consecutive ranks of the group; 1: adjacent ranks.
    """
    inside = max(1, min(size, cluster.per_host // stride))
    return RankGroup(size, inside, cluster.device.inside, cluster.device.between)


def all_reduce(ranks: RankGroup, num_bytes: float) -> float:
    """Seconds of an all-reduce: 2 (n - 1) / n x bytes around a ring; ring latency inside a host, tree latency between hosts."""
    if ranks.size == 1:
        return 0.0
    return 2 * _gather(ranks, num_bytes, tree=True)


def all_gather(ranks: RankGroup, num_bytes: float) -> float:
    """Seconds of a ring all-gather of `num_bytes` gathered bytes; also those of a reduce-scatter of `num_bytes` input bytes."""
    return _gather(ranks, num_bytes) if ranks.size > 1 else 0.0


def _gather(ranks: RankGroup, num_bytes: float, tree: bool = False) -> float:
    far = (math.log2(ranks.hosts) if ranks.hosts > 1 else 0.0) if tree else ranks.hosts - 1.0
    latency = (ranks.ranks_per_host - 1) * ranks.intra_node.latency + far * ranks.inter_node.latency
    moved = (ranks.size - 1) / ranks.size * num_bytes
    inside = _transfer(ranks.intra_node, moved, ranks.intra_node.bandwidth) if ranks.ranks_per_host > 1 else 0.0
    if ranks.hosts == 1:
        return latency + inside
    return latency + max(inside, _transfer(ranks.inter_node, moved, ranks.inter_node.bandwidth * ranks.ranks_per_host))


def _transfer(wire: LinkModel, num_bytes: float, bandwidth: float) -> float:
    """Seconds of a transfer, with the lower effective bandwidth of small messages."""
    return (num_bytes + math.sqrt(num_bytes * wire.ramp)) / bandwidth if num_bytes else 0.0


def all_to_all(
    ranks: RankGroup,
    num_bytes: float,
    inter_node_share: float = 1.0,
    intra_node_rate: float = 1.0,
    inter_node_rate: float = 1.0,
) -> float:
    """Seconds of an all-to-all.

    Args:
        ranks: process group.
        num_bytes: input bytes per rank, including the part that stays on the rank.
        inter_node_share: share of the bytes for other hosts that is sent; less than 1 if a token is sent once to each host
            instead of once to each of its experts there.
        intra_node_rate: reached share of the bandwidth inside a host.
        inter_node_rate: reached share of the bandwidth between hosts.
    """
    if ranks.size == 1:
        return 0.0
    near = num_bytes * (ranks.ranks_per_host - 1) / ranks.size
    far = num_bytes * (ranks.size - ranks.ranks_per_host) / ranks.size * inter_node_share
    latency = ranks.intra_node.latency * (ranks.ranks_per_host > 1) * 4 + ranks.inter_node.latency * min(
        8.0, float(ranks.hosts - 1)
    )
    inside = _transfer(ranks.intra_node, near, ranks.intra_node.bandwidth * intra_node_rate)
    return latency + max(inside, _transfer(ranks.inter_node, far, ranks.inter_node.bandwidth * inter_node_rate))


def point_to_point(ranks: RankGroup, num_bytes: float) -> float:
    """Seconds of one message to the next rank of the group, over the group's slowest link."""
    if ranks.size == 1:
        return 0.0
    wire = ranks.slowest
    return wire.latency + _transfer(wire, num_bytes, wire.bandwidth)


def exposed(communication: float, computation: float, slowdown: float) -> float:
    """Exposed communication time: seconds that communication adds to the computation that it overlaps with.

    Args:
        communication: seconds of the communication alone.
        computation: seconds of computation that the communication can overlap with.
        slowdown: slowdown of the overlapped computation, at least 1 (communication uses memory bandwidth and compute units).
    """
    hidden = min(communication, computation)
    return communication - hidden + hidden * (slowdown - 1)
