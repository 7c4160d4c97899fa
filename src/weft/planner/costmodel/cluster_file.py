"""Cluster file: a small TOML file with hosts, devices, links and calibration.

    device = "H100"                # name of a preset
    hosts = 16
    devices_per_host = 8           # optional; default: the preset's
    dollars_per_hour = 2.4         # optional; per device
    watts = 700                    # optional; per device, including its share of the host
    grams_co2_per_kwh = 350        # optional; emission of the electricity
    scalar = 1.08                  # optional; measured / predicted step time of one run on this machine
    operators_scalar = 1.05        # optional; the same for a prediction from timed operators (--measure)

    [figures]                      # optional, as are all its keys: overrides of the preset
    bf16_tflops = 989.0            # dense, as on the data sheet
    memory_gib = 80.0
    memory_gb_per_second = 3350.0

    [inside]                       # intra-node links, per device and direction
    latency_seconds = 1.5e-6
    gb_per_second = 370.0

    [between]                      # inter-node links, per device and direction
    latency_seconds = 12e-6
    gb_per_second = 46.0

Unlike hosts are tables of like hosts, in place of hosts, devices_per_host, figures and scalar (docs/unlike-devices.md):

    device = "H100"
    devices_per_host = 8

    [[host]]
    name = "new"                   # for messages
    count = 2                      # optional; number of such hosts
    scalar = 1.02                  # optional; measured / predicted step time

    [[host]]
    name = "old"
    device = "A100-80"             # optional; default: the device of the file
    scalar = 1.1

    [host.figures]                 # optional; of the table above it
    memory_gib = 78.0

`weft calibrate --out FILE` writes this file for the machine that it runs on; with --append, it adds a table [[host]].
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tomli_w
from pydantic import Field, ValidationError

from weft.errors import DeviceError
from weft.job import read_toml
from weft.plan import Table
from weft.planner.costmodel.hardware import GB, GIB, MIB, TERA, ClusterSpec, DeviceSpec, LinkModel, find_device

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class LinkFigures(Table):
    """Latency and bandwidth of one class of links."""

    latency_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    gb_per_second: Positive
    ramp_mib: Annotated[float, Field(ge=0)] = 0.2
    """Message size in MiB that takes twice the time of bytes / bandwidth."""

    def link_model(self) -> LinkModel:
        """Convert to bytes and bytes per second."""
        return LinkModel(self.latency_seconds, self.gb_per_second * GB, self.ramp_mib * MIB)


class Figures(Table):
    """Overrides of a device preset."""

    bf16_tflops: Positive | None = None
    fp8_tflops: Positive | None = None
    fp32_tflops: Positive | None = None
    native_bf16: bool | None = None
    """True if the device has bf16 instructions."""
    memory_gib: Positive | None = None
    memory_gb_per_second: Positive | None = None
    host_gb_per_second: Positive | None = None
    """Bandwidth between device and host memory."""
    efficiency: Share | None = None
    """Share of the peak FLOP/s that large matmuls reach."""
    attention_efficiency: Share | None = None
    stream_efficiency: Share | None = None
    launch_seconds: Positive | None = None
    """Minimum time of a kernel."""
    call_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Host overhead per operator call, in addition to the operator itself."""
    cores: Annotated[int, Field(ge=1)] | None = None
    """CPU cores shared by the ranks of a host."""
    units: Annotated[int, Field(ge=1)] | None = None
    """Compute units (SMs, AI cores); each works on one tile of a matmul."""
    tile: tuple[int, int] | None = None
    depth: Annotated[int, Field(ge=1)] | None = None


