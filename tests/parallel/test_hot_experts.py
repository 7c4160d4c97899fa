"""Replicas of hot experts: outputs and all gradients of the unmodified module, for any routing; even load of the ranks."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.test_hierarchical import make_group
from tests.lab.experts import balance_experts
from tests.lab.families import family
from tests.lab.parity import assert_parity as assert_model_parity
from tests.lab.parity import compare
from tests.lab.pool import run_ranks
from tests.parallel.test_expert import (
    HIDDEN,
    HOSTS,
    NUM_EXPERTS,
    TABLES,
    TOLERANCE,
    Case,
    build_model,
    experts_of,
    gradients,
)
from weft.comm.recorder import Recorder
from weft.job import Model
from weft.parallel.experts.balance import Replica, plan_replicas, rows_to_receive, rows_to_send, shares
from weft.parallel.experts.dispatch import Channel
from weft.plan import Plan
from weft.planner.costmodel.experts import held_replicas, replica_bytes
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.shape import Shape


def held_of(rank: int, ranks: int, slots: int) -> int:
    """Bytes of weights of replicas that autograd holds after a forward in which all tokens choose the first expert."""
    group = dist.group.WORLD
    assert group is not None
    experts = experts_of(build_model("mixtral", torch.float32, "grouped_mm"))[-1]
    for key, parameter in list(experts.named_parameters()):
        setattr(experts, key, torch.nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))
    sizes = {slots * parameter[0].nbytes for parameter in experts.parameters()}
    own = {parameter.untyped_storage().data_ptr() for parameter in experts.parameters()}
    balance_experts(experts, Channel(group), slots)
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() in sizes and storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden, index = torch.ones(61, HIDDEN, requires_grad=True), torch.zeros(61, 1, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = experts(hidden, index, torch.ones(61, 1, requires_grad=True))
    out.sum().backward()
    return sum(held.values())


@pytest.mark.parametrize("slots", [1, 3])
def test_the_planner_counts_the_weights_of_replicas(slots: int) -> None:
    """In forward a layer keeps the weights of all slots, on every rank of the group."""
    shape = Shape(1, HIDDEN, 4, 4, 8, 0, 64, experts=NUM_EXPERTS, top_k=1, expert_ffn=48)
    layout = TrainingLayout(64, 2, ep=2, dp=2, expert_tp=1, dtype="fp32", expert_slots=slots)
    assert 2 * replica_bytes(shape) == 4 * 3 * HIDDEN * 48  # in float32; sent in the test above
    assert run_ranks(2, held_of, slots) == [held_replicas(shape, layout)] * 2


# The plan


def loads_of_ranks(load: Any, replicas: list[Replica], ranks: int) -> Any:
    own = len(load) // ranks
    held = load.reshape(ranks, own).sum(1)
    for replica in replicas:
        held[replica.rank] += replica.copies
        held[replica.expert // own] -= replica.copies
    return held


def slowly(load: Any, ranks: int, slots: int) -> float:
    """Largest load of a rank after the same greedy choice in its smallest form, relative to the mean."""
    own, mean = len(load) // ranks, load.sum() / ranks
    for tau in (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0):
        left, cap = load.copy(), max(math.ceil(load.sum() * tau / ranks), 1)
        held, has = loads_of_ranks(load, [], ranks), set[tuple[int, int]]()
        while held.max() > cap:
            giver = int(held.argmax())
            expert = giver * own + int(left[giver * own : (giver + 1) * own].argmax())
            excess, used = held[giver] - cap, Counter(rank for _, rank in has)
            takers = [rank for rank in range(ranks) if (expert, rank) in has and cap - held[rank] >= excess]
            takers = takers or [r for r in range(ranks) if held[r] < cap and ((expert, r) in has or used[r] < slots)]
            if not takers or not left[expert]:
                break
            taker = min(takers, key=held.__getitem__)
            amount = min(excess, cap - held[taker], left[expert])
            has.add((expert, taker))
            left[expert] -= amount
            held[giver] -= amount
            held[taker] += amount
        else:
            return float(held.max() / mean)
    return float(loads_of_ranks(load, [], ranks).max() / mean)


@st.composite
def routings(draw: Any) -> tuple[Any, int]:
    """Copies of each rank's tokens for each expert, and slots."""
    ranks, own = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    sizes = st.one_of(st.just(0), st.integers(0, 30), st.integers(0, 1000))
    counts = draw(st.lists(sizes, min_size=ranks * ranks * own, max_size=ranks * ranks * own))
    return np.array(counts, np.int64).reshape(ranks, ranks * own), draw(st.integers(1, 3))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(routings())
