"""Topology of a job: its hosts and switches, and the speed of each class of links. It can be declared in a small file:

    inside_host = "nvlink"            # between ranks of one host
    between_hosts = "ethernet"        # between ranks of different hosts
    same_rail = "infiniband"          # optional: between ranks with the same local rank on different hosts
    same_switch = "leaf"              # optional: between ranks whose hosts name the same switch

    [[hosts]]                         # in rank order
    name = "node1"
    ranks = 8
    switch = "rack-3"                 # optional
    bytes_per_second = 400e9          # optional: uplink of the host, shared by its ranks

    [[links]]
    name = "nvlink"
    latency_seconds = 3e-6
    bytes_per_second = 200e9          # of one pair of ranks, in one direction
    # ... and one entry for each other name

    [[pairs]]                         # optional: a link that differs from the usual link of its level
    ranks = [0, 5]                    # or hosts = ["node1", "node2"]
    link = "slow"

`weft topology --out FILE` writes such a file from a measurement. Ranks are numbered host after host, as by the launcher.
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

from weft.errors import Refusal, TopologyError, raise_if_refused
from weft.job import read_toml
from weft.plan import Table

UNKNOWN = -1  # in the matrix of classes: a rank with itself, or an undeclared link
LEVELS = ("inside_host", "same_rail", "same_switch", "between_hosts")
SHOWN = 5  # maximum number of problems in one error


class Link(Table):
    """Class of links between two ranks."""

    name: Annotated[str, Field(min_length=1)]
    latency_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Latency alpha: time of an empty message."""
    bytes_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Bandwidth 1 / beta of one pair of ranks in one direction, without other traffic on the link."""

    def seconds(self, message_bytes: float) -> float:
        """Time of one message, alpha + bytes x beta (Hockney, 1994)."""
        return self.latency_seconds + message_bytes / self.bytes_per_second

    def __str__(self) -> str:
        return f"{self.name}, {format_rate(self.bytes_per_second)}, {format_seconds(self.latency_seconds)}"


class Host(Table):
    """Host and its number of ranks."""

    name: Annotated[str, Field(min_length=1)]
    ranks: Annotated[int, Field(ge=1)]
    switch: str = ""
    """Name of the switch of the host; empty: no relevant switch."""
    bytes_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Uplink bandwidth to other hosts, shared by the ranks of the host; None: the bandwidth of one link between hosts."""


class Pair(Table):
    """Link that differs from the usual link of its level: between two ranks, or between all ranks of two hosts."""

    ranks: tuple[int, int] | None = None
    hosts: tuple[str, str] | None = None
    link: str


