"""Hardware of published runs: parsed from the descriptions in their tables."""

import re
from dataclasses import replace

from weft.planner.costmodel.hardware import GB, GIB, MIB, ClusterSpec, recognise

# Fabrics other than InfiniBand and RoCE: the share of their bandwidth that collectives reach, and other link parameters.
FABRICS: dict[str, tuple[float, dict[str, float]]] = {
    "EFA": (0.7, {"latency": 100e-6, "ramp": 20 * MIB}),  # SRD, by libfabric
    "Omni-Path": (0.6, {}),  # copies through host memory
}


def read_hardware(text: str, num_devices: int) -> ClusterSpec:
    """Parse the hardware description of a published run: the device and the network between hosts.

    Recognized are "8x200Gb" and "3200Gb" per host, "400Gb ... per GPU", "8x50GB/s", "4/node" and "96GB HBM2e".

    Args:
        text: the description.
        num_devices: number of devices of the run.

    Raises:
        DeviceError: the text names no device that the planner knows.
    """
    device = recognise(text)
    if "HBM2e" in text and device.name == "H100":  # 96 GB, 500 W: slower memory and clocks
        device = replace(
            device, memory=95 * GIB, bandwidth=2400 * GB, efficiency={**device.efficiency, "bf16": 0.6, "fp8": 0.54}
        )
    host = re.search(r"\b(\d+)(?: GPU| NPU)?/node", text)
    per_host = int(host[1]) if host and device.per_host <= 16 else device.per_host
    each = _gigabits(text, per_host)
    if each:
        share, slow = next((known for fabric, known in FABRICS.items() if fabric in text), (0.92, {}))
        device = replace(device, between=replace(device.between, bandwidth=share * each / 8 * GB, **slow))
    per_host = min(per_host, num_devices)
    return ClusterSpec(device, -(-num_devices // per_host), per_host)


def _gigabits(text: str, per_host: int) -> float | None:
    """Inter-node bandwidth per device in Gb/s; None if the text does not state it."""
    own = re.search(r"(\d+)\s*Gb(?:/s|ps)?\b[^,;)]*\bper GPU", text)
    if own:
        return float(own[1])
    links = re.search(r"(\d+)x(\d+)\s?(Gb|GB/s)", text)
    if links:
        return float(links[1]) * float(links[2]) * (8 if links[3] == "GB/s" else 1) / per_host
    total = re.search(r"(\d{3,4})\s*Gb(?:ps|/s)?\b(?:/node| node|;)", text)
    return float(total[1]) / per_host if total else None
