"""Hostfiles: hosts of a job and their slots, as mpirun, DeepSpeed and HCCL write them.

    node1 slots=8        # Open MPI, DeepSpeed; also max_slots=8
    node2:8              # MPICH, Intel MPI
    user@node3           # number of ranks chosen by the host

A file that begins with a brace is a rank table of HCCL in JSON: a `server_list` of servers with `server_id`, optional
`host_ip`, and `device`; or the older `group_list` with `instance_list` (https://www.hiascend.com/document, "ranktable").
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import JobError

NAME = re.compile(r"(?:[\w.][\w.-]*@)?[\w.][\w.-]*", re.ASCII)  # no leading dash: ssh would take it for an option
MAX_SLOTS = ("max_slots", "max-slots")
LINE_RULE = (
    "one host a line, with its number of ranks: `node1 slots=8`, `node1:8`, or `node1` alone; # begins a comment"
)
TABLE_RULE = "a rank table has the status completed and a server_list, each server with server_id and a list device"


@dataclass(frozen=True)
class HostEntry:
    """Host of a hostfile."""

    name: str
    """Name or IPv4 address, with USER@ before it if the file has a user."""
    slots: int | None
    """Number of ranks; None if the file does not give it."""
    where: str
    """Line or entry of the file, for messages."""

    @property
    def hostname(self) -> str:
        """Name without user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[HostEntry]:
    """Hosts of a hostfile in the order of their ranks.

    Raises:
        JobError: the file cannot be read, names no host or one twice, or a line or the rank table is malformed.
    """
    where = f"--hostfile {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise JobError(
            f"the hostfile cannot be read: {path}: {problem}",
            where=where,
            rule=LINE_RULE,
            fix="name a readable text file, with lines such as node1 slots=8",
        ) from None
    entries = _of_table(text, where) if text.lstrip().startswith(("{", "[")) else _of_lines(text, where)
    if not entries:
        raise JobError(
            "the hostfile names no host", where=where, rule=LINE_RULE, fix="add a line such as node1 slots=8"
        )
    _check(entries)
    return entries


def _check(entries: Sequence[HostEntry]) -> None:
    """Refuse names that are no host, doubled hosts, and slots below one."""
    seen: dict[str, HostEntry] = {}
    for entry in entries:
        if not NAME.fullmatch(entry.name):
            raise JobError(
                f"{entry.name!r} is no name of a host",
                where=entry.where,
                rule="a name or IPv4 address of letters, digits, dots, dashes and underscores, with USER@ before it if needed",
                fix="write the name that ssh takes, such as node1 or 10.0.0.1",
            )
        if entry.slots is not None and entry.slots < 1:
            raise JobError(
                f"{entry.name} has {entry.slots} slots",
                where=entry.where,
                rule="each host has at least one rank",
                fix="remove the host, or give it one slot for each device",
            )
        if other := seen.get(entry.hostname):
            raise JobError(
                f"the host {entry.hostname} appears twice",
                where=f"{entry.where}; first in {other.where.rpartition(', ')[2]}",
                rule="one launcher starts all ranks of a host",
                fix=f"keep one entry, with all its slots: {entry.name} slots={(entry.slots or 1) + (other.slots or 1)}",
            )
        seen[entry.hostname] = entry


def _of_lines(text: str, where: str) -> list[HostEntry]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            entries.append(_of_words(words, f"{where}, line {number}"))
    return entries


def _of_words(words: Sequence[str], where: str) -> HostEntry:
    """Entry of one line: a host, and settings key=value."""
    name, colon, count = words[0].partition(":")
    found = {"slots": _integer(count, words[0], where)} if colon else {}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in ("slots", *MAX_SLOTS):
            raise JobError(
                f"unknown word {word!r} after the host {name}",
                where=where,
                rule=LINE_RULE,
                fix="remove the word; devices of a host are chosen with --env CUDA_VISIBLE_DEVICES=0,1",
            )
        if key in found:
            raise JobError(f"{name} has two values of {key}", where=where, rule=LINE_RULE, fix=f"keep one {key}=")
        found[key] = _integer(value, word, where)
    slots = found.get("slots")
    for key in MAX_SLOTS:
        if found.get(key, slots or 0) < (slots or 0):
            raise JobError(
                f"{name} has {slots} slots and {key}={found[key]}",
                where=where,
                rule=f"slots is at most {key}",
                fix=f"slots={found[key]}",
            )
    return HostEntry(name, slots, where)


def _integer(text: str, word: str, where: str) -> int:
    if not re.fullmatch(r"-?\d{1,6}", text, re.ASCII):
        raise JobError(
            f"{word!r} has no number of ranks", where=where, rule=LINE_RULE, fix="a whole number, such as slots=8"
        )
    return int(text)


def _of_table(text: str, where: str) -> list[HostEntry]:
    """Entries of a rank table of HCCL, in the order of their first rank."""
    try:
        table = json.loads(text)
    except ValueError as error:
        raise JobError(
            f"the rank table is no JSON: {error}",
            where=where,
            rule=TABLE_RULE,
            fix="remove comments, and close all braces",
        ) from None
    try:
        servers = _servers(table)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JobError(
            f"the rank table has another shape: {type(error).__name__}: {error}",
            where=where,
            rule=TABLE_RULE,
            fix='{"version": "1.0", "status": "completed", "server_count": "1", "server_list": [{"server_id": "10.0.0.1", '
            '"device": [{"device_id": "0", "device_ip": "192.168.1.8", "rank_id": "0"}]}]}',
        ) from None
    for entry in servers:
        if sorted(entry.devices) != list(range(len(entry.devices))):
            raise JobError(
                f"{entry.name} has the devices {', '.join(map(str, sorted(entry.devices)))}",
                where=f"{where}, server {entry.name}",
                rule="the ranks of a host use its first devices, from 0, each once",
                fix=f"a line `{entry.name} slots={len(entry.devices)}` in a text file, and "
                "--env ASCEND_RT_VISIBLE_DEVICES=... for all hosts",
            )
    servers.sort(key=lambda server: server.first_rank)
    return [HostEntry(server.name, len(server.devices), f"{where}, server {server.name}") for server in servers]


@dataclass
class _Server:
    name: str
    devices: list[int]
    first_rank: int


def _servers(table: Any) -> list[_Server]:
    """Servers of a rank table of either template; raises KeyError, TypeError or ValueError if it has another shape."""
    if table["status"] != "completed":
        raise ValueError(f"its status is {table['status']!r}, not 'completed'")
    if "server_list" in table:
        servers = [_of_server(server) for server in table["server_list"]]
        if int(table.get("server_count", len(servers))) != len(servers):
            raise ValueError(f"server_count is {table['server_count']}, and server_list has {len(servers)} servers")
        return servers
    found: dict[str, _Server] = {}
    for group in table["group_list"]:
        for order, instance in enumerate(group["instance_list"]):  # of a pod, or of a rank
            rank = int(instance.get("rank_id", order))
            server = found.setdefault(instance["server_id"], _Server(instance["server_id"], [], rank))
            server.devices += [int(device["device_id"]) for device in instance["devices"]]
            server.first_rank = min(rank, server.first_rank)
    return list(found.values())


def _of_server(server: Any) -> _Server:
    devices = [(int(device["device_id"]), int(device["rank_id"])) for device in server["device"]]
    name = server.get("host_ip") or server["server_id"]
    return _Server(str(name), [device for device, _ in devices], min((rank for _, rank in devices), default=0))
