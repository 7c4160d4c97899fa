"""Emulated hosts: network namespaces on one bridge, whose links can be slow and can be cut.

    with hosts(2, rate=100_000_000) as (a, b):
        server = a.start([sys.executable, "server.py"])
        client = b.start([sys.executable, "client.py", a.address])
        launcher = b.fork(["weft", "train", "job.toml"], main)       # of the test process, with its imports
        b.unplug()

A namespace has its own loopback, addresses and ports, but shares files and processes with the machine. The bridge is in a
namespace too, so only the names of the namespaces are visible on the machine. The name of a namespace contains the id of the
process that created it; the next call of `hosts` removes the namespaces of killed processes.
"""

import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.lab.commands import ForkedCommand, start_function

PREFIX = "weft"
INTERFACE = "eth0"
BURST_SECONDS = 0.004  # burst of a limited link while the kernel sleeps; with 1 ms a gigabit link is a tenth too slow
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000  # from linux/sched.h
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x1000, 0x4000, 1 << 18, 2  # from linux/mount.h
HEADER_BYTES = 66  # headers of a packet: Ethernet, IP, and TCP with time stamps


def payload_sent() -> int:
    """Bytes sent by this host without headers, by the counters of its interface; for a process on an emulated host."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split() for line in lines if line.strip().startswith(INTERFACE))
    return int(fields[9]) - HEADER_BYTES * int(fields[10])


@dataclass
class Host:
    """Emulated host: a namespace with loopback and one interface."""

    namespace: str
    address: str
    bridge: str
    """Namespace of the bridge."""
    port: str
    """Name of this host's link at the bridge."""
    processes: list[subprocess.Popen[Any] | ForkedCommand] = field(default_factory=list)
    interface: str = INTERFACE

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host, with options of `subprocess.Popen`; it is killed at the end of `hosts`.

        `ip netns exec` replaces itself by the command (exec), so process id, signals and exit code are the command's.
        """
        process = subprocess.Popen(["ip", "netns", "exec", self.namespace, *argv], **options)
        self.processes.append(process)
        return process

    def fork(
        self,
        argv: list[str],
        function: Callable[[], Any],
        *,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, Path] | None = None,
        merge: bool = False,
    ) -> ForkedCommand:
        """Call a function in a fork of the test process on this host; it is killed at the end of `hosts`.

        Args:
            argv: sys.argv in the fork.
            function: function without arguments.
            env: complete environment; default: that of the test process.
            files: files that only this host sees, by the path at which it sees them. It then also has a /dev/shm of its own.
            merge: stderr goes to stdout.
        """

        def on_this_host() -> Any:
            enter(self.namespace, files)
            return function()

        process = start_function(argv, on_this_host, env=env, merge=merge)
        self.processes.append(process)
        return process

    def unplug(self) -> None:
        """Cut the link at the bridge, like a pulled cable: the interface keeps its address, and no packet passes."""
        _run("ip", "-n", self.bridge, "link", "set", self.port, "down")

    def plug(self) -> None:
        """Restore the link."""
        _run("ip", "-n", self.bridge, "link", "set", self.port, "up")


def enter(namespace: str, files: Mapping[str, Path] | None = None) -> None:
    """Move this process, which has one thread, into a network namespace and mounts of its own, as `ip netns exec` does.

    Args:
        namespace: name of the network namespace.
        files: files to mount over others, by the path of the other; if given, /dev/shm is mounted too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open("rb") as file:
        _check(libc.setns(file.fileno(), CLONE_NEWNET), "setns")
    _check(libc.unshare(CLONE_NEWNS), "unshare")
    _mount(libc, "none", "/", None, MS_REC | MS_PRIVATE)
    libc.umount2(b"/sys", MNT_DETACH)  # interfaces in it are those of the namespace in which it was mounted
    _mount(libc, namespace, "/sys", "sysfs", 0)
    if files is not None:
        _mount(libc, "tmpfs", "/dev/shm", "tmpfs", 0)
        for path, source in files.items():
            _mount(libc, str(source), path, None, MS_BIND)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = kind.encode() if kind else None
    _check(libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), None), f"mount {target}")


def _check(result: int, call: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


@contextmanager
def hosts(count: int, rate: int | None = None) -> Iterator[list[Host]]:
    """Emulated hosts that reach each other at 10.x.y.1, 10.x.y.2 ...; removed at the end.

    Skips the test, with the reason, where namespaces cannot be created.

    Args:
        count: number of hosts.
        rate: bits per second of each link, in each direction; None: unlimited.
    """
    reason = unsupported_reason()
    if reason:
        pytest.skip(reason)
    remove_leftovers()
    run = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
    bridge = f"{run}-bridge"
    created: list[Host] = []
    try:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", bridge, "link", "set", "bridge", "up")
        network = f"10.{secrets.randbelow(256)}.{secrets.randbelow(256)}"
        for index in range(count):
            host = Host(f"{run}-{index}", f"{network}.{index + 1}", bridge, f"host{index}")
            created.append(host)
            _add(host, rate)
        yield created
    finally:
        for host in created:
            for process in host.processes:
                process.kill()
                process.wait()
        for namespace in [*(host.namespace for host in created), bridge]:
            _remove(namespace)


def limit_rate(namespace: str, interface: str, rate: int) -> None:
    """Limit the rate of an interface's outgoing traffic, in bits per second."""
    burst = max(32 * 1024, int(rate / 8 * BURST_SECONDS))  # below one packet nothing would pass
    limit = ("tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "latency", "200ms")
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *limit)


def unsupported_reason() -> str | None:
    """Reason why this machine cannot emulate hosts; None if it can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"emulated hosts need the command {missing[0]} (package iproute2)"
    if os.geteuid() != 0:
        return "emulated hosts need root"
    trial = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}-trial"
    done = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    _remove(trial)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


def remove_leftovers() -> None:
    """Remove the namespaces of ended processes, and kill the processes in them."""
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
    """Kill the processes in a namespace and delete it; another run may do the same at the same time."""
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
