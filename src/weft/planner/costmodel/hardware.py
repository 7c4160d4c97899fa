"""Devices and clusters as the planner sees them: peak rates, memory, links, prices. Data sheets; nothing is measured here.

Rates are dense (no sparsity), for one device: one die pair of Ascend 910C, one package of B200. Links are per device and one
direction, at what a long collective reaches and not at the signalling rate (NVLink 4: 450 GB/s on paper, 370 in a ring).
Prices are list prices of large clouds of 2025, in dollars an hour; 0 where none is known.
"""

import re
from dataclasses import dataclass, field, replace

from weft.errors import DeviceError, nearest

GB = 1e9
GIB = 2**30
MIB = 2**20
TERA = 1e12


@dataclass(frozen=True)
class Wire:
    """A class of links, as a long collective over it finds it."""

    latency: float
    """Seconds of one step of a collective."""
    bandwidth: float
    """Bytes a second of one device in one direction, for long messages."""
    ramp: float
    """Bytes of a message that takes twice as long as its bandwidth says: time = bytes / bandwidth x (1 + sqrt(ramp / bytes)).
    Of a whole collective; from NCCL measurements of 1 MiB to 1 GiB, whose bus bandwidth rises as the square root."""


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator."""

    name: str
    peak: dict[str, float]
    """FLOP/s by number format: fp32, bf16 (and fp16), fp8, fp4."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second to its memory."""
    per_host: int
    """Devices that the fast link joins."""
    inside: Wire
    """Between devices of one host."""
    between: Wire
    """Between hosts: the share of one device."""
    units: int
    """Parts that compute a tile of a matrix product each (SM, AI core)."""
    tile: tuple[int, int] = (128, 256)
    """Rows and columns of such a tile."""
    depth: int = 128
    """Depth of a product, in bf16, that costs as much as its start and its end."""
    efficiency: dict[str, float] = field(default_factory=dict)
    """Share of the peak that a product without end reaches, by format: clocks under load and instruction issue."""
    attention: float = 0.6
    """The same of fused attention, forward, written for this device."""
    portable: float = 0.5
    """The same of fused attention that was written for an older one, or in a portable language."""
    stream: float = 0.8
    """Share of the memory bandwidth that element-wise kernels reach."""
    launch: float = 4e-6
    """Seconds that a kernel takes at least."""
    call: float = 0.0
    """Seconds that the host takes for a call of an operator, beside the operator, where that is measured."""
    host_bandwidth: float = 25 * GB
    """Bytes a second to the memory of its host and back, of tensors of any size."""
    cores: int = 0
    """That the ranks of a host share, where ranks are processes; 0: each has a device of its own."""
    watts: float = 0.0
    dollars_per_hour: float = 0.0
    native_bf16: bool = True
    """Whether it has instructions for bf16; without them precision.param_dtype = "auto" means fp32."""

    def rate(self, number: str) -> float:
        """FLOP/s of long products in a format; a format that the device lacks runs in bf16."""
        known = number if number in self.peak else "bf16"
        return self.peak[known] * self.efficiency.get(known, self.efficiency["bf16"])


def _ampere(name: str, memory: float, bandwidth: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        peak={"fp32": 19.5 * TERA, "bf16": 312 * TERA},
        memory=memory * GIB,
        bandwidth=bandwidth * GB,
        per_host=8,
        inside=Wire(3e-6, 235 * GB, 2 * MIB),
        between=Wire(12e-6, 23 * GB, 0.2 * MIB),
        units=108,
        efficiency={"bf16": 0.84, "fp32": 0.85},
        watts=400,
        dollars_per_hour=2.5,
    )


def _hopper(name: str, memory: float, bandwidth: float, link: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        peak={"fp32": 67 * TERA, "bf16": 989 * TERA, "fp8": 1979 * TERA},
        memory=memory * GIB,
        bandwidth=bandwidth * GB,
        per_host=8,
        inside=Wire(1.5e-6, link * GB, 4.5 * MIB),
        between=Wire(12e-6, 46 * GB, 0.2 * MIB),
        units=132,
        depth=256,
        efficiency={"bf16": 0.74, "fp8": 0.68, "fp32": 0.8},
        attention=0.55,
        portable=0.33,
        launch=4e-6,
        watts=700,
        dollars_per_hour=4.0,
    )


