"""Link classes, slow links and the cache, on synthetic measurements."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.links import measurement
from weft.topology.measurement import (
    GAP,
    Measurement,
    cache_path,
    cut,
    find_slow,
    read_cached,
    to_topology,
    write_cache,
)
from weft.topology.topology import Topology

HOUR = 3600.0


def level(ranks: list[int], inside: float, between: float) -> Any:
    """Bandwidth function with one value inside hosts and one between hosts."""
    host_of_rank = [index for index, count in enumerate(ranks) for _ in range(count)]
    return lambda a, b: inside if host_of_rank[a] == host_of_rank[b] else between


# Classes


@given(st.lists(st.floats(1e3, 1e12), min_size=1))
def test_cut_splits_at_gaps(rates: list[float]) -> None:
    groups = cut(rates, lambda rate: rate)
    assert [rate for group in groups for rate in group] == sorted(rates, reverse=True)
    assert all(one < GAP * other for group in groups for one, other in itertools.pairwise(group))
    assert all(one[-1] >= GAP * other[0] for one, other in itertools.pairwise(groups))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.floats(0.9, 1.1), min_size=256, max_size=256),
    st.floats(5, 100),
)
def test_levels_are_classes(ranks: list[int], noise: list[float], factor: float) -> None:
    """For any hosts and noise: one class inside hosts and one between, with the bandwidth of each pair within the noise."""
    speed = level(ranks, 1e9 * factor, 1e9)
    measured = measurement(ranks, lambda a, b: speed(a, b) * noise[a * 16 + b])
    topology = to_topology(measured)
    world = range(sum(ranks))
    for a, b in ((a, b) for a in world for b in world if a != b):
        link = topology.link(a, b)
        assert link is not None
        assert link.bytes_per_second == pytest.approx(speed(a, b), rel=0.101)
    assert len(topology.links) == (max(ranks) > 1) + (len(ranks) > 1)
    assert topology.pairs == ()
    assert find_slow(measured) == []
    if world.stop > 1:
        again = Topology.parse(topology.model_dump())
        assert (again.classes == topology.classes).all()


def test_nvlink_bridges_are_a_class() -> None:
    """Pairs with an NVLink bridge among PCIe cards: two kinds, two classes, and no slow link."""
    bridged = measurement(
        [4], lambda a, b: 50e9 if a // 2 == b // 2 else 12e9, lambda a, b: "nvlink" if a // 2 == b // 2 else "pcie"
    )
    topology = to_topology(bridged)
    assert [topology.link(0, rank) for rank in (1, 2, 3)] == [topology.links[n] for n in (0, 1, 1)]
    assert [(link.name, link.bytes_per_second) for link in topology.links] == [("nvlink", 50e9), ("pcie", 12e9)]
    assert topology.inside_host == "pcie"
    assert [pair.ranks for pair in topology.pairs] == [(0, 1), (2, 3)]
    assert find_slow(bridged) == []


def test_leaf_switches_are_a_class() -> None:
    """Faster links between hosts of one leaf switch are a separate class, and the links over the spine are not slow."""
    measured = measurement([2] * 4, lambda a, b: 100e9 if a // 2 == b // 2 else 10e9 if a // 4 == b // 4 else 2e9)
    topology = to_topology(measured)
    assert [link.name for link in topology.links] == ["nvlink", "network-1", "network-2"]
    assert topology.between_hosts == "network-2"
    assert [pair.hosts for pair in topology.pairs] == [("node0", "node1"), ("node2", "node3")]
    assert find_slow(measured) == []


def test_unmeasured_pair_gets_the_median_of_similar_pairs() -> None:
    """It gets the median of the pairs between the same hosts, or of its kind if none of those were measured."""

    def rate(a: int, b: int) -> float | None:
        pair = {a, b}
        if pair in ({0, 3}, {1, 2}):
            return None
        return 1e8 if pair in ({0, 2}, {1, 3}) else None if pair & {4} else 1e9

    topology = to_topology(measurement([2, 2, 1], rate))
    assert all(topology.link(a, b).bytes_per_second == 1e8 for a in (0, 1) for b in (2, 3))  # type: ignore[union-attr]
    assert topology.link(4, 0).bytes_per_second == 1e8  # type: ignore[union-attr]
    nothing = to_topology(measurement([1, 1], lambda a, b: None))
    assert nothing.links == ()
    assert nothing.link(0, 1) is None


def test_host_memory_is_one_class() -> None:
    """A rank without a core of its own slows one direction of a pair, which does not count as a slow link."""
    busy = measurement([4], lambda a, b: 1e8 if (a, b) == (0, 1) else 2e9, lambda a, b: "memory")
    (link,) = to_topology(busy).links
    assert (link.name, link.bytes_per_second) == ("memory", 2e9)
    assert find_slow(busy) == []


# Slow links


def slower(ranks: list[int], slow: Any, factor: float = 5) -> Measurement:
    """Measurement with 1 GB/s between hosts and 100 GB/s inside, divided by `factor` for pairs selected by `slow`."""
    speed = level(ranks, 100e9, 1e9)
    return measurement(ranks, lambda a, b: speed(a, b) / (factor if slow(a, b) else 1))


def test_slow_host() -> None:
    """Also if the links of the slow host are the majority."""
    (text,) = find_slow(slower([2, 2, 2], lambda a, b: 2 in (a // 2, b // 2) and a // 2 != b // 2))
    assert text == (
        "host node2 is slow to other hosts: sends 0.2 GB/s, usual is 1 GB/s; receives 0.2 GB/s, usual is 1 GB/s"
    )
    topology = to_topology(slower([2, 2, 2], lambda a, b: 2 in (a // 2, b // 2) and a // 2 != b // 2))
    assert topology.link(0, 5).bytes_per_second == 2e8  # type: ignore[union-attr]
    assert topology.link(0, 3).bytes_per_second == 1e9  # type: ignore[union-attr]


def test_host_with_slow_sends() -> None:
    (text,) = find_slow(slower([1, 1, 1, 1], lambda a, b: a == 1))
    assert text == "host node1 is slow to other hosts: sends 0.2 GB/s, usual is 1 GB/s"


def test_slow_network_card_of_one_rank() -> None:
    (text,) = find_slow(slower([4, 4], lambda a, b: 6 in (a, b) and a // 4 != b // 4))
    assert text.startswith("rank 6 (node1) is slow to other hosts: sends 0.2 GB/s")


def test_slow_rank_inside_a_host() -> None:
    (text,) = find_slow(slower([8], lambda a, b: 3 in (a, b)))
    assert text.startswith("rank 3 (node0) is slow to ranks of its host: sends 20 GB/s, usual is 100 GB/s")


def test_host_with_slow_internal_links() -> None:
    (text,) = find_slow(slower([2, 2, 2], lambda a, b: a // 2 == b // 2 == 1))
    assert text.startswith("host node1 is slow between its own ranks: sends 20 GB/s")


def test_slow_pair() -> None:
    texts = find_slow(slower([1, 1, 1, 1], lambda a, b: {a, b} == {1, 3}))
    assert texts == [
        f"the link from host node{a} to host node{b} is slow: 0.2 GB/s; the median of network links is 1 GB/s"
        for a, b in ((1, 3), (3, 1))
    ]
    (text, _) = find_slow(slower([4], lambda a, b: {a, b} == {1, 3}))
    assert text == (
        "the link from rank 1 (node0) to rank 3 (node0) is slow: 20 GB/s; the median of nvlink links is 100 GB/s"
    )


def test_slow_direction_between_two_hosts() -> None:
    (text,) = find_slow(slower([2, 2], lambda a, b: a // 2 == 0 and b // 2 == 1))
    assert text.startswith("the link from host node0 to host node1 is slow: 0.2 GB/s")


def test_two_hosts_have_no_slow_link() -> None:
    """Two hosts with one link between them have no reference bandwidth."""
    assert find_slow(slower([2, 2], lambda a, b: a // 2 != b // 2)) == []


def test_link_below_half_of_the_median_is_slow() -> None:
    assert find_slow(slower([1, 1, 1, 1], lambda a, b: 1 in (a, b), factor=1.9)) == []
    assert find_slow(slower([1, 1, 1, 1], lambda a, b: 1 in (a, b), factor=2.1))


# The cache


HOSTS = (("node0", 2), ("node1", 2))


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Measurement]:
    monkeypatch.setattr("time.time", lambda: 10_000.0)
    measured = measurement([2, 2], level([2, 2], 1e9, 1e8)).model_copy(update={"written": 10_000.0 - HOUR})
    path = cache_path(tmp_path / "cache", HOSTS, measured.device)
    write_cache(measured, path)
    return path, measured


def test_cached_measurement_is_read_back(cached: tuple[Path, Measurement]) -> None:
    path, measured = cached
    assert read_cached(path, HOSTS, measured.device, 2 * HOUR) == (measured, f"measured 60 min ago: {path}")
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no temporary file remains


def test_other_hosts_or_devices_have_another_cache_file(cached: tuple[Path, Measurement]) -> None:
    path, measured = cached
    for hosts, device in (
        (HOSTS[:1], measured.device),
        (HOSTS, "cpu"),
        ((("node0", 3), ("node1", 1)), measured.device),
    ):
        other = cache_path(path.parent, hosts, device)
        assert other != path
        assert read_cached(other, hosts, device, HOUR) == (None, f"{other} does not exist")
        assert read_cached(path, hosts, device, 2 * HOUR) == (None, f"{path} is for other hosts, ranks or devices")


def test_old_cache_is_ignored(cached: tuple[Path, Measurement], monkeypatch: pytest.MonkeyPatch) -> None:
    path, measured = cached
    assert read_cached(path, HOSTS, measured.device, HOUR / 2) == (None, f"{path} is 1.0 h old, more than 0.5 h")
    monkeypatch.setattr("time.time", lambda: 0.0)  # the clock was set back
    assert read_cached(path, HOSTS, measured.device, HOUR)[0] is None


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_damaged_cache_is_ignored(share: float, cached: tuple[Path, Measurement]) -> None:
    path, measured = cached
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])
    found, reason = read_cached(path, HOSTS, measured.device, 2 * HOUR)
    assert found is None
    assert "cannot be read" in reason


@pytest.mark.parametrize("change", [{"format": 0}, {"kinds": (("",),)}, {"latency_seconds": ((None,),) * 4}])
def test_cache_with_another_format_is_ignored(change: dict[str, Any], cached: tuple[Path, Measurement]) -> None:
    path, measured = cached
    write_cache(measured.model_copy(update=change), path)
    assert read_cached(path, HOSTS, measured.device, 2 * HOUR) == (None, f"{path} has another format")
