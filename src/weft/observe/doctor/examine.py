"""`weft doctor` on one or several hosts: gather facts, exchange them over the store of host 0, and measure with ranks.

The launchers of `weft train` are the channel: membership, tunnel and store of `weft.launch`. Each host writes its facts under
one key; host 0 reads all of them, decides whether ranks can be started, judges, and writes the result for the other hosts.
"""

import json
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.device.detect import detect_for_launcher
from weft.device.device import Device
from weft.errors import RendezvousError, WeftError
from weft.job import Job
from weft.launch.coordinator import JobCoordinator
from weft.launch.follow import closing
from weft.launch.launcher import default_ranks, launch
from weft.launch.rendezvous import RendezvousConfig, interface_address
from weft.launch.store import SocketStore
from weft.observe.doctor.clocks import measure_clock
from weft.observe.doctor.devices import read_devices
from weft.observe.doctor.finding import Facts, Finding
from weft.observe.doctor.folders import SharedTrial, folders_of, read_folders, see_trial
from weft.observe.doctor.judge import judge, reason_against_ranks
from weft.observe.doctor.limits import read_limits
from weft.observe.doctor.names import read_names
from weft.observe.doctor.needs import estimate_needs
from weft.observe.doctor.paths import Responder, interface_mtu, partners, probe_path
from weft.observe.doctor.processor import read_processor
from weft.observe.doctor.rank import RESULT
from weft.observe.doctor.same import flatten, read_inputs, read_own_code, read_settings, read_versions

STORE = "doctor"  # name in the tunnel
JOIN_SECONDS = 120.0
SHARING_SECONDS = 10.0  # delay allowed until a file of one host is visible on another
FACTS_SECONDS = 600.0  # for the facts of a host; its data may have many files
LINK_SECONDS = 4.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Request:
    """Request of an examination."""

    job: Job | None
    """Job to be trained; None: hosts and devices alone."""
    ranks: int | None
    """Ranks of this host; None: one per accelerator, two on CPU."""
    rendezvous: RendezvousConfig | None
    """Rendezvous of several hosts; None for one host."""
    quick: bool
    """Leave out the dry run of the job and the measurements with ranks."""
    hostnames: Sequence[str] = ()
    """Names of a hostfile, on host 0."""


def examine(request: Request) -> tuple[list[Finding], list[Facts]]:
    """Examine all hosts. Every host calls it at the same time; the facts of all hosts are returned on host 0 alone.

    Returns:
        The findings, the same on all hosts, and the facts of all hosts (empty on hosts other than 0).

    Raises:
        WeftError: a subclass; the hosts could not connect, or host 0 was lost.
    """
    device = detect_for_launcher()
    ranks = request.ranks or default_ranks(device)
    if request.rendezvous is None:
        facts = _gather(request, device, ranks, None, None)
        facts |= _measure(ranks, None, device, _left_out(request))
        return judge([facts]), [facts]
    encrypt = request.job.cluster.encrypt if request.job else False
    rendezvous = replace(request.rendezvous, encrypt=encrypt)
    options: dict[str, Any] = {"node_rejoin_seconds": 0, "timeout": JOIN_SECONDS, "same_version": False}
    with closing(JobCoordinator.join(rendezvous, ranks, **options)) as coordinator:
        try:
            store = coordinator.open_store(STORE)
            if rendezvous.host == 0:
                return _lead(request, device, ranks, coordinator, store)
            return _follow(request, device, ranks, coordinator, store), []
        except dist.DistError as error:
            where = coordinator.host_label
            raise RendezvousError(f"host 0 was lost: {error}", where=where, fix="see its output") from None


def _lead(
    request: Request, device: Device, ranks: int, coordinator: JobCoordinator, store: SocketStore
) -> tuple[list[Finding], list[Facts]]:
    """Host 0: gather, decide, measure, judge, and tell the result."""
    hosts = coordinator.rendezvous.hosts
    with ExitStack() as stack:
        if request.job:
            trial = stack.enter_context(SharedTrial(folders_of(request.job)))
            store.set("trial", json.dumps(trial.offer()))
        own = _gather(request, device, ranks, coordinator, store)
        if request.job:
            own["written"] = _guarded(lambda: trial.seen(hosts, SHARING_SECONDS))
        facts = [own, *_read_others(coordinator, store, "facts")]
        reason = _left_out(request) or reason_against_ranks(facts)
        store.set("reason", json.dumps(reason))
        own |= _measure(ranks, coordinator, device, reason)
        own["clock_late"] = _guarded(lambda: measure_clock(store))
        for entry, late in zip(facts[1:], _read_others(coordinator, store, "late"), strict=True):
            entry |= late
        findings = judge(facts)
        store.set("findings", json.dumps([finding.to_json() for finding in findings]))
        return findings, facts


def _follow(
    request: Request, device: Device, ranks: int, coordinator: JobCoordinator, store: SocketStore
) -> list[Finding]:
    """Another host: gather, measure with the ranks of the other hosts, and wait for the result."""
    host = coordinator.host
    own = _gather(request, device, ranks, coordinator, store)
    store.set(f"facts/{host}", json.dumps(own))
    reason = json.loads(_wait(coordinator, store, "reason"))
    _measure(ranks, coordinator, device, reason)
    store.set(f"late/{host}", json.dumps({"clock_late": _guarded(lambda: measure_clock(store))}))
    return [Finding(**fields) for fields in json.loads(_wait(coordinator, store, "findings"))]


