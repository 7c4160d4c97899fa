"""Detection of out-of-memory kills from the counters of Linux control groups.

See Documentation/admin-guide/cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst (memory.oom_control) of Linux.
"""

import os
from dataclasses import dataclass
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 2**62  # version 1 reports a value near 2 ** 63 if there is no limit


def find_groups(
    controller: str, groups: Path = CONTROL_GROUPS, own: Path = Path("/proc/self/cgroup")
) -> list[tuple[tuple[Path, ...], int]]:
    """Find the control groups of this process, those of version 1 of the interface first.

    Args:
        controller: such as "memory".
        groups: mounted control groups, or a copy in tests.
        own: file with the groups of this process.

    Returns:
        Folder of each group with those of its ancestors, and version of its interface.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    places = [(groups / controller, path, 1) for _, kinds, path in lines if controller in kinds.split(",")]
    places += [(groups, path, 2) for hierarchy, kinds, path in lines if hierarchy == "0" and not kinds]
    found = []
    for root, path, version in places:
        folder = root / path.strip("/")
        if not folder.is_dir():  # in a container: the path is relative to the root of the host
            folder = root
        chain = (folder, *folder.parents)
        found.append((chain[: chain.index(root) + 1], version))
    return found


@dataclass(frozen=True)
class ControlGroup:
    """Memory control group of a process.

    Attributes:
        folders: folder of the group, followed by the folders of its ancestors.
        version: version of the interface, 1 or 2.
    """

    folders: tuple[Path, ...]
    version: int

    @classmethod
    def of_this_process(
        cls, groups: Path = CONTROL_GROUPS, own: Path = Path("/proc/self/cgroup")
    ) -> "ControlGroup | None":
        """Find the memory control group of this process; None if the system has no control groups or hides them."""
        found = (cls(folders, version) for folders, version in find_groups("memory", groups, own))
        return next((group for group in found if group.kills() is not None), None)

    def kills(self) -> int | None:
        """Number of out-of-memory kills in the group; None if the kernel does not count them."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        try:
            counts = dict(line.split() for line in (self.folders[0] / name).read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            return None

    def limit(self) -> int | None:
        """Memory limit of the group in bytes, the minimum over its ancestors; None without a limit."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        limits = []
        for folder in self.folders:
            try:
                limits.append(int((folder / name).read_text()))
            except (OSError, ValueError):  # the root group has no file, and "max" means no limit
                continue
        return min((limit for limit in limits if limit < UNLIMITED), default=None)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if the process has ended or there is no /proc."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