def test_every_copy_is_computed_once_and_loads_are_even(drawn: tuple[Any, int]) -> None:
    counts, slots = drawn
    ranks, experts = counts.shape
    own, load = experts // ranks, counts.sum(0)
    replicas = plan_replicas(load, ranks, slots)
    assert replicas == sorted(replicas)
    assert all(replica.copies > 0 and replica.expert // own != replica.rank for replica in replicas)
    assert max(Counter(replica.rank for replica in replicas).values(), default=0) <= slots
    held = loads_of_ranks(load, replicas, ranks)
    assert held.max() <= loads_of_ranks(load, [], ranks).max()
    if load.sum():
        assert held.max() * ranks / load.sum() <= slowly(load, ranks, slots) * 1.06 + 2 * ranks / load.sum()
    shared = shares(counts, replicas)
    to = np.zeros((ranks, experts, ranks), np.int64)
    to[:, range(experts), np.arange(experts) // own] = counts
    for expert, share in shared.items():
        to[:, expert] = share
    assert (to >= 0).all()
    assert (to.sum(2) == counts).all()
    assert (to.sum((0, 1)) == held).all()
    for rank in range(ranks):
        sent, received = rows_to_send(counts, shared, rank), rows_to_receive(counts, shared, rank)
        again = np.zeros((experts, ranks), np.int64), np.zeros((ranks, experts), np.int64)
        np.add.at(again[0], (sent.expert, sent.rank), sent.rows)
        np.add.at(again[1], (received.rank, received.expert), received.rows)
        assert (again[0] == to[rank]).all()
        assert (again[1] == to[:, :, rank]).all()
        assert list(zip(sent.expert, sent.rank, strict=True)) == sorted(zip(sent.expert, sent.rank, strict=True))


@pytest.mark.parametrize(("ranks", "experts"), [(8, 64), (16, 128), (64, 256)])
def test_popular_experts_are_shared(ranks: int, experts: int) -> None:
    generator = np.random.default_rng(0)
    popularity = generator.permutation(np.arange(1, experts + 1) ** -1.0)
    load = generator.multinomial(ranks * 1024, popularity / popularity.sum())
    before = loads_of_ranks(load, [], ranks).max() * ranks / load.sum()
    after = loads_of_ranks(load, plan_replicas(load, ranks, 2), ranks).max() * ranks / load.sum()
    assert before > 1.5
    assert after <= 1.051


# A module


def on_rank(rank: int, ranks: int, name: str, case: Case, recompute: bool, slots: int) -> dict[str, Any]:
    group = make_group(rank, case.hosts) if case.hosts else dist.new_group(backend="gloo")
    experts = experts_of(build_model(name, case.dtype, case.implementation))[-1]
    for key, parameter in list(experts.named_parameters()):
        setattr(experts, key, torch.nn.Parameter(parameter.detach().chunk(group.size())[group.rank()].clone()))
    balance_experts(experts, Channel(group, is_recomputed=recompute), slots)
    return gradients(experts, case.tokens()[rank], recompute)


def assert_parity(name: str, case: Case, recompute: bool = False, slots: int = 2) -> None:
    untouched = experts_of(build_model(name, case.dtype, case.implementation))[-1]
    hidden, index, weights, gradient = (torch.cat(parts).detach() for parts in zip(*case.tokens(), strict=True))
    expected = gradients(untouched, (hidden.requires_grad_(), index, weights.requires_grad_(), gradient))
    found = run_ranks(len(case.sizes), on_rank, name, case, recompute, slots)
    for key, value in expected.items():
        compare(f"{name}: {key}", torch.cat([part[key] for part in found]), value, TOLERANCE[case.dtype])


ROUTINGS = [
    ((5, 9), (2,), 1),  # all tokens to one expert
    ((5, 9, 2, 4), (1,), 1),
    ((40, 30, 20, 10), (0, 1), 2),  # half of the experts
    ((0, 60), (0, 1), 2),  # one source
    ((60, 0, 0, 0), (0, 1, 2, 3), 1),
    ((30, 30, 30, 30), (0, 1, 2, 3), 2),
    ((4, 3), (0, 1, 2, 3), 4),
]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize(("sizes", "allowed", "top_k"), ROUTINGS)
def test_any_routing(sizes: tuple[int, ...], allowed: tuple[int, ...], top_k: int, implementation: str) -> None:
    dtype = torch.float64 if implementation == "eager" else torch.float32
    for name in ("gpt_oss", "qwen3_moe"):
        assert_parity(name, Case(sizes, top_k, allowed, dtype, implementation))


@pytest.mark.must("composition: replicas of hot experts", case="gpt_oss-1")
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", TABLES)
def test_families(name: str, slots: int) -> None:
    assert_parity(name, Case((50, 9, 0, 30), allowed=(0, 1)), slots=slots)


@pytest.mark.must("parity: replicas of hot experts")
def test_recompute_and_two_hosts() -> None:
    assert_parity("mixtral", Case((5, 9, 3, 60), allowed=(1, 2), hosts=HOSTS), recompute=True)


def test_no_tokens_on_any_rank() -> None:
    for found in run_ranks(2, on_rank, "gpt_oss", Case((0, 0)), False, 2):
        assert {key: int(value.count_nonzero()) for key, value in found.items()} == dict.fromkeys(found, 0)


def messages_of(rank: int, ranks: int) -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    experts = experts_of(build_model("mixtral", torch.float32, "eager"))[-1]
    for key, parameter in list(experts.named_parameters()):
        setattr(experts, key, torch.nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))
    balance_experts(experts, Channel(group), 1)
    hidden, index = torch.ones(64, HIDDEN, requires_grad=True), torch.zeros(64, 1, dtype=torch.int64)
    with Recorder() as recorder:
        experts(hidden, index, torch.ones(64, 1, requires_grad=True)).sum().backward()
    return [message.bytes for message in recorder.messages]


def test_replicas_send_weights_and_keep_tokens() -> None:
    """All tokens of both ranks choose the first expert: each rank computes its own tokens, and no row travels."""
    counts, weights = 8 * NUM_EXPERTS, 4 * 3 * HIDDEN * 48
    for rank, sizes in enumerate(run_ranks(2, messages_of)):
        there, back = (weights, 0) if rank == 0 else (0, weights)
        assert sizes == [counts, there, 0, 0, 0, back, 0] or sizes == [counts, there, 0, 0, 0, 0, back]


# A model

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"parallel": {"zero": 0, "ep": 2}}),
    "zero 2": (2, {"parallel": {"zero": 2, "ep": 2}}),
    "zero 3": (2, {"parallel": {"zero": 3, "ep": 2}}),
    "joint": (2, {"parallel": {"zero": 3, "ep": 2}, "comm": {"expert_overlap": "joint"}}),
    "joint, recompute": (
        2,
        {
            "parallel": {"zero": 2, "ep": 2},
            "comm": {"expert_overlap": "joint"},
            "memory": {"recompute": ["block"]},
        },
    ),
    "edp 2, joint": (4, {"parallel": {"zero": 3, "ep": 2}, "comm": {"expert_overlap": "joint"}}),
    "tp 2": (4, {"parallel": {"zero": 2, "tp": 2, "ep": 4}}),
    "cp 2": (4, {"parallel": {"zero": 2, "cp": 2, "ep": 4}}),
    "dualpipev": (4, {"parallel": {"pp": 2, "zero": 0, "ep": 2}, "pipeline": {"schedule": "dualpipev"}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe"])
def test_parity_of_models(name: str, layout: str) -> None:
    ranks, tables = LAYOUTS[layout]
    precision = {"param_dtype": "fp32", "update": "fp32", "reduce_dtype": "fp32"}
    parallel = {**tables["parallel"], "expert_balance": "replicate"}
    plan = Plan.model_validate({"precision": precision, **tables, "parallel": parallel})
    config = {**family(name), "first_k_dense_replace": 0, "num_hidden_layers": 4 if "pp" in parallel else 2}
    assert_model_parity(Model(config=config), plan, ranks, 1, rows=16 if "edp" in layout else 8)
