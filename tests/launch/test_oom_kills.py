"""Out-of-memory kills: a real kill in a control group with a memory limit, where root can create one."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.commands import completed, start_function
from weft.errors import RankFailure
from weft.launch.launcher import launch
from weft.launch.oom_kills import CONTROL_GROUPS, ControlGroup, resident_bytes

MIB = 2**20
LIMIT = 1536 * MIB

RANK = """
import os, time

if os.environ["RANK"] == "1":
    first = bytes(1024 * 2**20)
    [first[offset] for offset in range(0, len(first), 4096)]
    block = bytearray(os.urandom(2**20) * 256)
    time.sleep(1)
    block *= 10
time.sleep(60)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    own = ControlGroup.of_this_process()
    folder = (own.folders[-1] if own else CONTROL_GROUPS) / f"weft-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if own and own.version == 1 else "memory.max"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot create a control group: {error}")
    try:
        (folder / name).write_text(str(LIMIT))
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"cannot set a memory limit: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.must("fault: The kernel kills a rank for memory")
def test_an_out_of_memory_kill_is_reported(group: Path, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)

    def launch_in_group() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            launch([sys.executable, str(tmp_path / "rank.py")], ranks=2, log_dir=tmp_path)
        except RankFailure as failure:
            print(failure)

    done = completed(start_function(["launcher"], launch_in_group), timeout=60)
    assert "rank 1 was killed by the kernel: out of memory (limit 1.5 GiB, resident " in done.stdout, done
    assert "`weft memory` shows the largest parts" in done.stdout
    assert "killed by the kernel: out of memory" in done.stderr


def write_group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_cgroup_version_2(tmp_path: Path) -> None:
    write_group(tmp_path / "fs", {})
    write_group(tmp_path / "fs" / "job", {"memory.max": "4096\n", "memory.events": "oom 9\noom_kill 5\n"})
    write_group(tmp_path / "fs" / "job" / "mine", {"memory.max": "max\n", "memory.events": "oom 1\noom_kill 2\n"})
    (tmp_path / "cgroup").write_text("0::/job/mine\n")
    cgroup = ControlGroup.of_this_process(tmp_path / "fs", tmp_path / "cgroup")
    assert cgroup is not None
    assert (cgroup.version, cgroup.kills(), cgroup.limit()) == (2, 2, 4096)


def test_cgroup_version_1_in_a_container(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory.oom_control": "under_oom 0\noom_kill 3\n"}
    write_group(tmp_path / "fs" / "memory", files)
    (tmp_path / "cgroup").write_text("3:cpu:/docker/1\n2:memory:/docker/1\n0::/\n")
    cgroup = ControlGroup.of_this_process(tmp_path / "fs", tmp_path / "cgroup")
    assert cgroup is not None
    assert (cgroup.version, cgroup.kills(), cgroup.limit()) == (1, 3, None)


def test_without_control_groups(tmp_path: Path) -> None:
    assert ControlGroup.of_this_process(tmp_path, tmp_path / "none") is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert ControlGroup.of_this_process(tmp_path, tmp_path / "cgroup") is None


def test_resident_bytes() -> None:
    assert resident_bytes(os.getpid()) > 10 * MIB
    assert resident_bytes(2**22 + 1) == 0
