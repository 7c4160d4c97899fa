"""Rates of the links between hosts, measured between two training steps in well under a second.

    probe = LinkProbe(host_of_rank)
    rates = probe.measure()             # on all ranks

One rank of each host takes part. As in `link_benchmark`, the pairs of hosts are measured in rounds in which no host takes part
twice; here both ends send at the same time, and the fastest of a few messages counts, because a rank may be descheduled in
the others.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm.link_benchmark import round_robin
from weft.comm.objects import all_gather_json

FIRST_BYTES, LAST_BYTES = 2**20, 2**23  # above the burst of a link whose rate is limited
MIN_SECONDS = 4e-3  # time of a message that measures bandwidth, when a link is first measured
REPEATS = 4
PAIR_SECONDS = 0.25  # then no further message is sent to a peer
Rates = list[list[float | None]]
"""Bytes/s, [hosts, hosts], from the host of the row to the host of the column; None on the diagonal."""


class LinkProbe:
    """Repeated measurement of the same links with messages of the same size.

    Args:
        host_of_rank: index of the host of each rank, from 0.
    """

    def __init__(self, host_of_rank: Sequence[int]):
        self.hosts = max(host_of_rank) + 1
        self.leaders = [list(host_of_rank).index(host) for host in range(self.hosts)]
        """First rank of each host."""
        self.sizes: dict[int, int] = {}
        """Bytes of the messages exchanged with each peer, chosen by the first measurement."""

    def measure(self) -> Rates:
        """Measure all pairs of hosts, in host memory. Collective over the default group; every rank gets the result."""
        rank, received = dist.get_rank(), dict[str, float]()
        if rank in self.leaders:
            host = self.leaders.index(rank)
            for pairs in round_robin(self.hosts):
                peer = next((a + b - host for a, b in pairs if host in (a, b)), None)
                if peer is not None:
                    received[str(peer)] = self._measure_pair(self.leaders[peer])
        gathered: list[dict[str, float]] = all_gather_json(received)
        rows = [gathered[leader] for leader in self.leaders]
        return [[rows[to].get(str(of)) for to in range(self.hosts)] for of in range(self.hosts)]

    def _measure_pair(self, peer: int) -> float:
        """Bytes/s received from a peer."""
        if peer not in self.sizes:
            size = FIRST_BYTES
            while size < LAST_BYTES and any(  # two messages, since a single one may be delayed by chance
                _agree(_exchange(peer, size), peer) < MIN_SECONDS for _ in range(2)
            ):
                size *= 2
            self.sizes[peer] = size
        size, best, total = self.sizes[peer], float("inf"), 0.0
        for _ in range(REPEATS):
            seconds = _exchange(peer, size)
            best, total = min(best, seconds), total + _agree(seconds, peer)
            if total > PAIR_SECONDS:
                break
        return size / best


def _agree(seconds: float, peer: int) -> float:
    """Maximum of the seconds of this rank and of its peer; also a barrier of both."""
    own, other = torch.tensor([seconds], dtype=torch.float64, device="cpu"), torch.zeros(1, dtype=torch.float64)
    receive = dist.irecv(other, peer)
    dist.send(own, peer)
    assert receive is not None
    receive.wait()
    return max(seconds, float(other))


def _exchange(peer: int, size: int) -> float:
    """Send `size` bytes to a peer while it does the same, and return the seconds until those of the peer have arrived."""
    sent, received = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    _agree(0.0, peer)
    begin = time.perf_counter()
    receive, send = dist.irecv(received, peer), dist.isend(sent, peer)
    assert receive is not None
    assert send is not None
    receive.wait()
    seconds = time.perf_counter() - begin
    send.wait()
    return seconds