class HostTable(Table):
    """Like hosts of a cluster of unlike hosts."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    count: Annotated[int, Field(ge=1)] = 1
    device: str | None = None
    scalar: Positive = 1.0
    operators_scalar: Positive = 1.0
    figures: Figures = Figures()
    inside: LinkFigures | None = None
    watts: Annotated[float, Field(ge=0)] | None = None
    dollars_per_hour: Annotated[float, Field(ge=0)] | None = None


class ClusterFile(Table):
    """Contents of a cluster file."""

    device: str
    host: tuple[HostTable, ...] = ()
    hosts: Annotated[int, Field(ge=1)] = 1
    devices_per_host: Annotated[int, Field(ge=1)] | None = None
    dollars_per_hour: Annotated[float, Field(ge=0)] | None = None
    watts: Annotated[float, Field(ge=0)] | None = None
    grams_co2_per_kwh: Annotated[float, Field(ge=0)] | None = None
    scalar: Positive = 1.0
    operators_scalar: Positive = 1.0
    figures: Figures = Figures()
    inside: LinkFigures | None = None
    between: LinkFigures | None = None

    def cluster(self) -> ClusterSpec:
        """Cluster described by the file.

        Raises:
            DeviceError: `device` is not the name of a preset.
        """
        device = self._device(find_device(self.device))
        per_host = self.devices_per_host or device.per_host
        return ClusterSpec(replace(device, per_host=per_host), self.hosts, per_host)

    def groups(self) -> tuple["HostGroup", ...]:
        """Groups of like hosts of a cluster of unlike hosts; empty without tables [[host]].

        Raises:
            DeviceError: a device is not the name of a preset, or the tables [[host]] contradict each other or the file.
        """
        own = {
            "hosts",
            "figures",
            "inside",
            "scalar",
            "operators_scalar",
            "watts",
            "dollars_per_hour",
        } & self.model_fields_set
        names = [host.name for host in self.host]
        if self.host and (own or len(set(names)) < len(names)):
            what = f"{min(own)} together with tables [[host]]" if own else "two tables [[host]] of one name"
            raise DeviceError(
                what,
                where="cluster file",
                rule="each table [[host]] has another name, and the figures of its hosts",
                fix=f"move {min(own)} into the tables [[host]]"
                if own
                else "choose other names, or one table with a count",
            )
        found = []
        for host in self.host:
            tables = host.model_dump(exclude={"name", "count"}) | {
                "device": host.device or self.device,
                "hosts": host.count,
                "devices_per_host": self.devices_per_host,
                "between": self.between,
                "grams_co2_per_kwh": self.grams_co2_per_kwh,
            }
            alone = ClusterFile.model_validate(tables)
            found.append(HostGroup(host.name, alone.cluster(), host.scalar))
        return tuple(found)

    def with_host(self, name: str, other: "ClusterFile") -> "ClusterFile":
        """Add the hosts of another file of one machine as a table [[host]]; its own figures become the first table.

        Raises:
            DeviceError: a table has the name, or the hosts have different numbers of devices.
        """
        if self.devices_per_host != other.devices_per_host:
            raise DeviceError(
                f"{other.devices_per_host} devices on this host, and {self.devices_per_host} on the hosts of the file",
                where="weft calibrate --append",
                rule="all hosts of a job have the same number of devices",
                fix=f"give --nproc-per-node {self.devices_per_host}",
            )
        tables = list(self.host) or [self._as_host("host0")]
        if name in [host.name for host in tables]:
            raise DeviceError(
                f"the file has a table [[host]] with the name {name}",
                where="weft calibrate --append",
                rule="each table [[host]] has another name",
                fix="give another name, or remove the table from the file",
            )
        tables.append(other._as_host(name))
        shared = self.model_dump(
            include={"device", "devices_per_host", "between", "grams_co2_per_kwh"}, exclude_none=True
        )
        return ClusterFile.model_validate(shared | {"host": tuple(tables)})

    def _as_host(self, name: str) -> HostTable:
        """Table [[host]] of the hosts of a file without such tables."""
        shared = self.model_dump(include=set(HostTable.model_fields) - {"name", "count"})
        return HostTable(name=name, count=self.hosts, **shared)

    def to_toml(self) -> str:
        """Serialize to TOML, without unset keys."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True, exclude_unset=bool(self.host)))

    def _device(self, preset: DeviceSpec) -> DeviceSpec:
        found = self.figures
        tflops = {"bf16": found.bf16_tflops, "fp8": found.fp8_tflops, "fp32": found.fp32_tflops}
        changes: dict[str, Any] = {
            "peak": preset.peak | {name: value * TERA for name, value in tflops.items() if value},
            "memory": found.memory_gib and found.memory_gib * GIB,
            "bandwidth": found.memory_gb_per_second and found.memory_gb_per_second * GB,
            "host_bandwidth": found.host_gb_per_second and found.host_gb_per_second * GB,
            "efficiency": found.efficiency
            and {**preset.efficiency, **dict.fromkeys(("bf16", "fp32"), found.efficiency)},
            "attention": found.attention_efficiency,
            "portable": found.attention_efficiency,
            "stream": found.stream_efficiency,
            "launch": found.launch_seconds,
            "call": found.call_seconds,
            "cores": found.cores,
            "units": found.units,
            "tile": found.tile,
            "depth": found.depth,
            "inside": self.inside and self.inside.link_model(),
            "between": self.between and self.between.link_model(),
            "native_bf16": found.native_bf16,
            "watts": self.watts,
            "grams_co2_per_kwh": self.grams_co2_per_kwh,
            "dollars_per_hour": self.dollars_per_hour,
        }
        return replace(preset, **{name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True)
class HostGroup:
    """Like hosts of a cluster of unlike hosts."""

    name: str
    cluster: ClusterSpec
    """The hosts of this group alone."""
    scalar: float = 1.0
    """Measured / predicted step time of these hosts."""


class Machine(NamedTuple):
    """A cluster and its calibration factors."""

    cluster: ClusterSpec
    scalar: float = 1.0
    """Measured / predicted step time, predicted by formula."""
    operators_scalar: float = 1.0
    """Measured / predicted step time, predicted from timed operators."""
    groups: tuple[HostGroup, ...] = ()
    """Groups of unlike hosts; empty for like hosts. `cluster` is then that of the first group."""


def read_cluster(path: Path) -> Machine:
    """Read a cluster file.

    Raises:
        JobError: the file is missing or not valid TOML.
        DeviceError: a key or value is invalid, or `device` is not the name of a preset.
    """
    found = read_cluster_file(path)
    if groups := found.groups():
        return Machine(groups[0].cluster, groups[0].scalar, groups=groups)
    return Machine(found.cluster(), found.scalar, found.operators_scalar)


def read_cluster_file(path: Path) -> ClusterFile:
    """Read the tables of a cluster file; raises as `read_cluster`."""
    try:
        return ClusterFile.model_validate(read_toml(path))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise DeviceError(
            "\n".join(lines),
            where=str(path),
            rule="a cluster file has the keys described in docs/planner.md",
            fix="correct these keys in the file",
        ) from None


def choose_cluster(path: Path | None, name: str | None, hosts: int, per_host: int | None) -> Machine:
    """Cluster from a file or from the name of a device preset.

    Args:
        path: cluster file.
        name: name of a device preset; exclusive with `path`.
        hosts: number of hosts; used with `name`.
        per_host: devices per host; used with `name`; None: the preset's.

    Raises:
        DeviceError: neither or both of `path` and `name` are given, or the given one is invalid.
    """
    if (path is None) == (name is None):
        raise DeviceError(
            "no cluster is named" if path is None else "the cluster is named twice, by --cluster and by --device",
            rule="a cluster is named either by a file (--cluster) or by a device preset (--device) with --nnodes",
            fix="give either --cluster or --device",
        )
    if path is not None:
        return read_cluster(path)
    device = find_device(str(name))
    each = per_host or device.per_host
    return Machine(ClusterSpec(replace(device, per_host=each), hosts, each))
