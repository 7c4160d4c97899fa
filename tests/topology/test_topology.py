"""A declared topology says which link joins each pair of ranks, or is refused with what is wrong."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.device.links import FAST, SLOW, two_levels
from weft.errors import JobError, TopologyError
from weft.plan import Plan
from weft.topology.axis_links import explain_axes, explain_plan
from weft.topology.topology import UNKNOWN, Topology, format_rate, format_seconds, of_hosts

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
    """Of a small topology, but for what a test changes; None takes a key away."""
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


def test_a_file_comes_back(tmp_path: Path) -> None:
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
        ({"hosts": [{"name": "a", "ranks": 1}] * 2}, ["hosts has 'a' twice", "rename"]),
        (
            {"links": [{"name": "x", "latency_seconds": 0, "bytes_per_second": 0}]},
            ["bytes_per_second = 0", "greater than 0"],
        ),
        ({"links": [{"name": "x", "latency_seconds": -1, "bytes_per_second": 1}]}, ["latency_seconds = -1"]),
        (
            {"links": [{"name": "x", "latency_seconds": 0, "bytes_per_second": "1 Gbit/s"}]},
            ["'1 Gbit/s'", "valid number"],
        ),
        ({"inside_host": "memry"}, ["inside_host = 'memry' is no link", "did you mean 'memory'?"]),
        ({"inside_host": None}, ["there is no inside_host", "every pair of ranks has a link"]),
        ({"between_hosts": None}, ["there is no between_hosts"]),
        ({"same_switch": "network"}, ["no two hosts name the same switch"]),
        ({"pairs": [{"ranks": [0, 4], "link": "network"}]}, ["pairs.0 is of 0 and 4", "ranks are 0 to 3"]),
        ({"pairs": [{"ranks": [1, 1], "link": "network"}]}, ["pairs.0 is of 1 and 1"]),
        ({"pairs": [{"hosts": ["a", "z"], "link": "network"}]}, ["pairs.0 is of a and z", "hosts are a, b"]),
        ({"pairs": [{"link": "network"}]}, ["neither ranks nor hosts"]),
        ({"pairs": [{"ranks": [0, 1], "hosts": ["a", "b"], "link": "network"}]}, ["both ranks and hosts"]),
        ({"pairs": [{"ranks": [0, 1], "link": "leaf"}]}, ["pairs.0.link = 'leaf' is no link"]),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology.parse(tables(**changes), where="cluster.toml")
    for word in [*words, "cluster.toml"]:
        assert word in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no file"):
        Topology.load(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("inside_host = ")
    with pytest.raises(JobError, match="is not a TOML file"):
        Topology.load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([2, 3], "gives host 1 (node1) 2 ranks; the job starts 3 there"),
        ([4], "has 2 hosts with 4 ranks; the job has 1 hosts with 4 ranks"),
        ([2, 2, 2], "has 2 hosts with 4 ranks; the job has 3 hosts with 6 ranks"),
    ],
)
def test_other_ranks_are_refused(ranks: list[int], words: str) -> None:
    two_levels(2, 2).check_fits([2, 2], where="cluster.toml")
    with pytest.raises(TopologyError) as caught:
        two_levels(2, 2).check_fits(ranks, where="cluster.toml")
    assert words in caught.value.what
    assert caught.value.fix


def test_numbers_are_readable() -> None:
    assert [format_rate(rate) for rate in (200e9, 1.25e9, 12.34e6)] == ["200 GB/s", "1.25 GB/s", "0.0123 GB/s"]
    assert [format_seconds(time) for time in (3e-6, 123.4e-6, 1.5e-3)] == ["3 us", "123 us", "1.5 ms"]


# Where axes run


def plan(world_size: int, **parallel: int) -> Plan:
    return Plan.model_validate({"parallel": parallel}).resolve(world_size)


def test_tp_inside_and_copies_between_hosts() -> None:
    assert explain_plan(two_levels(4, 4), plan(8, tp=4, dp_replicate=2)) == [
        "tp 4: inside a host (memory, 1 GB/s, 1 us)",
        "dp_replicate 2: between hosts (network, 0.1 GB/s, 100 us)",
    ]


def test_structure_is_known_without_links() -> None:
    assert explain_plan(of_hosts([2, 2]), plan(4, tp=2)) == ["tp 2: inside a host", "dp_shard 2: between hosts"]


def test_experts_have_a_mesh_of_their_own() -> None:
    lines = explain_plan(two_levels(2, 2), plan(4, ep=2))
    assert lines[0] == "ep 2: inside a host (memory, 1 GB/s, 1 us)"
    assert lines[1].startswith("dp_shard 4: between hosts")
    assert explain_plan(two_levels(2, 2), plan(4, ep=4))[0].startswith("ep 4: between hosts")


def test_the_slowest_link_of_a_group_counts() -> None:
    topology = Topology.parse(tables(pairs=[{"ranks": [2, 3], "link": "network"}]))
    assert explain_plan(topology, plan(4, tp=2))[0] == "tp 2: inside a host (network, 0.1 GB/s, 100 us)"


@pytest.mark.parametrize(
    ("ranks", "degrees", "words"),
    [
        ([2, 2], {"tp": 4}, "tp 4 crosses hosts, four times a layer; set plan.parallel.tp to a divisor of 2"),
        ([1, 1], {"tp": 2}, "set plan.parallel.tp = 1"),
        ([3, 3], {"tp": 2}, "tp 2 crosses hosts"),
        ([4, 4], {"tp": 2, "cp": 4}, "cp 4 crosses hosts in every layer; set plan.parallel.cp to 2 or tp lower"),
        ([4, 4], {"cp": 8, "cp_ulysses": 2}, "set plan.parallel.cp to 4, and"),
        ([2, 2], {"tp": 2, "cp": 2}, "set plan.parallel.cp = 1 or tp lower"),
    ],
)
def test_a_busy_axis_that_leaves_a_host(ranks: list[int], degrees: dict[str, int], words: str) -> None:
    assert words in explain_plan(two_levels(*ranks), plan(sum(ranks), **degrees))[-1]


@pytest.mark.parametrize("degrees", [{"tp": 2, "cp": 2}, {"tp": 4}, {"cp": 4}, {"tp": 2, "pp": 4}, {"ep": 8}])
def test_no_warning_where_all_is_well(degrees: dict[str, int]) -> None:
    assert not any("warning" in line for line in explain_plan(two_levels(4, 4), plan(8, **degrees)))


def test_some_groups_between_hosts() -> None:
    """Three ranks a host: of the groups of two, one in three crosses."""
    lines = explain_axes(two_levels(3, 3), {"dp_shard": 3, "tp": 2})
    assert lines[0].startswith("tp 2: 1 of 3 groups between hosts (network")


def test_thousands_of_ranks() -> None:
    topology = two_levels(*[8] * 128)
    assert np.count_nonzero(topology.classes == 0) == 1024 * 7
    assert len(explain_plan(topology, plan(1024, tp=8, pp=4, dp_replicate=2))) == 4
