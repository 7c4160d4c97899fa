"""Accelerators and network cards: memory errors, alarms, throttling, limits, PCIe, links, NUMA nodes, huge pages."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.device.health import DeviceHealth, read_health
from weft.observe.doctor.finding import Facts, Finding, group, label, read_text, summarize

RESET = "drain the host and reset the device or reboot; replace the device if it happens again"
POWER_SHARE = 0.98  # of the default power limit, below which a cap is reported


def read_devices(device_type: str, interface: str | None, sysfs: Path = Path("/sys")) -> dict[str, Any]:
    """Health of the accelerators of this host, and state of its network cards.

    Args:
        device_type: "cpu", "cuda" or "npu".
        interface: network interface of the traffic between ranks; None for one host.
        sysfs: the /sys of Linux, or a copy in tests.
    """
    return {
        "devices": [asdict(device) for device in read_health(device_type, sysfs)],
        "network": read_network(interface, sysfs) if interface else None,
        "infiniband": read_infiniband(sysfs),
    }


def read_network(interface: str, sysfs: Path = Path("/sys")) -> dict[str, Any]:
    """Nominal speed in bits/s, PCIe width and NUMA node of a network interface; None: not reported."""
    folder = sysfs / "class/net" / interface
    speed = _integer(folder / "speed")
    return {
        "name": interface,
        "bits_per_second": speed * 10**6 if speed and speed > 0 else None,
        "pcie_width": _integer(folder / "device/current_link_width"),
        "max_pcie_width": _integer(folder / "device/max_link_width"),
        "numa_node": _node(folder / "device/numa_node"),
    }


def read_infiniband(sysfs: Path = Path("/sys")) -> list[dict[str, Any]]:
    """State of each port of InfiniBand and RoCE: "ACTIVE", its rate, link errors and NUMA node."""
    ports = sorted((sysfs / "class/infiniband").glob("*/ports/*"))
    return [
        {
            "name": f"{port.parent.parent.name}:{port.name}",
            "state": read_text(port / "state").rpartition(": ")[2],
            "rate": read_text(port / "rate") or None,
            "link_downed": _integer(port / "counters/link_downed"),
            "numa_node": _node(port.parent.parent / "device/numa_node"),
        }
        for port in ports
    ]


def _integer(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.lstrip("-").isdigit() else None


def _node(path: Path) -> int | None:
    node = _integer(path)
    return node if node is not None and node >= 0 else None


def judge_devices(hosts: Sequence[Facts]) -> list[Finding]:
    """Judge the accelerators.

    Red: uncorrected memory errors, a failed memory repair, an alarm, a clock reduced by heat or power, fewer links than peers.
    Yellow: a power limit or clock below the default, a narrow PCIe link, no network card on the NUMA node of a device, more or
    fewer devices than on other hosts.

    Facts: "devices" of `read_devices`.
    """
    findings: list[Finding] = []
    examined = [facts for facts in hosts if (group(facts, "devices") or {}).get("devices")]
    every = [DeviceHealth(**device) for facts in examined for device in facts["devices"]["devices"]]
    most_links = max((device.links_up or 0 for device in every), default=0)
    for facts in examined:
        for device in (DeviceHealth(**fields) for fields in facts["devices"]["devices"]):
            where = f"device {device.index} of {label(facts)}"
            findings += _judge_errors(device, where) + _judge_speed(device, where)
            if device.links_up is not None and device.links_up < most_links:
                text = f"{where}: {device.links_up} NVLink or HCCS links are up, {most_links} on other devices"
                findings.append(Finding("red", "links of devices", text, f"reseat the bridge or cable; {RESET}"))
        findings += _judge_affinity(facts)
    counts = {len(facts["devices"]["devices"]) for facts in examined}
    if len(counts) > 1:
        text = ", ".join(f"{len(facts['devices']['devices'])} on {label(facts)}" for facts in examined)
        fix = "look for a device that fell off the bus: lspci, dmesg"
        findings.append(Finding("yellow", "devices", f"hosts have unequal numbers of devices: {text}", fix))
    return summarize("devices", findings, examined, f"{len(every)} devices are healthy")


def _judge_errors(device: DeviceHealth, where: str) -> list[Finding]:
    findings = []
    if device.uncorrected:
        text = f"{where}: {device.uncorrected} uncorrected memory errors since its last reset"
        findings.append(Finding("red", "memory errors", text, RESET))
    if device.repair:
        findings.append(Finding("red", "memory errors", f"{where}: {device.repair}", RESET))
    if device.alarms:
        text = f"{where}: {'; '.join(device.alarms)}"
        fix = f"look up the number in the vendor's list of errors; {RESET}"
        findings.append(Finding("red", "alarms", text, fix))
    return findings


def _judge_speed(device: DeviceHealth, where: str) -> list[Finding]:
    findings = []
    if device.slowed_by:
        text = f"{where}: its clock is reduced by {', '.join(device.slowed_by)}"
        findings.append(Finding("red", "throttling", text, "check cooling, power supply and cables of the host"))
    limit, default = device.power_limit, device.default_power_limit
    if limit is not None and default is not None and limit < POWER_SHARE * default:
        text = f"{where}: power is limited to {limit:g} W, the default is {default:g} W"
        findings.append(Finding("yellow", "power limit", text, f"nvidia-smi -i {device.index} -pl {default:g}"))
    clock, most = device.clock_limit, device.max_clock
    if clock is not None and most is not None and clock < most:
        text = f"{where}: clocks are limited to {clock:g} MHz of {most:g} MHz"
        findings.append(Finding("yellow", "clock limit", text, f"nvidia-smi -i {device.index} -rac"))
    width, widest = device.pcie_width, device.max_pcie_width
    if width is not None and widest is not None and width < widest:
        text = f"{where}: PCIe has {width} of {widest} lanes"
        findings.append(Finding("yellow", "PCIe width", text, "reseat the card, and check the slot and its riser"))
    return findings


def _judge_affinity(facts: Facts) -> list[Finding]:
    """Devices on a NUMA node without a network card, where some node has one."""
    devices = facts["devices"]
    cards = [devices["network"] or {}, *devices["infiniband"]]
    nodes = {card["numa_node"] for card in cards if card.get("numa_node") is not None}
    remote = [device["index"] for device in devices["devices"] if device["numa_node"] not in {None, *nodes}]
    if not nodes or not remote:
        return []
    text = f"devices {', '.join(map(str, remote))} are on a NUMA node without a network card"
    return [
        Finding(
            "yellow", "affinity", text, "use a host with a card on each node, or fewer ranks on this host", label(facts)
        )
    ]


def judge_network(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: an InfiniBand or RoCE port is down that is up on other hosts; yellow: a network card has a narrow PCIe link.

    Facts: "devices" of `read_devices`.
    """
    findings = []
    examined = [facts for facts in hosts if group(facts, "devices")]
    ports = [(facts, port) for facts in examined for port in facts["devices"]["infiniband"]]
    active = {port["name"] for _, port in ports if port["state"] == "ACTIVE"}
    for facts, port in ports:
        if port["state"] != "ACTIVE" and port["name"] in active:
            text = f"port {port['name']} is {port['state'] or 'unknown'}, and active on other hosts"
            findings.append(
                Finding(
                    "red", "network card", text, "check cable and switch port; ibstat shows the state", label(facts)
                )
            )
    for facts in examined:
        card = facts["devices"]["network"]
        if card and card["pcie_width"] and card["max_pcie_width"] and card["pcie_width"] < card["max_pcie_width"]:
            text = f"{card['name']} has {card['pcie_width']} of {card['max_pcie_width']} PCIe lanes"
            findings.append(
                Finding("yellow", "network card", text, "reseat the card, and check the slot", label(facts))
            )
    with_card = [facts for facts in examined if facts["devices"]["network"] or facts["devices"]["infiniband"]]
    return summarize("network card", findings, with_card, "network cards are up")
