"""Health of the accelerators of this host, parsed from the text of `nvidia-smi`, `npu-smi` and the kernel's log.

    devices = read_health("cuda")    # [] where the tool is missing; never initializes a device

Sources: nvidia-smi -q -x and its DTD, nvidia-smi nvlink --status; NVIDIA's list of Xid errors; npu-smi command reference of
Ascend (info -m, -t health, -t ecc), hccn_tool -link.
"""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

TOOL_SECONDS = 30.0
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
USER_XIDS = {"13", "31", "43", "45"}  # faults of a program, or its end: no sign of broken hardware
WITHOUT_HARM = ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "sync_boost", "display_clock_setting")
"""Reasons of a lower clock that an idle or normally loaded device has."""


@dataclass
class DeviceHealth:
    """State of one accelerator; None: not reported."""

    index: int
    name: str = ""
    bus_id: str = ""
    uncorrected: int | None = None
    """Uncorrected memory errors since the last reset."""
    corrected: int | None = None
    """Corrected memory errors since the last reset."""
    repair: str = ""
    """Memory repair that failed or needs a reset; empty: none."""
    alarms: list[str] = field(default_factory=list)
    """Alarms of the vendor's tool, and Xid errors of the kernel's log."""
    slowed_by: list[str] = field(default_factory=list)
    """Reasons for a reduced clock, such as "hw_thermal_slowdown"."""
    power_limit: float | None = None
    """Watt."""
    default_power_limit: float | None = None
    """Watt."""
    clock_limit: float | None = None
    """MHz, of application clocks where they are set."""
    max_clock: float | None = None
    """MHz."""
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    links_up: int | None = None
    """NVLink or HCCS links that are up."""
    links_down: int | None = None
    numa_node: int | None = None
    temperature: float | None = None
    """Degrees Celsius."""


def read_health(device_type: str, sysfs: Path = Path("/sys")) -> list[DeviceHealth]:
    """Read the health of all accelerators of this host; empty on cpu or without the vendor's tool.

    Args:
        device_type: "cpu", "cuda" or "npu".
        sysfs: the /sys of Linux, or a copy in tests.
    """
    devices: list[DeviceHealth] = []
    if device_type == "cuda":
        devices = parse_nvidia(run_tool("nvidia-smi", "-q", "-x"))
        add_nvlinks(devices, run_tool("nvidia-smi", "nvlink", "--status"))
        add_xids(devices, run_tool("dmesg"))
    elif device_type == "npu":
        devices = parse_npu_map(run_tool("npu-smi", "info", "-m"))
        cards = dict.fromkeys(device.bus_id for device in devices)
        for card in cards:
            errors = run_tool("npu-smi", "info", "-t", "ecc", "-i", card)
            for device in (device for device in devices if device.bus_id == card):
                add_npu_errors(device, errors)
                add_npu_health(
                    device,
                    run_tool("npu-smi", "info", "-t", "health", "-i", card, "-c", device.name.rpartition(" ")[2]),
                )
                add_npu_link(device, run_tool("hccn_tool", "-i", str(device.index), "-link", "-g"))
    for device in devices:
        device.numa_node = read_numa_node(device.bus_id, sysfs)
    return devices


def library_versions(device_type: str) -> dict[str, str]:
    """Versions of the driver and of the library of collectives; empty on cpu. Initializes no device."""
    if device_type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        root = _root(run_tool("nvidia-smi", "-q", "-x"))
        driver = (root.findtext("driver_version") if root is not None else None) or "unknown"
        return {"driver": driver, "CUDA": torch.version.cuda or "none", "NCCL": nccl}
    if device_type == "npu":
        found = {
            "driver": Path("/usr/local/Ascend/driver/version.info"),
            "HCCL": Path("/usr/local/Ascend/ascend-toolkit/latest/version.cfg"),
        }
        return {name: _stated_version(path) for name, path in found.items()}
    return {}


def run_tool(*command: str) -> str:
    """Output of a tool; empty if it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_numa_node(bus_id: str, sysfs: Path = Path("/sys")) -> int | None:
    """NUMA node of a PCI device such as "00000000:19:00.0"; None if it is unknown."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


# NVIDIA


def parse_nvidia(text: str) -> list[DeviceHealth]:
    """Parse `nvidia-smi -q -x`. Names of older and newer drivers are read; text that is not XML gives an empty list."""
    root = _root(text)
    return [] if root is None else [_nvidia_device(index, gpu) for index, gpu in enumerate(root.findall("gpu"))]


def _root(text: str) -> ElementTree.Element | None:
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None


