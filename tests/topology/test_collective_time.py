"""Predicted times of collectives equal values computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.device.links import FAST, SLOW, two_level_topology
from weft.errors import TopologyError
from weft.topology.collective_time import Operation, choose, collective_times
from weft.topology.topology import Topology, from_host_sizes

OPERATIONS: list[Operation] = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@pytest.mark.parametrize(
    ("operation", "flat", "two_level"),
    [
        # Flat: three steps of 1 MB over the slowest link of the ring, 1e-4 + 1e6 / 1e8 each.
        ("all_gather", 3 * 0.0101, 0.002001 + 0.0201),
        ("reduce_scatter", 3 * 0.0101, 0.002001 + 0.0201),
        # Hierarchical: 1e-6 + 2e6 / 1e9 inside; between hosts, two ranks share 1e8, so that 1e-4 + 1e6 / 5e7.
        ("all_reduce", 6 * 0.0101, 2 * (0.002001 + 0.0201)),
        # Flat: 1e-6 + 1e6 / 1e9 once and 1e-4 + 1e6 / 5e7 twice. Hierarchical: 1e-6 + 2e6 / 1e9 and 1e-4 + 2e6 / 5e7.
        ("all_to_all", 0.001001 + 2 * 0.0201, 0.002001 + 0.0401),
    ],
)
def test_two_hosts_of_two_ranks(operation: Operation, flat: float, two_level: float) -> None:
    times = collective_times(two_level_topology(2, 2), operation, 4e6, range(4))
    assert times == pytest.approx((flat, two_level))


def test_one_host_has_no_hierarchical_time() -> None:
    times = collective_times(two_level_topology(4, 4), "all_reduce", 4e6, [4, 5, 6, 7])
    assert times.flat == pytest.approx(6 * (1e-6 + 1e6 / 1e9))
    assert times.two_level is None
    assert times.best == "flat"


def test_one_rank_per_host_has_no_hierarchical_time() -> None:
    times = collective_times(two_level_topology(4, 4), "all_gather", 4e6, [1, 5])
    assert times == (pytest.approx(1e-4 + 2e6 / 1e8), None)


def test_concurrent_groups_share_the_uplink() -> None:
    """Four concurrent groups get a quarter of 1e8 each; with an uplink of 4e8 each gets the full link."""
    ranks = [0, 4]
    assert collective_times(two_level_topology(4, 4), "all_gather", 4e6, ranks, groups=4).flat == pytest.approx(
        1e-4 + 2e6 / 2.5e7
    )
    wide = two_level_topology(4, 4, uplink=4e8)
    assert collective_times(wide, "all_gather", 4e6, ranks, groups=4).flat == pytest.approx(1e-4 + 2e6 / 1e8)


def test_unequal_hosts_have_no_hierarchical_time() -> None:
    assert collective_times(two_level_topology(2, 1), "all_reduce", 4e6, range(3)).two_level is None


def test_slowest_link_determines_the_time() -> None:
    tables = two_level_topology(2, 2).model_dump() | {"pairs": [{"ranks": [2, 3], "link": "network"}]}
    times = collective_times(Topology.parse(tables), "all_to_all", 4e6, [2, 3])
    assert times.flat == pytest.approx(1e-4 + 2e6 / 1e8)


def test_all_to_all_is_hierarchical_for_small_and_flat_for_large_messages() -> None:
    """A hierarchical all-to-all saves latencies between hosts and copies all data once more inside."""
    assert choose(two_level_topology(4, 4), "all_to_all", 1e3, range(8)) == "two_level"
    assert choose(two_level_topology(4, 4), "all_to_all", 1e9, range(8)) == "flat"


def test_all_reduce_between_hosts_is_hierarchical() -> None:
    assert choose(two_level_topology(4, 4), "all_reduce", 1e8, range(8)) == "two_level"
    assert choose(two_level_topology(4, 4), "all_reduce", 1e8, range(4)) == "flat"


def test_unknown_link_is_refused() -> None:
    with pytest.raises(TopologyError, match="the speed of some links is unknown"):
        collective_times(from_host_sizes([2, 2]), "all_reduce", 1e6, range(4))
    assert collective_times(from_host_sizes([2, 2]), "all_reduce", 1e6, [1]).flat == 0


@given(
    st.sampled_from(OPERATIONS),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(1, 1e9),
    st.floats(1.1, 100),
    st.integers(1, 4),
)
def test_times_scale(operation: Operation, hosts: int, ranks: int, size: float, factor: float, groups: int) -> None:
    """Times are inversely proportional to the speed of the links, and grow with the number of bytes."""
    topology = two_level_topology(*[ranks] * hosts)
    faster = tuple(
        link.model_copy(
            update={
                "latency_seconds": link.latency_seconds / factor,
                "bytes_per_second": link.bytes_per_second * factor,
            }
        )
        for link in (FAST, SLOW)
    )
    world = range(hosts * ranks)
    times = collective_times(topology, operation, size, world, groups)
    quick = collective_times(topology.model_copy(update={"links": faster}), operation, size, world, groups)
    more = collective_times(topology, operation, size * factor, world, groups)
    assert (times.two_level is None) == (hosts == 1 or ranks == 1)
    for before, after, larger in zip(times, quick, more, strict=True):
        if before is not None:
            assert after == pytest.approx(before / factor)
            assert len(world) == 1 or larger > before
