"""Device lookup, parsing of hardware descriptions, and collective times."""

from dataclasses import replace

import pytest
from benchmarks.published.hardware import read_hardware

from weft.errors import DeviceError
from weft.planner.costmodel.hardware import DEVICES, GB, GIB, ClusterSpec, cluster_of, find_device
from weft.planner.costmodel.network import all_gather, all_reduce, all_to_all, exposed, group, point_to_point


def test_cluster_within_limits() -> None:
    cluster = cluster_of(replace(find_device("H100"), dollars_per_hour=3.0), 64)
    assert cluster.within(None, None) == cluster
    assert cluster.within(63, None).num_devices == 56  # full hosts
    assert cluster.within(1000, 60.0).num_devices == 16
    assert cluster.within(5, 1e6) == cluster.sized(5)
    assert cluster.sized(5).per_host == 5


@pytest.mark.parametrize("name", [*DEVICES, "a100", "h100", "ascend-910b", "mi300x"])
def test_find_device_ignores_spelling(name: str) -> None:
    device = find_device(name)
    assert 0 < device.rate("fp8") < max(device.peak.values())
    assert device.rate("bf16") < device.peak["bf16"]


def test_unknown_device_error_suggests_the_nearest() -> None:
    with pytest.raises(DeviceError) as found:
        find_device("H1000")
    assert "'H100'" in (found.value.fix or "")
    with pytest.raises(DeviceError, match="0 hosts"):
        ClusterSpec(find_device("H100"), 0, 8)


@pytest.mark.parametrize(
    ("text", "devices", "name", "per_host", "gigabytes"),
    [
        ("A100-80GB SXM DGX A100 (8 GPU/node NVSwitch, 8x200Gb HDR IB/node)", 64, "A100-80", 8, 25),
        ("A100-80GB SXM4 Jean Zay (8/node, 4x100Gb Omni-Path)", 64, "A100-80", 8, 4.08),
        ("A100-40GB SXM (1600Gbps RoCE node-node)", 64, "A100-40", 8, 25),
        ("H100-80GB SXM (8/node, EFA 3200Gb; HF cluster)", 64, "H100", 8, 38),
        ("H100 96GB HBM2e 500W Grand Teton (8/node NVLink, 400Gb/s RDMA per GPU)", 64, "H100", 8, 50),
        ("GH200 95GB, 4/node, Slingshot-11", 16, "GH200", 4, 50),
        ("DGX-GB200", 64, "GB200", 64, 50),
    ],
)
def test_read_hardware_parses_published_descriptions(
    text: str, devices: int, name: str, per_host: int, gigabytes: float
) -> None:
    found = read_hardware(text, devices)
    assert (found.device.name, found.per_host) == (name, per_host)
    assert found.device.between.bandwidth == pytest.approx(0.92 * gigabytes * GB, rel=0.01)
    with pytest.raises(DeviceError):
        read_hardware("a quantum computer", 1)


def test_group_spans_hosts_by_size_and_stride() -> None:
    cluster = cluster_of(find_device("H100"), 64)
    assert cluster.num_devices == 64
    assert [
        (g.ranks_per_host, g.hosts) for g in (group(cluster, 8, 1), group(cluster, 4, 8), group(cluster, 16, 2))
    ] == [
        (8, 1),
        (1, 4),
        (4, 4),
    ]
    # Each rank uses its own share of the inter-node links: with four times as many ranks per host, a quarter of the time.
    assert all_gather(group(cluster, 16, 2), 1e12) < 0.3 * all_gather(group(cluster, 16, 8), 1e12)


@pytest.mark.parametrize(("mebibytes", "measured"), [(16, 246), (256, 424), (1024, 468)])
def test_intra_node_all_reduce_is_near_nccl_measurements(mebibytes: int, measured: float) -> None:
    """Bus bandwidth on eight H100 in GB/s; the model's collectives are up to 30 % slower than the best measurement."""
    ranks = group(cluster_of(find_device("H100"), 8), 8, 1)
    size = mebibytes * 2**20
    bus = 2 * 7 / 8 * size / all_reduce(ranks, size) / GB
    assert 0.7 * measured < bus < 1.1 * measured


def test_collective_time_is_zero_for_one_rank_and_grows_with_size() -> None:
    cluster = cluster_of(find_device("H100"), 64)
    alone, many = group(cluster, 1, 1), group(cluster, 64, 1)
    for collective in (all_reduce, all_gather, all_to_all, point_to_point):
        assert collective(alone, 1e6) == 0
        assert 0 < collective(many, 1e6) < collective(many, 1e8)
    assert all_to_all(many, 1e8, inter_node_share=0.5) < all_to_all(many, 1e8)
    assert exposed(2.0, 5.0, 1.1) == pytest.approx(0.2)
    assert exposed(5.0, 2.0, 1.0) == 3.0


def test_peaks_match_data_sheets() -> None:
    assert DEVICES["A100-80"].peak["bf16"] == 312e12
    assert DEVICES["H100"].memory == 80 * GIB
