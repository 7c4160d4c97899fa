"""Energy of all ranks: counters where every device has one, else a stated power."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.comm.collectives import all_reduce
from weft.device.cpu import Cpu
from weft.job import Cluster
from weft.plan import Plan
from weft.topology.mesh import AXES, build_mesh
from weft.training.energy import Expenses, expense


class Counter:
    source = "counter"

    def __init__(self, step: float):
        self.step, self.total = step, 0.0

    def joules(self) -> float:
        self.total += self.step
        return self.total


class OneCard(Cpu):
    type = "card"  # not cpu: every rank has a device of its own


def expenses(
    rank: int, world_size: int, cluster: Cluster, device: Cpu, counters: dict[int, float]
) -> tuple[Any, int, str]:
    plan = resolved(Plan(), world_size)
    session = SimpleNamespace(
        job=SimpleNamespace(cluster=cluster),
        device=device,
        torch_device=torch.device("cpu"),
        mesh=build_mesh(plan, "cpu", world_size),
    )
    meters: Any = [Counter(counters[rank])] if rank in counters else []
    own = Expenses(session, rank, meters)  # type: ignore[arg-type]
    joules = own.own_joules()
    counted = None if joules is None else all_reduce(torch.tensor(joules), session.mesh, AXES).item()
    return own.take(counted), own.devices, own.source


def test_counters_of_all_cards_are_added() -> None:
    found = run_ranks(2, expenses, Cluster(watts=5.0), OneCard(), {0: 3.0, 1: 4.0})
    assert [(spent.joules, devices) for spent, devices, _ in found] == [(7.0, 2), (7.0, 2)]
    assert found[0][2] == "counter"


def test_one_card_without_a_counter_means_the_stated_power_for_all() -> None:
    found = run_ranks(2, expenses, Cluster(watts=5.0), OneCard(), {0: 3.0})
    assert [spent.joules is not None and spent.joules < 3 for spent, _, _ in found] == [True, True]
    assert found[0][2] == "5 W per device by cluster.watts, not measured"


def test_ranks_on_cpu_share_the_counters_and_the_price_of_their_host() -> None:
    found = run_ranks(2, expenses, Cluster(dollars_per_hour=3600.0), Cpu(), {0: 3.0})
    assert [(spent.joules, devices) for spent, devices, _ in found] == [(3.0, 1), (3.0, 1)]
    assert all(0 < spent.dollars < 60 for spent, _, _ in found)


def test_nothing_is_said_where_nothing_is_known() -> None:
    (spent, _, source), _ = run_ranks(2, expenses, Cluster(), Cpu(), {})
    assert (spent, source) == ((None, None, None), "")


def test_price_and_emission_follow_from_the_rates() -> None:
    spent = expense(Cluster(dollars_per_hour=2.0, grams_co2_per_kwh=400.0), 8, 1800.0, 7.2e6)
    assert spent == pytest.approx((7.2e6, 8.0, 800.0))
    assert expense(Cluster(grams_co2_per_kwh=400.0), 8, 1800.0, None) == (None, None, None)
