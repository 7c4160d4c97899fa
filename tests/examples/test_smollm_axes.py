"""Real weights and text: ten steps under tp, cp and pp have the losses of the untouched model, in float64.

Float32 would not do: ten updates of AdamW enlarge the rounding of 135 million gradients to more than 1e-5 of the loss.
The norms of Transformers still compute in float32, which is why 1e-6 is the limit and not less.

The model has 9 heads and 3 KV heads for tp 3; with 3 stages the head is a copy of the embedding, two ranks away.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.examples.test_smollm import smollm, tokens  # noqa: F401  (fixtures)
from tests.lab.parity import plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import close_pools, run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.job import Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Plan
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

STEPS = 10
SETTINGS = Optimizer(lr=1e-5, clip_norm=1.0)


def batch(tokens: torch.Tensor) -> MicroBatch:  # noqa: F811
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    return MicroBatch(tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous())


def curve(rank: int, ranks: int, plan: Plan, folder: Path, tokens: torch.Tensor) -> list[float]:  # noqa: F811
    source, plan = Model(path=str(folder)), resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source), torch.float64), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    rows_at_once = 1 if plan.parallel.pp > 1 else len(tokens)
    micro_batches = share(batch(tokens), data_rank(mesh), plan.parallel.data_ranks, rows_at_once)
    return [train_step(model, optimizer, micro_batches, clip_norm=SETTINGS.clip_norm).loss for _ in range(STEPS)]


@pytest.fixture(scope="module")
def expected(smollm: Path, tokens: torch.Tensor) -> list[float]:  # noqa: F811
    """Losses of the untouched model, with PyTorch's own optimizer and clipping."""
    model: Any = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float64)
    model.train()
    optimizer, rows, losses = build_optimizer(model, SETTINGS), batch(tokens[:2]), []
    for _ in range(STEPS):
        logits = model(input_ids=rows.input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.exclusive("its float64 states take half of the memory of the machine")
@pytest.mark.parametrize(
    ("ranks", "parallel"), [(3, {"tp": 3, "zero": 1}), (2, {"cp": 2, "zero": 1}), (3, {"pp": 3, "zero": 1})]
)
def test_ten_steps_equal_the_untouched_model(
    smollm: Path,  # noqa: F811
    tokens: torch.Tensor,  # noqa: F811
    expected: list[float],
    ranks: int,
    parallel: dict[str, int],
) -> None:
    assert expected[-1] < expected[0] - 0.1
    plan = plan_for("fp64", **parallel)
    close_pools()  # idle ranks keep the memory of earlier tests
    for losses in run_ranks(ranks, curve, plan, smollm, tokens[:2], timeout=300):
        assert losses == pytest.approx(expected, rel=1e-6)
    close_pools()
