"""Capacity of experts: the copies of a plain loop over tokens are kept, and the others contribute and learn nothing."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoConfig

from tests.backends.test_hierarchical import make_group
from tests.lab.experts import balance_experts, split_experts
from tests.lab.families import family
from tests.lab.parity import adamw, assert_parity, compare
from tests.lab.pool import run_ranks
from tests.lab.rounding import round_experts, round_model
from tests.parallel.test_expert import HOSTS, TOLERANCE, Case, build_model, experts_of, gradients
from tests.parallel.test_expert_tensor import run_on_hosts
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.comm.compression.rows import RowFormat
from weft.errors import PlanError, raise_if_refused
from weft.job import Model
from weft.parallel.experts.capacity import capacity_limit, kept_copies, reason_against_capacity
from weft.parallel.experts.dispatch import Channel
from weft.parallel.experts.groups import levels_of_group
from weft.parallel.experts.path import ExpertPath
from weft.plan import Parallel, Plan
from weft.training.startup import explain_capacity


def one_by_one(index: Tensor, weights: Tensor, num_experts: int, capacity: float, drop: str) -> Tensor:
    """Kept copies, by a loop over copies in the order in which experts take them."""
    most, taken = math.ceil(capacity * index.numel() / num_experts), [0] * (num_experts + 1)
    kept, flat = torch.zeros(index.numel(), dtype=torch.bool), index.flatten().tolist()
    order = list(range(index.numel()))
    if drop == "probs":
        order.sort(key=lambda copy: -weights.flatten()[copy].item())
    for copy in order:
        kept[copy] = taken[flat[copy]] < most
        taken[flat[copy]] += 1
    return kept.view(index.shape)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(1, 3), st.sampled_from([1.0, 1.1, 2.0]), st.sampled_from(["probs", "position"]))
def test_kept_copies(tokens: int, top_k: int, capacity: float, drop: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(0, 4, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    found = kept_copies(index, weights, 4, capacity, drop)
    assert torch.equal(found, one_by_one(index, weights, 4, capacity, drop))


def on_rank(rank: int, ranks: int, case: Case, drop: str, balanced: bool, kind: RowFormat | None) -> dict[str, Any]:
    group = make_group(rank, case.hosts) if len(set(case.hosts)) > 1 else dist.group.WORLD
    assert group is not None
    experts = experts_of(build_model("qwen3_moe", case.dtype, "eager"))[-1]
    limit = capacity_limit(experts.num_experts, 1.0, drop, is_split=ranks > 1)
    if ranks == 1:
        ExpertPath(experts, limit=limit).attach()
    else:
        for key, parameter in list(experts.named_parameters()):
            setattr(experts, key, torch.nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))
        if balanced:
            balance_experts(experts, Channel(group, row_format=kind), 2, limit=limit)
        else:
            channels = tuple(Channel(level, row_format=kind) for level in levels_of_group(group))
            split_experts(experts, channels, limit=limit)
    return gradients(experts, case.tokens()[rank])


def assert_dropped(case: Case, drop: str, balanced: bool, kind: RowFormat | None = None) -> None:
    """Outputs and all gradients are those of the untouched experts with router weights of zero for the dropped copies."""
    untouched = experts_of(build_model("qwen3_moe", case.dtype, "eager"))[-1]
    if kind:
        round_experts(untouched, kind, levels=len(set(case.hosts)))
    tokens = case.tokens()
    masks = [one_by_one(index, weights, 4, 1.0, drop) for _, index, weights, _ in tokens]
    assert not all(mask.all() for mask in masks)
    hidden, index, weights, gradient = (torch.cat(parts).detach() for parts in zip(*tokens, strict=True))
    limited = (weights * torch.cat(masks)).requires_grad_()
    expected = gradients(untouched, (hidden.requires_grad_(), index, limited, gradient))
    expected["weights"] = expected["weights"] * torch.cat(masks)
    found = run_ranks(len(case.sizes), on_rank, case, drop, balanced, kind)
    for key, value in expected.items():
        parts = [part[key] for part in found]
        compare(key, torch.cat(parts), value, TOLERANCE[case.dtype])


@pytest.mark.must("parity: capacity of experts")
@pytest.mark.parametrize("drop", ["probs", "position"])
@pytest.mark.parametrize(("sizes", "balanced"), [((9,), False), ((9, 14), False), ((9, 14), True)])
def test_dropped_copies_contribute_nothing(sizes: tuple[int, ...], balanced: bool, drop: str) -> None:
    assert_dropped(Case(sizes, allowed=(0, 1, 3)), drop, balanced)


@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize("drop", ["probs", "position"])
@pytest.mark.parametrize(
    ("sizes", "hosts", "balanced"),
    [
        ((9, 14), (0, 0), False),
        ((30, 14), (0, 0), True),
        ((9, 14, 0, 7), HOSTS, False),
    ],
    ids=["one host", "replicas", "two hosts"],
)
def test_dropped_copies_with_rows_in_8_bits(
    sizes: tuple[int, ...], hosts: tuple[int, ...], balanced: bool, drop: str, kind: RowFormat | None
) -> None:
    assert_dropped(Case(sizes, allowed=(0, 1, 3), hosts=hosts), drop, balanced, kind)


def limit_model(model: Any, drop: str) -> None:
    """Multiply the router weights of an untouched model by zero where `one_by_one` drops a copy."""
    for experts in experts_of(model):
        experts.forward = partial(without_dropped, experts.forward, drop)


def without_dropped(forward: Any, drop: str, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return forward(hidden, index, weights * one_by_one(index, weights.detach(), 4, 1.0, drop))


@pytest.mark.parametrize(("kind", "drop"), [(None, "probs"), ("int8", "position"), ("fp8", "probs")])
@pytest.mark.parametrize(
    ("ranks", "hosts", "parallel"),
    [
        (2, 1, {"ep": 2, "zero": 2}),
        (4, 1, {"ep": 2, "etp": 2, "zero": 0}),
        (8, 2, {"ep": 4, "etp": 2, "zero": 3}),
    ],
    ids=["ep", "etp", "etp on two hosts"],
)
def test_training(ranks: int, hosts: int, parallel: dict[str, Any], kind: RowFormat | None, drop: str) -> None:
    """A micro-batch of a rank is a row, which the untouched model computes alone."""
    precision = {"param_dtype": "fp64", "update": "fp64", "reduce_dtype": "fp64"}
    parallel = {**parallel, "expert_capacity": 1.0, "expert_drop": drop}
    comm = {"expert_compression": kind or "none"}
    plan = Plan.model_validate({"precision": precision, "parallel": parallel, "comm": comm})

    def make(groups: Any, model: Any) -> Any:
        if kind:
            round_model(model, kind, levels=hosts)
        limit_model(model, drop)
        return adamw(groups, model)

    run = partial(run_on_hosts, hosts) if hosts > 1 else None
    assert_parity(Model(config=family("mixtral")), plan, ranks, 1, rows_at_once=1, rows=8, make=make, run=run)


@pytest.mark.must("refusal: capacity of experts")
def test_refusals_and_the_line_at_start() -> None:
    with pytest.raises(ValidationError, match="expert_capacity"):
        Parallel(expert_capacity=0.5)
    model = build_on_meta(AutoConfig.for_model(**family("llama")), torch.float32)
    with pytest.raises(PlanError, match=r"expert_capacity = 1\.1 for llama"):
        raise_if_refused(reason_against_capacity(model, read_anatomy(model), 1.1))
    assert explain_capacity(Plan()) == []
    (line,) = explain_capacity(Plan(parallel=Parallel(expert_capacity=1.1, expert_drop="position")))
    assert "1.1 x an even load" in line
    assert "last tokens" in line
