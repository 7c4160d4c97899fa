"""Times of collectives against values worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.device.links import FAST, SLOW, two_levels
from weft.errors import TopologyError
from weft.topology.collective_time import Operation, choose, collective_times
from weft.topology.topology import Topology, of_hosts

OPERATIONS: list[Operation] = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@pytest.mark.parametrize(
    ("operation", "flat", "two_level"),
    [
        # Three steps of 1 MB over the slowest link of the ring: 1e-4 + 1e6 / 1e8.
        ("all_gather", 3 * 0.0101, 0.002001 + 0.0201),
        ("reduce_scatter", 3 * 0.0101, 0.002001 + 0.0201),
        # Inside 1e-6 + 2e6 / 1e9; across, two ranks share 1e8: 1e-4 + 1e6 / 5e7.
        ("all_reduce", 6 * 0.0101, 2 * (0.002001 + 0.0201)),
        # Flat 1e-6 + 1e6 / 1e9, and two of 1e-4 + 1e6 / 5e7; else 1e-6 + 2e6 / 1e9 and 1e-4 + 2e6 / 5e7.
        ("all_to_all", 0.001001 + 2 * 0.0201, 0.002001 + 0.0401),
    ],
)
def test_two_hosts_of_two_ranks(operation: Operation, flat: float, two_level: float) -> None:
    times = collective_times(two_levels(2, 2), operation, 4e6, range(4))
    assert times == pytest.approx((flat, two_level))


def test_inside_a_host() -> None:
    times = collective_times(two_levels(4, 4), "all_reduce", 4e6, [4, 5, 6, 7])
    assert times.flat == pytest.approx(6 * (1e-6 + 1e6 / 1e9))
    assert times.two_level is None
    assert times.best == "flat"


def test_one_rank_a_host() -> None:
    times = collective_times(two_levels(4, 4), "all_gather", 4e6, [1, 5])
    assert times == (pytest.approx(1e-4 + 2e6 / 1e8), None)


def test_groups_beside_each_other_share_the_host() -> None:
    """Four of them: a quarter of 1e8 each; with an uplink of 4e8 they do not feel each other."""
    ranks = [0, 4]
    assert collective_times(two_levels(4, 4), "all_gather", 4e6, ranks, groups=4).flat == pytest.approx(
        1e-4 + 2e6 / 2.5e7
    )
    wide = two_levels(4, 4, uplink=4e8)
    assert collective_times(wide, "all_gather", 4e6, ranks, groups=4).flat == pytest.approx(1e-4 + 2e6 / 1e8)


def test_hosts_with_different_ranks_have_no_two_levels() -> None:
    assert collective_times(two_levels(2, 1), "all_reduce", 4e6, range(3)).two_level is None


def test_the_slowest_link_decides() -> None:
    tables = two_levels(2, 2).model_dump() | {"pairs": [{"ranks": [2, 3], "link": "network"}]}
    times = collective_times(Topology.parse(tables), "all_to_all", 4e6, [2, 3])
    assert times.flat == pytest.approx(1e-4 + 2e6 / 1e8)


def test_small_messages_to_all_go_in_two_levels_and_large_ones_flat() -> None:
    """Two levels save latencies between hosts, and copy everything once more inside."""
    assert choose(two_levels(4, 4), "all_to_all", 1e3, range(8)) == "two_level"
    assert choose(two_levels(4, 4), "all_to_all", 1e9, range(8)) == "flat"


def test_reductions_go_in_two_levels() -> None:
    assert choose(two_levels(4, 4), "all_reduce", 1e8, range(8)) == "two_level"
    assert choose(two_levels(4, 4), "all_reduce", 1e8, range(4)) == "flat"


def test_unknown_links() -> None:
    with pytest.raises(TopologyError, match="how fast some links are is not known"):
        collective_times(of_hosts([2, 2]), "all_reduce", 1e6, range(4))
    assert collective_times(of_hosts([2, 2]), "all_reduce", 1e6, [1]).flat == 0


@given(
    st.sampled_from(OPERATIONS),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(1, 1e9),
    st.floats(1.1, 100),
    st.integers(1, 4),
)
def test_times_scale(operation: Operation, hosts: int, ranks: int, size: float, factor: float, groups: int) -> None:
    """Links that are faster by a factor, in latency and bandwidth, make all collectives so; more bytes take longer."""
    topology = two_levels(*[ranks] * hosts)
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