def _blackwell(name: str, memory: float, domain: int, fp4: float, watts: float) -> DeviceSpec:
    faster = 1.11 if name.startswith("G") else 1.0
    cooler = 1.2 if "300" in name else 1.0  # more watts a device keep the clock up
    return DeviceSpec(
        name=name,
        peak={"fp32": 75 * TERA, "bf16": 2250 * faster * TERA, "fp8": 4500 * faster * TERA, "fp4": fp4 * TERA},
        memory=memory * GIB,
        bandwidth=7700 * GB,
        per_host=domain,
        inside=Wire(1.5e-6, 700 * GB, 6 * MIB),
        between=Wire(12e-6, (92 if "300" in name else 46) * GB, 0.2 * MIB),
        units=148,
        tile=(256, 256),
        depth=512,
        efficiency={"bf16": 0.6 * cooler, "fp8": 0.66 * cooler, "fp4": 0.55 * cooler, "fp32": 0.8},
        attention=0.5,
        portable=0.5,  # PyTorch has cuDNN's
        stream=0.7,
        launch=4e-6,
        watts=watts,
        dollars_per_hour=6.0,
    )


DEVICES: dict[str, DeviceSpec] = {
    device.name: device
    for device in (
        _ampere("A100-40", 40, 1555),
        _ampere("A100-80", 80, 2039),
        _hopper("H100", 80, 3350, 370),
        _hopper("H200", 141, 4800, 370),
        _hopper("GH200", 95, 4000, 370),
        _hopper("H800", 80, 3350, 160),
        _blackwell("B200", 180, 8, 9000, 1000),
        _blackwell("GB200", 186, 72, 10000, 1200),
        _blackwell("B300", 275, 8, 13500, 1100),
        _blackwell("GB300", 277, 72, 15000, 1400),
        DeviceSpec(
            name="MI300X",
            peak={"fp32": 163 * TERA, "bf16": 1307 * TERA, "fp8": 2615 * TERA},
            memory=192 * GIB,
            bandwidth=5300 * GB,
            per_host=8,
            inside=Wire(4e-6, 310 * GB, 6 * MIB),
            between=Wire(14e-6, 45 * GB, 0.2 * MIB),
            units=304,
            depth=384,
            efficiency={"bf16": 0.5, "fp8": 0.45, "fp32": 0.6},
            attention=0.35,
            stream=0.75,
            watts=750,
            dollars_per_hour=3.5,
        ),
        DeviceSpec(
            name="Ascend 910B",
            peak={"fp32": 94 * TERA, "bf16": 313 * TERA},
            memory=64 * GIB,
            bandwidth=1600 * GB,
            per_host=8,
            inside=Wire(6e-6, 150 * GB, 4 * MIB),
            between=Wire(20e-6, 22 * GB, 0.5 * MIB),
            units=24,
            efficiency={"bf16": 0.88, "fp32": 0.6},
            attention=0.5,
            stream=0.7,
            launch=6e-6,
            watts=400,
        ),
        DeviceSpec(
            name="Ascend 910C",
            peak={"fp32": 188 * TERA, "bf16": 752 * TERA},
            memory=128 * GIB,
            bandwidth=3200 * GB,
            per_host=384,
            inside=Wire(6e-6, 150 * GB, 4 * MIB),
            between=Wire(20e-6, 45 * GB, 0.5 * MIB),
            units=48,
            efficiency={"bf16": 0.8, "fp32": 0.6},
            attention=0.5,
            stream=0.7,
            launch=6e-6,
            watts=800,
        ),
        DeviceSpec(
            name="V100",
            peak={"fp32": 15.7 * TERA, "bf16": 125 * TERA},
            memory=32 * GIB,
            bandwidth=900 * GB,
            per_host=16,
            inside=Wire(4e-6, 120 * GB, 1 * MIB),
            between=Wire(15e-6, 11 * GB, 0.2 * MIB),
            units=80,
            tile=(128, 128),
            efficiency={"bf16": 0.75, "fp32": 0.85},
            attention=0.5,
            watts=350,
            dollars_per_hour=1.5,
            native_bf16=False,  # the rate is that of fp16
        ),
        DeviceSpec(
            name="L40S",
            peak={"fp32": 91 * TERA, "bf16": 362 * TERA, "fp8": 733 * TERA},
            memory=48 * GIB,
            bandwidth=864 * GB,
            per_host=8,
            inside=Wire(8e-6, 20 * GB, 1 * MIB),
            between=Wire(15e-6, 11 * GB, 0.2 * MIB),
            units=142,
            tile=(128, 128),
            efficiency={"bf16": 0.6, "fp8": 0.55, "fp32": 0.6},
            watts=350,
            dollars_per_hour=1.2,
        ),
        DeviceSpec(
            name="CPU",
            peak={"fp32": 2 * TERA, "bf16": 4 * TERA},
            memory=256 * GIB,
            bandwidth=200 * GB,
            per_host=1,
            inside=Wire(5e-6, 10 * GB, 0.1 * MIB),
            between=Wire(50e-6, 1.2 * GB, 0.1 * MIB),
            units=32,
            tile=(64, 64),
            depth=64,
            efficiency={"bf16": 0.5, "fp32": 0.7},
            attention=0.3,
            launch=2e-6,
            watts=300,
            dollars_per_hour=1.0,
        ),
    )
}


