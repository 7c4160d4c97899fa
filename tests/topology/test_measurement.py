"""Classes, slow links and the cache, on measurements that are made up."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.links import measurement
from weft.topology.measurement import GAP, Measurement, cache_path, cut, find_slow, recall, remember, to_topology
from weft.topology.topology import Topology

HOUR = 3600.0


def level(ranks: list[int], inside: float, between: float) -> Any:
    """Bandwidth by level."""
    numbers = [number for number, count in enumerate(ranks) for _ in range(count)]
    return lambda a, b: inside if numbers[a] == numbers[b] else between


# Classes


@given(st.lists(st.floats(1e3, 1e12), min_size=1))
def test_cut(rates: list[float]) -> None:
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
def test_levels_become_classes(ranks: list[int], noise: list[float], factor: float) -> None:
    """Whatever the hosts and the noise: one class inside, one between, each pair within the noise of its own."""
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


def test_classes_of_a_box_with_bridges() -> None:
    """Pairs bridged by NVLink among PCIe cards: two kinds, two classes, and nothing is slow."""
    bridged = measurement(
        [4], lambda a, b: 50e9 if a // 2 == b // 2 else 12e9, lambda a, b: "nvlink" if a // 2 == b // 2 else "pcie"
    )
    topology = to_topology(bridged)
    assert [topology.link(0, rank) for rank in (1, 2, 3)] == [topology.links[n] for n in (0, 1, 1)]
    assert [(link.name, link.bytes_per_second) for link in topology.links] == [("nvlink", 50e9), ("pcie", 12e9)]
    assert topology.inside_host == "pcie"
    assert [pair.ranks for pair in topology.pairs] == [(0, 1), (2, 3)]
    assert find_slow(bridged) == []


def test_leaves_and_a_spine() -> None:
    """Hosts of one leaf reach each other faster: a class of its own, and most links, those over the spine, are not slow."""
    measured = measurement([2] * 4, lambda a, b: 100e9 if a // 2 == b // 2 else 10e9 if a // 4 == b // 4 else 2e9)
    topology = to_topology(measured)
    assert [link.name for link in topology.links] == ["nvlink", "network-1", "network-2"]
    assert topology.between_hosts == "network-2"
    assert [pair.hosts for pair in topology.pairs] == [("node0", "node1"), ("node2", "node3")]
    assert find_slow(measured) == []


def test_a_pair_that_was_not_measured() -> None:
    """It is as the others between the same hosts; and where there are none, as those of its kind."""

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


def test_memory_is_one_class() -> None:
    """A rank that has no core to itself makes no link slow, whatever it does to one direction of a pair."""
    busy = measurement([4], lambda a, b: 1e8 if (a, b) == (0, 1) else 2e9, lambda a, b: "memory")
    (link,) = to_topology(busy).links
    assert (link.name, link.bytes_per_second) == ("memory", 2e9)
    assert find_slow(busy) == []


# Slow links


def slower(ranks: list[int], slow: Any, factor: float = 5) -> Measurement:
    """1 GB/s between hosts and 100 GB/s inside, but for pairs that `slow` picks."""
    speed = level(ranks, 100e9, 1e9)
    return measurement(ranks, lambda a, b: speed(a, b) / (factor if slow(a, b) else 1))


def test_a_slow_host_is_named() -> None:
    """Also where the links to it are most of all links."""
    (text,) = find_slow(slower([2, 2, 2], lambda a, b: 2 in (a // 2, b // 2) and a // 2 != b // 2))
    assert text == (
        "host node2 is slow to other hosts: sends 0.2 GB/s, usual is 1 GB/s; receives 0.2 GB/s, usual is 1 GB/s"
    )
    topology = to_topology(slower([2, 2, 2], lambda a, b: 2 in (a // 2, b // 2) and a // 2 != b // 2))
    assert topology.link(0, 5).bytes_per_second == 2e8  # type: ignore[union-attr]
    assert topology.link(0, 3).bytes_per_second == 1e9  # type: ignore[union-attr]


def test_a_host_that_only_sends_slowly() -> None:
    (text,) = find_slow(slower([1, 1, 1, 1], lambda a, b: a == 1))
    assert text == "host node1 is slow to other hosts: sends 0.2 GB/s, usual is 1 GB/s"


def test_a_slow_network_card_of_one_rank() -> None:
    (text,) = find_slow(slower([4, 4], lambda a, b: 6 in (a, b) and a // 4 != b // 4))
    assert text.startswith("rank 6 (node1) is slow to other hosts: sends 0.2 GB/s")


def test_a_slow_card_inside_a_host() -> None:
    (text,) = find_slow(slower([8], lambda a, b: 3 in (a, b)))
    assert text.startswith("rank 3 (node0) is slow to ranks of its host: sends 20 GB/s, usual is 100 GB/s")


def test_a_host_that_is_slow_inside() -> None:
    (text,) = find_slow(slower([2, 2, 2], lambda a, b: a // 2 == b // 2 == 1))
    assert text.startswith("host node1 is slow between its own ranks: sends 20 GB/s")


def test_a_slow_pair() -> None:
    texts = find_slow(slower([1, 1, 1, 1], lambda a, b: {a, b} == {1, 3}))
    assert texts == [
        f"the link from host node{a} to host node{b} is slow: 0.2 GB/s; network links carry 1 GB/s (median)"
        for a, b in ((1, 3), (3, 1))
    ]
    (text, _) = find_slow(slower([4], lambda a, b: {a, b} == {1, 3}))
    assert text == (
        "the link from rank 1 (node0) to rank 3 (node0) is slow: 20 GB/s; nvlink links carry 100 GB/s (median)"
    )


def test_a_slow_direction_between_two_hosts() -> None:
    (text,) = find_slow(slower([2, 2], lambda a, b: a // 2 == 0 and b // 2 == 1))
    assert text.startswith("the link from host node0 to host node1 is slow: 0.2 GB/s")


def test_what_cannot_be_told_is_not_said() -> None:
    """Of two hosts with one link between them, both ways alike, nobody knows what is usual."""
    assert find_slow(slower([2, 2], lambda a, b: a // 2 != b // 2)) == []


def test_less_than_half_is_slow() -> None:
    assert find_slow(slower([1, 1, 1, 1], lambda a, b: 1 in (a, b), factor=1.9)) == []
    assert find_slow(slower([1, 1, 1, 1], lambda a, b: 1 in (a, b), factor=2.1))


# The cache


HOSTS = (("node0", 2), ("node1", 2))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Measurement]:
    monkeypatch.setattr("time.time", lambda: 10_000.0)
    measured = measurement([2, 2], level([2, 2], 1e9, 1e8)).model_copy(update={"written": 10_000.0 - HOUR})
    path = cache_path(tmp_path / "cache", HOSTS, measured.device)
    remember(measured, path)
    return path, measured


def test_a_measurement_is_kept(kept: tuple[Path, Measurement]) -> None:
    path, measured = kept
    assert recall(path, HOSTS, measured.device, 2 * HOUR) == (measured, f"measured 60 min ago: {path}")
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no draft is left


def test_others_have_another_file(kept: tuple[Path, Measurement]) -> None:
    path, measured = kept
    for hosts, device in (
        (HOSTS[:1], measured.device),
        (HOSTS, "cpu"),
        ((("node0", 3), ("node1", 1)), measured.device),
    ):
        other = cache_path(path.parent, hosts, device)
        assert other != path
        assert recall(other, hosts, device, HOUR) == (None, f"{other} is not there")
        assert recall(path, hosts, device, 2 * HOUR) == (None, f"{path} is of other hosts, ranks or devices")


def test_what_is_old_does_not_count(kept: tuple[Path, Measurement], monkeypatch: pytest.MonkeyPatch) -> None:
    path, measured = kept
    assert recall(path, HOSTS, measured.device, HOUR / 2) == (None, f"{path} is 1.0 h old, more than 0.5 h")
    monkeypatch.setattr("time.time", lambda: 0.0)  # the clock was set back
    assert recall(path, HOSTS, measured.device, HOUR)[0] is None


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_what_is_damaged_does_not_count(share: float, kept: tuple[Path, Measurement]) -> None:
    path, measured = kept
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])
    found, reason = recall(path, HOSTS, measured.device, 2 * HOUR)
    assert found is None
    assert "cannot be read" in reason


@pytest.mark.parametrize("change", [{"format": 0}, {"kinds": (("",),)}, {"latency_seconds": ((None,),) * 4}])
def test_another_format_does_not_count(change: dict[str, Any], kept: tuple[Path, Measurement]) -> None:
    path, measured = kept
    remember(measured.model_copy(update=change), path)
    assert recall(path, HOSTS, measured.device, 2 * HOUR) == (None, f"{path} is of another format")
