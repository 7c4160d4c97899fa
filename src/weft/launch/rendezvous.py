"""Rendezvous configuration of a multi-host job: secret token, endpoint of host 0, network interfaces."""

import ctypes
import fcntl
import ipaddress
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.errors import RendezvousError

TOKEN_VARIABLE = "WEFT_TOKEN"
TOKEN = re.compile("[0-9a-fA-F]{32,}")
HOST_NUMBERS = re.compile(r"(?:([0-9]{1,6}):)?([0-9]{1,6})")
HOST_NAME = re.compile(r"(?=.*[a-zA-Z])[a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9])?")
NAME_SECONDS = 60.0  # until the name of host 0 resolves to its address: caches of DNS
MAX_TOKEN_BYTES = 4096
SIOCGIFADDR = 0x8915  # from linux/sockios.h
DISCARD_PORT = 9  # any port will do to look up a route


@dataclass(frozen=True)
class RendezvousConfig:
    """Rendezvous parameters of one host of a job."""

    host: int
    """Number of this host, from 0."""
    hosts: int
    """Number of hosts."""
    address: str
    """IPv4 address of an interface of host 0, or a name that resolves to one. A name may move to another host 0."""
    port: int
    token: str
    interface: str | None = None
    """Network interface of this host for the traffic between ranks; None: the interface of the route to `address`."""
    min_hosts: int = 0
    """Number of hosts that start the job; up to `hosts` join while it runs. 0: all hosts start it."""
    encrypt: bool = False
    """TLS for the connections between launchers, the same on all hosts. `weft.planner.train.train` sets it from the job."""


def parse_hosts(text: str) -> tuple[int, int]:
    """Parse a number of hosts, "4", or the numbers of hosts with which a job starts and to which it may grow, "2:4".

    Returns:
        min_hosts: number of hosts that start the job; 0: all.
        hosts: number of hosts, at most.

    Raises:
        RendezvousError: the text is neither.
    """
    match = HOST_NUMBERS.fullmatch(text)
    low, high = (int(number or 0) for number in match.groups()) if match else (0, 0)
    if high < 1 or low > high or (match and match[1] and not low):
        raise RendezvousError(
            f"--nnodes {text}",
            where="command line",
            rule="a number of hosts, or MIN:MAX with 1 <= MIN <= MAX, as for torchrun",
            fix="--nnodes 4, or --nnodes 2:4 for a job that starts with two hosts and may grow to four",
        )
    return low if low < high else 0, high


def parse_rendezvous(
    host: int, hosts: int, endpoint: str | None, token_file: Path | None, interface: str | None, min_hosts: int = 0
) -> RendezvousConfig | None:
    """Parse the rendezvous options of a command line; returns None for a single host.

    Removes the token from the environment: ranks do not need it, and child processes of ranks could expose it.

    Args:
        host: number of this host (--node-rank).
        hosts: number of hosts (--nnodes).
        endpoint: ADDRESS:PORT of host 0 (--rdzv-endpoint).
        token_file: file with the token; by default the token is in the environment variable WEFT_TOKEN.
        interface: network interface of this host for the traffic between ranks.
        min_hosts: number of hosts that start the job; 0: all.

    Raises:
        RendezvousError: the endpoint or the token is missing or invalid, or the host number is not below the number of hosts.
    """
    if hosts == 1 and host == 0 and endpoint is None:
        return None
    if endpoint is None or host >= hosts:
        raise RendezvousError(
            f"host {host} of {hosts} " + ("has no --rdzv-endpoint" if endpoint is None else "does not exist"),
            where="command line",
            rule="host numbers are 0 to --nnodes - 1, and --rdzv-endpoint is an address or name and a port of host 0",
            fix="weft train JOB --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29400; on host 1 with --node-rank 1",
        )
    address, port = parse_endpoint(endpoint)
    token = read_token(token_file)
    _erase_variable(TOKEN_VARIABLE)
    return RendezvousConfig(host, hosts, address, port, token, interface, min_hosts)


def _erase_variable(name: str) -> None:
    """Remove a variable from the environment, and overwrite its value in /proc/PID/environ."""
    if name not in os.environ:
        return
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if address := getenv(name.encode()):
        ctypes.memset(address, ord("0"), len(os.environb[name.encode()]))
    del os.environ[name]


def new_token() -> str:
    """Create a random token for one job: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def read_token(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """Read the token of the job from a private file, or from the environment variable WEFT_TOKEN if `path` is None.

    Raises:
        RendezvousError: the token is missing or too short, or other users can read the file. The message never shows the token.
    """
    if path is None:
        if not environment.get(TOKEN_VARIABLE):
            raise RendezvousError(
                "this job has no token",
                where=TOKEN_VARIABLE,
                rule="hosts of a job authenticate each other by a secret of at least 32 hexadecimal digits",
                fix=f"set {TOKEN_VARIABLE} to the output of `openssl rand -hex 32`, the same on every host",
            )
        return token_key(environment[TOKEN_VARIABLE].strip(), TOKEN_VARIABLE).decode()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(MAX_TOKEN_BYTES)
    except OSError as error:
        raise RendezvousError(f"the token file cannot be read: {error.strerror}", where=str(path)) from None
    if mode & 0o077:
        raise RendezvousError(
            f"the token file has mode {mode:03o}: other users can read or change it",
            where=str(path),
            rule="only the owner can read a token file",
            fix=f"chmod 600 {path}, and create a new token if other people use this host",
        )
    return token_key(text.decode("ascii", "replace").strip(), str(path)).decode()


def token_key(token: str, where: str) -> bytes:
    """Convert the token into an HMAC key.

    Args:
        where: origin of the token, for the error message.

    Raises:
        RendezvousError: the token is too short or contains other characters than hexadecimal digits.
    """
    if not TOKEN.fullmatch(token):
        raise RendezvousError(
            f"the token is invalid: it has {len(token)} characters, or characters other than hexadecimal digits",
            where=where,
            rule="at least 32 hexadecimal digits",
            fix="create a token with `openssl rand -hex 32`",
        )
    return token.lower().encode()


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse a rendezvous endpoint such as "10.0.0.1:29400" into its address and port.

    Raises:
        RendezvousError: the text is not the IPv4 address of one interface or a host name, a colon and a port.
    """
    address, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise RendezvousError(
            f"{text!r} is not a valid rendezvous endpoint",
            rule="ADDRESS:PORT or NAME:PORT",
            fix="use an address or name and a port of host 0, for example 10.0.0.1:29400",
        )
    if not HOST_NAME.fullmatch(address):
        _check_address(address)
    return address, int(port)


