"""Declared topologies: link of each pair of ranks, errors, and links of mesh axes."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.device.links import FAST, SLOW, two_level_topology
from tests.lab.plans import resolved
from weft.errors import JobError, TopologyError
from weft.plan import Plan
from weft.topology.axis_links import explain_axes, explain_plan
from weft.topology.topology import UNKNOWN, Topology, format_rate, format_seconds, from_host_sizes

TEXT = """
inside_host = "nvlink"
between_hosts = "ethernet"
same_rail = "infiniband"
same_switch = "leaf"
hosts = [
    { name = "a", ranks = 2, switch = "rack-1" },
    { name = "b", ranks = 2, switch = "rack-1", bytes_per_second = 50e9 },
    { name = "c", ranks = 2 },
    { name = "d", ranks = 2 },
]
links = [
    { name = "nvlink", latency_seconds = 3e-6, bytes_per_second = 200e9 },
    { name = "infiniband", latency_seconds = 5e-6, bytes_per_second = 50e9 },
    { name = "leaf", latency_seconds = 20e-6, bytes_per_second = 12e9 },
    { name = "ethernet", latency_seconds = 30e-6, bytes_per_second = 3e9 },
    { name = "broken", latency_seconds = 30e-6, bytes_per_second = 1e9 },
]
pairs = [{ ranks = [4, 6], link = "ethernet" }, { hosts = ["c", "d"], link = "broken" }]
"""


def tables(**changes: Any) -> dict[str, Any]:
    """Tables of a small topology with changes; None removes a key."""
    found: dict[str, Any] = {
        "inside_host": "memory",
        "between_hosts": "network",
        "hosts": [{"name": "a", "ranks": 2}, {"name": "b", "ranks": 2}],
        "links": [FAST.model_dump(), SLOW.model_dump()],
    }
    return {key: value for key, value in (found | changes).items() if value is not None}


def test_each_pair_has_the_link_of_its_level() -> None:
    topology = Topology.parse(tomllib.loads(TEXT))
    names = {(a, b): link.name for a in range(8) for b in range(8) if (link := topology.link(a, b)) is not None}
    assert len(names) == 8 * 7
    assert all(names[a, b] == names[b, a] for a, b in names)
    expected = {(0, 1): "nvlink", (0, 2): "infiniband", (0, 3): "leaf", (0, 4): "infiniband", (0, 5): "ethernet"}
    expected |= {(4, 6): "ethernet", (4, 7): "broken", (5, 7): "broken", (6, 7): "nvlink"}
    assert {pair: names[pair] for pair in expected} == expected
    assert topology.link(3, 3) is None
    assert topology.ranks_of(2) == range(4, 6)


def test_toml_round_trip(tmp_path: Path) -> None:
    topology = Topology.parse(tomllib.loads(TEXT))
    (tmp_path / "cluster.toml").write_text(topology.to_toml())
    assert Topology.load(tmp_path / "cluster.toml") == topology


def test_one_rank_needs_no_link() -> None:
    assert Topology.parse({"hosts": [{"name": "a", "ranks": 1}]}).classes.tolist() == [[UNKNOWN]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"between_host": "network"}, ["unknown key between_host", "did you mean between_hosts?"]),
        ({"hosts": []}, ["hosts = []", "at least 1 item"]),
        ({"hosts": [{"name": "a", "ranks": 0}]}, ["hosts.0.ranks = 0", "greater than or equal to 1"]),
        ({"hosts": [{"name": "a"}]}, ["hosts.0.ranks is missing", "add hosts.0.ranks"]),
        ({"hosts": [{"name": "a", "ranks": 1}] * 2}, ["[[hosts]] has 'a' twice", "rename"]),
        (
            {"links": [{"name": "x", "latency_seconds": 0, "bytes_per_second": 0}]},
            ["bytes_per_second = 0", "greater than 0"],
        ),
        ({"links": [{"name": "x", "latency_seconds": -1, "bytes_per_second": 1}]}, ["latency_seconds = -1"]),
        (
            {"links": [{"name": "x", "latency_seconds": 0, "bytes_per_second": "1 Gbit/s"}]},
            ["'1 Gbit/s'", "valid number"],
        ),
        ({"inside_host": "memry"}, ["inside_host = 'memry' is not a declared link", "did you mean 'memory'?"]),
        ({"inside_host": None}, ["inside_host is missing", "every pair of ranks has a link"]),
        ({"between_hosts": None}, ["between_hosts is missing"]),
        ({"same_switch": "network"}, ["no two hosts name the same switch"]),
        ({"pairs": [{"ranks": [0, 4], "link": "network"}]}, ["pairs.0 is 0 and 4", "ranks are 0 to 3"]),
        ({"pairs": [{"ranks": [1, 1], "link": "network"}]}, ["pairs.0 is 1 and 1"]),
        ({"pairs": [{"hosts": ["a", "z"], "link": "network"}]}, ["pairs.0 is a and z", "hosts are a, b"]),
        ({"pairs": [{"link": "network"}]}, ["neither ranks nor hosts"]),
        ({"pairs": [{"ranks": [0, 1], "hosts": ["a", "b"], "link": "network"}]}, ["both ranks and hosts"]),
        ({"pairs": [{"ranks": [0, 1], "link": "leaf"}]}, ["pairs.0.link = 'leaf' is not a declared link"]),
    ],
)
def test_invalid_topology_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology.parse(tables(**changes), where="cluster.toml")
    for word in [*words, "cluster.toml"]:
        assert word in str(caught.value)


def test_missing_or_invalid_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no file"):
        Topology.load(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("inside_host = ")
    with pytest.raises(JobError, match="is not a TOML file"):
        Topology.load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([2, 3], "host 1 (node1) has 2 ranks in the topology, and 3 in the job"),
        ([4], "has 2 hosts with 4 ranks; the job has 1 hosts with 4 ranks"),
        ([2, 2, 2], "has 2 hosts with 4 ranks; the job has 3 hosts with 6 ranks"),
    ],
)
def test_topology_of_another_job_is_refused(ranks: list[int], words: str) -> None:
    two_level_topology(2, 2).check_fits([2, 2], where="cluster.toml")
    with pytest.raises(TopologyError) as caught:
        two_level_topology(2, 2).check_fits(ranks, where="cluster.toml")
    assert words in caught.value.what
    assert caught.value.fix


def test_rate_and_latency_format() -> None:
    assert [format_rate(rate) for rate in (200e9, 1.25e9, 12.34e6)] == ["200 GB/s", "1.25 GB/s", "0.0123 GB/s"]
    assert [format_seconds(time) for time in (3e-6, 123.4e-6, 1.5e-3)] == ["3 us", "123 us", "1.5 ms"]


# Links of mesh axes


def plan(world_size: int, **parallel: int) -> Plan:
    return resolved(Plan.model_validate({"parallel": parallel}), world_size)


def test_tp_inside_and_dp_between_hosts() -> None:
    assert explain_plan(two_level_topology(4, 4), plan(8, tp=4, dp_replicate=2)) == [
        "tp 4: inside a host (memory, 1 GB/s, 1 us)",
        "dp_replicate 2: between hosts (network, 0.1 GB/s, 100 us)",
    ]


def test_axes_without_links_have_no_speed() -> None:
    assert explain_plan(from_host_sizes([2, 2]), plan(4, tp=2)) == ["tp 2: inside a host", "dp_shard 2: between hosts"]


def test_ep_uses_the_expert_mesh() -> None:
    lines = explain_plan(two_level_topology(2, 2), plan(4, ep=2))
    assert lines[0] == "ep 2: inside a host (memory, 1 GB/s, 1 us)"
    assert lines[1].startswith("dp_shard 4: between hosts")
    assert explain_plan(two_level_topology(2, 2), plan(4, ep=4))[0].startswith("ep 4: between hosts")


def test_slowest_link_of_an_axis_is_named() -> None:
    topology = Topology.parse(tables(pairs=[{"ranks": [2, 3], "link": "network"}]))
    assert explain_plan(topology, plan(4, tp=2))[0] == "tp 2: inside a host (network, 0.1 GB/s, 100 us)"


@pytest.mark.parametrize(
    ("ranks", "degrees", "words"),
    [
        ([2, 2], {"tp": 4}, "tp 4 crosses hosts, four times per layer; set plan.parallel.tp to a divisor of 2"),
        ([1, 1], {"tp": 2}, "set plan.parallel.tp = 1"),
        ([3, 3], {"tp": 2}, "tp 2 crosses hosts"),
        ([4, 4], {"tp": 2, "cp": 4}, "cp 4 crosses hosts in every layer; set plan.parallel.cp to 2 or lower tp"),
        ([4, 4], {"cp": 8, "cp_ulysses": 2}, "set plan.parallel.cp to 4, and"),
        ([2, 2], {"tp": 2, "cp": 2}, "set plan.parallel.cp = 1 or lower tp"),
    ],
)
def test_tp_or_cp_across_hosts_is_warned_of(ranks: list[int], degrees: dict[str, int], words: str) -> None:
    assert words in explain_plan(two_level_topology(*ranks), plan(sum(ranks), **degrees))[-1]


@pytest.mark.parametrize("degrees", [{"tp": 2, "cp": 2}, {"tp": 4}, {"cp": 4}, {"tp": 2, "pp": 4}, {"ep": 8}])
def test_no_warning_if_tp_and_cp_stay_inside_hosts(degrees: dict[str, int]) -> None:
    assert not any("warning" in line for line in explain_plan(two_level_topology(4, 4), plan(8, **degrees)))


def test_some_groups_between_hosts() -> None:
    """With three ranks per host, one of three groups of two ranks crosses hosts."""
    lines = explain_axes(two_level_topology(3, 3), {"dp_shard": 3, "tp": 2})
    assert lines[0].startswith("tp 2: 1 of 3 groups between hosts (network")


def test_thousands_of_ranks() -> None:
    topology = two_level_topology(*[8] * 128)
    assert np.count_nonzero(topology.classes == 0) == 1024 * 7
    assert len(explain_plan(topology, plan(1024, tp=8, pp=4, dp_replicate=2))) == 4
