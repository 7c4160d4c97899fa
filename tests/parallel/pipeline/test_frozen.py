"""Frozen weights (`requires_grad_(False)` before `parallelize`) under a pipeline: all trained weights have the gradients and
updates of the plain model in one process, wherever the frozen weights are.
"""

import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.lab.families import family
from tests.lab.parity import compare, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.folders import folder_of
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.checkpoint.manifest import Position
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.checkpoint.restore import Reader, restore, verify_together
from weft.checkpoint.snapshot import Snapshots, Target
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.job import Checkpoint, Job, Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Comm, Memory, Pipeline, Plan, Precision
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

SETTINGS = Optimizer(lr=1e-2, eps=1e-3, warmup_steps=0, schedule="constant", clip_norm=0.5)
STEPS, ROWS, TOKENS = 3, 8, 12
CPU = torch.device("cpu")
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
LLAMA = Model(config={**family("llama"), "num_hidden_layers": 4})
TIED = Model(config={**family("qwen3"), "num_hidden_layers": 4})
GPT2 = Model(config={**family("gpt2"), "n_layer": 4})  # tied, with biases
EXPERTS = Model(config={**family("qwen3_moe"), "num_hidden_layers": 4})
BALANCED = Model(config={**family("qwen3_moe"), **AUXILIARY, "num_hidden_layers": 4})


class Case(NamedTuple):
    source: Model
    frozen: tuple[str, ...]
    """Patterns of parameter names; a pattern after ! is an exception."""


def blocks(*indices: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{index}.*" for index in indices)


EMBEDDING, HEAD = "model.embed_tokens.*", ("model.norm.*", "lm_head.*")
CASES = {
    "embedding": Case(LLAMA, (EMBEDDING,)),
    "first stage": Case(LLAMA, (EMBEDDING, *blocks(0, 1))),
    "half of the first stage": Case(LLAMA, (EMBEDDING, *blocks(0), "*layernorm*")),
    "all but the last block": Case(LLAMA, (EMBEDDING, *blocks(0, 1, 2), *HEAD)),
    "all but the head": Case(LLAMA, (EMBEDDING, *blocks(0, 1, 2, 3), "model.norm.*")),
    "last stage": Case(LLAMA, (*blocks(2, 3), *HEAD)),
    "all but the embedding": Case(LLAMA, (*blocks(0, 1, 2, 3), *HEAD)),
    "all but the last norm of a block": Case(LLAMA, ("*", "!*post_attention_layernorm*")),
    "all but two matrices": Case(LLAMA, ("*", "!*v_proj*", "!*q_proj*")),
    "tied embedding": Case(TIED, (EMBEDDING,)),
    "tied embedding and first stage": Case(TIED, (EMBEDDING, *blocks(0, 1))),
    "all but biases": Case(GPT2, ("*.weight",)),
    "experts": Case(EXPERTS, ("*.experts.*", EMBEDDING)),
    "all but routers": Case(EXPERTS, ("*", "!*.gate.*")),
    "first stage with an auxiliary loss": Case(BALANCED, (EMBEDDING, *blocks(0, 1))),
    "embedding with an auxiliary loss": Case(BALANCED, (EMBEDDING,)),
}


def trains(name: str, frozen: tuple[str, ...]) -> bool:
    exceptions = [pattern[1:] for pattern in frozen if pattern.startswith("!")]
    named = any(fnmatch.fnmatchcase(name, pattern) for pattern in frozen)
    return not named or any(fnmatch.fnmatchcase(name, pattern) for pattern in exceptions)


def freeze(model: Any, frozen: tuple[str, ...]) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name, frozen))
    return model


