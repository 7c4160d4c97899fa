"""Emulated hosts with real sshd, which a login host reaches by ssh without a password.

    with ssh_hosts(tmp_path, nodes=2) as cluster:
        cluster.start("ssh", "-F", str(cluster.configuration), "node1", "true")

Each host has its own memory file system and its own /etc/hosts. Keys and configuration are temporary. Needs root and Debian's
packages openssh-server and openssh-client (`make cluster-tools`).
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab.hosts import Host, hosts

START_SECONDS = 30
MOUNT = 'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && shift 2 && exec "$@"'
CONFIGURATION = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""


@dataclass
class SshHosts:
    """Emulated hosts with sshd, and the login host."""

    login: Host
    nodes: list[Host]
    """Host i is named "node" and i."""
    folder: Path
    settings: dict[str, Path]
    """Options of ssh: key and known hosts."""

    def start(self, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a process on the login host."""
        return self._start(self.login, argv, **options)

    def start_sshd(self, index: int) -> None:
        """Start the sshd of a host, and wait until it listens."""
        log = self.folder / f"sshd-{index}.log"
        argv = [shutil.which("sshd", path=SBIN) or "", "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with log.open("ab") as file:
            self._start(self.nodes[index], argv, stdout=file, stderr=file)
        end = time.monotonic() + START_SECONDS
        while "listening on" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)

    def processes(self, index: int) -> list[int]:
        """Ids of the processes of a host."""
        argv = ["ip", "netns", "pids", self.nodes[index].namespace]
        return [int(pid) for pid in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()]

    def _start(self, host: Host, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        name = f"node{self.nodes.index(host)}" if host in self.nodes else "login"
        command = ["unshare", "--mount", "--uts", "sh", "-c", MOUNT, "sh", name, str(self.folder / "hosts"), *argv]
        return host.start(command, **options)


SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin"


@contextmanager
def ssh_hosts(folder: Path, nodes: int = 2) -> Iterator[SshHosts]:
    """Hosts with sshd, and a login host; all their processes are killed at the end.

    Skips the test, with the reason, where sshd or emulated hosts cannot be had.

    Args:
        folder: folder for keys, configuration and logs.
        nodes: number of hosts with sshd.
    """
    if missing := [tool for tool in ("sshd", "ssh", "ssh-keygen") if shutil.which(tool, path=SBIN) is None]:
        pytest.skip(f"no {missing[0]} on this machine: `make cluster-tools` installs it")
    folder = folder / "ssh"
    folder.mkdir()
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
            check=True,
            stdin=subprocess.DEVNULL,
        )
    (folder / "sshd_config").write_text(CONFIGURATION.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd needs this empty folder
    with hosts(nodes + 1) as (login, *compute):
        names = [f"{host.address} node{index}" for index, host in enumerate(compute)]
        lines = ["127.0.0.1 localhost", f"{login.address} login", *names, ""]
        (folder / "hosts").write_text("\n".join(lines))
        public = (folder / "host_key.pub").read_text()
        known = [f"node{index},{host.address} {public}" for index, host in enumerate(compute)]
        (folder / "known_hosts").write_text("".join(known))
        settings = {"IdentityFile": folder / "key", "UserKnownHostsFile": folder / "known_hosts"}
        cluster = SshHosts(login, compute, folder, settings)
        for index in range(nodes):
            cluster.start_sshd(index)
        yield cluster
