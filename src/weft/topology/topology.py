"""Which ranks share a host, a switch or a link, and how fast each class of links is. One small file says it:

    inside_host = "nvlink"            # between ranks of one host
    between_hosts = "ethernet"        # between ranks of different hosts
    same_rail = "infiniband"          # may be left out: between ranks with the same number on their hosts
    same_switch = "leaf"              # may be left out: between ranks whose hosts name the same switch

    [[hosts]]                         # in the order of their ranks
    name = "node1"
    ranks = 8
    switch = "rack-3"                 # may be left out
    bytes_per_second = 400e9          # may be left out: what its ranks together send to other hosts

    [[links]]
    name = "nvlink"
    latency_seconds = 3e-6
    bytes_per_second = 200e9          # of one pair of ranks, in one direction
    # ... and one for each other name

    [[pairs]]                         # may be left out: a link that is not as those of its level
    ranks = [0, 5]                    # or hosts = ["node1", "node2"]
    link = "slow"

`weft topology --out FILE` writes one from what it has measured. Ranks are numbered host after host, as the launcher does.
"""

import difflib
import os
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tomli_w
from pydantic import Field, ValidationError

from weft.errors import TopologyError
from weft.job import read_toml
from weft.plan import Table

UNKNOWN = -1  # in the matrix of classes: a rank and itself, or a link of which nothing is said
LEVELS = ("inside_host", "same_rail", "same_switch", "between_hosts")


SHOWN = 5  # errors of one message


class Link(Table):
    """A class of links between two ranks."""

    name: Annotated[str, Field(min_length=1)]
    latency_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Alpha: the time of an empty message."""
    bytes_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """1 / beta: what one pair of ranks sends in one direction, when it has the link for itself."""

    def seconds(self, message_bytes: float) -> float:
        """Time of one message, alpha + bytes x beta (Hockney, 1994)."""
        return self.latency_seconds + message_bytes / self.bytes_per_second

    def __str__(self) -> str:
        return f"{self.name}, {format_rate(self.bytes_per_second)}, {format_seconds(self.latency_seconds)}"


class Host(Table):
    """A host and its ranks."""

    name: Annotated[str, Field(min_length=1)]
    ranks: Annotated[int, Field(ge=1)]
    switch: str = ""
    """Name of the switch that it hangs on; empty: none that matters."""
    bytes_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What its ranks together send to other hosts; None: what one link between hosts carries, which they share."""


class Pair(Table):
    """A link that is not as those of its level: between two ranks, or between all ranks of two hosts."""

    ranks: tuple[int, int] | None = None
    hosts: tuple[str, str] | None = None
    link: str


