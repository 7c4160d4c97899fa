"""Measured latency and bandwidth between ranks, its cache, its classes of links, and the detection of slow links.

    measured, reason = read_cached(path, hosts, device, max_age_seconds)    # measurement of an earlier job of the same ranks
    topology = to_topology(measured)
    for text in find_slow(measured): ...

`weft.comm.link_benchmark` makes the measurement.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
from pydantic import ValidationError

from weft.plan import Table
from weft.topology.topology import UNKNOWN, Host, Link, Pair, Topology, format_rate, save_text

GAP = 2.0  # minimum ratio of bandwidths between two adjacent classes
SLOW = 0.5  # fraction of the median bandwidth below which a link is slow
FORMAT = 1  # version of the cache file
MEMORY, LOOPBACK, NETWORK = "memory", "loopback", "network"  # kinds of links, in addition to those of `device/links.py`
NO_LINKS = (MEMORY, LOOPBACK)
Row = tuple[float | None, ...]
T = TypeVar("T")


class Measurement(Table):
    """Latency and bandwidth between ranks.

    Matrices are [world_size, world_size], from the rank of the row to the rank of the column; None: not measured.
    """

    format: int = FORMAT
    hosts: tuple[tuple[str, int], ...]
    """Name and number of ranks of each host, in rank order."""
    device: str
    """Device of the ranks."""
    kinds: tuple[tuple[str, ...], ...]
    """Kind of link of each pair of ranks: network, memory, loopback, nvlink ..."""
    latency_seconds: tuple[Row, ...]
    bytes_per_second: tuple[Row, ...]
    together: Row
    """Aggregate bytes/s of all ranks of each host, to or from another host."""
    rounds: int
    """Number of completed rounds."""
    all_rounds: int
    """Number of rounds that measure every pair."""
    seconds: float
    """Duration of the measurement."""
    written: float
    """Time of the measurement, in seconds since 1970."""

    @property
    def world_size(self) -> int:
        """Number of ranks of all hosts."""
        return len(self.kinds)

    @property
    def host_of_rank(self) -> list[int]:
        """Host index of each rank."""
        return [index for index, (_, ranks) in enumerate(self.hosts) for _ in range(ranks)]

    def rates(self) -> np.ndarray:
        """Bandwidth in bytes/s, [world_size, world_size], from row to column; NaN: not measured."""
        return np.array(self.bytes_per_second, dtype=np.float64)

    def latencies(self) -> np.ndarray:
        """Latency in seconds, [world_size, world_size], from row to column; NaN: not measured."""
        return np.array(self.latency_seconds, dtype=np.float64)


# Cache


def cache_path(folder: Path, hosts: Sequence[tuple[str, int]], device: str) -> Path:
    """Cache file for the given hosts, ranks and devices."""
    key = json.dumps([list(map(list, hosts)), device])
    return folder / f"topology-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read_cached(
    path: Path, hosts: Sequence[tuple[str, int]], device: str, max_age_seconds: float
) -> tuple[Measurement | None, str]:
    """Read a cached measurement of the same ranks.

    Args:
        path: cache file.
        hosts: name and number of ranks of each host.
        device: device of the ranks.
        max_age_seconds: maximum age of a valid measurement.

    Returns:
        The measurement, or None if there is no valid one; and a text with the age or the reason.
    """
    try:
        found = Measurement.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, f"{path} does not exist"
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        return None, f"{path} cannot be read: {str(error).splitlines()[0]}"
    size = sum(ranks for _, ranks in found.hosts)
    matrices = (found.kinds, found.latency_seconds, found.bytes_per_second)
    if found.format != FORMAT or any(len(part) != size for matrix in matrices for part in (matrix, *matrix)):
        return None, f"{path} has another format"
    if (found.hosts, found.device) != (tuple(hosts), device):
        return None, f"{path} is for other hosts, ranks or devices"
    age = time.time() - found.written
    if not 0 <= age <= max_age_seconds:
        return None, f"{path} is {age / 3600:.1f} h old, more than {max_age_seconds / 3600:g} h"
    return found, f"measured {age / 60:.0f} min ago: {path}"


def write_cache(measured: Measurement, path: Path) -> None:
    """Write a measurement for `read_cached`, atomically."""
    save_text(measured.model_dump_json(), path)


# Classes


def to_topology(measured: Measurement) -> Topology:
    """Group all pairs into link classes. Pairs of one kind are sorted by bandwidth and split at ratios of `GAP` or more.

    The bandwidth of a pair is that of the slower direction. Its latency is the shorter one, since both directions measure a
    round trip. A pair that was not measured gets the median bandwidth of the measured pairs between the same hosts, or else
    of its kind. A class has the median latency and bandwidth of its pairs. The memory of a host is one class with the
    bandwidth of the faster direction: ranks copy with their own cores, so that differences come from the load of the cores.
    """
    rates, latencies = _both_ways(measured.rates(), np.fmin), _both_ways(measured.latencies(), np.fmin)
    copied = np.isin(measured.kinds, NO_LINKS)
    rates[copied] = _both_ways(measured.rates(), np.fmax)[copied]
    _fill(measured, rates)
    members: dict[str, list[tuple[int, int]]] = {}
    for a, b in combinations(range(measured.world_size), 2):
        if not np.isnan(rates[a, b]):
            members.setdefault(measured.kinds[a][b], []).append((a, b))
    classes = np.full(rates.shape, UNKNOWN)
    links: list[Link] = []
    for kind, pairs in members.items():
        groups = [pairs] if kind in NO_LINKS else cut(pairs, lambda pair: float(rates[pair]))
        for index, group in enumerate(groups, 1):
            rows, columns = np.array(group).T
            classes[rows, columns] = classes[columns, rows] = len(links)
            name = kind if len(groups) == 1 else f"{kind}-{index}"
            latency = latencies[rows, columns]
            links.append(
                Link(
                    name=name,
                    latency_seconds=_rounded(np.nanmedian(latency)) if not np.isnan(latency).all() else 0.0,
                    bytes_per_second=_rounded(np.median(rates[rows, columns])),
                )
            )
    return _describe(measured, classes, links)


def cut(items: Iterable[T], rate: Callable[[T], float]) -> list[list[T]]:
    """Split items into groups by rate, the fastest first: a group ends where the next item is slower by `GAP` or more."""
    ordered = sorted(items, key=rate, reverse=True)
    starts = [
        0,
        *(index for index, (a, b) in enumerate(pairwise(ordered), 1) if rate(a) >= GAP * rate(b)),
        len(ordered),
    ]
    return [ordered[start:end] for start, end in pairwise(starts) if start < end]


def _rounded(value: float | np.floating) -> float:
    """Round to four digits, more than the precision of a measurement."""
    return float(f"{value:.4g}")


def _both_ways(matrix: np.ndarray, choose: np.ufunc) -> np.ndarray:
    """Combine both directions of each pair with `choose`, or use the only measured one."""
    return choose(matrix, matrix.T)


def _fill(measured: Measurement, rates: np.ndarray) -> None:
    """Fill pairs that were not measured with the median of similar pairs, in place."""
    host, kinds = np.array(measured.host_of_rank), np.array(measured.kinds)
    empty = np.isnan(rates) & ~np.eye(len(rates), dtype=bool)
    known = ~np.isnan(rates)
    for a, b in np.argwhere(empty & (host[:, None] <= host[None])):
        same_kind = known & (kinds == kinds[a, b])
        same_hosts = same_kind & (host[:, None] == host[a]) & (host[None] == host[b])
        near = rates[same_hosts] if same_hosts.any() else rates[same_kind]
        if len(near):
            rates[a, b] = rates[b, a] = np.median(near)


def _describe(measured: Measurement, classes: np.ndarray, links: list[Link]) -> Topology:
    """Convert a matrix of classes into a topology: the most frequent class of each level, and the pairs that differ."""
    host = np.array(measured.host_of_rank)
    inside = host[:, None] == host[None]
    top = [Counter(classes[level & (classes != UNKNOWN)].tolist()).most_common(1) for level in (inside, ~inside)]
    usual = [found[0][0] if found else UNKNOWN for found in top]
    names = [link.name for link in links]
    hosts = tuple(
        Host(name=name, ranks=ranks, bytes_per_second=_rounded(rate) if rate else None)
        for (name, ranks), rate in zip(measured.hosts, measured.together, strict=True)
    )
    inside_host, between_hosts = ("" if index == UNKNOWN else names[index] for index in usual)
    return Topology(
        hosts=hosts,
        links=tuple(links),
        inside_host=inside_host,
        between_hosts=between_hosts,
        pairs=_overrides(classes, hosts, names, usual),
    )


def _overrides(
    classes: np.ndarray, hosts: Sequence[Host], names: Sequence[str], usual: Sequence[int]
) -> tuple[Pair, ...]:
    """List the pairs whose class differs from the usual class of their level, with one entry per pair of hosts if possible.

    Args:
        classes: [world_size, world_size], symmetric, indices into `names`.
        hosts: hosts in rank order.
        names: names of the links.
        usual: usual class inside a host, and between hosts.
    """
    bounds = [0, *accumulate(host.ranks for host in hosts)]
    ranks = [range(*bounds[host : host + 2]) for host in range(len(hosts))]
    overrides = []
    for host, own in enumerate(ranks):
        odd = [(a, b) for a, b in combinations(own, 2) if classes[a, b] not in (usual[0], UNKNOWN)]
        overrides += [Pair(ranks=pair, link=names[classes[pair]]) for pair in odd]
        for other in range(host + 1, len(hosts)):
            block = classes[own.start : own.stop, ranks[other].start : ranks[other].stop]
            kinds = np.unique(block)
            if len(kinds) == 1 and kinds[0] not in (usual[1], UNKNOWN):
                overrides.append(Pair(hosts=(hosts[host].name, hosts[other].name), link=names[kinds[0]]))
            elif len(kinds) > 1:
                odd = [(a, b) for a in own for b in ranks[other] if classes[a, b] not in (usual[1], UNKNOWN)]
                overrides += [Pair(ranks=pair, link=names[classes[pair]]) for pair in odd]
    return tuple(overrides)


# Slow links


class _Endpoint(NamedTuple):
    """Host or rank as an endpoint of links."""

    name: str
    ranks: frozenset[int]


def find_slow(measured: Measurement) -> list[str]:
    """Find hosts, ranks and pairs with less than half of the usual bandwidth; one line each, hosts before ranks before pairs.

    A host (or a rank) is slow if even its best link to other hosts (or ranks) is slow: the cause is then common to all of its
    links. The usual bandwidth is the median of the best links of all hosts (or ranks), of which there must be at least three.
    A pair is slow if neither endpoint is slow and the pair has less than half of the median bandwidth of its kind. Sending and
    receiving are examined separately. The memory of a host is not a link, see `to_topology`.
    """
    rates, host, kinds = measured.rates(), np.array(measured.host_of_rank), np.array(measured.kinds)
    rates[np.isin(kinds, NO_LINKS)] = np.nan
    inside = (host[:, None] == host[None]) & ~np.isnan(rates)
    between = (host[:, None] != host[None]) & ~np.isnan(rates)
    ranks = [_Endpoint(f"rank {r} ({measured.hosts[h][0]})", frozenset([r])) for r, h in enumerate(host)]
    bounds = [0, *accumulate(count for _, count in measured.hosts)]
    hosts = [
        _Endpoint(f"host {name}", frozenset(range(*span)))
        for (name, _), span in zip(measured.hosts, pairwise(bounds), strict=True)
    ]
    explained = np.zeros(rates.shape, dtype=bool)
    texts = _slow_endpoints(hosts, hosts, rates, between, explained, "to other hosts")
    texts += _slow_endpoints(hosts, hosts, rates, inside, explained, "between its own ranks")
    texts += _slow_endpoints(ranks, hosts, rates, between, explained, "to other hosts")
    texts += _slow_endpoints(ranks, hosts, rates, inside, explained, "to ranks of its host")
    for kind in dict.fromkeys(kinds[inside | between].tolist()):
        usual = float(np.median(rates[(inside | between) & (kinds == kind)]))
        slow = (inside | between) & (kinds == kind) & (rates < SLOW * usual) & ~explained
        texts += _slow_pairs(slow, rates, ranks, hosts, between, f"the median of {kind} links is {format_rate(usual)}")
    return texts


def _slow_endpoints(
    endpoints: list[_Endpoint],
    hosts: list[_Endpoint],
    rates: np.ndarray,
    level: np.ndarray,
    explained: np.ndarray,
    where: str,
) -> list[str]:
    """Find endpoints whose best link is slow. Their links are marked in `explained` and not examined again.

    If all ranks of a host are slow, no rank is named: the cause lies in the links between hosts.
    """
    texts: dict[int, list[str]] = {}
    for verb, matrix, candidates in (("sends", rates, level), ("receives", rates.T, level.T)):
        open_links = candidates & ~(explained if verb == "sends" else explained.T)
        best = [
            float(np.max(matrix[sorted(e.ranks)], initial=0.0, where=open_links[sorted(e.ranks)])) for e in endpoints
        ]
        known = [rate for rate in best if rate > 0]
        usual = median(known) if len(known) >= 3 else 0.0
        slow = {index for index, rate in enumerate(best) if 0 < rate < SLOW * usual}
        affected = frozenset(rank for index in slow for rank in endpoints[index].ranks)
        if endpoints is not hosts:
            slow_hosts = [host.ranks for host in hosts if host.ranks <= affected]
            slow -= {index for index in slow if any(endpoints[index].ranks <= ranks for ranks in slow_hosts)}
        for index in slow:
            texts.setdefault(index, []).append(f"{verb} {format_rate(best[index])}, usual is {format_rate(usual)}")
    for index, parts in texts.items():
        ranks = sorted(endpoints[index].ranks)
        if any(part.startswith("sends") for part in parts):
            explained[ranks] |= level[ranks]
        if any(part.startswith("receives") for part in parts):
            explained[:, ranks] |= level[:, ranks]
    return [f"{endpoints[index].name} is slow {where}: {'; '.join(parts)}" for index, parts in sorted(texts.items())]


def _slow_pairs(
    slow: np.ndarray,
    rates: np.ndarray,
    ranks: list[_Endpoint],
    hosts: list[_Endpoint],
    between: np.ndarray,
    usual: str,
) -> list[str]:
    """Describe single slow links; if all links between two hosts are slow, name the hosts instead of the ranks."""
    texts, remaining = [], slow.copy()
    for one in hosts:
        for other in hosts:
            block = np.ix_(sorted(one.ranks), sorted(other.ranks))
            if one is not other and between[block].any() and (slow[block] == between[block]).all():
                rate = format_rate(float(np.median(rates[block][between[block]])))
                texts.append(f"the link from {one.name} to {other.name} is slow: {rate}; {usual}")
                remaining[block] = False
    for a, b in np.argwhere(remaining):
        texts.append(f"the link from {ranks[a].name} to {ranks[b].name} is slow: {format_rate(rates[a, b])}; {usual}")
    return texts