def batches_of(vocab_size: int) -> list[MicroBatch]:
    """One global batch per step: rows of one document each, with unequal numbers of targets."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(3, vocab_size, (ROWS, TOKENS + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[0, 5:] = -100
        found.append(MicroBatch(tokens[:, :-1].contiguous(), torch.arange(TOKENS).repeat(ROWS, 1), targets))
    return found


class Trace(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    """Clipped gradients of every step: STEP/NAME."""
    weights: dict[str, torch.Tensor]


def reference(case: Case, dtype: str) -> Trace:
    """The plain model in one process: a forward per row, with PyTorch's AdamW and clipping."""
    model: Any = build_plain(case.source, read_config(case.source), DTYPES[dtype]).train()
    trained = [parameter for parameter in freeze(model, case.frozen).parameters() if parameter.requires_grad]
    decay = {True: SETTINGS.weight_decay, False: 0.0}
    groups = [{"params": [p for p in trained if (p.ndim >= 2) == m], "weight_decay": decay[m]} for m in decay]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches_of(model.config.vocab_size)):
        total, count = 0.0, int((batch.targets != -100).sum())
        for tokens, targets in zip(batch.input_ids, batch.targets, strict=True):
            output = model(input_ids=tokens[None], use_cache=False)
            loss = F.cross_entropy(output.logits[0], targets, reduction="sum") / count
            balance = 0.1 * output.aux_loss / ROWS if case.source is BALANCED else 0.0
            (loss + balance).backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm).item())
        gradients |= {f"{step}/{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Trace(losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()})


def open_model(rank: int, ranks: int, case: Case, plan: Plan, has_weights: bool = True) -> tuple[Any, Plan, Any]:
    """Parallelized model of a user's training loop: with its weights, or on the meta device and materialized afterwards."""
    plan = resolved(plan, ranks)
    mesh, config, dtype = build_mesh(plan, "cpu", ranks), read_config(case.source), DTYPES[plan.precision.update]
    model: Any = build_plain(case.source, config, dtype) if has_weights else build_on_meta(config, dtype)
    parallelize(freeze(model, case.frozen).train(), plan, mesh)
    if not has_weights:
        materialize(model, case.source, CPU)
    return model, plan, mesh


def train(model: Any, optimizer: DistributedOptimizer, batch: MicroBatch, plan: Plan, mesh: Any) -> Any:
    mine = share(batch, data_rank(mesh), plan.parallel.data_ranks, 1)
    result = train_step(model, optimizer, mine, SETTINGS.clip_norm)
    assert result.problem is None, result.problem
    return result


def run(rank: int, ranks: int, case: Case, plan: Plan, has_weights: bool) -> Trace:
    model, plan, mesh = open_model(rank, ranks, case, plan, has_weights)
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    losses, norms, gradients = [], [], {}

    def keep(*_: object) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[f"{len(losses)}/{name}"] = parameter.grad.detach().clone()

    optimizer.inner.register_step_pre_hook(keep)
    for batch in batches_of(model.config.vocab_size):
        result = train(model, optimizer, batch, plan, mesh)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    full = {key: whole(gradient) for key, gradient in gradients.items()}
    return Trace(losses, norms, full, gather_weights(model))


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(case: Case, plan: Plan, ranks: int, has_weights: bool = True, tolerance: float = 1e-5) -> None:
    """Compare losses, norms and gradients of three steps, and the final weights."""
    expected = reference(case, plan.precision.update)
    traces = run_ranks(ranks, run, case, plan, has_weights, timeout=60)
    embedding = next(iter(expected.weights))
    for trace in traces:
        assert trace.losses == pytest.approx(expected.losses, rel=tolerance)
        assert trace.norms == pytest.approx(expected.norms, rel=tolerance)
        for key, gradient in trace.gradients.items():
            # The head's copy of a tied embedding has the summed gradient.
            known = key if key in expected.gradients else f"{key[0]}/{embedding}"
            compare(f"gradient {key}", gradient, expected.gradients[known], tolerance, at_least=1e-3)
    assert {key for trace in traces for key in trace.gradients} >= set(expected.gradients)
    for name, weight in expected.weights.items():
        compare(name, traces[0].weights[name], weight, tolerance, at_least=STEPS * SETTINGS.lr)


@pytest.mark.must("parity: pipeline schedules", case="1-interleaved-first stage")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_weights_match_plain_model_for_every_schedule_and_zero(zero: int, schedule: str, name: str) -> None:
    check(CASES[name], plan_for("fp32", Pipeline(schedule=schedule), pp=2, zero=zero), 2, has_weights=zero < 2)


# Frozen case, ranks, schedule, degrees, other tables of the plan
LAYOUTS: dict[str, tuple[str, int, str, dict[str, int], dict[str, Any]]] = {
    "dp, zero 0": ("first stage", 4, "zb-h1", {"zero": 0}, {}),
    "dp, zero 1": ("all but two matrices", 4, "zbv", {"zero": 1}, {}),
    "dp, zero 2": ("tied embedding", 4, "1f1b", {"zero": 2}, {}),
    "dp, zero 3": ("half of the first stage", 4, "dualpipev", {"zero": 3}, {}),
    "two stages without backward": ("all but the last block", 4, "1f1b", {"pp": 4, "zero": 1}, {}),
    "two stages without weights that train": ("all but the embedding", 4, "zb-h1", {"pp": 4, "zero": 3}, {}),
    "tp": ("all but two matrices", 4, "zb-h1", {"tp": 2, "zero": 1}, {}),
    "tp in chunks": ("half of the first stage", 4, "zb-h1", {"tp": 2, "zero": 0}, {"comm": Comm(overlap_chunks=2)}),
    "cp": ("first stage", 4, "zbv", {"cp": 2, "zero": 1}, {}),
    "ep": ("experts", 4, "1f1b", {"ep": 2, "zero": 1}, {}),
    "recompute of blocks": ("first stage", 2, "zbv", {"zero": 3}, {"memory": Memory(recompute=("block",))}),
    "recompute of parts": ("embedding", 2, "zb-h1", {"zero": 1}, {"memory": Memory(recompute=("attention", "mlp"))}),
    "recompute of outputs": (
        "half of the first stage",
        2,
        "1f1b",
        {"zero": 0},
        {"memory": Memory(recompute=("norm",))},
    ),
    "offload": ("all but two matrices", 2, "zb-h1", {"zero": 1}, {"memory": Memory(offload=("block",))}),
    "states on the host": (
        "all but the last block",
        2,
        "1f1b",
        {"zero": 1},
        {"memory": Memory(optimizer_device="host")},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_weights_match_plain_model_with_other_axes_and_techniques(layout: str) -> None:
    name, ranks, schedule, degrees, tables = LAYOUTS[layout]
    plan = plan_for("fp32", Pipeline(schedule=schedule), **{"pp": 2, **degrees}).model_copy(update=tables)
    check(CASES[name], plan, ranks)


BF16 = {"param_dtype": "bf16", "update": "fp32", "reduce_dtype": "fp32"}


def run_bf16(rank: int, ranks: int, case: Case, plan: Plan) -> Trace:
    return run(rank, ranks, case, plan.model_copy(update={"precision": Precision(**BF16)}), True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "zero"), [("half of the first stage", 1), ("first stage", 3)])
def test_bf16_matches_one_rank(name: str, zero: int) -> None:
    """Also with split backwards, where some weight gradients of a stage are immediate and some are deferred."""
    alone = run_ranks(1, run_bf16, CASES[name], plan_for("fp32", zero=zero))[0]
    traces = run_ranks(2, run_bf16, CASES[name], plan_for("fp32", Pipeline(schedule="zb-h1"), pp=2, zero=zero))
    assert {key for trace in traces for key in trace.gradients} == set(alone.gradients)
    for trace in traces:
        assert trace.losses == alone.losses
        for key, gradient in trace.gradients.items():
            compare(key, gradient, alone.gradients[key], 1e-6)


def keep_and_resume(
    rank: int, ranks: int, case: Case, plan: Plan, folder: Path, begin: int, end: int
) -> dict[str, Any]:
    """Resume from the checkpoint of step `begin`, train to step `end`, and save a checkpoint there."""
    model, plan, mesh = open_model(rank, ranks, case, plan)
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    if begin:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with Reader(folder_of(folder, begin), verify_together(folder_of(folder, begin))) as reader:
            restore(model, optimizer, reader, lambda files: None)
    for batch in batches_of(model.config.vocab_size)[begin:end]:
        train(model, optimizer, batch, plan, mesh)
    job = Job(model=case.source, plan=plan, checkpoint=Checkpoint(every=1))
    snapshots = Snapshots(job, model, optimizer, detect(), CPU)
    position = Position(step=end, next_batch=end, loss_scale=LossScale())
    snapshots.take(position, Target(folder, rank == 0, keep=0, keep_hours=0))
    snapshots.finish()
    dist.barrier()
    return gather_weights(model)


@pytest.mark.parametrize("name", ["all but the last block", "tied embedding", "last stage"])
def test_checkpoint_resume_is_bit_equal_also_on_one_rank(name: str, tmp_path: Path) -> None:
    """Frozen weights are saved without optimizer states, also on a rank where all weights are frozen."""
    case, plan = CASES[name], plan_for("fp32", Pipeline(schedule="1f1b"), pp=2, zero=1)
    through = run_ranks(2, keep_and_resume, case, plan, tmp_path / "through", 0, 3)[0]
    run_ranks(2, keep_and_resume, case, plan, tmp_path / "cut", 0, 2)
    resumed = run_ranks(2, keep_and_resume, case, plan, tmp_path / "cut", 2, 3)[0]
    alone = run_ranks(1, keep_and_resume, case, plan_for("fp32", zero=0), tmp_path / "cut", 3, 3)[0]
    assert resumed.keys() == through.keys()
    for key, weight in through.items():
        assert torch.equal(resumed[key], weight), key
        assert torch.equal(alone[key], weight), key
    expected = reference(case, "fp32").weights
    for key, weight in expected.items():
        compare(key, resumed[key], weight, 1e-5, at_least=STEPS * SETTINGS.lr)


def train_changed(rank: int, ranks: int, case: Case, name: str, becomes: bool) -> None:
    model, plan, mesh = open_model(rank, ranks, case, plan_for("fp32", pp=2, zero=1))
    for key, parameter in model.named_parameters():
        if key == name:
            parameter.requires_grad_(becomes)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, detect())
    train(model, optimizer, batches_of(model.config.vocab_size)[0], plan, mesh)


def test_weight_unfrozen_after_parallelize_is_refused() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(RankError, match=rf"{name} trains, but was frozen in weft.parallelize"):
        run_ranks(2, train_changed, CASES["first stage"], name, True)


def test_fully_frozen_model_is_refused() -> None:
    with pytest.raises(RankError, match="no parameter of the model trains"):
        run_ranks(2, train_changed, Case(LLAMA, ("*",)), "", False)