class Topology(Table):
    """The hosts of a job, in the order of their ranks, and the classes of links between them."""

    hosts: Annotated[tuple[Host, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    inside_host: str = ""
    """Name of the link between ranks of one host; empty: not known."""
    between_hosts: str = ""
    """Name of the link between ranks of different hosts; empty: not known."""
    same_rail: str = ""
    """Name of the link between ranks with the same number on different hosts; empty: as between_hosts."""
    same_switch: str = ""
    """Name of the link between ranks of different hosts at one switch; empty: as between_hosts."""
    pairs: tuple[Pair, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Topology":
        """Read a declared topology.

        Raises:
            JobError: the file is missing or no TOML.
            TopologyError: a key is unknown, a value breaks its rule, or a name is of no link, host or rank.
        """
        return cls.parse(read_toml(path), where=str(path))

    @classmethod
    def parse(cls, tables: dict[str, Any], *, where: str = "topology") -> "Topology":
        """Make a topology from nested tables, of which nothing may be missing.

        Raises:
            TopologyError: a key is unknown, a value breaks its rule, or a name is of no link, host or rank.
        """
        try:
            found = cls.model_validate(tables)
        except ValidationError as error:
            raise _explain(error, where) from None
        _check_names(found, where)
        _check_levels(found, where)
        return found

    def to_toml(self) -> str:
        """As a file that `load` reads back to an equal topology."""
        return tomli_w.dumps(self.model_dump(exclude_none=True, exclude_defaults=True))

    def check_fits(self, ranks: Sequence[int], where: str) -> None:
        """Refuse a topology of other hosts or ranks than those of the job.

        Args:
            ranks: ranks of each host of the job.
            where: what declares the topology.

        Raises:
            TopologyError: another number of hosts, or a host with another number of ranks.
        """
        declared = [host.ranks for host in self.hosts]
        if declared == list(ranks):
            return
        if len(declared) != len(ranks):
            what = f"the topology has {len(declared)} hosts with {sum(declared)} ranks; "
            what += f"the job has {len(ranks)} hosts with {sum(ranks)} ranks"
        else:
            number, host = next((n, host) for n, host in enumerate(self.hosts) if host.ranks != ranks[n])
            what = f"the topology gives host {number} ({host.name}) {host.ranks} ranks; the job starts {ranks[number]} there"
        raise TopologyError(
            what,
            where=where,
            rule="a topology names the hosts of the job, in the order of their ranks, each with all its ranks",
            fix="start as many ranks, correct [[hosts]], or measure anew with `weft topology --out FILE`",
        )

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return sum(host.ranks for host in self.hosts)

    @cached_property
    def host_numbers(self) -> np.ndarray:
        """The host of each rank, [world_size]."""
        return np.repeat(np.arange(len(self.hosts)), [host.ranks for host in self.hosts])

    @cached_property
    def classes(self) -> np.ndarray:
        """The class of the link of each pair of ranks, [world_size, world_size]: a place in `links`, or UNKNOWN."""
        number = {link.name: place for place, link in enumerate(self.links)} | {"": UNKNOWN}
        local = np.concatenate([np.arange(host.ranks) for host in self.hosts])
        names = [host.switch for host in self.hosts]
        switch = np.array([names.index(name) if name else -1 - place for place, name in enumerate(names)])
        host, switch = self.host_numbers, switch[self.host_numbers]
        found = np.full((self.world_size, self.world_size), number[self.between_hosts], dtype=np.int16)
        if self.same_switch:
            found[switch[:, None] == switch[None]] = number[self.same_switch]
        if self.same_rail:
            found[local[:, None] == local[None]] = number[self.same_rail]
        found[host[:, None] == host[None]] = number[self.inside_host]
        for pair in sorted(self.pairs, key=lambda pair: pair.ranks is not None):  # two ranks say more than two hosts
            ends = (
                [[rank] for rank in pair.ranks] if pair.ranks else [self._ranks_of(name) for name in pair.hosts or ()]
            )
            for one, other in (ends, ends[::-1]):
                found[np.ix_(one, other)] = number[pair.link]
        np.fill_diagonal(found, UNKNOWN)
        return found

    def ranks_of(self, host: int) -> range:
        """The ranks of a host, by its number."""
        ends = [0, *accumulate(host.ranks for host in self.hosts)]
        return range(ends[host], ends[host + 1])

    def link(self, one: int, other: int) -> Link | None:
        """The class of the link between two ranks; None if it is not known."""
        place = int(self.classes[one, other])
        return None if place == UNKNOWN else self.links[place]

    def _ranks_of(self, name: str) -> range:
        return self.ranks_of([host.name for host in self.hosts].index(name))


def of_hosts(ranks: Sequence[int]) -> Topology:
    """What is known without a file or a measurement: which ranks share a host.

    Args:
        ranks: ranks of each host.
    """
    return Topology(hosts=tuple(Host(name=f"host {number}", ranks=count) for number, count in enumerate(ranks)))


def save_text(text: str, path: Path) -> None:
    """Write a file at once: who reads it meanwhile finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def format_rate(bytes_per_second: float) -> str:
    """A bandwidth in GB/s (10^9), three digits."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def format_seconds(seconds: float) -> str:
    """A latency in the unit that suits it, three digits."""
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"


def _check_names(topology: Topology, where: str) -> None:
    """Every name stands for one thing that is there."""
    for kind, names in (
        ("hosts", [host.name for host in topology.hosts]),
        ("links", [link.name for link in topology.links]),
    ):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise TopologyError(
                f"{kind} has {twice!r} twice", where=where, rule="names are unique", fix="rename one of them"
            )
    links = [link.name for link in topology.links]
    used = [(level, getattr(topology, level)) for level in LEVELS]
    used += [(f"pairs.{number}.link", pair.link) for number, pair in enumerate(topology.pairs)]
    for key, name in used:
        if name and name not in links:
            near = difflib.get_close_matches(name, links, n=1)
            raise TopologyError(
                f"{key} = {name!r} is no link",
                where=where,
                rule=f"[[links]] has {', '.join(links) or 'none'}",
                fix=f"did you mean {near[0]!r}?" if near else f"add it to [[links]], or correct {key}",
            )
    hosts = [host.name for host in topology.hosts]
    for number, pair in enumerate(topology.pairs):
        if (pair.ranks is None) == (pair.hosts is None):
            raise TopologyError(
                f"pairs.{number} names " + ("both ranks and hosts" if pair.ranks else "neither ranks nor hosts"),
                where=where,
                rule="a pair is of two ranks or of two hosts",
                fix='write ranks = [0, 5], or hosts = ["node1", "node2"]',
            )
        ends: Sequence[Any] = pair.ranks or pair.hosts or ()
        known: Sequence[Any] = range(topology.world_size) if pair.ranks else hosts
        if ends[0] == ends[1] or any(end not in known for end in ends):
            listed = f"ranks are 0 to {topology.world_size - 1}" if pair.ranks else f"hosts are {', '.join(hosts)}"
            raise TopologyError(
                f"pairs.{number} is of {ends[0]} and {ends[1]}",
                where=where,
                rule=f"two different ones that are there; {listed}",
                fix="correct the pair, or leave it out",
            )


def _check_levels(topology: Topology, where: str) -> None:
    """There is a link for every pair of ranks."""
    needed = {
        "inside_host": any(host.ranks > 1 for host in topology.hosts),
        "between_hosts": len(topology.hosts) > 1,
    }
    for level, is_needed in needed.items():
        if is_needed and not getattr(topology, level):
            raise TopologyError(
                f"there is no {level}",
                where=where,
                rule="every pair of ranks has a link",
                fix=f'set {level} to the name of one of [[links]], above the tables: {level} = "name"',
            )
    switches = [host.switch for host in topology.hosts if host.switch]
    if topology.same_switch and len(switches) == len(set(switches)):
        raise TopologyError(
            f"same_switch = {topology.same_switch!r}, and no two hosts name the same switch",
            where=where,
            rule="it is the link between hosts at one switch",
            fix="set switch in [[hosts]], or leave out same_switch",
        )


def _explain(error: ValidationError, where: str) -> TopologyError:
    """Turn pydantic's errors into one of ours: each key with its value and rule, and the nearest known key."""
    tables = (Topology, Host, Link, Pair)
    known = list(dict.fromkeys(name for table in tables for name in table.model_fields))
    lines, fixes = [], []
    for item in error.errors(include_url=False):
        key = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {key}")
            near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
            fixes.append(f"did you mean {near[0]}?" if near else f"a topology has {', '.join(known)}")
        elif item["type"] == "missing":
            lines.append(f"{key} is missing")
            fixes.append(f"add {key}")
        else:
            lines.append(f"{key} = {item['input']!r}: {item['msg']}")
            fixes.append(f"correct {key}")
    more = [f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)
    return TopologyError(
        "\n".join([*lines[:SHOWN], *more]),
        where=where,
        rule="a topology has the keys and values of docs/topology.md",
        fix="; ".join(dict.fromkeys(fixes[:SHOWN])),
    )
