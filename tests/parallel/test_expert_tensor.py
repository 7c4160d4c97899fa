"""Expert tensor parallelism: parity of training with the untouched model in one process, bytes, checkpoints and refusals."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from tests.lab.families import family
from tests.lab.parity import ParityRecord, adamw, assert_parity, run_plan
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from tests.lab.rounding import round_model
from tests.parallel.test_expert import HIDDEN, LLAMA4, build_model, experts_of
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.backends import hierarchical
from weft.comm.recorder import Recorder
from weft.errors import PlanError, raise_if_refused
from weft.job import Model
from weft.parallel.experts.checks import reason_against_etp
from weft.parallel.experts.groups import dispatch_groups
from weft.parallel.experts.layers import split_experts
from weft.parallel.experts.matrices import split_dims
from weft.parallel.experts.path import ExpertPath
from weft.plan import Parallel, Plan
from weft.topology.mesh import build_expert_mesh, build_mesh

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero 0": (4, 8, {"parallel": {"zero": 0, "ep": 2, "etp": 2}}),
    "zero 3": (4, 8, {"parallel": {"zero": 3, "ep": 2, "etp": 2}}),
    "zero 3, edp 2": (8, 8, {"parallel": {"zero": 3, "ep": 2, "etp": 2}}),
    "zero 2, replicas": (8, 8, {"parallel": {"zero": 2, "dp_replicate": 2, "ep": 2, "etp": 2}}),
    "joint": (4, 8, {"parallel": {"zero": 2, "ep": 2, "etp": 2}, "comm": {"expert_overlap": "joint"}}),
    "tp 2": (4, 4, {"parallel": {"zero": 3, "tp": 2, "ep": 2, "etp": 2}}),
    "pp 2, recompute": (
        8,
        8,
        {"parallel": {"zero": 0, "pp": 2, "ep": 2, "etp": 2}, "memory": {"recompute": ["block"]}},
    ),
}
"""Ranks, rows of the global batch, and the plan."""
FAMILIES = ("mixtral", "gpt_oss", "qwen3_moe")


def plan_of(layout: str, **comm: str) -> tuple[int, int, Plan]:
    ranks, rows, tables = LAYOUTS[layout]
    precision = {"param_dtype": "fp64", "update": "fp64", "reduce_dtype": "fp64"}
    return (
        ranks,
        rows,
        Plan.model_validate({"precision": precision, **tables, "comm": {**tables.get("comm", {}), **comm}}),
    )


@pytest.mark.must("parity: tensor parallelism of experts", case="mixtral-zero 0")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_parity(name: str, layout: str) -> None:
    ranks, rows, plan = plan_of(layout)
    config = family(name) | ({"num_hidden_layers": 4} if plan.parallel.pp > 1 else {})
    assert_parity(Model(config=config), plan, ranks, 1, rows=rows)


def test_rows_are_rounded_once() -> None:
    """Rows that dispatch has rounded, and gradients that combine has rounded, are gathered as they are."""
    ranks, rows, plan = plan_of("zero 0", expert_compression="fp8")

    def make(groups: Any, model: Any) -> Any:
        round_model(model, "fp8")
        return adamw(groups, model)

    assert_parity(Model(config=family("mixtral")), plan, ranks, 1, rows=rows, make=make)


# Several hosts

HOST_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3": (2, {"parallel": {"zero": 3}}),
    "zero 0, joint": (2, {"parallel": {"zero": 0}, "comm": {"expert_overlap": "joint"}}),
    "zero 2, recompute": (2, {"parallel": {"zero": 2}, "memory": {"recompute": ["block"]}}),
    "tp 2": (2, {"parallel": {"zero": 3, "tp": 2}}),
    "a host for each rank of ep": (4, {"parallel": {"zero": 3}}),
    "etp between hosts": (8, {"parallel": {"zero": 3}}),
}
"""Hosts and the plan of 8 ranks with ep 4 and etp 2."""


def plan_on_hosts(layout: str, **comm: str) -> tuple[int, Plan]:
    hosts, tables = HOST_LAYOUTS[layout]
    precision = {"param_dtype": "fp64", "update": "fp64", "reduce_dtype": "fp64"}
    parallel, comm = {"ep": 4, "etp": 2, **tables["parallel"]}, {**tables.get("comm", {}), **comm}
    return hosts, Plan.model_validate({"precision": precision, **tables, "parallel": parallel, "comm": comm})


def run_on_hosts(hosts: int, rank: int, ranks: int, source: Model, plan: Plan, *rest: Any) -> ParityRecord:
    """`run_plan` with the ranks divided equally among emulated hosts."""
    with mock.patch.object(hierarchical, "host_id", return_value=[f"host {rank * hosts // ranks}"]):
        chosen = resolved(plan, ranks)
        levels = dispatch_groups(build_expert_mesh(chosen, build_mesh(chosen, "cpu", ranks)), chosen.comm)
        assert [level.size() for level in levels] == ([2, 2] if hosts == 2 else [4])
        return run_plan(rank, ranks, source, plan, *rest)


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_parity_on_several_hosts(name: str, layout: str) -> None:
    hosts, plan = plan_on_hosts(layout)
    assert_parity(Model(config=family(name)), plan, 8, 1, rows=8, run=partial(run_on_hosts, hosts))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_gradients_are_rounded_between_hosts_and_inside(kind: str) -> None:
    """As without etp: its ranks gather rows and gradients that are rounded already."""
    hosts, plan = plan_on_hosts("zero 3", expert_compression=kind)

    def make(groups: Any, model: Any) -> Any:
        round_model(model, kind, levels=2)
        return adamw(groups, model)

    run = partial(run_on_hosts, hosts)
    assert_parity(Model(config=family("mixtral")), plan, 8, 1, rows=8, make=make, run=run)


# Traffic


def traffic(rank: int, ranks: int) -> list[tuple[str, str, int]]:
    plan = resolved(Plan(parallel=Parallel(zero=0, ep=2, etp=2)), ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = build_model("mixtral", torch.float32, "eager")
    path = ExpertPath(experts_of(model)[0])
    split_experts({"experts": path}, plan, build_expert_mesh(plan, mesh))
    path.attach()
    experts = path.experts
    index = torch.arange(16).view(8, 2) % 4
    with Recorder() as recorder:
        experts(torch.ones(8, HIDDEN, requires_grad=True), index, torch.ones(8, 2, requires_grad=True)).sum().backward()
    return [(message.operation, message.axis, message.bytes) for message in recorder.messages]


def test_bytes_are_those_of_dispatch_and_of_a_gather() -> None:
    """Each rank has 16 copies: half of them leave it in dispatch, and all that it received are gathered by the other rank."""
    rows = 4 * HIDDEN
    there = [("all_to_all", "ep", 8 * rows), ("all_to_all", "etp", 16 * rows)]
    for messages in run_ranks(4, traffic):
        counts, dispatch, sizes, gather, index, *rest = messages
        assert (counts, sizes) == (("all_to_all", "ep", 8 * 2), ("all_gather", "etp", 8))
        assert [dispatch, gather] == there
        assert index == ("all_to_all", "etp", 16 * 8)
        assert rest == [*there[::-1], *there, *there[::-1]]


@pytest.mark.must("refusal: tensor parallelism of experts")
@pytest.mark.parametrize(
    ("table", "etp", "what"),
    [
        (family("mixtral"), 5, "etp = 5 does not divide experts that are 48 wide"),
        (LLAMA4, 2, "etp = 2 for Llama4TextExperts"),
    ],
)
def test_refused(table: dict[str, Any], etp: int, what: str) -> None:
    model = build_on_meta(AutoConfig.for_model(**table), torch.float32)
    raise_if_refused(reason_against_etp(model, read_anatomy(model), 1))
    with pytest.raises(PlanError, match=what):
        raise_if_refused(reason_against_etp(model, read_anatomy(model), etp))


def test_an_unknown_parameter_is_refused() -> None:
    model: Any = build_on_meta(AutoConfig.for_model(**family("gpt_oss")), torch.float32)
    experts = experts_of(model)[0]
    assert split_dims(experts) == {
        "gate_up_proj": 2,
        "gate_up_proj_bias": 1,
        "down_proj": 1,
        "down_proj_bias": None,
    }
    experts.scale = nn.Parameter(torch.empty(4, 1, device="meta"))
    with pytest.raises(PlanError, match="which has a parameter scale"):
        raise_if_refused(reason_against_etp(model, read_anatomy(model), 2))


def test_degrees_must_fit_the_ranks() -> None:
    with pytest.raises(PlanError, match="ep 2 x etp 4 does not divide dp_shard 4 x cp 1 x tp 1"):
        resolved(Plan(parallel=Parallel(ep=2, etp=4)), 4)
