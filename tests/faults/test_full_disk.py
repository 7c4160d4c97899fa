"""Full disk during `weft train`: training continues, or its state is kept in memory until there is space."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.kill import differences, job_file, leftovers_of, run_alone, weft_train
from weft.checkpoint.folders import list_checkpoints

LAYOUT = "zero3 on 2"
STEPS = {"steps": 14}
MIB = 2**20


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a run with enough disk space."""
    return run_alone(tmp_path_factory.mktemp("space"), LAYOUT, train=STEPS)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Disk"]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=2000", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    yield Disk(folder, request.param)
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Disk:
    """Small disk that can be filled, with bytes or with files."""

    def __init__(self, folder: Path, kind: str):
        self.folder, self.kind = folder, kind

    def fill(self) -> None:
        (self.folder / "filler").mkdir(exist_ok=True)
        index = len(list((self.folder / "filler").iterdir()))
        try:
            while self.kind == "files":
                (self.folder / "filler" / str(index)).touch()
                index += 1
            with (self.folder / "filler" / str(index)).open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        except OSError:
            pass

    def free(self) -> None:
        for path in (self.folder / "filler").iterdir():
            path.unlink()


@pytest.mark.parametrize("disk", ["bytes", "files"], indirect=True)
def test_training_continues_through_a_temporarily_full_disk(disk: Disk, reference: Path, tmp_path: Path) -> None:
    job, out = job_file(tmp_path, LAYOUT, train=STEPS), disk.folder / "run"
    with weft_train(job, LAYOUT, out) as command:
        rank = command.rank_at(0, 2)
        disk.fill()
        full = rank.status().step or 0  # filling it takes some steps
        command.until(lambda: (rank.status().step or 0) >= full + 4, "steps on a full disk")
        disk.free()
        assert command.wait() == 0, command.printed()
    printed = command.printed()
    assert "no checkpoint of step " in printed or "no checkpoint: " in printed
    assert differences(reference, out) == []
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    "disk",
    [
        pytest.param(
            "bytes", marks=pytest.mark.must("fault: The disk has no space for the export or the last checkpoint")
        ),
        "files",
    ],
    indirect=True,
)
def test_state_is_kept_in_memory_while_the_disk_is_full_after_a_kill(
    disk: Disk, reference: Path, tmp_path: Path
) -> None:
    job, out = job_file(tmp_path, LAYOUT, train=STEPS), disk.folder / "run"
    with weft_train(job, LAYOUT, out, "--max-restarts", "2") as command:
        command.rank_at(0, 4)
        disk.fill()
        os.kill(command.rank_at(1, 6).pid, signal.SIGKILL)
        command.until(lambda: any("restart 1 of 2" in line.text for line in command.lines), "a restart")
        rank = command.rank_at(0, 5)
        while command.process.poll() is None and rank.status().phase != "exporting":
            disk.fill()  # repeatedly, as older checkpoints are removed
            time.sleep(0.01)
        assert command.wait() == 2, command.printed()
    printed = command.printed()
    assert "the state after step 14 is kept in host memory" in printed
    assert "run the same command with --resume auto" in printed
    assert "Traceback" not in printed
    assert "restart 2 of 2" not in printed
    disk.free()
    with weft_train(job, LAYOUT, out, "--resume", "auto") as command:
        assert command.wait() == 0, command.printed()
    assert "resuming after step 14, from the memory of 1 hosts" in command.printed()
    last = [path.name for path in list_checkpoints(out)[:1]]
    assert last == ["step-00000014"]
    found = [
        text for text in differences(reference, out) if "metrics" not in text
    ]  # metrics lines without disk space are lost
    assert found == []
    assert leftovers_of(out) == []
