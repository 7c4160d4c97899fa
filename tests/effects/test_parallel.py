"""Effects of the table plan.parallel and of plan.techniques on a run of `weft train`."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.effects.watch import MOE, SEEN, route_to_the_first_half, unwatch
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import ObservedRun, observe
from weft.errors import PlanError
from weft.job import Job
from weft.parallel.runtime import runtime
from weft.training.session import Session

Run = Callable[..., ObservedRun]
TOKENS = 32
"""Tokens of a row."""
HEADS = {"model": {"config": {**family("llama"), "vocab_size": 300, "num_key_value_heads": 4}}}
"""A dense model with as many heads for keys as for queries, so that two ranks have two of each."""


def note_inputs(session: Session) -> None:
    """Note rows and tokens of the hidden states that enter the first block."""
    first = session.model.get_submodule(session.anatomy.blocks[0].name)
    first.register_forward_pre_hook(
        lambda _, args, kwargs: SEEN.append(tuple((*args, *kwargs.values())[0].shape[:2])), with_kwargs=True
    )


def facts_of(session: Session) -> dict[str, Any]:
    """Notes of a rank, the elements of its parameters, and the shapes of its parts of weights, by the end of the name."""
    local = {
        name: p.to_local() if isinstance(p, DTensor) else p.detach() for name, p in session.model.named_parameters()
    }
    shapes = {name.split("layers.0.")[-1]: tuple(part.shape) for name, part in local.items()}
    relocation = runtime(session.model).relocation
    homes = [own.expert_of for own in relocation.homes.values()] if relocation else []
    elements = sum(part.numel() for part in local.values())
    return {"seen": unwatch(), "elements": elements, "shapes": shapes, "homes": homes}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Function that trains one step with settings of plan.parallel; each run is made once."""
    found: dict[str, ObservedRun] = {}

    def trained(ranks: int = 2, fault: Any = note_inputs, **settings: Any) -> ObservedRun:
        names = ("model", "train", "comm", "checkpoint", "techniques")
        tables = {name: settings.pop(name) for name in names if name in settings}
        key = f"{ranks} {fault.__name__} {settings} {tables}"
        if key not in found:
            plan = {"parallel": settings, "precision": {"param_dtype": "fp32"}}
            plan |= {name: tables.pop(name) for name in ("comm", "techniques") if name in tables}
            train = {"steps": 1, "global_batch_size": 4, **tables.pop("train", {})}
            job = write_job(tmp_path_factory.mktemp("run"), plan=plan, train=train, **tables)
            found[key] = observe(Job.load(job), ranks, fault=fault, probe=facts_of)
        return found[key]

    return trained


def sent(run: ObservedRun) -> dict[str, dict[str, float]]:
    """Bytes and messages of rank 0 in the first step, by mesh axis."""
    return run.metrics[0].comm or {}


# Data parallelism


@pytest.mark.effect("plan.parallel.zero", "elements of the parameters of a rank: all with 0, half on two ranks with 3")
def test_zero_3_shards_parameters(run: Run) -> None:
    whole, sharded = ([facts["elements"] for facts in run(zero=zero).facts] for zero in (0, 3))
    assert whole[0] == whole[1] == sum(sharded)
    assert sharded[0] < 0.6 * whole[0]


@pytest.mark.effect(
    "plan.parallel.dp_replicate", "elements of the parameters of a rank, all instead of half; bytes of its all-reduce"
)
@pytest.mark.effect(
    "plan.parallel.dp_shard", "elements of the parameters of a rank; refusal of another number of ranks"
)
def test_replicas_hold_all_parameters_and_all_reduce_gradients(run: Run) -> None:
    sharded, replicas = run(zero=3), run(zero=3, dp_replicate=2, dp_shard=1)
    elements = sum(facts["elements"] for facts in sharded.facts)
    assert [facts["elements"] for facts in replicas.facts] == [elements] * 2
    assert sent(sharded).keys() == {"dp_shard"}
    assert sent(replicas).keys() == {"dp_replicate"}
    assert sent(replicas)["dp_replicate"]["all_reduce_bytes"] >= 4 * elements
    with pytest.raises(PlanError, match="dp_shard 1 = 1, but there are 2 ranks"):
        run(zero=3, dp_shard=1)


@pytest.mark.effect("plan.parallel.rows_per_rank", "rows of the hidden states of each rank: 3 and 1 instead of 2 and 2")
def test_ranks_get_the_rows_of_rows_per_rank(run: Run) -> None:
    equal, unequal = run(zero=3), run(zero=3, rows_per_rank=[3, 1])
    assert [facts["seen"][0] for facts in equal.facts] == [(2, TOKENS), (2, TOKENS)]
    assert [facts["seen"][0] for facts in unequal.facts] == [(3, TOKENS), (1, TOKENS)]
    assert unequal.metrics[0].rows_per_rank == (3, 1)


def slow_rank(session: Session) -> None:
    """Note the inputs; rank 1 needs 0.08 s more for each row."""
    note_inputs(session)
    if session.rank == 1:
        session.model.register_forward_pre_hook(
            lambda _, args, kwargs: time.sleep(0.08 * len(kwargs["input_ids"])), with_kwargs=True
        )