def _plain(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


ALIASES = {"A100": "A100-80", "910B": "Ascend 910B", "910C": "Ascend 910C", "Ascend": "Ascend 910B"}
# What devices are called in plain letters, the longest first, so that a GH200 is no H200.
NAMES = {_plain(name): name for name in DEVICES} | {_plain(name): known for name, known in ALIASES.items()}
NAMES = dict(sorted(NAMES.items(), key=lambda item: -len(item[0])))


def find_device(name: str) -> DeviceSpec:
    """A preset by its name, whatever its case, blanks and dashes.

    Raises:
        DeviceError: there is none of that name; the nearest is named.
    """
    if _plain(name) in NAMES:
        return DEVICES[NAMES[_plain(name)]]
    raise DeviceError(
        f"no device is called {name!r}",
        where="device",
        rule=f"known are {', '.join(DEVICES)}",
        fix=nearest(name, DEVICES),
    )


def recognise(text: str) -> DeviceSpec:
    """The preset whose name is a part of a text, such as "NVIDIA H100 80GB HBM3".

    Raises:
        DeviceError: none is.
    """
    return find_device(next((name for name in NAMES if name in _plain(text)), text))


@dataclass(frozen=True)
class ClusterSpec:
    """Equal hosts of one kind of device."""

    device: DeviceSpec
    hosts: int
    per_host: int

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.per_host < 1:
            raise DeviceError(
                f"a cluster of {self.hosts} hosts with {self.per_host} devices",
                rule="both are 1 or more",
                fix="give the number of hosts and of devices on each",
            )

    @property
    def num_devices(self) -> int:
        """Of all hosts."""
        return self.hosts * self.per_host

    def sized(self, num_devices: int) -> "ClusterSpec":
        """As many devices on hosts of the same kind."""
        per_host = min(self.per_host, num_devices)
        return replace(self, hosts=-(-num_devices // per_host), per_host=per_host)

    def within(self, most_devices: int | None, most_dollars: float | None) -> "ClusterSpec":
        """As many of its devices as may be used: whole hosts, or a part of one.

        Args:
            most_devices: of them; None: all.
            most_dollars: that all devices may cost in an hour; None: any sum.

        Raises:
            DeviceError: a sum is given and the price of a device is not known, or it does not pay for one.
        """
        price, most = self.device.dollars_per_hour, self.num_devices
        if most_dollars is not None and price <= 0:
            raise DeviceError(
                f"no price is known of {self.device.name}",
                where="--max-dollars",
                rule="a limit of dollars needs the price of a device",
                fix="write dollars_per_hour into a cluster file, or limit the devices",
            )
        if most_dollars is not None:
            most = min(most, int(most_dollars / price))
        if most_devices is not None:
            most = min(most, most_devices)
        if most < 1:
            raise DeviceError(
                f"{most_dollars:g} dollars an hour do not pay for one {self.device.name}",
                where="--max-dollars",
                rule=f"a device costs {price:g} dollars an hour",
                fix="allow more, or take cheaper devices",
            )
        return self.sized(most if most < self.per_host else most - most % self.per_host)


def cluster_of(device: DeviceSpec, num_devices: int) -> ClusterSpec:
    """The cluster of so many devices on hosts of the usual size."""
    return ClusterSpec(device, 1, device.per_host).sized(num_devices)


# Fabrics that are no InfiniBand or RoCE: the share of their bandwidth that collectives reach, and what else they take longer.
FABRICS: dict[str, tuple[float, dict[str, float]]] = {
    "EFA": (0.7, {"latency": 100e-6, "ramp": 20 * MIB}),  # SRD, by libfabric
    "Omni-Path": (0.6, {}),  # through buffers of the host
}


def read_hardware(text: str, num_devices: int) -> ClusterSpec:
    """The cluster that a published table describes in words: kind of device, and what joins its hosts.

    Understood are "8x200Gb" and "3200Gb" a host, "400Gb ... per GPU", "8x50GB/s", "4/node" and "96GB HBM2e".

    Raises:
        DeviceError: no device known to the planner is in it.
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
    """Gb/s between hosts for each device."""
    own = re.search(r"(\d+)\s*Gb(?:/s|ps)?\b[^,;)]*\bper GPU", text)
    if own:
        return float(own[1])
    links = re.search(r"(\d+)x(\d+)\s?(Gb|GB/s)", text)
    if links:
        return float(links[1]) * float(links[2]) * (8 if links[3] == "GB/s" else 1) / per_host
    total = re.search(r"(\d{3,4})\s*Gb(?:ps|/s)?\b(?:/node| node|;)", text)
    return float(total[1]) / per_host if total else None
