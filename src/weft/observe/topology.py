"""Output of a topology: tables for the terminal, and JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from weft.topology.measurement import Measurement, find_slow
from weft.topology.topology import UNKNOWN, Topology, format_rate, format_seconds, save_text

MOST_RANKS = 16  # maximum number of ranks for a table with one column per rank


def print_topology(topology: Topology, measured: Measurement | None, source: str, lines: Sequence[str] = ()) -> None:
    """Print bandwidth and latency between ranks (with many ranks, between hosts), the link classes and the slow links.

    Args:
        measured: measurement behind the topology; None if it was declared.
        source: origin of the topology, in words.
        lines: lines about the links that each parallel axis uses.
    """
    ranks = topology.world_size
    wide = 20 + 8 * ranks if ranks <= MOST_RANKS else 0
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, wide)
    console.print(f"{_count(len(topology.hosts), 'host')}, {_count(ranks, 'rank')}, {source}", markup=False)
    rates, latencies = _matrices(topology, measured)
    if 1 < ranks <= MOST_RANKS:
        console.print(_matrix(topology, "GB/s from row to column", rates / 1e9))
        console.print(_matrix(topology, "latency in us", latencies * 1e6))
    if ranks > MOST_RANKS or any(host.bytes_per_second for host in topology.hosts):
        console.print(_hosts(topology, rates, latencies))
    console.print(_classes(topology))
    for line in notes(measured):
        console.print(line, markup=False)
    for line in lines:
        console.print(line, markup=False)


def notes(measured: Measurement | None) -> list[str]:
    """Lines about slow links and about pairs of ranks that were not measured."""
    if measured is None or measured.world_size == 1:
        return []
    found = find_slow(measured) or ["no link is slow compared with other links of its class"]
    if measured.rounds < measured.all_rounds:
        found.append(
            f"only {measured.rounds} of {measured.all_rounds} rounds were measured in the given time; the other pairs of ranks "
            "are assumed equal to measured pairs of the same hosts or class (increase --seconds to measure more)"
        )
    return found


def write_topology(
    topology: Topology, measured: Measurement | None, source: str, lines: Sequence[str], path: Path
) -> None:
    """Write topology, measurement, slow links and axes as JSON."""
    facts = {
        "source": source,
        "topology": topology.model_dump(),
        "measurement": measured.model_dump() if measured else None,
        "slow": find_slow(measured) if measured else [],
        "axes": list(lines),
    }
    save_text(json.dumps(facts, indent=1), path)


def _matrices(topology: Topology, measured: Measurement | None) -> tuple[np.ndarray, np.ndarray]:
    """Bandwidth (bytes/s) and latency (s) from row to column, measured or by link class; NaN where unknown."""
    if measured is not None:
        return measured.rates(), measured.latencies()
    rates = np.array([*(link.bytes_per_second for link in topology.links), np.nan])
    latencies = np.array([*(link.latency_seconds for link in topology.links), np.nan])
    return rates[topology.classes], latencies[topology.classes]  # UNKNOWN is -1, the index of the appended NaN


def _matrix(topology: Topology, title: str, values: np.ndarray) -> Table:
    """Table with one row and one column per rank, and a separator between hosts."""
    several = len(topology.hosts) > 1
    table = Table(Column(title, no_wrap=True), *(Column(str(rank), justify="right") for rank in range(len(values))))
    for index, host in enumerate(topology.hosts):
        mine = topology.ranks_of(index)
        for rank in mine:
            cells = [_format_value(value) for value in values[rank]]
            name = f"{rank}  {host.name}" if several and rank == mine[0] else str(rank)
            table.add_row(name, *cells, end_section=rank == mine[-1])
    return table


def _hosts(topology: Topology, rates: np.ndarray, latencies: np.ndarray) -> Table:
    """Table with one row per host: median bandwidth and latency inside and to other hosts, and the host's total bandwidth."""
    names = ("inside", "to other hosts", "total")
    right = [Column(name, justify="right", no_wrap=True) for name in names]
    table = Table(Column("host", no_wrap=True), "ranks", *right)
    host_of_rank = topology.host_of_rank
    for index, host in enumerate(topology.hosts):
        mine, others = host_of_rank == index, host_of_rank != index
        span = topology.ranks_of(index)
        cells = []
        for there in (mine, others):
            block = np.ix_(mine, there)
            known = ~np.isnan(rates[block])
            cells.append(
                f"{format_rate(float(np.median(rates[block][known])))}, "
                f"{format_seconds(float(np.nanmedian(latencies[block])))}"
                if known.any()
                else "-"
            )
        together = format_rate(host.bytes_per_second) if host.bytes_per_second else "-"
        table.add_row(host.name, f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]), *cells, together)
    return table


def _classes(topology: Topology) -> Table:
    """Table with one row per link class."""
    right = [Column(name, justify="right") for name in ("pairs", "bandwidth", "latency")]
    table = Table("link class", "where", *right)
    host_of_rank, upper = topology.host_of_rank, np.triu(topology.classes != UNKNOWN)
    inside = host_of_rank[:, None] == host_of_rank[None]
    for index, link in enumerate(topology.links):
        pairs = upper & (topology.classes == index)
        where = [
            name for name, level in (("inside hosts", inside), ("between hosts", ~inside)) if (pairs & level).any()
        ]
        figures = format_rate(link.bytes_per_second), format_seconds(link.latency_seconds)
        table.add_row(link.name, " and ".join(where) or "nowhere", str(int(pairs.sum())), *figures)
    return table


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _format_value(value: float) -> str:
    """Format a value with three significant digits, or as an integer from 1,000; empty for NaN."""
    if np.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