@pytest.mark.effect("plan.parallel.rebalance", "rows of a slow rank in the step after a checkpoint, fewer than half")
def test_rebalance_gives_a_slow_rank_fewer_rows(run: Run) -> None:
    train = {"steps": 5, "global_batch_size": 8, "micro_batch_size": 8}
    slow = run(fault=slow_rank, rebalance="auto", train=train, checkpoint={"every": 4})
    rows = [step.rows_per_rank for step in slow.metrics]
    assert rows[:4] == [(4, 4)] * 4
    first, second = rows[4]
    assert first > 4 > second
    assert [facts["seen"][4] for facts in slow.facts] == [(first, TOKENS), (second, TOKENS)]
    assert f"step 4: from now on the data ranks have {first}, {second} rows" in slow.printed[0]


# Tensor and context parallelism


@pytest.mark.effect("plan.parallel.tp", "shape of the query weight of a rank: half of the rows; bytes along tp")
@pytest.mark.effect("plan.parallel.sp", "tokens of a rank between blocks; all-reduces along tp instead of gathers")
def test_tensor_parallelism_splits_matrices_and_sequence_parallelism_tokens(run: Run) -> None:
    one, both, without = run(zero=0), run(zero=0, tp=2), run(zero=0, tp=2, sp=False)
    rows, columns = one.facts[0]["shapes"]["self_attn.q_proj.weight"]
    for split in (both, without):
        assert [facts["shapes"]["self_attn.q_proj.weight"] for facts in split.facts] == [(rows // 2, columns)] * 2
        assert "tp" in sent(split)
        assert "tp" not in sent(one)
    assert [facts["seen"][0] for facts in both.facts] == [(4, TOKENS // 2)] * 2
    assert [facts["seen"][0] for facts in without.facts] == [(4, TOKENS)] * 2
    activations = 4 * 4 * TOKENS * 32  # bytes of the hidden states of all rows
    assert sent(both)["tp"]["reduce_scatter_bytes"] > activations > sent(both)["tp"]["all_reduce_bytes"]
    assert sent(without)["tp"]["all_reduce_bytes"] > activations
    assert "reduce_scatter_bytes" not in sent(without)["tp"]


@pytest.mark.effect("plan.parallel.cp", "tokens of a rank, half of each row; bytes along the ring")
@pytest.mark.effect("plan.parallel.cp_ulysses", "all-to-alls of heads instead of messages along the ring")
@pytest.mark.effect(
    "plan.comm.ulysses_chunks", "number of all-to-alls of a step: twice as many with 2, of as many bytes"
)
def test_context_parallelism_splits_rows_along_a_ring_or_by_heads(run: Run) -> None:
    ring, heads = run(cp=2, **HEADS), run(cp=2, cp_ulysses=2, **HEADS)
    chunks = run(cp=2, cp_ulysses=2, comm={"ulysses_chunks": 2}, **HEADS)
    for split in (ring, heads, chunks):
        assert [facts["seen"][0] for facts in split.facts] == [(4, TOKENS // 2)] * 2
    assert sent(ring)["cp_ring"]["send_bytes"] > 0
    assert "cp_ulysses" not in sent(ring)
    assert sent(heads)["cp_ulysses"]["all_to_all_bytes"] > 0
    assert "cp_ring" not in sent(heads)
    # In each of two layers: heads and tokens, in forward and backward. Both runs have the same small messages besides.
    assert sent(chunks)["cp_ulysses"]["messages"] == sent(heads)["cp_ulysses"]["messages"] + 2 * 4
    assert sent(chunks)["cp_ulysses"]["all_to_all_bytes"] == sent(heads)["cp_ulysses"]["all_to_all_bytes"]


# Experts

COPIES = 2 * TOKENS * 2
"""Copies of the tokens of one of two ranks."""


def moe(run: Run, ranks: int = 2, fault: Any = route_to_the_first_half, **settings: Any) -> ObservedRun:
    return run(ranks, fault, zero=0, model={"config": MOE}, **settings)


@pytest.mark.effect(
    "plan.parallel.ep", "experts of a rank, four of eight; rows that each rank computes; bytes along ep"
)
@pytest.mark.effect("plan.parallel.etp", "columns of the matrices of an expert on a rank: half; bytes along etp")
def test_experts_are_split_over_ranks(run: Run) -> None:
    one, split = moe(run), moe(run, ep=2)
    experts, outputs, inputs = one.facts[0]["shapes"]["mlp.experts.gate_up_proj"]
    assert [facts["shapes"]["mlp.experts.gate_up_proj"] for facts in split.facts] == [(4, outputs, inputs)] * 2
    assert experts == 8
    assert [facts["seen"][0] for facts in split.facts] == [2 * COPIES, 0]  # all experts of these tokens are on rank 0
    assert "ep" not in sent(one)
    assert sent(split)["ep"]["all_to_all_bytes"] > 0
    both = moe(run, 4, ep=2, etp=2)
    assert [facts["shapes"]["mlp.experts.gate_up_proj"] for facts in both.facts] == [(4, outputs // 2, inputs)] * 4
    assert "etp" not in sent(split)
    assert sent(both)["etp"]["all_to_all_bytes"] > 0


@pytest.mark.effect(
    "plan.parallel.expert_balance", "rows that each rank computes: the same, where the router chose one rank"
)
@pytest.mark.effect("plan.parallel.expert_slots", "rows that each rank computes, with a replica of one expert alone")
def test_replicas_of_hot_experts_even_out_the_rows_of_ranks(run: Run) -> None:
    balanced = moe(run, ep=2, expert_balance="replicate")
    slots = moe(run, ep=2, expert_balance="replicate", expert_slots=1)
    # Two calls in each layer, for replicas and for own experts; four experts have half of the copies of a rank each.
    assert [sum(facts["seen"][:2]) for facts in balanced.facts] == [COPIES, COPIES]
    assert [sum(facts["seen"][:2]) for facts in slots.facts] == [3 * COPIES // 2, COPIES // 2]


def note_kept_copies(session: Session) -> None:
    """Route tokens to the first experts, and note the router weights of the first layer before and after copies are dropped."""
    route_to_the_first_half(session)
    path = runtime(session.model).experts[session.anatomy.blocks[0].experts[0]]
    limit = path.limit
    assert limit is not None

    def noted(index: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = limit(index, weights)
        SEEN.extend(tensor.detach().clone() for tensor in (weights, kept[1]))
        return kept

    path.limit = noted


@pytest.mark.effect(
    "plan.parallel.expert_capacity", "copies that ranks compute: half, where half of the experts get all"
)
@pytest.mark.effect(
    "plan.parallel.expert_drop", "copies that are dropped: of the last tokens, or with the smallest weights"
)
def test_a_capacity_drops_copies_by_weight_or_by_position(run: Run) -> None:
    for drop, words in (("probs", "with the smallest router weights"), ("position", "of the last tokens")):
        dropped = moe(run, fault=note_kept_copies, ep=2, expert_capacity=1.0, expert_drop=drop)
        assert any(f"copies beyond 1 x an even load are dropped, those {words}" in line for line in dropped.screen)
        assert [facts["seen"][2] for facts in dropped.facts] == [COPIES, 0]  # of both ranks, which have `COPIES` each
        for facts in dropped.facts:
            before, after = facts["seen"][:2]
            kept = (after > 0).flatten().view(-1, 4)  # copies of each of the four experts, in the order of tokens
            assert kept.sum(0).tolist() == [COPIES // 8] * 4
            by_position = torch.arange(len(kept))[:, None].expand(-1, 4) < COPIES // 8
            assert torch.equal(kept, by_position) == (drop == "position")
            weights = before.flatten().view(-1, 4)
            smallest, largest = weights.where(kept, 1).amin(0), weights.where(~kept, 0).amax(0)
            assert bool((smallest >= largest).all()) == (drop == "probs")


@pytest.mark.effect(
    "plan.parallel.expert_relocate_every", "experts of the slots of all ranks after a step; experts that moved"
)
def test_experts_move_after_an_update(run: Run) -> None:
    still, moving = moe(run, fault=note_inputs, ep=2), moe(run, fault=note_inputs, ep=2, expert_relocate_every=1)
    assert still.metrics[0].moved_experts is None
    assert moving.facts[0]["homes"] == moving.facts[1]["homes"]
    slots = [(slot, expert) for homes in moving.facts[0]["homes"] for slot, expert in enumerate(homes)]
    others = sum(slot // 4 != expert // 4 for slot, expert in slots)
    assert moving.metrics[0].moved_experts == others > 0
    assert "step 1: " in moving.printed[0]
    assert "experts move to other ranks" in moving.printed[0]


# Techniques


def double_the_embeddings(model: Any, anatomy: Any, plan: Any, mesh: Any) -> None:
    """Technique that doubles the embeddings of a model, and notes its arguments at each call of its hook."""

    def double(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        SEEN.append((mesh.size(), plan.parallel.zero))
        return 2 * output

    model.get_submodule(anatomy.embedding).register_forward_hook(double)


@pytest.mark.effect("plan.techniques", "calls of a hook of the user's function on each rank; scale of its results")
def test_a_technique_changes_the_model_of_each_rank(run: Run) -> None:
    plain = run(zero=3, fault=note_scale)
    changed = run(zero=3, fault=note_scale, techniques=[f"{__name__}:double_the_embeddings"])
    for rank in (0, 1):
        (scale, *_), (call, doubled, *_) = plain.facts[rank]["seen"], changed.facts[rank]["seen"]
        assert call == (2, 3)
        assert doubled == pytest.approx(2 * scale)


def note_scale(session: Session) -> None:
    """Note the largest element of the hidden states that enter the first block."""
    first = session.model.get_submodule(session.anatomy.blocks[0].name)
    first.register_forward_pre_hook(
        lambda _, args, kwargs: SEEN.append((*args, *kwargs.values())[0].abs().max().item()), with_kwargs=True
    )
