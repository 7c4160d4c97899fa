"""Paths between hosts: TCP connections, and the largest packet that passes without being divided.

Each host answers probes at its address (`Responder`) and probes other hosts (`probe_path`). A probe is a UDP packet with the
don't-fragment bit, of a given size on the network; the answer is short, so that one direction is measured at a time.
"""

import fcntl
import secrets
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from weft.observe.doctor.finding import Facts, Finding, group, label, summarize

# From linux/in.h: set the don't-fragment bit, and send up to the interface's MTU.
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = (10, 3)
SIOCGIFMTU = 0x8921  # from linux/sockios.h
HEADERS = 28  # of IPv4 and UDP
LEAST_MTU = 576  # of IPv4
ANSWER_SECONDS, TRIES = 0.2, 3
CONNECT_SECONDS = 3.0
ALL_PAIRS = 8  # number of hosts up to which every pair is probed


class Responder:
    """Thread that answers probes at one address, on a UDP and a TCP port that the system chooses; a context manager.

    It answers packets that begin with `nonce` alone, with fewer bytes than it received.
    """

    def __init__(self, address: str, nonce: bytes):
        self.nonce = nonce
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((address, 0))
        self._tcp = socket.create_server((address, 0))
        self._wake, self._woken = socket.socketpair()
        self.udp_port, self.tcp_port = self._udp.getsockname()[1], self._tcp.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="Responder", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._udp, self._tcp, self._woken], [], [])
            if self._woken in ready:
                return
            with suppress(OSError):  # the peer is gone
                if self._tcp in ready:
                    self._tcp.accept()[0].close()
                if self._udp in ready:
                    packet, peer = self._udp.recvfrom(2**16)
                    if packet.startswith(self.nonce):
                        head = len(self.nonce)
                        self._udp.sendto(packet[: head + 4] + struct.pack(">I", len(packet)), peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._wake.send(b"-")
        self._thread.join()
        for opened in (self._udp, self._tcp, self._wake, self._woken):
            opened.close()


def interface_mtu(interface: str) -> int:
    """MTU of a network interface of this host in bytes (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFMTU, struct.pack("16si16x", interface.encode(), 0))
    return int(struct.unpack("16si16x", answer)[1])


def partners(index: int, count: int) -> list[int]:
    """Hosts that a host probes: all others; of many hosts, those 1, 2, 4, 8 ... after it."""
    if count <= ALL_PAIRS:
        return [host for host in range(count) if host != index]
    return sorted({(index + 2**step) % count for step in range((count - 1).bit_length())} - {index})


def probe_path(address: str, udp_port: int, tcp_port: int, nonce: bytes, mtu: int) -> dict[str, Any]:
    """Probe the path to a `Responder`.

    Args:
        address, udp_port, tcp_port, nonce: of the responder.
        mtu: largest packet to try, the MTU of the interface.

    Returns:
        tcp: None if a TCP connection is accepted, else the error.
        mtu: bytes of the largest packet that arrives, at most `mtu`; None if no packet is answered.
    """
    refused = None
    try:
        socket.create_connection((address, tcp_port), CONNECT_SECONDS).close()
    except OSError as error:
        refused = str(error)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        probe.connect((address, udp_port))
        probe.settimeout(ANSWER_SECONDS)

        def passes(packet_bytes: int) -> bool:
            return any(_answered(probe, nonce, packet_bytes - HEADERS) for _ in range(TRIES))

        if passes(mtu):
            return {"tcp": refused, "mtu": mtu}
        low, high = LEAST_MTU, mtu
        if not passes(low):
            return {"tcp": refused, "mtu": None}
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if passes(middle) else (low, middle)
        return {"tcp": refused, "mtu": low}


def _answered(probe: socket.socket, nonce: bytes, payload: int) -> bool:
    head = nonce + secrets.token_bytes(4)
    try:
        probe.send(head.ljust(payload, b"\0"))
        while True:
            answer = probe.recv(256)
            if answer == head + struct.pack(">I", payload):
                return True
    except OSError:  # includes the timeout, and EMSGSIZE of a router's report
        return False


def judge_paths(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: a host cannot be reached, or a packet of the interface's MTU does not arrive; yellow: interfaces of different MTU.

    Facts: "path": interface, mtu of the interface, and to: [index of the other host, result of `probe_path`] for each host that
    was probed.
    """
    findings: list[Finding] = []
    examined = [facts for facts in hosts if group(facts, "path")]
    for facts in examined:
        path = facts["path"]
        for other, found in path["to"]:
            there = f"from {label(facts)} to {label(hosts[other])}"
            if found["tcp"]:
                text = f"no TCP connection {there}: {found['tcp']}"
                fix = "open all TCP ports between the hosts; ranks listen at ports that the system chooses"
                findings.append(Finding("red", "path", text, fix))
            elif found["mtu"] is None:
                text = f"no UDP packet is answered {there}, so that the MTU of the path is not known"
                findings.append(Finding("yellow", "path MTU", text, "open UDP between the hosts, or ignore this"))
            elif found["mtu"] < path["mtu"]:
                text = f"{there}, packets of {found['mtu']} bytes pass, and {path['interface']} sends {path['mtu']}"
                fix = (
                    f"set the MTU of the switches on the way and of the other host to {path['mtu']}, "
                    f"or that of {path['interface']} to {found['mtu']}"
                )
                findings.append(Finding("red", "path MTU", text, fix))
    sizes = {facts["path"]["mtu"] for facts in examined}
    if len(sizes) > 1 and not findings:
        text = ", ".join(f"{facts['path']['mtu']} on {label(facts)}" for facts in examined)
        findings.append(
            Finding("yellow", "MTU", f"interfaces differ: {text}", "set the same MTU on the interfaces of all hosts")
        )
    text = f"packets of {min(sizes, default=0)} bytes pass between all hosts that were probed"
    return summarize("path", findings, [facts for facts in examined if facts["path"]["to"]], text)