def _nvidia_device(index: int, gpu: ElementTree.Element) -> DeviceHealth:
    def number(*paths: str) -> float | None:
        for path in paths:
            if match := NUMBER.match(gpu.findtext(path) or ""):
                return float(match[0])
        return None

    def states(path: str, yes: str) -> list[str]:
        found = gpu.find(path)
        return [] if found is None else [e.tag for e in found if (e.text or "").strip() == yes]

    active = states("clocks_event_reasons", "Active") or states("clocks_throttle_reasons", "Active")
    reasons = [re.sub(r"^clocks_(event|throttle)_reason_", "", tag) for tag in active]
    repairs = states("remapped_rows", "Yes") + states("retired_pages", "Yes")
    power = ("gpu_power_readings", "power_readings")
    width = "pci/pci_gpu_link_info/link_widths"
    return DeviceHealth(
        index,
        name=gpu.findtext("product_name") or "",
        bus_id=gpu.get("id") or gpu.findtext("pci/pci_bus_id") or "",
        uncorrected=_ecc_errors(gpu, "uncorrectable"),
        corrected=_ecc_errors(gpu, "correctable"),
        repair=", ".join(name.replace("_", " ") for name in repairs),
        slowed_by=[reason for reason in reasons if reason not in WITHOUT_HARM],
        power_limit=number(*(f"{p}/{n}" for p in power for n in ("current_power_limit", "power_limit"))),
        default_power_limit=number(*(f"{p}/default_power_limit" for p in power)),
        clock_limit=number("applications_clocks/graphics_clock"),
        max_clock=number("default_applications_clocks/graphics_clock", "max_clocks/graphics_clock"),
        pcie_width=_whole(number(f"{width}/current_link_width")),
        max_pcie_width=_whole(number(f"{width}/max_link_width")),
        temperature=number("temperature/gpu_temp"),
    )


def _ecc_errors(gpu: ElementTree.Element, kind: str) -> int | None:
    """Sum of the counters since the last reset whose name ends in a kind of error, parity and SEC-DED included."""
    volatile = gpu.find("ecc_errors/volatile")
    texts = [] if volatile is None else [(e.tag, e.text or "") for e in volatile.iter() if not len(e)]
    pattern = re.compile(rf"(^|_){kind}(_parity|_secded)?$")
    counts = [int(value) for tag, value in texts if value.isdigit() and pattern.search(tag)]
    return sum(counts) if counts else None


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def add_nvlinks(devices: Sequence[DeviceHealth], text: str) -> None:
    """Count the links of `nvidia-smi nvlink --status`: "Link 0: 26.562 GB/s", or "<inactive>" and "0 GB/s" for a link down."""
    current: DeviceHealth | None = None
    known = {device.index: device for device in devices}
    for line in text.splitlines():
        if start := re.match(r"GPU (\d+):", line.strip()):
            current = known.get(int(start[1]))
        elif current is not None and (link := re.match(r"Link \d+:\s*(.*)", line.strip())):
            rate = NUMBER.match(link[1])
            up = rate is not None and float(rate[0]) > 0
            current.links_up = (current.links_up or 0) + up
            current.links_down = (current.links_down or 0) + (not up)


def add_xids(devices: Sequence[DeviceHealth], text: str) -> None:
    """Add the Xid errors of the kernel's log to the alarms of their devices, each number once, without those of programs."""
    for address, number in XID.findall(text):
        domain, _, rest = address.lower().partition(":")
        for device in devices:
            own = device.bus_id.lower()
            matches = own[-len("0000:19:00.0") :].startswith(f"{domain[-4:]}:{rest}")
            alarm = f"Xid {number}"
            if matches and number not in USER_XIDS and alarm not in device.alarms:
                device.alarms.append(alarm)


# Ascend


def parse_npu_map(text: str) -> list[DeviceHealth]:
    """Parse `npu-smi info -m`: NPU ID, chip ID, logic ID and name of each chip; `bus_id` is the NPU ID."""
    devices = []
    for line in text.splitlines():
        if found := re.match(r"\s*(\d+)\s+(\d+)\s+(\d+)\s+(?:\d+\s+)?(\S.*?)\s*$", line):
            devices.append(DeviceHealth(int(found[3]), name=f"{found[4]}, chip {found[2]}", bus_id=found[1]))
    return devices


def add_npu_errors(device: DeviceHealth, text: str) -> None:
    """Add the counters of `npu-smi info -t ecc`: single-bit errors are corrected, double-bit errors are not."""
    for kind, count in re.findall(r"(Single|Double) Bit Error Count\s*:\s*(\d+)", text):
        if kind == "Double":
            device.uncorrected = (device.uncorrected or 0) + int(count)
        else:
            device.corrected = (device.corrected or 0) + int(count)


def add_npu_health(device: DeviceHealth, text: str) -> None:
    """Add the alarm of `npu-smi info -t health`: any state but OK, with its error code."""
    fields = dict(
        re.findall(r"^\s*(Health(?: Status)?|Error Code|Error Information)\s*:\s*(.*?)\s*$", text, re.MULTILINE)
    )
    state = fields.get("Health Status") or fields.get("Health") or "OK"
    if state != "OK":
        details = [fields[name] for name in ("Error Code", "Error Information") if fields.get(name, "NA") != "NA"]
        device.alarms.append(": ".join([state, *details]))


def add_npu_link(device: DeviceHealth, text: str) -> None:
    """Add the state of the network port of `hccn_tool -link -g`: "link status: UP"."""
    if found := re.search(r"link status:\s*(\w+)", text):
        device.links_up, device.links_down = (1, 0) if found[1].upper() == "UP" else (0, 1)


def _stated_version(path: Path) -> str:
    """First version number in a file of the vendor."""
    try:
        found = re.search(r"\d+(?:\.\w+)+", path.read_text())
    except OSError:
        return "unknown"
    return found[0] if found else "unknown"
