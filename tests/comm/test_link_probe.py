"""Rates of the links between hosts, measured by one rank of each."""

from tests.lab.pool import run_ranks
from weft.comm.link_probe import FIRST_BYTES, LAST_BYTES, LinkProbe, Rates


def measure_twice(rank: int, world_size: int, host_of_rank: list[int]) -> tuple[Rates, Rates, dict[int, int]]:
    probe = LinkProbe(host_of_rank)
    return probe.measure(), probe.measure(), probe.sizes


def test_all_ranks_get_the_rates_of_all_pairs_of_hosts() -> None:
    results = run_ranks(4, measure_twice, [0, 0, 1, 2])
    first, second, _ = results[0]
    for rates in (first, second):
        assert [[rate is None for rate in row] for row in rates] == [[a == b for b in range(3)] for a in range(3)]
        assert all(rate > 1e6 for row in rates for rate in row if rate is not None)
    assert first != second
    assert all(result[:2] == (first, second) for result in results)
    sizes = [result[2] for result in results]
    assert [set(one) for one in sizes] == [{2, 3}, set(), {0, 3}, {0, 2}]
    assert sizes[0][2] == sizes[2][0]  # both ends send as much
    assert all(FIRST_BYTES <= size <= LAST_BYTES for one in sizes for size in one.values())
