"""Link benchmark between ranks of one host, and between emulated hosts with links of known bandwidth."""

import json
import os
import runpy
import time
from collections import Counter
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.hosts import Host, hosts, limit_rate
from tests.lab.pool import RankError, run_ranks
from weft.cli import main
from weft.comm.link_benchmark import measure, name_hosts, round_robin, schedule
from weft.device.cpu import Cpu
from weft.errors import TopologyError
from weft.launch.rendezvous import new_token
from weft.topology.measurement import LOOPBACK, MEMORY, Measurement, find_slow, to_topology

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.25  # relative, of the bandwidth of a rate-limited link


# Schedule


@given(st.integers(1, 40))
def test_round_robin_has_every_pair_once(count: int) -> None:
    rounds = round_robin(count)
    all_pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(all_pairs) == list(combinations(range(count), 2))
    assert all(len({item for pair in pairs for item in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == count - 1 + count % 2


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_no_host_is_twice_in_a_round(sizes: list[int]) -> None:
    host_of_rank = [index for index, size in enumerate(sizes) for _ in range(size)]
    rounds = schedule(sizes)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(sum(sizes)), 2))
    for pairs in rounds:
        busy = Counter(host for pair in pairs for host in {host_of_rank[rank] for rank in pair})
        assert pairs
        assert max(busy.values()) == 1


def test_first_rounds_have_all_pairs_of_hosts_and_all_local_ranks() -> None:
    rounds = schedule([4] * 8)[6 : 6 + 7]  # after six rounds of pairs inside hosts
    assert {(a // 4, b // 4) for pairs in rounds for a, b in pairs} == set(combinations(range(8), 2))
    assert {a % 4 for pairs in rounds for a, _ in pairs} == {0, 1, 2, 3}


def test_host_names_and_rank_order() -> None:
    assert name_hosts([(("x",), "a"), (("x",), "a"), (("y",), "b")]) == [("a", 2), ("b", 1)]
    assert name_hosts([(("x",), "vm"), (("y",), "vm")]) == [("vm-0", 1), ("vm-1", 1)]
    with pytest.raises(TopologyError, match="the ranks of host a are not consecutive"):
        name_hosts([(("x",), "a"), (("y",), "b"), (("x",), "a")])


# Ranks of the pool


def measure_here(rank: int, world_size: int, options: dict[str, Any]) -> tuple[str, str, float]:
    began = time.monotonic()
    measured, source = measure(Cpu(), torch.device("cpu"), **options)
    return measured.model_dump_json(), source, time.monotonic() - began


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_of_one_host(world_size: int) -> None:
    results = run_ranks(world_size, measure_here, {"seconds": 3.0})
    assert len({text for text, _, _ in results}) == 1  # the same result on all ranks
    measured = Measurement.model_validate_json(results[0][0])
    topology = to_topology(measured)
    assert [ranks for _, ranks in measured.hosts] == [world_size]
    (link,) = topology.links
    assert link.name in (MEMORY, LOOPBACK)
    assert link.bytes_per_second > 1e6
    assert 0 < link.latency_seconds < 1
    assert find_slow(measured) == []
    assert measured.together == (None,)


def test_without_time_no_round_begins() -> None:
    (text, _, _), *_ = run_ranks(2, measure_here, {"seconds": -1.0})
    measured = Measurement.model_validate_json(text)
    assert (measured.rounds, measured.all_rounds) == (0, 1)
    assert to_topology(measured).link(0, 1) is None


def test_cached_measurement_is_reused(tmp_path: Path) -> None:
    options = {"seconds": 0.5, "cache": tmp_path / "cache"}
    (text, source, _), *_ = run_ranks(2, measure_here, options)
    assert "does not exist" in source
    assert source.startswith("measured in")
    (again, source, _), *_ = run_ranks(2, measure_here, options)
    assert again == text
    assert "min ago" in source
    (path,) = (tmp_path / "cache").iterdir()
    path.write_text("{")
    (fresh, source, _), *_ = run_ranks(2, measure_here, options)
    assert fresh != text
    assert "cannot be read" in source
    (_, source, _), *_ = run_ranks(2, measure_here, options)
    assert "min ago" in source  # the damaged file was replaced


def fail(rank: int, world_size: int) -> None:
    if rank == 1:
        raise RuntimeError("no link")
    measure(Cpu(), torch.device("cpu"))


def test_failed_rank_is_named() -> None:
    with pytest.raises(RankError, match="no link") as caught:
        run_ranks(2, fail)
    assert caught.value.rank == 1


# Emulated hosts


def measure_between(made: list[Host], ranks: int, folder: Path) -> Measurement:
    """Measure between emulated hosts with `ranks` ranks each, without launchers."""
    started = []
    for number, host in enumerate(made):
        for local in range(ranks):
            own = {"RANK": number * ranks + local, "WORLD_SIZE": len(made) * ranks, "LOCAL_RANK": local}
            rendezvous = {"MASTER_ADDR": made[0].address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": host.interface}
            environment = os.environ | rendezvous | {name: str(value) for name, value in own.items()}
            result = folder / f"host-{number}"
            result.mkdir(exist_ok=True)
            run = partial(runpy.run_module, "weft.comm.measure_links", run_name="__main__")
            started.append(host.fork(["measure_links", str(result), "6", ""], run, env=environment))
    for process in started:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    texts = {(folder / f"host-{number}" / "measurement.json").read_text() for number in range(len(made))}
    assert len(texts) == 1
    return Measurement.model_validate_json(texts.pop())


def slow_down(host: Host, rate: int) -> None:
    """Limit an emulated host's link in both directions, to `rate` bits per second."""
    for namespace, interface in ((host.namespace, host.interface), (host.bridge, host.port)):
        limit_rate(namespace, interface, rate)


def check_two_by_two(measured: Measurement, bits_per_second: int, least_together: float) -> None:
    """Check a measurement of two hosts with two ranks: two classes, and the bandwidth of the link between the hosts.

    Args:
        measured: measurement.
        bits_per_second: rate of the link.
        least_together: minimum fraction of the rate with all ranks sending and receiving, which may be short of cores.
    """
    limit = bits_per_second / 8
    topology = to_topology(measured)
    assert [ranks for _, ranks in measured.hosts] == [2, 2]
    assert measured.rounds == measured.all_rounds == 5
    assert sorted(link.name for link in topology.links) == [MEMORY, "network"]
    assert (topology.inside_host, topology.between_hosts, topology.pairs) == (MEMORY, "network", ())
    for a, b in ((0, 2), (0, 3), (1, 2), (1, 3)):
        for rate in (measured.bytes_per_second[a][b], measured.bytes_per_second[b][a]):
            assert rate == pytest.approx(limit, rel=TOLERANCE)
    link = topology.link(0, 2)
    assert link is not None
    assert link.bytes_per_second == pytest.approx(limit, rel=TOLERANCE)
    for host in topology.hosts:
        assert host.bytes_per_second is not None
        assert least_together * limit < host.bytes_per_second < (1 + TOLERANCE) * limit
    assert find_slow(measured) == []


@pytest.mark.exclusive("measures the rate of a link")
def test_topology_command_on_two_hosts(tmp_path: Path) -> None:
    """Output and files of `weft topology` on both hosts, with a link of 100 Mbit/s."""
    rate = 100_000_000
    with hosts(2, rate) as made:
        environment = os.environ | {"WEFT_TOKEN": new_token()}
        started = []
        for number, host in enumerate(made):
            command = ["weft", "topology", "--nproc-per-node", "2"]
            command += ["--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"{made[0].address}:29400"]
            command += ["--set", "plan.parallel.tp=2", "--json", str(tmp_path / f"{number}.json"), "--seconds", "6"]
            started.append(host.fork(command, main, env=environment, merge=True))
        printed = [process.communicate(timeout=150)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], printed
    facts = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    assert facts[0] == facts[1]
    check_two_by_two(Measurement.model_validate(facts[0]["measurement"]), rate, 1 - TOLERANCE)
    for text in printed:
        assert "2 hosts, 4 ranks, measured in" in text
        assert "no link is slow compared with other links of its class" in text
        assert "tp 2: inside a host (memory, " in text
        assert "dp_shard 2: between hosts (network, 0.01" in text


@pytest.mark.exclusive("measures the rate of a link")
def test_two_hosts_with_a_gigabit_link(tmp_path: Path) -> None:
    """Other load on the cores can only reduce the measured bandwidth, so that the best of several measurements counts."""
    with hosts(2, 1_000_000_000) as made:
        for _ in range(3):
            measured = measure_between(made, 2, tmp_path)
            slowest = min(link.bytes_per_second for link in to_topology(measured).links)
            if slowest > 125e6 * 0.9:
                break
    check_two_by_two(measured, 1_000_000_000, 0.25)


@pytest.mark.exclusive("measures the rates of links")
def test_host_with_a_slow_link(tmp_path: Path) -> None:
    with hosts(3, 100_000_000) as made:
        slow_down(made[2], 20_000_000)
        measured = measure_between(made, 1, tmp_path)
    (text,) = find_slow(measured)
    assert text.startswith(f"host {measured.hosts[2][0]} is slow to other hosts: sends 0.00")
    topology = to_topology(measured)
    assert [link.name for link in topology.links] == ["network-1", "network-2"]
    rates = [topology.link(a, b).bytes_per_second for a, b in ((0, 1), (0, 2), (1, 2))]  # type: ignore[union-attr]
    assert rates == pytest.approx([12.5e6, 2.5e6, 2.5e6], rel=TOLERANCE)
    together = [host.bytes_per_second for host in topology.hosts]
    assert together == pytest.approx([12.5e6, 12.5e6, 2.5e6], rel=TOLERANCE)
