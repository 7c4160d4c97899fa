"""The z-loss of routers and its gradients equal a plain script with forward hooks on the untouched model, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import compare, full_tensor, logits_of, packed_batches, plan_for, share
from tests.lab.plans import resolved, resolved_job
from tests.lab.pool import run_ranks
from tests.lab.runs import train_in_the_pool
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.device.detect import detect
from weft.errors import JobError
from weft.job import Job, Model, Optimizer, Train
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Comm, Memory, Pipeline, Plan
from weft.topology.mesh import build_mesh, data_rank
from weft.training.functions import use_loss
from weft.training.job_checks import check_model
from weft.training.metrics import read_metrics
from weft.training.optimizer import build_optimizer
from weft.training.step import compute_gradients

COEFFICIENT = 0.1
JOINT = {"comm": Comm(expert_overlap="joint")}
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {  # ranks, plan, micro-batch
    "zero 3": (2, {"zero": 3}, 1),
    "tp 2, ep 2": (2, {"tp": 2, "ep": 2, "zero": 1}, 2),
    "tp 2 without sp": (2, {"tp": 2, "sp": False, "zero": 0}, 4),
    "cp 2": (2, {"cp": 2, "zero": 2}, 2),
    "joint, recompute": (2, {"zero": 2, "ep": 2, **JOINT, "memory": Memory(recompute=("block",))}, 1),
    "pp 2": (2, {"pp": 2, "zero": 1, "pipeline": Pipeline(schedule="zb-h1")}, 1),
    "cp 2, tp 2, ep 4": (4, {"cp": 2, "tp": 2, "ep": 4, "zero": 1}, 1),
    "pp 2, tp 2, virtual": (
        4,
        {"pp": 2, "tp": 2, "zero": 0, "pipeline": Pipeline(schedule="zbv", virtual_stages=2)},
        1,
    ),
    "dualpipev, ep 2": (4, {"pp": 2, "ep": 2, "zero": 0, "pipeline": Pipeline(schedule="dualpipev")}, 1),
}


def source(name: str, **changes: Any) -> Model:
    return Model(config={**family(name), "num_hidden_layers": 4, "first_k_dense_replace": 2, **changes})


def on_rank(rank: int, ranks: int, origin: Model, plan: Plan, micro_batch: int) -> tuple[dict[str, Any], float, float]:
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(origin), torch.float64), plan, mesh)
    use_loss(model, Job(model=origin, train=Train(router_z_loss=COEFFICIENT), plan=plan))
    materialize(model, origin, torch.device("cpu"))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, Optimizer()), model, detect())
    mine = share(packed_batches(96, rows=8)[0], data_rank(mesh), plan.parallel.data_ranks, micro_batch)
    found = compute_gradients(model, optimizer, mine)
    gradients = {name: full_tensor(parameter.grad).clone() for name, parameter in model.named_parameters()}
    assert found.router_z_loss is not None
    return gradients, found.router_z_loss, found.loss


def reference(origin: Model) -> tuple[dict[str, Any], float, float]:
    """Gradients, z-loss and cross entropy of the untouched model in one process."""
    model = build_plain(origin, read_config(origin), torch.float64).train()
    logits: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    batch = packed_batches(96, rows=8)[0]
    loss = F.cross_entropy(logits_of(model, batch).flatten(0, 1), batch.targets.flatten())
    z_loss = torch.logsumexp(torch.cat(logits), -1).square().mean()
    (loss + COEFFICIENT * z_loss).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, z_loss.item(), loss.item()


@pytest.mark.must("parity: z-loss of routers", case="mixtral-pp 2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "granitemoe"])
def test_gradients_equal_one_process(name: str, layout: str) -> None:
    ranks, tables, micro_batch = LAYOUTS[layout]
    tables = dict(tables)
    outside = {key: tables.pop(key) for key in ("comm", "memory") if key in tables}
    plan = plan_for("fp64", **tables).model_copy(update=outside)
    gradients, z_loss, loss = reference(source(name))
    tolerance = 1e-6 if name in ("deepseek_v3", "granitemoe") else 1e-10  # whose logits are float32
    seen = set()
    for own, own_z_loss, own_loss in run_ranks(ranks, on_rank, source(name), plan, micro_batch):
        assert (own_z_loss, own_loss) == pytest.approx((z_loss, loss), rel=tolerance)
        for key, gradient in own.items():
            compare(key, gradient, gradients[key], tolerance)
        seen |= own.keys()
    assert seen == gradients.keys()


def test_a_run_records_the_z_loss(tmp_path: Path) -> None:
    """A large factor makes the z-loss smaller; without the key there is none."""
    config = {**family("qwen3_moe"), "vocab_size": 300}
    found = []
    for name, train in (("with", {"router_z_loss": 10.0}), ("aux", {"router_z_loss": 0.001}), ("without", {})):
        (tmp_path / name).mkdir()
        optimizer = {"lr": 0.01, "warmup_steps": 0}
        path = write_job(tmp_path / name, model={"config": config}, train={"steps": 4, **train}, optimizer=optimizer)
        out, _ = train_in_the_pool(Job.load(path), 2)
        found.append([row.router_z_loss for row in read_metrics(out / "metrics.jsonl")])
    strong, weak, without = found
    assert without == [None] * 4
    assert strong[0] == pytest.approx(weak[0], rel=1e-6)
    assert strong[-1] < 0.99 * weak[-1]


@pytest.mark.must("refusal: z-loss of routers")
@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (family("llama"), "llama, which has no routers"),
        (
            {**family("llama"), "model_type": "llama4_text", "num_local_experts": 4, "intermediate_size_mlp": 48},
            r"llama4_text: model\.layers\.0\.feed_forward\.router does not return its logits",
        ),
    ],
)
def test_a_model_whose_logits_cannot_be_seen_is_refused(config: dict[str, Any], problem: str, tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path, model={"config": {**config, "vocab_size": 300}}, train={"router_z_loss": 0.001}))
    job = resolved_job(job, 1)
    with pytest.raises(JobError, match=rf"router_z_loss = 0\.001 for {problem}"):
        check_model(job)
