"""Slurm cluster on emulated hosts: munged, slurmctld and one slurmd a host, with temporary configuration.

    with slurm(nodes=2) as cluster:
        job = cluster.run("sbatch", "--parsable", "job.sh").strip()
        cluster.wait_for_state(job, "COMPLETED")

The controller and the commands of the user run on a separate host. All daemons run as root in the foreground, so that they
end with `hosts`. Each host has its own address, so that all slurmd use the same port. Each host also has its own memory file
system and its own /etc/hosts, in which its name has a loopback address, as Debian's installer writes it. Needs Debian's
packages slurm-wlm and munge (`make cluster-tools`).
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.lab.hosts import Host, hosts

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
START_SECONDS = 60
MOUNT = 'mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && shift && exec "$@"'
CONFIGURATION = """\
ClusterName=weft
SlurmctldHost={hostname}({controller})
SlurmUser=root
SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=sched_interval=2,bf_interval=5
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={silence}
KillWait={kill_wait}
MailProg=/bin/true
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Slurm cluster of emulated hosts.

    Args:
        controller: host of slurmctld and of the commands.
        nodes: compute nodes; node i is named "node" and i.
        folder: folder of configuration, sockets, logs and spool.
    """

    def __init__(self, controller: Host, nodes: list[Host], folder: Path):
        self.controller, self.nodes, self.folder = controller, nodes, folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *argv: str, code: int = 0, cwd: Path | None = None) -> str:
        """Run a command on the controller's host; return its output."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.controller.namespace, *argv],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start_node(self, index: int) -> subprocess.Popen[bytes]:
        """Start the slurmd of a node, and its link if it is cut."""
        self.nodes[index].plug()
        return self._daemon(self.nodes[index], "slurmd", "-D", "-N", f"node{index}")

    def kill_node(self, index: int) -> None:
        """Kill slurmd and everything that it has started on a node without a word to other hosts, like a power failure."""
        self.nodes[index].unplug()
        found = subprocess.run(
            ["ip", "netns", "pids", self.nodes[index].namespace], capture_output=True, text=True, check=True
        )
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def state(self, job: str) -> str:
        """State of a job, such as "RUNNING"."""
        return self.show(job, "JobState")

    def show(self, job: str, field: str) -> str:
        """Field of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{field}="))

    def wait_for_state(self, job: str, *states: str, seconds: float = 120, output: Callable[[], str] = str) -> None:
        """Wait until a job has one of the states."""
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < end, f"job {job} is {state} after {seconds:g} s\n{output()}"
            time.sleep(0.2)

    def start_all(self) -> None:
        """Start all daemons, and wait until all nodes are idle."""
        socket_path, key = self.folder / "munge.socket", self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = ("--pid-file", "munge.pid"), ("--log-file", "munge.log"), ("--seed-file", "munge.seed")
        options = [f"{option}={self.folder / name}" for option, name in files]
        self._daemon(
            self.controller,
            "munged",
            "--foreground",
            "--force",
            f"--socket={socket_path}",
            f"--key-file={key}",
            *options,
        )
        _until(socket_path.exists, "munged does not run", self.folder)
        self._daemon(self.controller, "slurmctld", "-D", "-c")
        for index in range(len(self.nodes)):
            self.start_node(index)
        _until(lambda: self._idle() == len(self.nodes), "the nodes are not idle", self.folder)

    def _idle(self) -> int:
        done = subprocess.run(
            ["ip", "netns", "exec", self.controller.namespace, "sinfo", "-h", "-N", "-o", "%T"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return done.stdout.split().count("idle")

    def _daemon(self, host: Host, *argv: str) -> subprocess.Popen[bytes]:
        names = self.folder / f"hosts-{host.port}"
        lines = [
            f"{node.address if node is not host else '127.0.1.1'} node{index}" for index, node in enumerate(self.nodes)
        ]
        names.write_text(
            "\n".join(["127.0.0.1 localhost", f"{self.controller.address} {socket.gethostname()}", *lines, ""])
        )
        with (self.folder / "daemons.log").open("ab") as log:
            return host.start(
                ["unshare", "-m", "sh", "-c", MOUNT, "sh", str(names), *argv],
                env=self.environment,
                stdout=log,
                stderr=log,
            )


@contextmanager
def slurm(nodes: int = 2, kill_wait: int = 60, silence: int = 20) -> Iterator[Cluster]:
    """Slurm cluster with `nodes` idle nodes; all its processes are killed at the end.

    Skips the test, with the reason, where Slurm or emulated hosts cannot be had.

    Args:
        nodes: number of compute nodes.
        kill_wait: seconds between SIGTERM and SIGKILL of a job that is cancelled.
        silence: seconds after which a silent node is down.
    """
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"no {missing[0]} on this machine: `make cluster-tools` installs it")
    with (
        TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as short,
        hosts(nodes + 1) as (controller, *compute),
    ):
        folder = Path(short)  # the folder of a test may be too long for the sockets of the daemons
        (folder / "state").mkdir()
        for parent in (folder, *folder.parents):  # munge refuses a socket that other users cannot reach
            if parent.stat().st_uid == os.geteuid():
                parent.chmod(parent.stat().st_mode | 0o011)
        text = CONFIGURATION.format(
            hostname=socket.gethostname(),
            controller=controller.address,
            folder=folder,
            kill_wait=kill_wait,
            silence=silence,
        )
        for index in range(nodes):
            (folder / f"spool-node{index}").mkdir()
            text += f"NodeName=node{index} NodeHostname={socket.gethostname()} NodeAddr=node{index} CPUs=2 RealMemory=1000\n"
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # not used, but v2 needs a mounted /sys/fs/cgroup
        cluster = Cluster(controller, compute, folder)
        cluster.start_all()
        yield cluster


def _until(condition: Callable[[], bool], problem: str, folder: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > end:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.log")))
            raise AssertionError(f"{problem} after {START_SECONDS} s\n{logs}")
        time.sleep(0.1)
