"""Rendezvous configuration: tokens stay secret, and addresses name one interface."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weft.errors import RendezvousError
from weft.launch import rendezvous
from weft.launch.rendezvous import (
    interface_address,
    interface_of,
    interface_towards,
    listen,
    new_token,
    parse_endpoint,
    read_token,
)


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.must("format: token file and key file")
def test_a_new_token_can_be_read_back(tmp_path: Path) -> None:
    token = new_token()
    assert len(token) == 64
    assert token != new_token()
    assert read_token(environment={"WEFT_TOKEN": token}) == token
    assert read_token(token_file(tmp_path, f"{token}\n"), {"WEFT_TOKEN": new_token()}) == token
    assert read_token(token_file(tmp_path, token.upper())) == token


@pytest.mark.parametrize("text", ["", "secret", "ab" * 15, "xy" * 32, "ab" * 16 + " " + "ab" * 16, "é" * 64])
def test_a_weak_token_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    for read in (lambda: read_token(environment={"WEFT_TOKEN": text}), lambda: read_token(token_file(tmp_path, text))):
        with pytest.raises(RendezvousError) as caught:
            read()
        assert caught.value.exit_code == 2
        assert not text or text not in str(caught.value)


def test_a_missing_token_is_refused() -> None:
    with pytest.raises(RendezvousError, match="no token"):
        read_token(environment={})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_token_file_readable_by_others_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=f"mode {mode:o}"):
        read_token(token_file(tmp_path, new_token(), mode))


def test_a_missing_token_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="No such file"):
        read_token(tmp_path / "token")


def test_parse_endpoint() -> None:
    assert parse_endpoint("10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert parse_endpoint("node-0.job.svc:29400") == ("node-0.job.svc", 29400)


@pytest.mark.parametrize(
    "text",
    [
        *("10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:²", ":29400", "host_0:29400", "host0"),
        *("0.0.0.0:29400", "[::]:29400", "10.0.0.256:29400", "224.0.0.1:29400"),
    ],
)
def test_an_invalid_endpoint_is_refused(text: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        parse_endpoint(text)
    assert caught.value.fix


def test_interfaces() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(RendezvousError, match="'nosuch0'") as caught:
        interface_address("nosuch0")
    assert "lo (127.0.0.1)" in str(caught.value.fix)
    with pytest.raises(RendezvousError, match=r"203\.0\.113\.1"):
        interface_of("203.0.113.1")


def test_the_interface_towards_rank_0_is_not_loopback_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"lo": "127.0.0.1", "eth0": "10.0.0.7"}
    monkeypatch.setattr(rendezvous, "_interfaces", lambda: own)
    assert interface_towards("127.0.0.1", several_hosts=False) == "lo"
    assert interface_towards("127.0.1.1", several_hosts=True) == "eth0"
    own["eth1"] = "10.0.1.7"
    assert interface_towards("127.0.1.1", several_hosts=True) is None, "there is a choice"
    assert interface_towards("127.0.1.1", several_hosts=False) == "lo"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", "localhost", "203.0.113.1"])
def test_listening_on_all_interfaces_or_foreign_addresses_is_refused(address: str) -> None:
    with pytest.raises(RendezvousError, match=r"IPv4 address of one interface|cannot listen at") as caught:
        listen(address, 0)
    assert "lo (127.0.0.1)" in str(caught.value.fix)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            listen("127.0.0.1", port)


PRINT_TOKEN = """
import os, sys
from weft.launch.rendezvous import parse_rendezvous
rendezvous = parse_rendezvous(0, 2, "127.0.0.1:29400", None, None)
print(rendezvous.token, "WEFT_TOKEN" in os.environ, open("/proc/self/environ").read().count(rendezvous.token))
"""


def test_the_token_is_erased_from_the_environment() -> None:
    """Neither in the environment of child processes nor in /proc."""
    token = new_token()
    environment = os.environ | {"WEFT_TOKEN": token}
    ended = subprocess.run(
        [sys.executable, "-c", PRINT_TOKEN], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == [token, "False", "0"]
