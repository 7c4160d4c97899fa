"""What was measured between ranks, and what follows from it: classes of links, and the links that are slow.

    measured, reason = recall(path, hosts, device, max_age_seconds)    # what an earlier job of the same ranks has measured
    topology = to_topology(measured)
    for text in find_slow(measured): ...

How it is measured says `weft.comm.link_benchmark`.
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

GAP = 2.0  # between two classes: neighbours in the order of bandwidth differ by this factor
SLOW = 0.5  # of what is usual
FORMAT = 1  # of the file
MEMORY, LOOPBACK, NETWORK = "memory", "loopback", "network"  # kinds of links, beside those of `device_links`
NO_LINKS = (MEMORY, LOOPBACK)
Row = tuple[float | None, ...]
T = TypeVar("T")


class Measurement(Table):
    """Latency and bandwidth between ranks. Matrices are [world_size, world_size], from the rank of the row to that of the
    column; None stands for what was not measured."""

    format: int = FORMAT
    hosts: tuple[tuple[str, int], ...]
    """Name and number of ranks, in the order of ranks."""
    device: str
    """What the ranks run on."""
    kinds: tuple[tuple[str, ...], ...]
    """What each pair of ranks is joined by: network, memory, loopback, nvlink ..."""
    latency_seconds: tuple[Row, ...]
    bytes_per_second: tuple[Row, ...]
    together: Row
    """Bytes/s of all ranks of each host together, to or from another host."""
    rounds: int
    """How many rounds there was time for."""
    all_rounds: int
    seconds: float
    """How long it took."""
    written: float
    """When, in seconds since 1970."""

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return len(self.kinds)

    @property
    def host_numbers(self) -> list[int]:
        """The host of each rank."""
        return [number for number, (_, ranks) in enumerate(self.hosts) for _ in range(ranks)]

    def rates(self) -> np.ndarray:
        """Bytes/s, [world_size, world_size], from row to column; NaN where nothing was measured."""
        return np.array(self.bytes_per_second, dtype=np.float64)

    def latencies(self) -> np.ndarray:
        """Seconds, [world_size, world_size], from row to column; NaN where nothing was measured."""
        return np.array(self.latency_seconds, dtype=np.float64)


# What was measured before


def cache_path(folder: Path, hosts: Sequence[tuple[str, int]], device: str) -> Path:
    """The file of these hosts, ranks and devices."""
    key = json.dumps([list(map(list, hosts)), device])
    return folder / f"topology-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def recall(
    path: Path, hosts: Sequence[tuple[str, int]], device: str, max_age_seconds: float
) -> tuple[Measurement | None, str]:
    """An earlier measurement of the same ranks; or None, and why there is none that counts."""
    try:
        found = Measurement.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, f"{path} is not there"
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        return None, f"{path} cannot be read: {str(error).splitlines()[0]}"
    size = sum(ranks for _, ranks in found.hosts)
    matrices = (found.kinds, found.latency_seconds, found.bytes_per_second)
    if found.format != FORMAT or any(len(part) != size for matrix in matrices for part in (matrix, *matrix)):
        return None, f"{path} is of another format"
    if (found.hosts, found.device) != (tuple(hosts), device):
        return None, f"{path} is of other hosts, ranks or devices"
    age = time.time() - found.written
    if not 0 <= age <= max_age_seconds:
        return None, f"{path} is {age / 3600:.1f} h old, more than {max_age_seconds / 3600:g} h"
    return found, f"measured {age / 60:.0f} min ago: {path}"


def remember(measured: Measurement, path: Path) -> None:
    """Write a measurement for `recall`, at once."""
    save_text(measured.model_dump_json(), path)


# Classes


def to_topology(measured: Measurement) -> Topology:
    """Sort all pairs into classes. Pairs of one kind are ordered by bandwidth, and cut where neighbours differ by `GAP`.

    The bandwidth of a pair is that of its slower direction, its latency the shorter one, as both are of the way there and back.
    A pair that was not measured is taken to be as the median of those between the same hosts, else of its kind. A class has the
    median latency and bandwidth of its pairs. Memory of a host is one class, and counts in the better direction: ranks copy
    there with their own cores, and what differs is their load.
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
        for number, group in enumerate(groups, 1):
            rows, columns = np.array(group).T
            classes[rows, columns] = classes[columns, rows] = len(links)
            name = kind if len(groups) == 1 else f"{kind}-{number}"
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
    """Items in groups, the fastest first: a new group begins where the next item is slower by the factor `GAP` or more."""
    ordered = sorted(items, key=rate, reverse=True)
    starts = [
        0,
        *(place for place, (a, b) in enumerate(pairwise(ordered), 1) if rate(a) >= GAP * rate(b)),
        len(ordered),
    ]
    return [ordered[start:end] for start, end in pairwise(starts) if start < end]