def own_address(rendezvous: RendezvousConfig) -> str:
    """Address of this host on the route to host 0. Sends no packets: connecting a UDP socket only looks up the route.

    Raises:
        RendezvousError: there is no route to host 0, or host 0 cannot resolve its own name to an address of its network.
    """
    if rendezvous.host == 0:
        return _resolve(rendezvous.address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect((rendezvous.address, rendezvous.port))
        except OSError as error:
            raise RendezvousError(
                f"no route to {rendezvous.address}: {error.strerror}", rule="hosts of a job share a network"
            ) from None
        return str(route.getsockname()[0])


def _resolve(name: str) -> str:
    """IPv4 address of host 0, on host 0. A name may follow host 0 to its new machine with a delay; an address is returned."""
    if not HOST_NAME.fullmatch(name):
        return name
    end = time.monotonic() + NAME_SECONDS
    while True:
        try:
            address = socket.gethostbyname(name)
            problem = f"{name} resolves to {address} on host 0"
        except OSError as error:
            address, problem = "", f"host 0 cannot resolve {name}: {error.strerror}"
        is_loopback = address.startswith("127.")
        if name == "localhost" or (address in _interfaces().values() and not is_loopback):
            return address
        if is_loopback or time.monotonic() > end:
            raise RendezvousError(
                problem,
                where="--rdzv-endpoint",
                rule="host 0 listens at the address of its own name, which other hosts must reach: no loopback address",
                fix=f"correct /etc/hosts or DNS, or use an address: this host has {_list_interfaces()}",
            )
        time.sleep(0.5)


def interface_address(name: str) -> str:
    """First IPv4 address of a network interface of this host (Linux).

    Raises:
        RendezvousError: the interface does not exist or has no IPv4 address.
    """
    if (address := _interfaces().get(name)) is None:
        raise RendezvousError(
            f"this host has no network interface {name!r} with an IPv4 address",
            rule="an interface of this host that is up",
            fix=f"use one of {_list_interfaces()}",
        )
    return address


def interface_of(address: str) -> str:
    """Network interface whose first IPv4 address is `address`, for `INTERFACE_VARIABLES` (Linux).

    Raises:
        RendezvousError: no interface of this host has this address.
    """
    for name, first_address in _interfaces().items():
        if first_address == address:
            return name
    raise RendezvousError(
        f"no network interface of this host has the address {address}",
        rule="an address of this host",
        fix=f"use one of {_list_interfaces()}",
    )


def interface_towards(address: str, several_hosts: bool) -> str | None:
    """Network interface of this host on the route to the host of rank 0 (Linux). Sends no packets.

    The name of a host often has a loopback address on the host itself, as Debian's installer writes it, where gloo would
    listen. If ranks are on several hosts, the only other interface is taken instead.

    Args:
        address: address or name of the host of rank 0.
        several_hosts: True if the job has ranks on several hosts.

    Returns:
        Name of the interface; None if there is no route, or a choice of interfaces.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect((address, DISCARD_PORT))
        except OSError:
            return None
        own = str(route.getsockname()[0])
    loopback = several_hosts and ipaddress.IPv4Address(own).is_loopback
    addresses = {name: ipaddress.IPv4Address(first) for name, first in _interfaces().items()}
    found = [name for name, at in addresses.items() if (not at.is_loopback if loopback else str(at) == own)]
    return found[0] if len(found) == 1 else None


def listen(address: str, port: int) -> socket.socket:
    """Create a listening socket at one address of this host. With port 0 the system chooses a free port.

    Raises:
        RendezvousError: the address means every interface or belongs to another host, or the port is in use.
    """
    _check_address(address)
    try:
        return socket.create_server((address, port))
    except OSError as error:
        raise RendezvousError(
            f"host 0 cannot listen at {address}:{port}: {error.strerror}",
            rule="an address of this host and a free port",
            fix=f"this host has {_list_interfaces()}",
        ) from None


def _interfaces() -> dict[str, str]:
    """First IPv4 address of every interface that has an IPv4 address."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_ipv4_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_ipv4_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # no IPv4 address
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _list_interfaces() -> str:
    return ", ".join(f"{name} ({address})" for name, address in _interfaces().items())


def _check_address(address: str) -> None:
    try:
        parsed = ipaddress.IPv4Address(address)
    except ValueError:
        parsed = None
    if parsed is None or parsed.is_unspecified or parsed.is_multicast:
        raise RendezvousError(
            f"{address!r} is not the IPv4 address of one interface",
            rule="the tunnel server listens on one network that the user chooses, never on all networks",
            fix=f"use an address of host 0; this host has {_list_interfaces()}",
        )
