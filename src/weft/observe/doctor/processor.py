"""Processor of a host: cores and ranks, load by others, time stolen by a hypervisor, frequency governor."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.observe.doctor.finding import Facts, Finding, group, label, read_text, summarize

SAMPLE_SECONDS = 1.0
RED_STEAL, YELLOW_STEAL = 0.2, 0.03
YELLOW_LOAD = 0.3  # share of the cores that other processes use
SLOW_GOVERNORS = ("powersave", "conservative")
OWN_GOVERNORS = ("intel_pstate", "amd-pstate-epp")  # drivers whose "powersave" follows the load


def read_processor(root: Path = Path("/"), seconds: float = SAMPLE_SECONDS) -> dict[str, Any]:
    """Load and steal time over a sample, governor and SMT of this host; None: not reported. Sleeps meanwhile.

    Args:
        root: root of /proc and /sys, or a copy in tests.
        seconds: length of the sample.
    """
    before = _times(root)
    time.sleep(seconds)
    spent = [after - earlier for earlier, after in zip(before, _times(root), strict=True)]
    total = sum(spent)
    cpufreq = root / "sys/devices/system/cpu"
    return {
        "busy": (total - spent[3] - spent[4] - spent[7]) / total if total else 0.0,  # idle, iowait, steal
        "steal": spent[7] / total if total else 0.0,
        "governors": sorted({read_text(path) for path in cpufreq.glob("cpu[0-9]*/cpufreq/scaling_governor")}),
        "frequency_driver": read_text(cpufreq / "cpu0/cpufreq/scaling_driver"),
        "smt": {"1": True, "0": False}.get(read_text(cpufreq / "smt/active")),
    }


def _times(root: Path) -> list[int]:
    """First eight times of the line "cpu" of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal; ticks."""
    line = read_text(root / "proc/stat").partition("\n")[0].split()
    return [int(word) for word in line[1:9]] if line[:1] == ["cpu"] else [0] * 8


def judge_processor(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: a hypervisor takes more than 20 % of the time; yellow: 3 %, other processes, few cores, a slow governor.

    Facts: "processor" of `read_processor`; "limits" with cores and cgroup_cores; "device" with the ranks of the host.
    """
    findings: list[Finding] = []
    examined = [facts for facts in hosts if group(facts, "processor")]
    for facts in examined:
        found, where = facts["processor"], label(facts)
        if found["steal"] > YELLOW_STEAL:
            text = f"the hypervisor takes {found['steal']:.0%} of the processor's time"
            fix = "use a machine with cores of its own; the provider has put too many machines on one"
            findings.append(Finding("red" if found["steal"] > RED_STEAL else "yellow", "steal time", text, fix, where))
        if found["busy"] > YELLOW_LOAD:
            text = f"other processes use {found['busy']:.0%} of the cores"
            findings.append(Finding("yellow", "load", text, "end them (top shows them), or use another host", where))
        slow = [name for name in found["governors"] if name in SLOW_GOVERNORS]
        if slow and found["frequency_driver"] not in OWN_GOVERNORS:
            text = f"frequency governor {', '.join(slow)}"
            findings.append(Finding("yellow", "governor", text, "cpupower frequency-set -g performance", where))
        findings += _judge_cores(facts, where)
    return summarize("processor", findings, examined, "cores are free, and none is slowed")


def _judge_cores(facts: Facts, where: str) -> list[Finding]:
    limits, ranks = group(facts, "limits"), facts["device"]["ranks"]
    if limits is None:
        return []
    cores, quota = limits["cores"], limits["cgroup_cores"]
    granted = min(cores, quota) if quota is not None else cores
    if granted >= ranks:
        return []
    of = "its control group grants" if granted != cores else "it may use"
    text = f"{of} {granted:g} cores for {ranks} ranks"
    return [
        Finding("yellow", "cores", text, "start fewer ranks (--nproc-per-node), or raise the limit (--cpus)", where)
    ]