def _rounded(value: float | np.floating) -> float:
    """Four digits: more than a measurement has."""
    return float(f"{value:.4g}")


def _both_ways(matrix: np.ndarray, choose: np.ufunc) -> np.ndarray:
    """One value for each pair: the one that `choose` takes of both directions, or the only one there is."""
    return choose(matrix, matrix.T)


def _fill(measured: Measurement, rates: np.ndarray) -> None:
    """Put the median of those that are like them for pairs that were not measured, in place."""
    host, kinds = np.array(measured.host_numbers), np.array(measured.kinds)
    empty = np.isnan(rates) & ~np.eye(len(rates), dtype=bool)
    known = ~np.isnan(rates)
    for a, b in np.argwhere(empty & (host[:, None] <= host[None])):
        same_kind = known & (kinds == kinds[a, b])
        same_hosts = same_kind & (host[:, None] == host[a]) & (host[None] == host[b])
        near = rates[same_hosts] if same_hosts.any() else rates[same_kind]
        if len(near):
            rates[a, b] = rates[b, a] = np.median(near)


def _describe(measured: Measurement, classes: np.ndarray, links: list[Link]) -> Topology:
    """The matrix of classes in few lines: what is usual at each level, and the pairs that differ."""
    host = np.array(measured.host_numbers)
    inside = host[:, None] == host[None]
    usual = [Counter(classes[level & (classes != UNKNOWN)].tolist()).most_common(1) for level in (inside, ~inside)]
    common = [found[0][0] if found else UNKNOWN for found in usual]
    names = [link.name for link in links]
    hosts = tuple(
        Host(name=name, ranks=ranks, bytes_per_second=_rounded(rate) if rate else None)
        for (name, ranks), rate in zip(measured.hosts, measured.together, strict=True)
    )
    inside_host, between_hosts = ("" if place == UNKNOWN else names[place] for place in common)
    return Topology(
        hosts=hosts,
        links=tuple(links),
        inside_host=inside_host,
        between_hosts=between_hosts,
        pairs=_overrides(classes, hosts, names, common),
    )


def _overrides(
    classes: np.ndarray, hosts: Sequence[Host], names: Sequence[str], usual: Sequence[int]
) -> tuple[Pair, ...]:
    """The pairs of a matrix of classes that are not as those of their level, in as few lines as there are.

    Args:
        classes: [world_size, world_size], symmetric, places in `names`.
        names: of the links.
        usual: the class inside a host, and between hosts.
    """
    ends = [0, *accumulate(host.ranks for host in hosts)]
    ranks = [range(*ends[number : number + 2]) for number in range(len(hosts))]
    found = []
    for number, mine in enumerate(ranks):
        odd = [(a, b) for a, b in combinations(mine, 2) if classes[a, b] not in (usual[0], UNKNOWN)]
        found += [Pair(ranks=pair, link=names[classes[pair]]) for pair in odd]
        for other in range(number + 1, len(hosts)):
            block = classes[mine.start : mine.stop, ranks[other].start : ranks[other].stop]
            kinds = np.unique(block)
            if len(kinds) == 1 and kinds[0] not in (usual[1], UNKNOWN):
                found.append(Pair(hosts=(hosts[number].name, hosts[other].name), link=names[kinds[0]]))
            elif len(kinds) > 1:
                odd = [(a, b) for a in mine for b in ranks[other] if classes[a, b] not in (usual[1], UNKNOWN)]
                found += [Pair(ranks=pair, link=names[classes[pair]]) for pair in odd]
    return tuple(found)


# Slow links


class _End(NamedTuple):
    """A host or a rank, as the end of links."""

    name: str
    ranks: frozenset[int]


