"""Detection of out-of-memory kills from the counters of Linux control groups.

See Documentation/admin-guide/cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst (memory.oom_control) of Linux.
"""

import os
from dataclasses import dataclass
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 2**62  # version 1 reports a value near 2 ** 63 if there is no limit


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
        try:
            lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        except OSError:
            return None
        candidates = [(groups / "memory", path, 1) for _, kinds, path in lines if "memory" in kinds.split(",")]
        candidates += [(groups, path, 2) for hierarchy, kinds, path in lines if hierarchy == "0" and not kinds]
        for root, path, version in candidates:
            folder = root / path.strip("/")
            if not folder.is_dir():  # in a container: the path is relative to the root of the host
                folder = root
            chain = (folder, *folder.parents)
            group = cls(chain[: chain.index(root) + 1], version)
            if group.kills() is not None:
                return group
        return None

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
