"""Device presets and clusters for the planner: peak rates, memory, links and prices from data sheets.

Rates are dense (without sparsity) and per device: one die pair of an Ascend 910C, one package of a B200. Link bandwidths are
per device and direction, as reached by large collectives, not the signalling rate (NVLink 4: 450 GB/s nominal, 370 in a ring).
Prices are 2025 list prices of large clouds, in dollars per hour; 0: unknown.
"""

import re
from dataclasses import dataclass, field, replace

from weft.errors import DeviceError, nearest

GB = 1e9
GIB = 2**30
MIB = 2**20
TERA = 1e12


@dataclass(frozen=True)
class LinkModel:
    """Link parameters, as measured with collectives."""

    latency: float
    """Seconds per step of a collective."""
    bandwidth: float
    """Bytes per second, per device and direction, for large messages."""
    ramp: float
    """Message size in bytes that takes twice the time of bytes / bandwidth.

    The time of a full collective is bytes / bandwidth x (1 + sqrt(ramp / bytes)). In NCCL measurements from 1 MiB to 1 GiB,
    bus bandwidth rises with the square root of the size."""


@dataclass(frozen=True)
class DeviceSpec:
    """Specification of one accelerator."""

    name: str
    peak: dict[str, float]
    """Peak FLOP/s by dtype: fp32, bf16 (also fp16), fp8, fp4."""
    memory: float
    """Device memory in bytes."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    per_host: int
    """Devices per host: the size of the fast (scale-up) domain."""
    inside: LinkModel
    """Link between devices of one host."""
    between: LinkModel
    """Link between hosts, per device."""
    units: int
    """Compute units (SMs, AI cores); each works on one tile of a matmul."""
    tile: tuple[int, int] = (128, 256)
    """Rows and columns of a matmul tile."""
    depth: int = 128
    """Inner dimension of a bf16 matmul whose main loop takes as long as prologue and epilogue of a tile."""
    efficiency: dict[str, float] = field(default_factory=dict)
    """Share of the peak that very large matmuls reach, by dtype; limited by clocks under load and instruction issue."""
    attention: float = 0.6
    """Share of the peak that fused attention reaches in forward, with kernels written for this device."""
    portable: float = 0.5
    """Share of the peak that fused attention reaches in forward, with kernels for an older device or in a portable language."""
    stream: float = 0.8
    """Share of the memory bandwidth that element-wise kernels reach."""
    launch: float = 4e-6
    """Minimum seconds per kernel."""
    call: float = 0.0
    """Host overhead per operator call in seconds, in addition to the operator; 0: not measured."""
    host_bandwidth: float = 25 * GB
    """Bytes per second between device and host memory."""
    cores: int = 0
    """CPU cores shared by the ranks of a host; 0: each rank has its own device."""
    watts: float = 0.0
    dollars_per_hour: float = 0.0
    grams_co2_per_kwh: float = 0.0
    """Emission of the electricity; 0: unknown."""
    native_bf16: bool = True
    """True if the device has bf16 instructions; if not, precision.param_dtype = "auto" means fp32."""
    grouped_fp8: bool = True
    """False if FP8 experts stay in bf16: CUDA devices before compute capability 9 have no grouped matmul in FP8."""

    def rate(self, dtype: str) -> float:
        """FLOP/s of large matmuls in a dtype; a dtype that the device does not support runs in bf16."""
        known = self.peak_dtype(dtype)
        return self.peak[known] * self.efficiency.get(known, self.efficiency["bf16"])

    def peak_dtype(self, dtype: str) -> str:
        """Key of `peak` for a dtype of matmuls; "bf16" for one that the device does not support."""
        name = dtype.removesuffix("_block")
        return name if name in self.peak else "bf16"


def _ampere(name: str, memory: float, bandwidth: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        peak={"fp32": 19.5 * TERA, "bf16": 312 * TERA},
        memory=memory * GIB,
        bandwidth=bandwidth * GB,
        per_host=8,
        inside=LinkModel(3e-6, 235 * GB, 2 * MIB),
        between=LinkModel(12e-6, 23 * GB, 0.2 * MIB),
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
        inside=LinkModel(1.5e-6, link * GB, 4.5 * MIB),
        between=LinkModel(12e-6, 46 * GB, 0.2 * MIB),
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
    cooler = 1.2 if "300" in name else 1.0  # a higher power limit keeps the clock up
    return DeviceSpec(
        name=name,
        peak={"fp32": 75 * TERA, "bf16": 2250 * faster * TERA, "fp8": 4500 * faster * TERA, "fp4": fp4 * TERA},
        memory=memory * GIB,
        bandwidth=7700 * GB,
        per_host=domain,
        inside=LinkModel(1.5e-6, 700 * GB, 6 * MIB),
        between=LinkModel(12e-6, (92 if "300" in name else 46) * GB, 0.2 * MIB),
        units=148,
        tile=(256, 256),
        depth=512,
        efficiency={"bf16": 0.6 * cooler, "fp8": 0.66 * cooler, "fp4": 0.55 * cooler, "fp32": 0.8},
        attention=0.5,
        portable=0.5,  # PyTorch uses the kernels of cuDNN
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
            inside=LinkModel(4e-6, 310 * GB, 6 * MIB),
            between=LinkModel(14e-6, 45 * GB, 0.2 * MIB),
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
            inside=LinkModel(6e-6, 150 * GB, 4 * MIB),
            between=LinkModel(20e-6, 22 * GB, 0.5 * MIB),
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
            inside=LinkModel(6e-6, 150 * GB, 4 * MIB),
            between=LinkModel(20e-6, 45 * GB, 0.5 * MIB),
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
            inside=LinkModel(4e-6, 120 * GB, 1 * MIB),
            between=LinkModel(15e-6, 11 * GB, 0.2 * MIB),
            units=80,
            tile=(128, 128),
            efficiency={"bf16": 0.75, "fp32": 0.85},
            attention=0.5,
            watts=350,
            dollars_per_hour=1.5,
            native_bf16=False,  # the bf16 rate above is that of fp16
        ),
        DeviceSpec(
            name="L40S",
            peak={"fp32": 91 * TERA, "bf16": 362 * TERA, "fp8": 733 * TERA},
            memory=48 * GIB,
            bandwidth=864 * GB,
            per_host=8,
            inside=LinkModel(8e-6, 20 * GB, 1 * MIB),
            between=LinkModel(15e-6, 11 * GB, 0.2 * MIB),
            units=142,
            tile=(128, 128),
            efficiency={"bf16": 0.6, "fp8": 0.55, "fp32": 0.6},
            watts=350,
            dollars_per_hour=1.2,
            grouped_fp8=False,
        ),
        DeviceSpec(
            name="CPU",
            peak={"fp32": 2 * TERA, "bf16": 4 * TERA},
            memory=256 * GIB,
            bandwidth=200 * GB,
            per_host=1,
            inside=LinkModel(5e-6, 10 * GB, 0.1 * MIB),
            between=LinkModel(50e-6, 1.2 * GB, 0.1 * MIB),
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
# Normalized names and aliases of the presets, longest first, so that "GH200" does not match H200.
NAMES = {_plain(name): name for name in DEVICES} | {_plain(name): known for name, known in ALIASES.items()}
NAMES = dict(sorted(NAMES.items(), key=lambda item: -len(item[0])))


def find_device(name: str) -> DeviceSpec:
    """Look up a preset by name, ignoring case, spaces and dashes.

    Raises:
        DeviceError: the name is unknown; the error suggests the nearest name.
    """
    if _plain(name) in NAMES:
        return DEVICES[NAMES[_plain(name)]]
    raise DeviceError(
        f"the planner has no device {name!r}",
        where="device",
        rule=f"a device is one of {', '.join(DEVICES)}",
        fix=nearest(name, DEVICES),
    )


def recognise(text: str) -> DeviceSpec:
    """Find the preset whose name occurs in a text, such as "NVIDIA H100 80GB HBM3".

    Raises:
        DeviceError: the text contains no known name.
    """
    return find_device(next((name for name in NAMES if name in _plain(text)), text))


@dataclass(frozen=True)
class ClusterSpec:
    """Homogeneous cluster: identical hosts with identical devices."""

    device: DeviceSpec
    hosts: int
    per_host: int

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.per_host < 1:
            raise DeviceError(
                f"the cluster has {self.hosts} hosts with {self.per_host} devices each",
                rule="a cluster has at least one host and one device per host",
                fix="set the number of hosts and the number of devices per host to 1 or more",
            )

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.per_host

    def sized(self, num_devices: int) -> "ClusterSpec":
        """Cluster of `num_devices` devices on the same hosts."""
        per_host = min(self.per_host, num_devices)
        return replace(self, hosts=-(-num_devices // per_host), per_host=per_host)

    def within(self, most_devices: int | None, most_dollars: float | None) -> "ClusterSpec":
        """Largest part of the cluster within limits: full hosts, or a part of one host.

        Args:
            most_devices: maximum number of devices; None: no limit.
            most_dollars: maximum cost of all devices, in dollars per hour; None: no limit.

        Raises:
            DeviceError: `most_dollars` is given, but the price of a device is unknown or exceeds it.
        """
        price, most = self.device.dollars_per_hour, self.num_devices
        if most_dollars is not None and price <= 0:
            raise DeviceError(
                f"the price of {self.device.name} is not known",
                where="--max-dollars",
                rule="a cost limit needs the price of a device",
                fix="set dollars_per_hour in a cluster file, or limit the number of devices instead",
            )
        if most_dollars is not None:
            most = min(most, int(most_dollars / price))
        if most_devices is not None:
            most = min(most, most_devices)
        if most < 1:
            raise DeviceError(
                f"{most_dollars:g} dollars per hour do not pay for one {self.device.name}",
                where="--max-dollars",
                rule=f"one device costs {price:g} dollars per hour",
                fix="raise the limit, or use cheaper devices",
            )
        return self.sized(most if most < self.per_host else most - most % self.per_host)


def cluster_of(device: DeviceSpec, num_devices: int) -> ClusterSpec:
    """Cluster of `num_devices` devices, with the preset's number of devices per host."""
    return ClusterSpec(device, 1, device.per_host).sized(num_devices)