def find_slow(measured: Measurement) -> list[str]:
    """Name hosts, ranks and pairs that are slow: less than half of what is usual. One line each, the most telling first.

    A host (or a rank) is slow if even its best link to other hosts (to other ranks) is: at fault is what all its links share.
    Usual is the median of the best links of all hosts (ranks), of which there must be three. A pair is slow if neither of its
    ends is, and it carries less than half of the median of its kind; sending and receiving count apart. Memory of a host is no
    link, see `to_topology`.
    """
    rates, numbers, kinds = measured.rates(), np.array(measured.host_numbers), np.array(measured.kinds)
    rates[np.isin(kinds, NO_LINKS)] = np.nan
    inside = (numbers[:, None] == numbers[None]) & ~np.isnan(rates)
    between = (numbers[:, None] != numbers[None]) & ~np.isnan(rates)
    ranks = [_End(f"rank {r} ({measured.hosts[h][0]})", frozenset([r])) for r, h in enumerate(numbers)]
    ends = [0, *accumulate(count for _, count in measured.hosts)]
    hosts = [
        _End(f"host {name}", frozenset(range(*span)))
        for (name, _), span in zip(measured.hosts, pairwise(ends), strict=True)
    ]
    explained = np.zeros(rates.shape, dtype=bool)
    texts = _slow_ends(hosts, hosts, rates, between, explained, "to other hosts")
    texts += _slow_ends(hosts, hosts, rates, inside, explained, "between its own ranks")
    texts += _slow_ends(ranks, hosts, rates, between, explained, "to other hosts")
    texts += _slow_ends(ranks, hosts, rates, inside, explained, "to ranks of its host")
    for kind in dict.fromkeys(kinds[inside | between].tolist()):
        usual = float(np.median(rates[(inside | between) & (kinds == kind)]))
        slow = (inside | between) & (kinds == kind) & (rates < SLOW * usual) & ~explained
        texts += _slow_pairs(slow, rates, ranks, hosts, between, f"{kind} links carry {format_rate(usual)} (median)")
    return texts


def _slow_ends(
    ends: list[_End], hosts: list[_End], rates: np.ndarray, level: np.ndarray, explained: np.ndarray, where: str
) -> list[str]:
    """Ends whose best link is slow. What they explain is marked in `explained`, and not looked at again.

    Where all ranks of a host are slow it is not they who are: that is left to the links between hosts.
    """
    words: dict[int, list[str]] = {}
    for verb, matrix, there in (("sends", rates, level), ("receives", rates.T, level.T)):
        there = there & ~(explained if verb == "sends" else explained.T)
        best = [float(np.max(matrix[sorted(e.ranks)], initial=0.0, where=there[sorted(e.ranks)])) for e in ends]
        known = [rate for rate in best if rate > 0]
        usual = median(known) if len(known) >= 3 else 0.0
        slow = {place for place, rate in enumerate(best) if 0 < rate < SLOW * usual}
        affected = frozenset(rank for place in slow for rank in ends[place].ranks)
        if ends is not hosts:
            whole = [host.ranks for host in hosts if host.ranks <= affected]
            slow -= {place for place in slow if any(ends[place].ranks <= ranks for ranks in whole)}
        for place in slow:
            words.setdefault(place, []).append(f"{verb} {format_rate(best[place])}, usual is {format_rate(usual)}")
    for place, said in words.items():
        mine = sorted(ends[place].ranks)
        if any(word.startswith("sends") for word in said):
            explained[mine] |= level[mine]
        if any(word.startswith("receives") for word in said):
            explained[:, mine] |= level[:, mine]
    return [f"{ends[place].name} is slow {where}: {'; '.join(said)}" for place, said in sorted(words.items())]


def _slow_pairs(
    slow: np.ndarray, rates: np.ndarray, ranks: list[_End], hosts: list[_End], between: np.ndarray, usual: str
) -> list[str]:
    """Single links, from one to another; where all between two hosts are slow, the hosts are named."""
    texts, left = [], slow.copy()
    for one in hosts:
        for other in hosts:
            block = np.ix_(sorted(one.ranks), sorted(other.ranks))
            if one is not other and between[block].any() and (slow[block] == between[block]).all():
                rate = format_rate(float(np.median(rates[block][between[block]])))
                texts.append(f"the link from {one.name} to {other.name} is slow: {rate}; {usual}")
                left[block] = False
    for a, b in np.argwhere(left):
        texts.append(f"the link from {ranks[a].name} to {ranks[b].name} is slow: {format_rate(rates[a, b])}; {usual}")
    return texts