class Topology(Table):
    """Hosts of a job, in rank order, and the classes of links between their ranks."""

    hosts: Annotated[tuple[Host, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    inside_host: str = ""
    """Name of the link between ranks of one host; empty: unknown."""
    between_hosts: str = ""
    """Name of the link between ranks of different hosts; empty: unknown."""
    same_rail: str = ""
    """Name of the link between ranks with the same local rank on different hosts; empty: as between_hosts."""
    same_switch: str = ""
    """Name of the link between ranks of different hosts on one switch; empty: as between_hosts."""
    pairs: tuple[Pair, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Topology":
        """Read a declared topology from a TOML file.

        Raises:
            JobError: the file is missing or is not TOML.
            TopologyError: an unknown key, an invalid value, or the name of an undeclared link, host or rank.
        """
        return cls.parse(read_toml(path), where=str(path))

    @classmethod
    def parse(cls, tables: dict[str, Any], *, where: str = "topology") -> "Topology":
        """Create a topology from the nested tables of a file.

        Raises:
            TopologyError: an unknown or missing key, an invalid value, or the name of an undeclared link, host or rank.
        """
        try:
            found = cls.model_validate(tables)
        except ValidationError as error:
            raise _explain(error, where) from None
        refusal = _reason_against_names(found, where) or _reason_against_pairs(found, where)
        raise_if_refused(refusal or _reason_against_levels(found, where))
        return found

    def to_toml(self) -> str:
        """TOML text that `load` reads back to an equal topology."""
        return tomli_w.dumps(self.model_dump(exclude_none=True, exclude_defaults=True))

    def check_fits(self, ranks: Sequence[int], where: str) -> None:
        """Refuse a topology whose hosts or ranks differ from those of the job.

        Args:
            ranks: number of ranks of each host of the job.
            where: source of the topology, for the error.

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
            index, host = next((n, host) for n, host in enumerate(self.hosts) if host.ranks != ranks[n])
            what = f"host {index} ({host.name}) has {host.ranks} ranks in the topology, and {ranks[index]} in the job"
        raise TopologyError(
            what,
            where=where,
            rule="a topology lists the hosts of the job in rank order, with the number of ranks of each",
            fix="change the number of ranks, correct [[hosts]], or measure again with `weft topology --out FILE`",
        )

    @property
    def world_size(self) -> int:
        """Number of ranks of all hosts."""
        return sum(host.ranks for host in self.hosts)

    @cached_property
    def host_of_rank(self) -> np.ndarray:
        """Host index of each rank, [world_size]."""
        return np.repeat(np.arange(len(self.hosts)), [host.ranks for host in self.hosts])

    @cached_property
    def classes(self) -> np.ndarray:
        """Link class of each pair of ranks, [world_size, world_size]: an index into `links`, or UNKNOWN."""
        class_of = {link.name: index for index, link in enumerate(self.links)} | {"": UNKNOWN}
        local = np.concatenate([np.arange(host.ranks) for host in self.hosts])
        names = [host.switch for host in self.hosts]
        switch = np.array([names.index(name) if name else -1 - index for index, name in enumerate(names)])
        host, switch = self.host_of_rank, switch[self.host_of_rank]
        classes = np.full((self.world_size, self.world_size), class_of[self.between_hosts], dtype=np.int16)
        if self.same_switch:
            classes[switch[:, None] == switch[None]] = class_of[self.same_switch]
        if self.same_rail:
            classes[local[:, None] == local[None]] = class_of[self.same_rail]
        classes[host[:, None] == host[None]] = class_of[self.inside_host]
        names = [host.name for host in self.hosts]
        # Pairs of ranks override pairs of hosts.
        for pair in sorted(self.pairs, key=lambda pair: pair.ranks is not None):
            of_hosts = [self.ranks_of(names.index(name)) for name in pair.hosts or ()]
            ends = [[rank] for rank in pair.ranks] if pair.ranks else of_hosts
            for one, other in (ends, ends[::-1]):
                classes[np.ix_(one, other)] = class_of[pair.link]
        np.fill_diagonal(classes, UNKNOWN)
        return classes

    def ranks_of(self, host: int) -> range:
        """Ranks of the host with an index."""
        bounds = [0, *accumulate(host.ranks for host in self.hosts)]
        return range(bounds[host], bounds[host + 1])

    def link(self, one: int, other: int) -> Link | None:
        """Link class between two ranks; None if unknown."""
        index = int(self.classes[one, other])
        return None if index == UNKNOWN else self.links[index]


def from_host_sizes(ranks: Sequence[int]) -> Topology:
    """Create a topology without links, which only tells the ranks that share a host.

    Args:
        ranks: number of ranks of each host.
    """
    return Topology(hosts=tuple(Host(name=f"host {index}", ranks=count) for index, count in enumerate(ranks)))


def save_text(text: str, path: Path) -> None:
    """Write a file atomically: concurrent readers see either the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def format_rate(bytes_per_second: float) -> str:
    """Format a bandwidth in GB/s (10^9 bytes/s), with three digits."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def format_seconds(seconds: float) -> str:
    """Format a latency in us or ms, with three digits."""
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"


def _reason_against_names(topology: Topology, where: str) -> Refusal | None:
    """Reason against names that are not unique or not declared."""
    for kind, names in (
        ("hosts", [host.name for host in topology.hosts]),
        ("links", [link.name for link in topology.links]),
    ):
        if twice := next((name for name in names if names.count(name) > 1), None):
            return Refusal(
                f"[[{kind}]] has {twice!r} twice",
                where=where,
                rule="names are unique",
                fix=f"rename one of the {kind}",
                error=TopologyError,
            )
    links = [link.name for link in topology.links]
    used = [(level, getattr(topology, level)) for level in LEVELS]
    used += [(f"pairs.{index}.link", pair.link) for index, pair in enumerate(topology.pairs)]
    for key, name in used:
        if name and name not in links:
            near = difflib.get_close_matches(name, links, n=1)
            return Refusal(
                f"{key} = {name!r} is not a declared link",
                where=where,
                rule=f"declared in [[links]]: {', '.join(links) or 'none'}",
                fix=f"did you mean {near[0]!r}?" if near else f"add {name!r} to [[links]], or correct {key}",
                error=TopologyError,
            )
    return None


def _reason_against_pairs(topology: Topology, where: str) -> Refusal | None:
    """Reason against pairs that are not two ranks or two hosts of the topology."""
    hosts = [host.name for host in topology.hosts]
    for index, pair in enumerate(topology.pairs):
        if (pair.ranks is None) == (pair.hosts is None):
            return Refusal(
                f"pairs.{index} names " + ("both ranks and hosts" if pair.ranks else "neither ranks nor hosts"),
                where=where,
                rule="a pair consists of two ranks or of two hosts",
                fix='write ranks = [0, 5], or hosts = ["node1", "node2"]',
                error=TopologyError,
            )
        ends: Sequence[Any] = pair.ranks or pair.hosts or ()
        known: Sequence[Any] = range(topology.world_size) if pair.ranks else hosts
        if ends[0] == ends[1] or any(end not in known for end in ends):
            listed = f"ranks are 0 to {topology.world_size - 1}" if pair.ranks else f"hosts are {', '.join(hosts)}"
            return Refusal(
                f"pairs.{index} is {ends[0]} and {ends[1]}",
                where=where,
                rule=f"a pair consists of two different ranks or hosts of the topology; {listed}",
                fix="correct or remove the pair",
                error=TopologyError,
            )
    return None


def _reason_against_levels(topology: Topology, where: str) -> Refusal | None:
    """Reason against a topology in which a pair of ranks has no link."""
    needed = {
        "inside_host": any(host.ranks > 1 for host in topology.hosts),
        "between_hosts": len(topology.hosts) > 1,
    }
    for level, is_needed in needed.items():
        if is_needed and not getattr(topology, level):
            return Refusal(
                f"{level} is missing",
                where=where,
                rule="every pair of ranks has a link",
                fix=f'set {level} to a name from [[links]], above the tables: {level} = "name"',
                error=TopologyError,
            )
    switches = [host.switch for host in topology.hosts if host.switch]
    if topology.same_switch and len(switches) == len(set(switches)):
        return Refusal(
            f"same_switch = {topology.same_switch!r}, and no two hosts name the same switch",
            where=where,
            rule="same_switch is the link between hosts on one switch",
            fix="set switch in [[hosts]], or remove same_switch",
            error=TopologyError,
        )
    return None


def _explain(error: ValidationError, where: str) -> TopologyError:
    """Convert a validation error of pydantic: each key with its value and rule, and the most similar known key."""
    tables = (Topology, Host, Link, Pair)
    known = list(dict.fromkeys(name for table in tables for name in table.model_fields))
    lines, fixes = [], []
    for item in error.errors(include_url=False):
        key = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {key}")
            near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
            fixes.append(f"did you mean {near[0]}?" if near else f"the keys of a topology are {', '.join(known)}")
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
        rule="docs/topology.md lists the keys and values of a topology",
        fix="; ".join(dict.fromkeys(fixes[:SHOWN])),
    )
