"""Emulated hosts: network namespaces on one bridge, whose links can be slow, and can break.

    with hosts(2, rate=100_000_000) as (a, b):
        server = a.start([sys.executable, "server.py"])
        client = b.start([sys.executable, "client.py", a.address])
        b.unplug()

A namespace has its own loopback, addresses and ports; files and processes are those of the machine. The bridge stands in a
namespace too, so nothing is seen on the machine but names. A namespace carries the id of the process that made it: what a
killed run left behind goes with the next `hosts`.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PREFIX = "weft"
INTERFACE = "eth0"
BURST_SECONDS = (
    0.004  # what a limited link saves up while the kernel sleeps; at 1 ms a gigabit carries a tenth too little
)
HEADER_BYTES = 66  # of Ethernet, IP and TCP with time stamps around each packet


def payload_sent() -> int:
    """Bytes that have left this host by the counters of its interface, headers taken off. For a process on a host."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split() for line in lines if line.strip().startswith(INTERFACE))
    return int(fields[9]) - HEADER_BYTES * int(fields[10])


@dataclass
class Host:
    """One emulated host: a namespace with loopback and one interface."""

    namespace: str
    address: str
    bridge: str
    """Namespace of the bridge."""
    port: str
    """Name of this host's link at the bridge."""
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)
    interface: str = INTERFACE

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host, with the options of `subprocess.Popen`; the end of `hosts` kills it.

        `ip netns exec` becomes the process by exec, so its id, signals and exit code are the command's.
        """
        process = subprocess.Popen(["ip", "netns", "exec", self.namespace, *argv], **options)
        self.processes.append(process)
        return process

    def unplug(self) -> None:
        """Take the link down at the bridge, as a pulled cable: the interface keeps its address, and no packet passes."""
        _run("ip", "-n", self.bridge, "link", "set", self.port, "down")

    def plug(self) -> None:
        """Take the link up again."""
        _run("ip", "-n", self.bridge, "link", "set", self.port, "up")


@contextmanager
def hosts(number: int, rate: int | None = None) -> Iterator[list[Host]]:
    """`number` emulated hosts that reach each other at 10.x.y.1, 10.x.y.2 ...; all is removed at the end.

    Skips the test, with the reason, where namespaces cannot be made.

    Args:
        rate: bits per second of each link, in each direction; None: as fast as the machine copies.
    """
    reason = unable()
    if reason:
        pytest.skip(reason)
    remove_leftovers()
    run = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
    bridge = f"{run}-bridge"
    made: list[Host] = []
    try:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", bridge, "link", "set", "bridge", "up")
        network = f"10.{secrets.randbelow(256)}.{secrets.randbelow(256)}"
        for i in range(number):
            host = Host(f"{run}-{i}", f"{network}.{i + 1}", bridge, f"host{i}")
            made.append(host)
            _add(host, rate)
        yield made
    finally:
        for host in made:
            for process in host.processes:
                process.kill()
                process.wait()
        for namespace in [*(host.namespace for host in made), bridge]:
            _remove(namespace)


def limit_rate(namespace: str, interface: str, rate: int) -> None:
    """Limit what leaves an interface to so many bits per second."""
    burst = max(32 * 1024, int(rate / 8 * BURST_SECONDS))  # below one packet nothing would pass
    limit = ("tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "latency", "200ms")
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *limit)


def unable() -> str | None:
    """Why this machine cannot emulate hosts; None if it can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"emulated hosts need the command {missing[0]} (package iproute2)"
    if os.geteuid() != 0:
        return "emulated hosts need root"
    trial = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}-trial"
    done = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    _remove(trial)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


def remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone, and what still runs in them."""
    for name in namespaces():
        pid = re.match(rf"{PREFIX}-(\d+)-", name)
        if pid and not Path("/proc", pid[1]).exists():
            _remove(name)


def namespaces() -> list[str]:
    """Names of all network namespaces of the machine."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _add(host: Host, rate: int | None) -> None:
    _run("ip", "netns", "add", host.namespace)
    ends = (host.namespace, INTERFACE), (host.bridge, host.port)
    peer = ("peer", "name", host.port, "netns", host.bridge)
    _run("ip", "link", "add", INTERFACE, "netns", host.namespace, "type", "veth", *peer)
    _run("ip", "-n", host.bridge, "link", "set", host.port, "master", "bridge")
    _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
    for namespace, interface in ends:
        _run("ip", "-n", namespace, "link", "set", interface, "up")
        if rate is not None:
            limit_rate(namespace, interface, rate)


def _remove(namespace: str) -> None:
    """Kill what runs in a namespace and delete it; another run may be doing the same."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
    for pid in found.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    assert not Path("/run/netns", namespace).exists(), f"the network namespace {namespace} cannot be deleted"


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr.strip()}"
    return done.stdout
