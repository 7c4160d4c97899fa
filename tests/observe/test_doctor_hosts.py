"""`weft doctor` on emulated hosts: a healthy pair, and one planted fault for each check that this machine can make fail."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab.hosts import Host, hosts, limit_rate
from tests.lab.jobs import write_job
from weft.launch.rendezvous import new_token

ROOT = Path(__file__).parents[2]
MOUNT = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'  # a memory file system of this host alone
SECONDS = 240

pytestmark = pytest.mark.sweep


class Doctor:
    """`weft doctor` on two emulated hosts with a job."""

    def __init__(self, pair: list[Host], folder: Path):
        self.hosts, self.folder = pair, folder
        self.job = write_job(folder)

    def run(
        self,
        *options: str,
        prefix: dict[int, Sequence[str]] | None = None,
        own: dict[int, Sequence[str]] | None = None,
        variables: dict[int, dict[str, str]] | None = None,
        mount: str = MOUNT,
    ) -> tuple[dict[str, Any], list[str]]:
        """Run it on both hosts; return the JSON of host 0 and the outputs.

        Args:
            options: options of both hosts.
            prefix: words before the command of a host, such as faketime.
            own: further options of a host.
            variables: further environment variables of a host.
            mount: shell line that prepares the file systems of a host and then becomes the command.
        """
        token, result = new_token(), self.folder / "doctor.json"
        processes = []
        for index, host in enumerate(self.hosts):
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "WEFT_TOKEN": token,
                **(variables or {}).get(index, {}),
            }
            command = [*(prefix or {}).get(index, []), sys.executable, "-m", "weft", "doctor", str(self.job)]
            command += ["--nproc-per-node", "1", "--nnodes", "2", "--node-rank", str(index), *options]
            command += ["--rdzv-endpoint", f"{self.hosts[0].address}:29400", *(own or {}).get(index, [])]
            command += ["--json", str(result)] if index == 0 else []
            shell = ["unshare", "-m", "sh", "-c", mount.replace("INDEX", str(index)), "sh", *command]
            processes.append(
                host.start(shell, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
        assert result.exists(), "\n".join(printed)
        found = json.loads(result.read_text())
        assert [process.returncode for process in processes] == 2 * [found["exit_code"]], "\n".join(printed)
        return found, printed


@pytest.fixture
def doctor(tmp_path: Path) -> Iterator[Doctor]:
    with hosts(2) as pair:
        yield Doctor(pair, tmp_path)


def red(found: dict[str, Any]) -> list[str]:
    """Names and texts of the red findings."""
    return [f"{finding['check']}: {finding['text']}" for finding in found["findings"] if finding["level"] == "red"]


def texts(found: dict[str, Any], check: str, level: str = "red") -> list[str]:
    return [f["text"] for f in found["findings"] if f["check"] == check and f["level"] == level]


def test_a_healthy_pair_has_no_red_line(doctor: Doctor) -> None:
    found, printed = doctor.run()
    assert red(found) == []
    assert found["exit_code"] == 0
    green = {finding["check"] for finding in found["findings"] if finding["level"] == "green"}
    assert green >= {"clock", "version", "job", "path", "folder", "limits", "memory"}
    assert len(found["hosts"][0]["ranks"]) == 2
    assert found["hosts"][0]["needs"]["peak_bytes"] > 0
    assert "2 hosts examined: 0 red" in printed[0]
    assert printed[1].strip().splitlines()[-1].startswith("host 1: 0 red")
    assert not list(doctor.folder.glob(".weft-doctor-*"))
    assert not (doctor.folder / "run").exists()
