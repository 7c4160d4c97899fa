"""A cluster as a small TOML file: hosts, devices, and what is known of them beyond their data sheet.

    device = "H100"                # a preset, or "custom" with [figures]
    hosts = 16
    devices_per_host = 8           # may be left out: as many as the device usually has
    dollars_per_hour = 2.4         # of one device; may be left out
    watts = 700                    # of one device, with its share of the host; may be left out
    scalar = 1.08                  # measured over predicted step time on this machine, of one run; may be left out
    operators_scalar = 1.05        # the same of a step whose operators were timed (--measure); may be left out

    [figures]                      # may be left out, as a whole or in parts: what differs from the preset
    bf16_tflops = 989.0            # dense, as on the data sheet
    memory_gib = 80.0
    memory_gb_per_second = 3350.0

    [inside]                       # links between devices of one host, of one device in one direction
    latency_seconds = 1.5e-6
    gb_per_second = 370.0

    [between]                      # links between hosts: the share of one device
    latency_seconds = 12e-6
    gb_per_second = 46.0

`weft calibrate --out FILE` writes one for the machine it runs on.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tomli_w
from pydantic import Field, ValidationError

from weft.errors import DeviceError
from weft.job import read_toml
from weft.plan import Table
from weft.planner.costmodel.hardware import GB, GIB, MIB, TERA, ClusterSpec, DeviceSpec, Wire, find_device

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class LinkFigures(Table):
    """A class of links."""

    latency_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    gb_per_second: Positive
    ramp_mib: Annotated[float, Field(ge=0)] = 0.2
    """Size of a message that takes twice as long as the bandwidth says."""

    def wire(self) -> Wire:
        """As the formulas take it."""
        return Wire(self.latency_seconds, self.gb_per_second * GB, self.ramp_mib * MIB)


class Figures(Table):
    """What differs from the preset."""

    bf16_tflops: Positive | None = None
    fp8_tflops: Positive | None = None
    fp32_tflops: Positive | None = None
    native_bf16: bool | None = None
    """Whether the device has instructions for bf16."""
    memory_gib: Positive | None = None
    memory_gb_per_second: Positive | None = None
    host_gb_per_second: Positive | None = None
    """To the memory of the host and back."""
    efficiency: Share | None = None
    """Share of the peak that long matrix products reach."""
    attention_efficiency: Share | None = None
    stream_efficiency: Share | None = None
    launch_seconds: Positive | None = None
    """What a kernel takes at least."""
    call_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """What the host takes for a call of an operator, beside the operator itself."""
    cores: Annotated[int, Field(ge=1)] | None = None
    """That the ranks of a host share, where ranks are processes."""
    units: Annotated[int, Field(ge=1)] | None = None
    """Parts that compute a tile of a product each."""
    tile: tuple[int, int] | None = None
    depth: Annotated[int, Field(ge=1)] | None = None


class ClusterFile(Table):
    """The file."""

    device: str
    hosts: Annotated[int, Field(ge=1)] = 1
    devices_per_host: Annotated[int, Field(ge=1)] | None = None
    dollars_per_hour: Annotated[float, Field(ge=0)] | None = None
    watts: Annotated[float, Field(ge=0)] | None = None
    scalar: Positive = 1.0
    operators_scalar: Positive = 1.0
    figures: Figures = Figures()
    inside: LinkFigures | None = None
    between: LinkFigures | None = None

    def cluster(self) -> ClusterSpec:
        """The cluster it describes.

        Raises:
            DeviceError: no preset has that name.
        """
        device = self._device(find_device(self.device))
        per_host = self.devices_per_host or device.per_host
        return ClusterSpec(replace(device, per_host=per_host), self.hosts, per_host)

    def to_toml(self) -> str:
        """As the file has it, without what is not known."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

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
            "inside": self.inside and self.inside.wire(),
            "between": self.between and self.between.wire(),
            "native_bf16": found.native_bf16,
            "watts": self.watts,
            "dollars_per_hour": self.dollars_per_hour,
        }
        return replace(preset, **{name: value for name, value in changes.items() if value is not None})


class Machine(NamedTuple):
    """A cluster, and what one measured run of it says of predictions."""

    cluster: ClusterSpec
    scalar: float = 1.0
    """Measured over predicted step time, by formula."""
    operators_scalar: float = 1.0
    """The same of a step whose operators were timed."""


def read_cluster(path: Path) -> Machine:
    """A cluster from its file.

    Raises:
        JobError: the file is missing or no TOML.
        DeviceError: a key or value in it is wrong, or no preset has the name.
    """
    try:
        found = ClusterFile.model_validate(read_toml(path))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise DeviceError(
            "\n".join(lines), where=str(path), rule="a cluster has the keys of docs/planner.md", fix="correct the file"
        ) from None
    return Machine(found.cluster(), found.scalar, found.operators_scalar)


def choose_cluster(path: Path | None, name: str | None, hosts: int, per_host: int | None) -> Machine:
    """A cluster from a file, or of so many hosts of a preset.

    Raises:
        DeviceError: neither or both are given, or they are wrong.
    """
    if (path is None) == (name is None):
        raise DeviceError(
            "no cluster is named" if path is None else "a cluster is named twice",
            rule="a cluster is a file (--cluster), or a device by name (--device) with --nnodes",
            fix="give one of them",
        )
    if path is not None:
        return read_cluster(path)
    device = find_device(str(name))
    each = per_host or device.per_host
    return Machine(ClusterSpec(replace(device, per_host=each), hosts, each))
