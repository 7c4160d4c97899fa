"""Predicted time of flat and hierarchical collectives on a topology, and the choice between the two algorithms.

The cost model is that of Hockney (1994) with the long-message algorithms of Thakur, Rabenseifner and Gropp (2005),
"Optimization of Collective Communication Operations in MPICH": rings for all-reduce, all-gather and reduce-scatter, pairwise
exchange for all-to-all. A message of s bytes takes a + s / B. There are n ranks on h hosts with g ranks each. S is the size of
the full tensor in bytes (gathered, or before the scatter; for all-to-all, all data of one rank, its own part included).

    flat          all-gather, reduce-scatter  (n - 1) (a + S/n / B), for the slowest link of the ring 0, 1 ... n - 1, 0
                  all-reduce                  twice that time
                  all-to-all                  (g - 1) (a_in + S/n / B_in) + (n - g) (a_out + S/n / B_out(g))
    hierarchical  reduce-scatter              (g - 1) (a_in + S/g / B_in) + (h - 1) (a_out + S/n / B_out(g))
                  all-gather                  the same time, with the steps in reverse order
                  all-reduce                  twice that time: reduce-scatter inside and between, all-gather between and inside
                  all-to-all                  (g - 1) (a_in + S/g / B_in) + (h - 1) (a_out + S/h / B_out(g))

The subscript `in` is the slowest link inside a host, `out` the slowest link between hosts. B_out(m) = min(B_out, U / m): m
ranks of a host that send to other hosts at once share the uplink U of the host (`Host.bytes_per_second`; B_out if not given).
In a ring one rank of each host sends to another host; in a hierarchical collective all g ranks do. The formulas rank the
algorithms; they do not replace a measurement.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from weft.errors import TopologyError
from weft.topology.topology import UNKNOWN, Link, Topology

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
Algorithm = Literal["flat", "two_level"]


class Times(NamedTuple):
    """Predicted seconds of one collective, by algorithm."""

    flat: float
    two_level: float | None
    """Hierarchical algorithm; None for one host, one rank per host, or hosts with different numbers of ranks."""

    @property
    def best(self) -> Algorithm:
        """Faster algorithm; "flat" if both take the same time."""
        return "two_level" if self.two_level is not None and self.two_level < self.flat else "flat"


def collective_times(
    topology: Topology, operation: Operation, num_bytes: float, ranks: Sequence[int], groups: int = 1
) -> Times:
    """Predict the seconds of a collective for the flat and the hierarchical algorithm.

    Args:
        topology: topology of all ranks.
        operation: collective.
        num_bytes: size S of the full tensor, see above.
        ranks: ranks of the group, in group order.
        groups: number of concurrent groups on the same hosts, which share the uplinks; for example the dp groups of a job
            with tp inside a host.

    Raises:
        TopologyError: a link between two ranks of the group is unknown.
    """
    n, order = len(ranks), list(ranks)
    if n < 2:
        return Times(0.0, None)
    host = topology.host_of_rank[order]
    crosses, same_rank = host[:, None] != host[None], np.eye(n, dtype=bool)
    classes = topology.classes[np.ix_(order, order)]
    inside, between = _slowest(topology, classes[~crosses & ~same_rank]), _slowest(topology, classes[crosses])
    counts = Counter(host.tolist())
    h, g = len(counts), max(counts.values())
    uplink = _uplink(topology, list(counts), between) / groups
    across = _shared(between, uplink / g)
    if operation == "all_to_all":
        flat = (g - 1) * _seconds(inside, num_bytes / n) + (n - g) * _seconds(across, num_bytes / n)
        two_level = (g - 1) * _seconds(inside, num_bytes / g) + (h - 1) * _seconds(across, num_bytes / h)
    else:
        times = 2 if operation == "all_reduce" else 1
        ring = np.arange(n), (np.arange(n) + 1) % n
        edges, crossing = classes[ring], crosses[ring]
        links = _slowest(topology, edges[~crossing]), _shared(_slowest(topology, edges[crossing]), uplink)
        flat = times * (n - 1) * max(_seconds(link, num_bytes / n) for link in links)
        two_level = times * ((g - 1) * _seconds(inside, num_bytes / g) + (h - 1) * _seconds(across, num_bytes / n))
    has_levels = h > 1 and g > 1 and set(counts.values()) == {g}
    return Times(flat, two_level if has_levels else None)


def choose(
    topology: Topology, operation: Operation, num_bytes: float, ranks: Sequence[int], groups: int = 1
) -> Algorithm:
    """Choose the faster algorithm; see `collective_times` for the arguments."""
    return collective_times(topology, operation, num_bytes, ranks, groups).best


def _slowest(topology: Topology, classes: np.ndarray) -> Link | None:
    """Largest latency and smallest bandwidth of a set of link classes; None for an empty set."""
    indices = np.unique(classes).tolist()
    if UNKNOWN in indices:
        raise TopologyError(
            "the speed of some links is unknown",
            rule="the time of a collective depends on the latency and bandwidth of every link",
            fix="declare the topology, or measure it with `weft topology --out FILE`",
        )
    if not indices:
        return None
    links = [topology.links[index] for index in indices]
    slowest = min(links, key=lambda link: link.bytes_per_second)
    return slowest.model_copy(update={"latency_seconds": max(link.latency_seconds for link in links)})


def _uplink(topology: Topology, hosts: list[int], between: Link | None) -> float:
    """Smallest uplink bandwidth of a set of hosts, in bytes/s."""
    if between is None:
        return float("inf")
    return min(topology.hosts[index].bytes_per_second or between.bytes_per_second for index in hosts)


def _shared(link: Link | None, share: float) -> Link | None:
    """Limit the bandwidth of a link to a share of the host's uplink."""
    if link is None or share >= link.bytes_per_second:
        return link
    return link.model_copy(update={"bytes_per_second": share})


def _seconds(link: Link | None, message_bytes: float) -> float:
    return 0.0 if link is None else link.seconds(message_bytes)
