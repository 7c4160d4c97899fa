"""Names of the hosts of a hostfile: resolution, and reachability by ssh from host 0."""

import shutil
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from weft.observe.doctor.finding import Facts, Finding, group, summarize

SSH_SECONDS = 10


def read_names(names: Sequence[str]) -> list[dict[str, Any]]:
    """Address of each name, and the error of ssh without a password; None: reached, or no ssh here."""
    return [{"name": name, "address": _address(name), "ssh": _ssh_error(name)} for name in names]


def _address(name: str) -> str | None:
    try:
        return socket.gethostbyname(name.rpartition("@")[2])
    except OSError:
        return None


def _ssh_error(name: str) -> str | None:
    if shutil.which("ssh") is None:
        return "there is no ssh on host 0"
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_SECONDS}")
    try:
        done = subprocess.run(
            ["ssh", *options, name, "true"], capture_output=True, text=True, errors="replace", timeout=2 * SSH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {2 * SSH_SECONDS} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["exit code 255"])[-1]


def judge_names(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: a name of the hostfile has no address, or ssh to it fails; yellow: its address is of no host that was examined.

    Facts: "names" of host 0, of `read_names`; "host" with the address of each host.
    """
    names = (group(hosts[0], "names") or []) if hosts else []
    addresses = {facts["host"].get("address") for facts in hosts}
    findings = []
    for entry in names:
        if entry["address"] is None:
            text = f"{entry['name']} has no address"
            findings.append(Finding("red", "name resolution", text, "add it to DNS or to /etc/hosts of host 0"))
        elif entry["ssh"]:
            text = f"ssh to {entry['name']} fails: {entry['ssh']}"
            fix = "ssh-copy-id to the host, accept its key once, and start sshd there"
            findings.append(Finding("red", "ssh", text, fix))
        elif len(hosts) > 1 and entry["address"] not in addresses and not entry["address"].startswith("127."):
            text = f"{entry['name']} is {entry['address']}, the address of no host that was examined"
            findings.append(
                Finding("yellow", "name resolution", text, "start weft doctor on all hosts of the hostfile")
            )
    return summarize("names and ssh", findings, names, f"{len(names)} hosts are reached by ssh")
