"""How long collectives take on a topology, flat and in two levels, and which of the two is quicker.

The model is that of Hockney (1994) with the long-message algorithms of Thakur, Rabenseifner and Gropp (2005), "Optimization of
Collective Communication Operations in MPICH": rings for all-reduce, all-gather and reduce-scatter, pairwise exchange for
all-to-all. A message of s bytes takes a + s / B. With n ranks on h hosts of g, and S bytes of the full tensor (the gathered or
not yet scattered side; of all-to-all, what one rank has for all, itself included):

    flat          all-gather, reduce-scatter  (n - 1) (a + S/n / B), of the slowest link of the ring 0, 1 ... n - 1, 0
                  all-reduce                  twice that
                  all-to-all                  (g - 1) (a_in + S/n / B_in) + (n - g) (a_out + S/n / B_out(g))
    two levels    reduce-scatter              (g - 1) (a_in + S/g / B_in) + (h - 1) (a_out + S/n / B_out(g))
                  all-gather                  the same, the other way round
                  all-reduce                  twice that: reduce-scatter inside and across, gather across and inside
                  all-to-all                  (g - 1) (a_in + S/g / B_in) + (h - 1) (a_out + S/h / B_out(g))

in: the slowest link inside a host; out: the slowest between hosts. B_out(m) = min(B_out, U / m): when m ranks of a host send to
other hosts at once they share U, what the host sends (`Host.bytes_per_second`; where that is not given, B_out: one link for
all). In a ring one rank of each host does, on two levels all g do. Formulas rank; they do not replace a measurement.
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
    """Seconds of one collective."""

    flat: float
    two_level: float | None
    """None where there are no two levels: one host, one rank a host, or hosts with different numbers of ranks."""

    @property
    def best(self) -> Algorithm:
        """The quicker one; flat where they are equal."""
        return "two_level" if self.two_level is not None and self.two_level < self.flat else "flat"


def collective_times(
    topology: Topology, operation: Operation, num_bytes: float, ranks: Sequence[int], groups: int = 1
) -> Times:
    """Seconds that a collective takes, flat and in two levels.

    Args:
        num_bytes: S above.
        ranks: of the group, in its order.
        groups: how many such groups of the same hosts work at once, as those of dp do beside each other where tp is inside a
            host; they share what a host sends.

    Raises:
        TopologyError: a link between two of the ranks is not known.
    """
    n, order = len(ranks), list(ranks)
    if n < 2:
        return Times(0.0, None)
    host = topology.host_numbers[order]
    crosses, itself = host[:, None] != host[None], np.eye(n, dtype=bool)
    classes = topology.classes[np.ix_(order, order)]
    inside, between = _slowest(topology, classes[~crosses & ~itself]), _slowest(topology, classes[crosses])
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
        edges, leaves = classes[ring], crosses[ring]
        links = _slowest(topology, edges[~leaves]), _shared(_slowest(topology, edges[leaves]), uplink)
        flat = times * (n - 1) * max(_seconds(link, num_bytes / n) for link in links)
        two_level = times * ((g - 1) * _seconds(inside, num_bytes / g) + (h - 1) * _seconds(across, num_bytes / n))
    has_levels = h > 1 and g > 1 and set(counts.values()) == {g}
    return Times(flat, two_level if has_levels else None)


def choose(
    topology: Topology, operation: Operation, num_bytes: float, ranks: Sequence[int], groups: int = 1
) -> Algorithm:
    """The quicker of both algorithms; see `collective_times`."""
    return collective_times(topology, operation, num_bytes, ranks, groups).best


def _slowest(topology: Topology, classes: np.ndarray) -> Link | None:
    """The largest latency and the smallest bandwidth of some links, given by their classes; None if there are none."""
    places = np.unique(classes).tolist()
    if UNKNOWN in places:
        raise TopologyError(
            "how fast some links are is not known",
            rule="times of collectives follow from the latency and bandwidth of every link",
            fix="declare the topology, or measure it with `weft topology --out FILE`",
        )
    if not places:
        return None
    links = [topology.links[place] for place in places]
    slowest = min(links, key=lambda link: link.bytes_per_second)
    return slowest.model_copy(update={"latency_seconds": max(link.latency_seconds for link in links)})


def _uplink(topology: Topology, hosts: list[int], between: Link | None) -> float:
    """What the weakest of some hosts sends to others, in bytes/s."""
    if between is None:
        return float("inf")
    return min(topology.hosts[number].bytes_per_second or between.bytes_per_second for number in hosts)


def _shared(link: Link | None, share: float) -> Link | None:
    """A link that carries no more than a share of what its host sends."""
    if link is None or share >= link.bytes_per_second:
        return link
    return link.model_copy(update={"bytes_per_second": share})


def _seconds(link: Link | None, message_bytes: float) -> float:
    return 0.0 if link is None else link.seconds(message_bytes)
