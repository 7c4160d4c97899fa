"""Relocation of experts: even load of the ranks with few moves; the steps of the untouched model; exact resume."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import SETTINGS, STEPS, compare, packed_batches, reference, share
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from tests.lab.runs import train_in_the_pool
from weft.anatomy.build import build_on_meta
from weft.backends import hierarchical
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.device.detect import detect
from weft.job import Job, Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.experts.homes import SMALLEST_GAIN, ExpertHomes, load_of_ranks, plan_homes
from weft.parallel.experts.relocation import Box, plan_rows
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh, data_rank
from weft.training.metrics import read_metrics
from weft.training.optimizer import build_optimizer, learning_rate
from weft.training.step import evaluate, train_step

# The plan


@st.composite
def skews(draw: Any) -> tuple[Any, Any, int]:
    """Load of each expert, expert in each slot, and ranks."""
    ranks, own = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    load = draw(st.lists(st.integers(0, 1000), min_size=ranks * own, max_size=ranks * own))
    return np.array(load, np.int64), np.array(draw(st.permutations(range(ranks * own)))), ranks


@settings(max_examples=200, deadline=None, derandomize=True)
@given(skews())
def test_homes_are_a_permutation_that_is_evener_or_unchanged(drawn: tuple[Any, Any, int]) -> None:
    load, homes, ranks = drawn
    own = len(load) // ranks
    found = plan_homes(load, homes.copy(), ranks)
    assert sorted(found) == list(range(len(load)))
    before, after = (load_of_ranks(load, each, ranks).max() for each in (homes, found))
    changed = found != homes
    assert not changed.any() or after <= (1 - SMALLEST_GAIN) * before
    was, now = homes.argsort() // own, found.argsort() // own
    assert (was != now).sum() == changed.sum()  # an expert that stays on its rank keeps its slot
    assert (plan_homes(load, found, ranks) == found).all() or after > 1.02 * load.sum() / ranks


def largest_first(load: Any, ranks: int) -> int:
    """Load of the fullest rank if each expert in turn, the largest first, goes to the emptiest rank with a free slot."""
    held, free = [0] * ranks, [len(load) // ranks] * ranks
    for expert in np.argsort(-load, kind="stable"):
        rank = min((rank for rank in range(ranks) if free[rank]), key=held.__getitem__)
        held[rank] += int(load[expert])
        free[rank] -= 1
    return max(held)


@pytest.mark.parametrize(("ranks", "experts"), [(8, 64), (16, 128), (64, 256)])
@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_a_lasting_skew_is_evened_out_with_few_moves(ranks: int, experts: int, exponent: float) -> None:
    generator = np.random.default_rng(0)
    load = (1e6 * generator.permutation(np.arange(1, experts + 1) ** -exponent)).astype(np.int64)
    homes = np.arange(experts)
    found = plan_homes(load, homes, ranks)
    after, least = load_of_ranks(load, found, ranks).max(), largest_first(load, ranks)
    assert after <= max(1.021 * load.sum() / ranks, (1 + SMALLEST_GAIN) * least)
    assert (found != homes).sum() <= 0.4 * experts


def test_slots_of_experts() -> None:
    homes = ExpertHomes(4)
    index = torch.tensor([[0, 3], [4, 1]])
    assert homes.slots(index) is index
    homes.set([2, 1, 3, 0], torch.device("cpu"))
    assert homes.slots(index).tolist() == [[3, 2], [4, 1]]  # 4: a copy that is not sent
    weight = torch.arange(4)[:, None]
    assert homes.reorder(weight, True).flatten().tolist() == [2, 1, 3, 0]
    assert torch.equal(homes.reorder(homes.reorder(weight, True), False), weight)


@pytest.mark.parametrize("layout", ["replicas", "sharded rows", "sharded columns"])
def test_rows_reach_every_holder(layout: str) -> None:
    """Exchange of labels between eight ranks in one process, from the plans of all of them."""
    parts = {
        "replicas": [Box(4 * (r % 2), 4, (0, 9)) for r in range(8)],
        "sharded rows": [Box(r, 1, (0, 9)) for r in range(8)],
        "sharded columns": [Box(4 * (r % 2), 4, (r // 4, 1)) for r in range(8)],
    }
    boxes, source = parts[layout], [5, 1, 0, 3, 4, 2, 7, 6]
    plans = [plan_rows(boxes, source, rank) for rank in range(8)]
    held = [[(slot, box.rest) for slot in range(box.first, box.first + box.slots)] for box in boxes]
    sent = [iter([held[rank][row] for row in plans[rank].sent]) for rank in range(8)]
    messages = {(a, b): [next(sent[a]) for _ in range(plans[a].input_splits[b])] for a in range(8) for b in range(8)}
    for rank, (box, plan) in enumerate(zip(boxes, plans, strict=True)):
        arrived = [row for other in range(8) for row in messages[other, rank]]
        for row, value in zip(plan.received, arrived, strict=True):
            held[rank][row] = value
        assert held[rank] == [(source[slot], box.rest) for slot in range(box.first, box.first + box.slots)]
    busiest = max(len(plan.sent) for plan in plans)
    assert busiest <= (2 if layout == "sharded rows" else 5)


# A model

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"parallel": {"zero": 0, "ep": 2}}),
    "zero 1": (2, {"parallel": {"zero": 1, "ep": 2}}),
    "zero 3": (2, {"parallel": {"zero": 3, "ep": 2}}),
    "zero 0, edp 2": (4, {"parallel": {"zero": 0, "ep": 2}}),
    "zero 2, edp 2": (4, {"parallel": {"zero": 2, "ep": 2}}),
    "zero 3, edp 2": (4, {"parallel": {"zero": 3, "ep": 2}}),
    "replicas of shards": (4, {"parallel": {"zero": 3, "ep": 2, "dp_replicate": 2}}),
    "joint, replicate": (
        2,
        {
            "parallel": {"zero": 2, "ep": 2, "expert_balance": "replicate"},
            "comm": {"expert_overlap": "joint"},
            "memory": {"recompute": ["block"]},
        },
    ),
    "tp 2": (4, {"parallel": {"zero": 2, "tp": 2, "ep": 4}}),
    "cp 2": (4, {"parallel": {"zero": 3, "cp": 2, "ep": 4}}),
    "pp 2": (4, {"parallel": {"pp": 2, "zero": 0, "ep": 2}, "pipeline": {"schedule": "dualpipev"}}),
}


def source(name: str, layers: int = 2) -> Model:
    experts = {"qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}.get(name, "num_local_experts")
    return Model(config={**family(name), "num_hidden_layers": layers, "first_k_dense_replace": 1, experts: 8})


def on_rank(rank: int, ranks: int, origin: Model, plan: Plan, optimizer_settings: Optimizer) -> dict[str, Any]:
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(origin), DTYPES[plan.precision.update]), plan, mesh)
    materialize(model, origin, torch.device("cpu"))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, optimizer_settings), model, detect())
    losses, norms, moved, relocation = [], [], 0, runtime(model).relocation
    batches = packed_batches(96, rows=8)
    for step, batch in enumerate(batches, 1):
        for group in optimizer.inner.param_groups:
            group["lr"] = learning_rate(step, STEPS, SETTINGS)
        result = train_step(
            model, optimizer, share(batch, data_rank(mesh), plan.parallel.data_ranks, 1), SETTINGS.clip_norm
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
        moved += relocation.moved if relocation else 0
    held_out = evaluate(model, share(batches[0], data_rank(mesh), plan.parallel.data_ranks, 1))
    return {"losses": losses, "norms": norms, "moved": moved, "held_out": held_out, "weights": gather_weights(model)}


def plan_of(tables: dict[str, Any], dtype: str, every: int = 1) -> Plan:
    precision = {"param_dtype": dtype, "update": dtype, "reduce_dtype": dtype, **tables.get("precision", {})}
    parallel = {**tables["parallel"], "expert_relocate_every": every}
    return Plan.model_validate({**tables, "precision": precision, "parallel": parallel})


@pytest.mark.must("parity: relocation of experts", case="qwen3_moe-zero 0")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_steps_equal_the_untouched_model(name: str, layout: str) -> None:
    ranks, tables = LAYOUTS[layout]
    origin = source(name, 4 if "pp" in tables["parallel"] else 2)
    expected = reference(origin, "fp64", packed_batches(96, rows=8), 8)
    found = run_ranks(ranks, on_rank, origin, plan_of(tables, "fp64"), SETTINGS)
    tolerance = 1e-6 if name == "deepseek_v3" else 1e-10  # its router computes in float32
    assert all(part["moved"] == found[0]["moved"] > 0 for part in found)
    for part in found:
        assert part["losses"] == pytest.approx(expected.losses, rel=tolerance)
        assert part["norms"] == pytest.approx(expected.norms, rel=tolerance)
        assert part["held_out"] == pytest.approx(expected.held_out, rel=tolerance)
    for key, weight in expected.weights.items():
        compare(key, found[0]["weights"][key], weight, tolerance, at_least=STEPS * SETTINGS.lr)


def on_two_hosts(rank: int, ranks: int, *args: Any) -> dict[str, Any]:
    with mock.patch.object(hierarchical, "host_id", return_value=[f"host {rank * 2 // ranks}"]):
        return on_rank(rank, ranks, *args)


def test_two_hosts() -> None:
    plan = plan_of({"parallel": {"zero": 0, "ep": 4}}, "fp64")
    expected, found = (run_ranks(4, run, source("mixtral"), plan, SETTINGS)[0] for run in (on_rank, on_two_hosts))
    assert found["moved"] == expected["moved"] > 0
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    for key, weight in expected["weights"].items():
        compare(key, found["weights"][key], weight, 1e-10, at_least=STEPS * SETTINGS.lr)


STATES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {  # plan, optimizer, tolerance
    "adafactor": ({}, {"name": "adafactor"}, 1e-5),
    "muon": ({}, {"name": "muon"}, 1e-5),
    "split weights": (
        {"precision": {"param_dtype": "bf16", "weights": "split_even", "reduce_dtype": "fp32"}},
        {},
        2e-2,
    ),
    "int8 states": ({"precision": {"optimizer_state_dtype": "int8"}}, {}, 1e-5),
    "states on disk": ({"memory": {"optimizer_device": "disk"}}, {}, 1e-5),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", STATES)
def test_states_of_every_kind_move(kind: str, zero: int, tmp_path: Path) -> None:
    tables, changes, tolerance = STATES[kind]
    memory = {"memory": {**tables["memory"], "offload_dir": str(tmp_path)}} if "memory" in tables else {}
    tables = {**tables, **memory, "parallel": {"zero": zero, "ep": 2}}
    optimizer = SETTINGS.model_copy(update=changes)
    still, moving = (
        run_ranks(4, on_rank, source("gpt_oss"), plan_of(tables, "fp32", every), optimizer)[0] for every in (0, 1)
    )
    assert moving["moved"] > 0
    assert moving["losses"] == pytest.approx(still["losses"], rel=tolerance)
    for key, weight in still["weights"].items():
        compare(key, moving["weights"][key], weight, 10 * tolerance, at_least=STEPS * SETTINGS.lr)


# A run


def job_of(folder: Path, every: int, steps: int = 6, **tables: Any) -> Job:
    folder.mkdir(exist_ok=True)
    config = {**source("qwen3_moe").config, "vocab_size": 300}  # type: ignore[dict-item]
    parallel = {"zero": 2, "ep": 2, "expert_relocate_every": every, **tables.pop("parallel", {})}
    train = {"steps": steps, "global_batch_size": 8, "micro_batch_size": 2}
    plan = {"parallel": parallel, "precision": {"param_dtype": "fp32"}}
    return Job.load(write_job(folder, model={"config": config}, train=train, plan=plan, **tables))


def test_a_resumed_run_continues_bit_equal_and_exports_are_in_order(tmp_path: Path) -> None:
    whole, printed = train_in_the_pool(job_of(tmp_path / "whole", 2), 2)
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row.moved_experts for row in rows][::2] == [0, 0, 0]
    assert sum(row.moved_experts or 0 for row in rows[:3]) > 0
    assert "experts move to other ranks; fullest rank / mean" in printed[0]
    # Between two relocations, and not the first checkpoint: homes and loads are in it, and the slices are laid out again.
    first, _ = train_in_the_pool(job_of(tmp_path / "first", 2, checkpoint={"every": 1, "keep": 0}), 2)
    resume = {"resume": str(first / "step-00000003"), "accept_changes": True}
    same, _ = train_in_the_pool(job_of(tmp_path / "same", 2), 2, **resume)
    after = read_metrics(same / "metrics.jsonl")[-3:]
    assert [(row.loss, row.grad_norm, row.moved_experts) for row in after] == [
        (row.loss, row.grad_norm, row.moved_experts) for row in rows[3:]
    ]
    other, _ = train_in_the_pool(job_of(tmp_path / "other", 0, parallel={"ep": 1, "zero": 3}), 2, **resume)
    assert [row.loss for row in read_metrics(other / "metrics.jsonl")[-3:]] == pytest.approx(
        [row.loss for row in rows[3:]], rel=1e-5
    )
    still, _ = train_in_the_pool(job_of(tmp_path / "still", 0), 2)
    weights = [load_file(out / "export" / "model.safetensors") for out in (whole, same, other, still)]
    for key, weight in weights[0].items():
        assert torch.equal(weights[1][key], weight)
        for found in weights[2:]:
            compare(key, found[key], weight, 1e-4)


def with_flat_states(rank: int, ranks: int, plan: Plan) -> None:
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source("qwen3_moe")), torch.float32), plan, mesh)
    materialize(model, source("qwen3_moe"), torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for parameter in model.parameters():
        optimizer.state[parameter]["flat"] = torch.zeros(parameter.numel())
    batch = share(packed_batches(96, rows=8)[0], rank, ranks, 1)
    train_step(model.train(), DistributedOptimizer(optimizer, model, detect()), batch, 0.0)


def test_states_that_cannot_move_are_refused() -> None:
    with pytest.raises(RankError, match=r"the optimizer keeps flat of shape \(\d+,\) for model\.layers"):
        run_ranks(2, with_flat_states, resolved(plan_of(LAYOUTS["zero 0"][1], "fp32"), 2))


def frozen(rank: int, ranks: int, plan: Plan) -> None:
    model = build_on_meta(read_config(source("qwen3_moe")), torch.float32)
    model.requires_grad_(False)
    parallelize(model, plan, build_mesh(plan, "cpu", ranks))


@pytest.mark.must("refusal: relocation of experts")
def test_frozen_experts_are_refused() -> None:
    with pytest.raises(RankError, match=r"expert_relocate_every = 1 for model\.layers\.0\.mlp\.experts\.\w+, which is"):
        run_ranks(2, frozen, resolved(plan_of(LAYOUTS["zero 0"][1], "fp32"), 2))
