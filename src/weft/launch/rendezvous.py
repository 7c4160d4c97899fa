"""What hosts of a job must know to meet: a secret token, an address of host 0, and the interfaces they have."""

import ctypes
import fcntl
import ipaddress
import os
import re
import secrets
import socket
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.errors import RendezvousError

TOKEN_VARIABLE = "WEFT_TOKEN"
TOKEN = re.compile("[0-9a-fA-F]{32,}")
MAX_TOKEN_BYTES = 4096
SIOCGIFADDR = 0x8915  # of Linux


@dataclass(frozen=True)
class RendezvousConfig:
    """Where hosts meet, and as what this one comes."""

    host: int
    """Its number, from 0."""
    hosts: int
    address: str
    """IPv4 address of an interface of host 0."""
    port: int
    token: str
    interface: str | None = None
    """Of this host, for the traffic of ranks; None: the one that leads to the address."""
    encrypt: bool = False
    """TLS for the connections between launchers; the same on all hosts. `weft.train.run.train` takes it from the job."""


def parse_rendezvous(
    host: int, hosts: int, meet: str | None, token_file: Path | None, interface: str | None
) -> RendezvousConfig | None:
    """The rendezvous that a command line describes; None for one host.

    The token is taken out of the environment: ranks have no use for it, and what they start might show it.

    Raises:
        RendezvousError: there is no address or no token, or the number of this host does not fit.
    """
    if hosts == 1 and host == 0 and meet is None:
        return None
    if meet is None or host >= hosts:
        raise RendezvousError(
            f"host {host} of {hosts} " + ("has no --rdzv-endpoint" if meet is None else "does not exist"),
            where="command line",
            rule="several hosts have numbers from 0 to --nnodes - 1, and meet at an address of host 0",
            fix="weft train JOB --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29400, and the same with --node-rank 1 on the other",
        )
    address, port = parse_endpoint(meet)
    token = read_token(token_file)
    _forget_variable(TOKEN_VARIABLE)
    return RendezvousConfig(host, hosts, address, port, token, interface)


def _forget_variable(name: str) -> None:
    """Take a variable out of the environment, and overwrite it where the kernel shows it (/proc/PID/environ)."""
    if name not in os.environ:
        return
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if address := getenv(name.encode()):
        ctypes.memset(address, ord("0"), len(os.environb[name.encode()]))
    del os.environ[name]


def new_token() -> str:
    """A fresh token for one job: 64 hexadecimal digits from the system's random source."""
    return secrets.token_hex(32)


def read_token(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """The token of the job, from a file that only its owner may read, or else from the variable WEFT_TOKEN.

    Raises:
        RendezvousError: there is none, it is too short, or others may read the file. The message never shows it.
    """
    if path is None:
        if not environment.get(TOKEN_VARIABLE):
            raise RendezvousError(
                "this job has no token",
                where=TOKEN_VARIABLE,
                rule="hosts of one job know each other by a secret of at least 32 hexadecimal digits",
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
            f"the token file has mode {mode:03o}: others may read or change it",
            where=str(path),
            rule="only the owner may read a token",
            fix=f"chmod 600 {path}, and make a new token if others use this host",
        )
    return token_key(text.decode("ascii", "replace").strip(), str(path)).decode()


def token_key(token: str, where: str) -> bytes:
    """The token as a key of HMAC.

    Raises:
        RendezvousError: it is too short or no hexadecimal number; `where` says whose token it is.
    """
    if not TOKEN.fullmatch(token):
        raise RendezvousError(
            f"the token has {len(token)} characters, or some that are not hexadecimal digits",
            where=where,
            rule="at least 32 hexadecimal digits",
            fix="make one with `openssl rand -hex 32`",
        )
    return token.lower().encode()


def parse_endpoint(text: str) -> tuple[str, int]:
    """Address and port of "10.0.0.1:29400".

    Raises:
        RendezvousError: it is not the IPv4 address of one interface, a colon and a port.
    """
    address, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise RendezvousError(
            f"{text!r} is no rendezvous point",
            rule="ADDRESS:PORT",
            fix="write it as 10.0.0.1:29400, an address of host 0",
        )
    _check_address(address)
    return address, int(port)


def own_address(rendezvous: RendezvousConfig) -> str:
    """The address of this host on the way to host 0. Nothing is sent: connecting UDP only asks for the route.

    Raises:
        RendezvousError: there is no way.
    """
    if rendezvous.host == 0:
        return rendezvous.address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect((rendezvous.address, rendezvous.port))
        except OSError as error:
            raise RendezvousError(
                f"there is no way to {rendezvous.address}: {error.strerror}", rule="hosts of a job share a network"
            ) from None
        return str(route.getsockname()[0])


def interface_address(name: str) -> str:
    """The first IPv4 address of a network interface of this host (Linux).

    Raises:
        RendezvousError: there is no such interface, or it has no IPv4 address.
    """
    if (address := _interfaces().get(name)) is None:
        raise RendezvousError(
            f"there is no network interface {name!r} with an IPv4 address",
            rule="an interface of this host that is up",
            fix=f"choose one of {_listed()}",
        )
    return address


def interface_of(address: str) -> str:
    """The network interface whose first IPv4 address this is: for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (Linux).

    Raises:
        RendezvousError: no interface of this host has it.
    """
    for name, own in _interfaces().items():
        if own == address:
            return name
    raise RendezvousError(
        f"no network interface of this host has the address {address}",
        rule="an address of this host",
        fix=f"choose one of {_listed()}",
    )


def listen(address: str, port: int) -> socket.socket:
    """A listening socket at one address of this host; port 0 takes a free one.

    Raises:
        RendezvousError: the address stands for every interface, is not of this host, or the port is taken.
    """
    _check_address(address)
    try:
        return socket.create_server((address, port))
    except OSError as error:
        raise RendezvousError(
            f"host 0 cannot listen at {address}:{port}: {error.strerror}",
            rule="an address of this host and a port that is free",
            fix=f"this host has {_listed()}",
        ) from None


def _interfaces() -> dict[str, str]:
    """First IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _listed() -> str:
    return ", ".join(f"{name} ({address})" for name, address in _interfaces().items())


def _check_address(address: str) -> None:
    try:
        known = ipaddress.IPv4Address(address)
    except ValueError:
        known = None
    if known is None or known.is_unspecified or known.is_multicast:
        raise RendezvousError(
            f"{address!r} is not the IPv4 address of one interface",
            rule="a gate listens on one network that the user names, never on all of them",
            fix=f"write an address of host 0; this host has {_listed()}",
        )
