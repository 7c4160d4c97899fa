"""Whether the kernel has killed a process of this job for want of memory. Only the counters of control groups can prove that.

See Documentation/admin-guide/cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst (memory.oom_control) of Linux.
"""

import os
from dataclasses import dataclass
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 2**62  # version 1 writes a number near 2 ** 63 where there is no limit


@dataclass(frozen=True)
class ControlGroup:
    """What limits the memory of a process and its children.

    Attributes:
        folders: of the group and of those above it, the group's own first.
        version: 1 or 2, of the interface.
    """

    folders: tuple[Path, ...]
    version: int

    @classmethod
    def of_this_process(
        cls, groups: Path = CONTROL_GROUPS, own: Path = Path("/proc/self/cgroup")
    ) -> "ControlGroup | None":
        """None where the system has no such groups, or does not show them."""
        try:
            lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        except OSError:
            return None
        places = [(groups / "memory", path, 1) for _, kinds, path in lines if "memory" in kinds.split(",")]
        places += [(groups, path, 2) for number, kinds, path in lines if number == "0" and not kinds]
        for root, path, version in places:
            folder = root / path.strip("/")
            if not folder.is_dir():  # in a container, where the path counts from the root of the host
                folder = root
            chain = (folder, *folder.parents)
            found = cls(chain[: chain.index(root) + 1], version)
            if found.kills() is not None:
                return found
        return None

    def kills(self) -> int | None:
        """How many processes of the group the kernel has killed for want of memory; None if it does not count them."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        try:
            counts = dict(line.split() for line in (self.folders[0] / name).read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            return None

    def limit(self) -> int | None:
        """Bytes that the group may have; None without a limit."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        limits = []
        for folder in self.folders:
            try:
                limits.append(int((folder / name).read_text()))
            except (OSError, ValueError):  # the root has none; "max" is none
                continue
        return min((limit for limit in limits if limit < UNLIMITED), default=None)


def resident_bytes(pid: int) -> int:
    """Memory that a process has; 0 if it has ended, or where there is no /proc."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
