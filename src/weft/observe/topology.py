"""A topology as tables for the terminal, and as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from weft.topology.measurement import Measurement, find_slow
from weft.topology.topology import UNKNOWN, Topology, format_rate, format_seconds, save_text

MOST_RANKS = 16  # of a table with a column a rank


def print_topology(topology: Topology, measured: Measurement | None, source: str, lines: Sequence[str] = ()) -> None:
    """Print bandwidth and latency between ranks (of many ranks, between hosts), the classes of links, and what is slow.

    Args:
        measured: what the topology was made from; None if it was declared.
        source: where it comes from.
        lines: over which links axes run.
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
    """What is slow, and what was not measured."""
    if measured is None or measured.world_size == 1:
        return []
    found = find_slow(measured) or ["no link is slow for its kind"]
    if measured.rounds < measured.all_rounds:
        found.append(
            f"there was time for {measured.rounds} of {measured.all_rounds} rounds; "
            "other pairs are taken to be as those of the same hosts, or of the same kind (more --seconds measure more)"
        )
    return found


def write_topology(
    topology: Topology, measured: Measurement | None, source: str, lines: Sequence[str], path: Path
) -> None:
    """Write all figures as JSON: topology, measurement, slow links, axes."""
    facts = {
        "source": source,
        "topology": topology.model_dump(),
        "measurement": measured.model_dump() if measured else None,
        "slow": find_slow(measured) if measured else [],
        "axes": list(lines),
    }
    save_text(json.dumps(facts, indent=1), path)


def _matrices(topology: Topology, measured: Measurement | None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes/s and seconds from row to column, as measured, or of the classes; NaN where nothing is known."""
    if measured is not None:
        return measured.rates(), measured.latencies()
    rates = np.array([*(link.bytes_per_second for link in topology.links), np.nan])
    latencies = np.array([*(link.latency_seconds for link in topology.links), np.nan])
    return rates[topology.classes], latencies[topology.classes]  # UNKNOWN is the last place


def _matrix(topology: Topology, title: str, values: np.ndarray) -> Table:
    """A row and a column a rank; a line between hosts."""
    several = len(topology.hosts) > 1
    table = Table(Column(title, no_wrap=True), *(Column(str(rank), justify="right") for rank in range(len(values))))
    for number, host in enumerate(topology.hosts):
        mine = topology.ranks_of(number)
        for rank in mine:
            cells = [_number(value) for value in values[rank]]
            name = f"{rank}  {host.name}" if several and rank == mine[0] else str(rank)
            table.add_row(name, *cells, end_section=rank == mine[-1])
    return table


def _hosts(topology: Topology, rates: np.ndarray, latencies: np.ndarray) -> Table:
    """A row a host: medians inside and to others, and the bandwidth that all its ranks share."""
    names = ("inside", "to other hosts", "together")
    right = [Column(name, justify="right", no_wrap=True) for name in names]
    table = Table(Column("host", no_wrap=True), "ranks", *right)
    numbers = topology.host_numbers
    for number, host in enumerate(topology.hosts):
        mine, others = numbers == number, numbers != number
        span = topology.ranks_of(number)
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
    """A row a class of links."""
    right = [Column(name, justify="right") for name in ("pairs", "bandwidth", "latency")]
    table = Table("class of links", "where", *right)
    numbers, upper = topology.host_numbers, np.triu(topology.classes != UNKNOWN)
    inside = numbers[:, None] == numbers[None]
    for place, link in enumerate(topology.links):
        pairs = upper & (topology.classes == place)
        where = [
            name for name, level in (("inside hosts", inside), ("between hosts", ~inside)) if (pairs & level).any()
        ]
        figures = format_rate(link.bytes_per_second), format_seconds(link.latency_seconds)
        table.add_row(link.name, " and ".join(where) or "nowhere", str(int(pairs.sum())), *figures)
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _number(value: float) -> str:
    """Three digits, or all before the point; nothing for NaN."""
    if np.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