def _wait(coordinator: JobCoordinator, store: SocketStore, key: str, host: int = 0) -> str:
    """Wait until a host has set a key.

    Raises:
        RendezvousError: the host is gone, or does not set it in time.
    """
    end = time.monotonic() + FACTS_SECONDS
    while not store.check([key]):
        state = next((state for state in coordinator.membership.host_states() if state.host == host), None)
        if (state is not None and state.gone) or time.monotonic() > end:
            raise RendezvousError(
                f"host {host} ended or was lost during the examination",
                where=coordinator.host_label,
                fix="see its output, and start weft doctor on all hosts again",
            )
        time.sleep(POLL_SECONDS)
    return store.get(key).decode()


def _read_others(coordinator: JobCoordinator, store: SocketStore, name: str) -> list[Facts]:
    """What all hosts but host 0 have written, in host order."""
    hosts = range(1, coordinator.rendezvous.hosts)
    return [json.loads(_wait(coordinator, store, f"{name}/{host}", host)) for host in hosts]


def _left_out(request: Request) -> str | None:
    return "left out by --quick" if request.quick else None


def _gather(
    request: Request, device: Device, ranks: int, coordinator: JobCoordinator | None, store: SocketStore | None
) -> Facts:
    """Facts of this host."""
    host, hosts = (coordinator.host, coordinator.rendezvous.hosts) if coordinator else (0, 1)
    interface = coordinator.interface if coordinator else None
    job = request.job
    address = interface_address(interface) if interface else None
    facts: Facts = {
        "host": {"index": host, "name": socket.gethostname(), "address": address, "cwd": os.getcwd()},
        "device": {"type": device.type, "ranks": ranks, "memory": None},
    }
    sources: dict[str, Callable[[], Any]] = {}
    if store is not None:
        sources["clock"] = lambda: measure_clock(store)  # first: its drift is that until the end
    sources |= {
        "processor": read_processor,  # before this process works
        "versions": lambda: read_versions(device.type),
        "settings": read_settings,
        "limits": read_limits,
        "devices": lambda: read_devices(device.type, interface),
    }
    if job is not None:
        sources |= {
            "job": lambda: flatten(job.model_dump(mode="json")),
            "inputs": lambda: read_inputs(job),
            "code": lambda: read_own_code(job),
            "folders": lambda: read_folders(job, leads=host == 0),
        }
        if host and store is not None and coordinator is not None:
            sources["seen"] = lambda: see_trial(json.loads(_wait(coordinator, store, "trial")), host, SHARING_SECONDS)
        if host == 0:
            world_size = coordinator.world_size() if coordinator else ranks
            sources["needs"] = lambda: estimate_needs(job, world_size, device, dry_run=not request.quick)
    if host == 0 and request.hostnames:
        sources["names"] = lambda: read_names(request.hostnames)
    if store is not None and coordinator is not None and address and interface:
        sources["path"] = lambda: _probe_paths(coordinator, store, address, interface, hosts)
    for name, read in sources.items():
        facts[name] = _guarded(read)
    if device.type != "cpu":
        facts["device"]["memory"] = _guarded(lambda: device.total_memory_bytes)
    return facts


def _guarded(read: Callable[[], Any]) -> Any:
    """Result of reading facts; {"error": text} if it fails, so that one odd host does not hide all other findings."""
    try:
        return read()
    except (RendezvousError, dist.DistError):
        raise
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def _probe_paths(
    coordinator: JobCoordinator, store: SocketStore, address: str, interface: str, hosts: int
) -> dict[str, Any]:
    """Probe the paths to other hosts, while each host answers until all have probed."""
    host, nonce = coordinator.host, secrets.token_bytes(8)
    with Responder(address, nonce) as responder:
        ports = {"udp_port": responder.udp_port, "tcp_port": responder.tcp_port}
        store.set(f"responder/{host}", json.dumps({"address": address, "nonce": nonce.hex(), **ports}))
        mtu, results = interface_mtu(interface), []
        for other in partners(host, hosts):
            there = json.loads(_wait(coordinator, store, f"responder/{other}", other))
            there["nonce"] = bytes.fromhex(there["nonce"])
            results.append([other, probe_path(**there, mtu=mtu)])
        store.set(f"probed/{host}", "")
        for other in range(hosts):
            _wait(coordinator, store, f"probed/{other}", other)
    return {"interface": interface, "mtu": mtu, "to": results}


def _measure(ranks: int, coordinator: JobCoordinator | None, device: Device, reason: str | None) -> Facts:
    """Facts of host 0 from ranks on all hosts: "ranks" and "links", or "failure"; "skipped" with a reason against ranks."""
    if reason is not None:
        return {"skipped": {"speed": reason, "links": reason}}
    network = coordinator.network_environment() if coordinator else {}
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "weft.observe.doctor.rank", name, str(LINK_SECONDS)]
        try:
            launch(
                command,
                ranks=ranks,
                log_dir=folder / "logs",
                environment=network,
                coordinator=coordinator,
                use_forkserver=device.supports_fork,
            )
        except WeftError as error:
            return {"failure": error.what.splitlines()[0]}
        if coordinator is not None and coordinator.host:
            return {}
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    counts = coordinator.ranks_by_host() if coordinator else [ranks]
    host_of_rank = [host for host, count in enumerate(counts) for _ in range(count)]
    return {
        "ranks": [{**rank, "host": host} for rank, host in zip(found["ranks"], host_of_rank, strict=True)],
        "links": found["links"],
    }
