"""Correction biases of routers follow the loads of global batches, as beside the untouched model, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import logits_of, packed_batches, share
from tests.lab.plans import resolved, resolved_job
from tests.lab.pool import run_ranks
from tests.lab.runs import train_in_the_pool
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.errors import JobError
from weft.job import Job, Model
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Plan
from weft.topology.mesh import build_mesh, data_rank
from weft.training.forward_backward import forward_backward
from weft.training.job_checks import check_model

RATE, STEPS = 0.05, 3
BIAS = "e_score_correction_bias"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0, ep 2": (2, {"parallel": {"zero": 0, "ep": 2}}),
    "zero 3": (2, {"parallel": {"zero": 3}}),
    "tp 2, ep 2": (2, {"parallel": {"tp": 2, "ep": 2}}),
    "cp 2": (2, {"parallel": {"cp": 2}}),
    "recompute": (2, {"parallel": {"zero": 2}, "memory": {"recompute": ["block"]}}),
    "joint, replicas": (
        2,
        {
            "parallel": {"zero": 2, "ep": 2, "expert_balance": "replicate"},
            "comm": {"expert_overlap": "joint"},
            "memory": {"recompute": ["block"]},
        },
    ),
    "pp 2": (2, {"parallel": {"pp": 2, "zero": 0}}),
}


def source(name: str) -> Model:
    return Model(config={**family(name), "first_k_dense_replace": 0})


def reference(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and biases of the untouched model, whose biases are moved by hand."""
    model = build_plain(source(name), read_config(source(name)), torch.float32).train()
    chosen: dict[str, list[torch.Tensor]] = {}
    for key, module in model.named_modules():
        if key.endswith(".experts"):
            chosen[key.removesuffix(".experts")] = seen = []
            module.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[1].flatten()))
    losses = []
    for batch in packed_batches(96)[:STEPS]:
        loss = F.cross_entropy(logits_of(model, batch).flatten(0, 1), batch.targets.flatten(), reduction="sum")
        losses.append(loss.item())
        for key, bias in model.named_buffers():
            if key.endswith(BIAS):
                layer = next(name for name in chosen if key.startswith(f"{name}."))
                load = torch.bincount(torch.cat(chosen[layer]), minlength=len(bias)).float()
                bias += RATE * torch.sign(load.mean() - load)
        for seen in chosen.values():
            seen.clear()
    return losses, {key: bias for key, bias in model.named_buffers() if key.endswith(BIAS)}


def on_rank(rank: int, ranks: int, name: str, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source(name)), torch.float32), plan, mesh)
    materialize(model, source(name), torch.device("cpu"))
    model.train()
    losses, routers = [], runtime(model).router_stats
    for batch in packed_batches(96)[:STEPS]:
        mine = share(batch, data_rank(mesh), plan.parallel.data_ranks, 1)
        losses.append(forward_backward(model, mine, 1.0).item())
        routers.correct(routers.take_loads() or {}, RATE)
    return losses, {key: bias for key, bias in model.named_buffers() if key.endswith(BIAS)}


@pytest.mark.must("parity: biases of routers", case="glm4_moe-joint, replicas")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_biases_equal_one_process(name: str, layout: str) -> None:
    ranks, tables = LAYOUTS[layout]
    precision = {"param_dtype": "fp32", "update": "fp32", "reduce_dtype": "fp32"}
    plan = Plan.model_validate({"precision": precision, **tables})
    losses, biases = reference(name)
    assert all(bias.abs().max() > RATE / 2 for bias in biases.values())
    found = run_ranks(ranks, on_rank, name, plan)
    copies = plan.parallel.tp  # ranks with the same loss
    total = [sum(each) / copies for each in zip(*(part[0] for part in found), strict=True)]
    assert total == pytest.approx(losses, rel=1e-5)
    seen = {}
    for _, part in found:
        for key, bias in part.items():
            torch.testing.assert_close(bias, biases[key], rtol=0, atol=1e-6)
            seen[key] = bias
    assert seen.keys() == biases.keys()


def test_a_run_moves_and_saves_biases(tmp_path: Path) -> None:
    config = {**family("deepseek_v3"), "first_k_dense_replace": 0, "vocab_size": 300}
    path = write_job(tmp_path, model={"config": config}, train={"steps": 3, "router_bias_rate": RATE})  # odd
    out, _ = train_in_the_pool(Job.load(path), 2)
    exported = build_plain(Model(path=str(out / "export")), read_config(Model(path=str(out / "export"))), torch.float32)
    biases = [bias for key, bias in exported.named_buffers() if key.endswith(BIAS)]
    assert len(biases) == 2
    for bias in biases:
        assert set((bias / RATE).round().int().tolist()) <= set(range(-4, 5))
        assert bias.abs().max() > 0


@pytest.mark.must("refusal: biases of routers")
def test_a_model_without_biases_is_refused(tmp_path: Path) -> None:
    config = {**family("qwen3_moe"), "vocab_size": 300}
    job = Job.load(write_job(tmp_path, model={"config": config}, train={"router_bias_rate": RATE}))
    job = resolved_job(job, 1)
    with pytest.raises(JobError, match=r"router_bias_rate = 0\.05 for qwen3_moe"):
        check_model(job)
