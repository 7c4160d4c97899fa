"""A cluster file overrides a preset, and unknown or invalid keys are refused."""

from pathlib import Path

import pytest

from weft.errors import DeviceError
from weft.planner.costmodel.cluster_file import choose_cluster, read_cluster
from weft.planner.costmodel.hardware import GB, GIB, find_device

FILE = """
device = "H100"
hosts = 4
devices_per_host = 2
dollars_per_hour = 1.5
scalar = 1.25

[figures]
memory_gib = 40.0
efficiency = 0.5

[between]
latency_seconds = 1e-5
gb_per_second = 12.5
"""


def test_figures_override_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE, encoding="utf-8")
    cluster, scalar, *_ = read_cluster(path)
    device, preset = cluster.device, find_device("H100")
    assert (cluster.hosts, cluster.per_host, cluster.num_devices, scalar) == (4, 2, 8, 1.25)
    assert (device.memory, device.dollars_per_hour, device.watts) == (40 * GIB, 1.5, preset.watts)
    assert device.rate("bf16") == 0.5 * preset.peak["bf16"]
    assert device.between.bandwidth == 12.5 * GB
    assert device.inside == preset.inside


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('device = "H1000"', "H100"),
        ('device = "H100"\nhosts = 0', "hosts"),
        ('device = "H100"\ncolour = "red"', "colour"),
        ('device = "H100"\n[figures]\nefficiency = 1.5', "figures.efficiency"),
        ("hosts = 2", "device"),
    ],
)
def test_invalid_cluster_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DeviceError, match=words) as refused:
        read_cluster(path)
    assert refused.value.fix


def test_cluster_needs_either_a_file_or_a_name() -> None:
    cluster, scalar, *_ = choose_cluster(None, "a100-40", 3, None)
    assert (cluster.num_devices, scalar) == (24, 1.0)
    for path, name in ((None, None), (Path("x"), "H100")):
        with pytest.raises(DeviceError, match="named"):
            choose_cluster(path, name, 1, None)
