"""Limits of a host: shared memory, resource limits of processes, memory, control groups, swap."""

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.launch.oom_kills import CONTROL_GROUPS, ControlGroup, find_groups
from weft.launch.scratch import MIN_FREE_BYTES, SHARED_MEMORY
from weft.observe.doctor.finding import Facts, Finding, group, label, read_text, size, summarize

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
# Open files; a rank has about 100 of its own, two for each peer, and those of its data.
RED_FILES, YELLOW_FILES = (1024, 4096)
RED_PROCESSES, YELLOW_PROCESSES = 256, 2048  # processes and threads of the user
NCCL_SHARED_BYTES = 2**30  # that NCCL's documentation asks for
DOCKER_SHARED_BYTES = 2**26  # default of Docker, which NCCL fills
HEADROOM = 0.9  # of the memory that a plan may need


def read_limits(proc: Path = Path("/proc"), control_group: ControlGroup | None = None) -> dict[str, Any]:
    """Limits of this host in bytes and counts; None: no limit, or not known.

    Args:
        proc: the /proc of Linux, or a copy in tests.
        control_group: memory control group of this process; None: detect it.
    """
    soft = {name: resource.getrlimit(number)[0] for name, number in LIMITS.items()}
    memory = _meminfo(proc / "meminfo")
    found = control_group or ControlGroup.of_this_process()
    return {
        **{name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()},
        "shm": _space(SHARED_MEMORY),
        "memory_total": memory.get("MemTotal"),
        "memory_available": memory.get("MemAvailable"),
        "swap_total": memory.get("SwapTotal"),
        "swap_used": memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        "huge_pages": memory.get("HugePages_Total", 0),
        "huge_page_mode": _selected(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "cgroup_memory": found.limit() if found else None,
        "cgroup_cores": cpu_quota(),
        "cgroup_processes": _pids(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "is_root": os.geteuid() == 0,
    }


def _meminfo(path: Path) -> dict[str, int]:
    """Fields of /proc/meminfo, bytes; HugePages_Total is a count."""
    rows = [line.split() for line in read_text(path).splitlines()]
    return {row[0].rstrip(":"): int(row[1]) * (1024 if len(row) > 2 else 1) for row in rows if len(row) > 1}


def _space(folder: Path) -> dict[str, int] | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return {"total": status.f_blocks * status.f_frsize, "free": status.f_bavail * status.f_frsize}


def _selected(path: Path) -> str | None:
    """Selected word of a file of sysfs such as "always [madvise] never"."""
    return read_text(path).partition("[")[2].partition("]")[0] or None


def cpu_quota(groups: Path = CONTROL_GROUPS, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores that the control groups of this process grant, the minimum over its ancestors; None without a limit.

    Reads cpu.max of version 2, and cpu.cfs_quota_us with cpu.cfs_period_us of version 1.
    """
    cores = []
    for folder, version in ((part, version) for parts, version in find_groups("cpu", groups, own) for part in parts):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            cores.append(int(quota) / int(period))
        except (OSError, ValueError):  # no file at the root, or "max"
            continue
    return min((count for count in cores if count > 0), default=None)  # -1 is no limit in version 1


def _pids() -> int | None:
    """Processes and threads that the control groups of this process allow; None without a limit."""
    texts = [read_text(folder / "pids.max") for folders, _ in find_groups("pids") for folder in folders]
    return min((int(text) for text in texts if text.isdigit()), default=None)  # no file at the root, or "max"


def judge_limits(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: fewer than 1024 open files or 256 processes, or too little shared memory; yellow: limits that may not suffice.

    Facts: "limits" of `read_limits`; "device": type and ranks of the host; "needs" of host 0, with shared_bytes of in-memory
    checkpoints per rank.
    """
    findings: list[Finding] = []
    shared = (group(hosts[0], "needs") or {}).get("shared_bytes", 0) if hosts else 0
    for facts in hosts:
        limits = group(facts, "limits")
        if limits is not None:
            findings += _judge_processes(facts, limits) + _judge_shared(facts, limits, shared)
    return summarize("limits", findings, [facts for facts in hosts if group(facts, "limits")], "all limits suffice")


def _judge_processes(facts: Facts, limits: Facts) -> list[Finding]:
    findings, on_accelerator = [], facts["device"]["type"] != "cpu"
    files, processes, locked = limits["nofile"], limits["nproc"], limits["memlock"]
    if files is not None and files < YELLOW_FILES:
        text = f"a process may open {files} files"
        fix = f"ulimit -n {2**16} before the start, or nofile in /etc/security/limits.conf"
        findings.append(Finding("red" if files < RED_FILES else "yellow", "open files", text, fix, label(facts)))
    counts = [count for count in (processes, limits["cgroup_processes"]) if count is not None]
    if limits["is_root"]:  # the limit of a user does not apply to root
        counts = [count for count in (limits["cgroup_processes"],) if count is not None]
    if counts and min(counts) < YELLOW_PROCESSES:
        text = f"{min(counts)} processes and threads are allowed"
        fix = "ulimit -u 65536, and pids.max of the control group (docker run --pids-limit)"
        findings.append(
            Finding("red" if min(counts) < RED_PROCESSES else "yellow", "processes", text, fix, label(facts))
        )
    if on_accelerator and locked is not None:
        text = f"{size(locked)} of memory may be locked, which RDMA and pinned buffers need"
        findings.append(
            Finding(
                "yellow", "locked memory", text, "ulimit -l unlimited (docker run --ulimit memlock=-1)", label(facts)
            )
        )
    return findings


def _judge_shared(facts: Facts, limits: Facts, per_rank: float) -> list[Finding]:
    ranks, accelerated = facts["device"]["ranks"], facts["device"]["type"] != "cpu"
    space = limits["shm"]
    where, host = str(SHARED_MEMORY), label(facts)
    fix = f"mount -o remount,size=50% {SHARED_MEMORY} (docker run --shm-size, a memory-backed emptyDir on Kubernetes)"
    if space is None:
        return [
            Finding("yellow", "shared memory", f"{where} does not exist", f"mount a tmpfs at {SHARED_MEMORY}", host)
        ]
    if per_rank and space["free"] < ranks * per_rank:
        text = f"{where} has {size(space['free'])} free, and in-memory checkpoints need {size(ranks * per_rank)}"
        return [Finding("red", "shared memory", text, f"{fix}, or checkpoint.memory_every = 0", host)]
    if accelerated and ranks > 1 and space["total"] < NCCL_SHARED_BYTES:
        level = "red" if space["total"] <= DOCKER_SHARED_BYTES else "yellow"
        text = f"{where} has {size(space['total'])}, and NCCL's ranks of one host exchange data there"
        return [Finding(level, "shared memory", text, fix, host)]  # type: ignore[arg-type]
    if space["free"] < MIN_FREE_BYTES:
        text = f"{where} has {size(space['free'])} free; heartbeats and stores go to the disk of temporary files"
        return [Finding("yellow", "shared memory", text, fix, host)]
    return []


def judge_memory(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: the ranks of a host need more memory than it has; yellow: more than 90 % of it, or swap in use.

    Facts: "limits"; "device": type, ranks, and memory of one device in bytes; "needs" of host 0: peak_bytes per
    rank, by the dry run.
    """
    findings: list[Finding] = []
    needs = group(hosts[0], "needs") if hosts else None
    for facts in hosts:
        limits, device = group(facts, "limits"), facts["device"]
        if limits is None:
            continue
        on_cpu = device["type"] == "cpu"
        available = [limits["memory_available"], limits["cgroup_memory"]]
        host_bytes = min((count for count in available if count is not None), default=None)
        if needs and needs.get("peak_bytes"):
            bounded = limits["cgroup_memory"] is not None and host_bytes == limits["cgroup_memory"]
            where = "its control group allows" if bounded else "the host has free"
            if on_cpu:
                need = device["ranks"] * needs["peak_bytes"]
                findings += _judge_need(facts, "memory", need, host_bytes, where)
            else:
                findings += _judge_need(facts, "device memory", needs["peak_bytes"], device["memory"], "a device has")
        if limits["swap_total"] and limits["swap_used"] > 0.1 * limits["swap_total"]:
            text = f"{size(limits['swap_used'])} of swap are in use, so that memory was short"
            findings.append(
                Finding("yellow", "swap", text, "end other processes, and swapoff -a && swapon -a", label(facts))
            )
    text = "memory suffices"
    if needs and needs.get("peak_bytes"):
        text = f"a rank needs {size(needs['peak_bytes'])} at its peak, by the dry run; memory suffices"
    return summarize("memory", findings, [facts for facts in hosts if group(facts, "limits")], text)


def _judge_need(facts: Facts, check: str, need: float, available: float | None, where: str) -> list[Finding]:
    if available is None or need < HEADROOM * available:
        return []
    text = f"the plan needs {size(need)}, and {where} {size(available)}"
    fix = "`weft memory JOB` lists options that need less; or end other processes, or raise the limit"
    return [Finding("red" if need > available else "yellow", check, text, fix, label(facts))]
