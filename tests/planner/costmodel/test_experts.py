"""What joint forwards and backwards hide, and what replicas of hot experts cost and gain."""

from dataclasses import replace
from typing import Any

import pytest

from tests.lab.families import family
from weft.job import Job
from weft.observe.expert_reasons import expert_reasons
from weft.plan import Parallel, Plan
from weft.planner.costmodel.experts import held_replicas, replica_bytes, rows_that_pay
from weft.planner.costmodel.frameworks import WEFT
from weft.planner.costmodel.hardware import GB, GIB, ClusterSpec, LinkModel, find_device
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.shape import Shape
from weft.planner.dryrun.replicas import replica_bounds
from weft.planner.search.options import ExpertOptions
from weft.planner.search.space import Space

SHAPE = Shape(8, 2048, 16, 16, 128, 0, 32000, experts=64, top_k=8, expert_ffn=1024)
LAYOUT = TrainingLayout(4096, 64, 2, ep=16, dp=16, zero=1, expert_tp=1)
OPTIONS = [ExpertOptions(joint, slots) for joint in (False, True) for slots in (0, 2)]


def space(inside: float = 300 * GB, between: float = 50 * GB, hosts: int = 2) -> Space:
    device = replace(find_device("H100"), inside=LinkModel(1e-5, inside, 0.0), between=LinkModel(1e-5, between, 0.0))
    return Space(SHAPE, 4096, 64, ClusterSpec(device, hosts, 16 // hosts), WEFT, expert_options=OPTIONS)


def seconds(where: Space, **settings: Any) -> float:
    return where.time(replace(LAYOUT, **settings)).seconds


def test_bytes_of_replicas() -> None:
    """A gated expert has 3 x hidden x expert_ffn weights, sent there and back; a copy that stays saves four rows."""
    assert replica_bytes(SHAPE) == 2 * 3 * 2048 * 1024
    assert rows_that_pay(SHAPE) == 1.5 * 1024
    assert held_replicas(SHAPE, LAYOUT) == 0
    assert held_replicas(SHAPE, replace(LAYOUT, expert_slots=2)) == 2 * replica_bytes(SHAPE)
    where, balanced = space(), replace(LAYOUT, expert_slots=2)
    held = [where.memory(one).activations for one in (balanced, LAYOUT)]
    layers = 8 * (held_replicas(SHAPE, balanced) - LAYOUT.tokens * 8 * 0.3 * (4 * 2048 + 6 * 1024))
    assert held[0] - held[1] == pytest.approx(layers)
    recomputed = [where.memory(replace(one, recompute="full")).activations for one in (balanced, LAYOUT)]
    assert recomputed[0] == recomputed[1], "a recompute sends the weights again"


def test_dry_runs_name_what_replicas_add_at_most() -> None:
    config = {**family("qwen3_moe"), "num_hidden_layers": 2, "num_experts": 8}
    tables = {"parallel": {"ep": 2, "expert_balance": "replicate"}, "precision": {"param_dtype": "fp32"}}
    job = Job.parse({"model": {"config": config}, "data": {"source": "tokens", "seq_len": 64}, "plan": tables})
    size = 4 * 3 * config["hidden_size"] * config["moe_intermediate_size"]
    (line,) = replica_bounds(job, 2)
    assert f"at most {(2 * 2 + 2 * 2) * size / 2**30:,.3f} GiB more" in line
    assert f"{size / 1e6:,.3f} MB of weights received" in line
    assert replica_bounds(job.model_copy(update={"plan": Plan(parallel=Parallel(ep=2))}), 2) == []


def test_replicas_pay_where_weights_travel_quickly() -> None:
    assert seconds(space(), expert_slots=2) < seconds(space())
    few = {"seq": 512, "micro_batch": 1}  # 64 rows of a rank for an expert
    slow = space(between=2 * GB)
    assert seconds(slow, **few, expert_slots=2) > seconds(slow, **few)
    assert seconds(slow, expert_slots=2) < seconds(slow), "with 1,024 rows they save as many bytes as they cost"


def test_joint_lanes_hide_messages_of_all_pairs_but_one() -> None:
    where, joint = space(between=500 * GB), replace(LAYOUT, joint_experts=True)
    layer, m = where.layer(joint), LAYOUT.micro_batches
    assert m == 2
    assert where.time(joint).ep == pytest.approx(8 * (m * layer.ep.sum - layer.hidden))
    assert 0.8 * layer.ep.sum < layer.hidden < 0.9 * layer.ep.sum, "overlapped computation is a tenth slower"
    assert where.time(joint).compute == where.time(LAYOUT).compute
    # A recompute does not hand over.
    full = where.layer(replace(joint, recompute="full"))
    assert full.ep.sum == pytest.approx(1.5 * layer.ep.sum)
    assert full.waits == layer.waits
    assert where.memory(joint).activations == 2 * where.memory(LAYOUT).activations


def test_lanes_of_one_cpu_host_hide_nothing() -> None:
    device = find_device("CPU")
    for hosts in (1, 2):
        where = replace(space(), cluster=ClusterSpec(device, hosts, 16 // hosts))
        assert (where.layer(replace(LAYOUT, joint_experts=True)).hidden > 0) == (hosts > 1)


def test_reasons_say_seconds_and_bytes() -> None:
    where = space()
    joint, rows, replicas = expert_reasons(where, replace(LAYOUT, expert_slots=2))
    wire, gained = (
        2 * 8 * where.layer(replace(LAYOUT, expert_slots=2)).ep.sum,
        seconds(where, expert_slots=2) - seconds(where),
    )
    assert joint.startswith(
        f"messages of experts take {wire:.3g} s a step: not joint; forwards and backwards together take -"
    )
    assert rows.startswith(
        f"rows of the busiest rank 1.35 -> 1.05 x the mean, assumed: replicas; in 2 slots they take {gained:+.3g} s"
    )
    assert replicas.startswith("a replica sends 12 MiB of weights and 12 MiB of gradients between hosts")
    assert "from 1,536 rows of a rank for the expert, and the mean is 1,024" in replicas
    piped = replace(LAYOUT, pp=2, ep=8, dp=8, zero=1, vpp=2)
    assert "schedule 1f1b has no joint slots" in expert_reasons(where, replace(piped, vpp=1))[0]
    assert (
        "a joint slot of dualpipev hides 8"
        in expert_reasons(where, replace(piped, schedule="dualpipev", joint_experts=True))[0]
    )
    assert not expert_reasons(where, replace(LAYOUT, ep=1))
    assert where.memory(LAYOUT).total < 80 * GIB
