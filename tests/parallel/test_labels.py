"""The loss of a custom training loop is the mean over the targets of all ranks, for any distribution of targets."""

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.lab.families import family
from tests.lab.parity import compare, full_tensor, plan_for
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from tests.lab.shrink import shrunk
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.job import Model
from weft.parallel.data.fsdp import begin_micro_batch
from weft.parallel.runtime import reorder_packed, runtime
from weft.plan import Plan
from weft.topology.mesh import build_mesh, data_rank

LLAMA = Model(config=family("llama"))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 2": (2, {"zero": 2}),
    "zero 3": (2, {"zero": 3}),
    "two copies": (4, {"dp_replicate": 2, "zero": 3}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 1}),
    "cp2 x dp2": (4, {"cp": 2, "zero": 2}),
}


def labelled_rows() -> tuple[Tensor, Tensor]:
    """Four rows with 15, 3, 11 and 0 targets."""
    rows = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(1))
    labels = rows.clone()
    for row, length in enumerate((16, 4, 12, 1)):
        labels[row, length:] = -100
    return rows, labels


def build(source: Model, plan: Plan, ranks: int) -> tuple[Any, Any, int, int]:
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = weft.parallelize(build_on_meta(read_config(source), torch.float64), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    return model, mesh, data_rank(mesh), plan.parallel.data_ranks


def custom_step(
    rank: int, ranks: int, source: Model, plan: Plan, micro_batches: int
) -> tuple[float, dict[str, Tensor], float]:
    """Loss and gradients of a step, and the evaluation loss of this rank."""
    model, mesh, part, parts = build(source, plan, ranks)
    rows, labels = (tensor.chunk(parts)[part] for tensor in labelled_rows())
    items = weft.count_targets(labels.chunk(micro_batches), mesh) if micro_batches > 1 else None
    total = 0.0
    for index in range(micro_batches):
        begin_micro_batch(
            model, resolved(plan, ranks), runtime(model).gradient_reducer, last=index == micro_batches - 1
        )
        own = {"input_ids": rows.chunk(micro_batches)[index], "labels": labels.chunk(micro_batches)[index]}
        loss = model(**own, num_items_in_batch=items).loss
        loss.backward()
        total += loss.item()
    gradients = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        evaluated = model(input_ids=rows, labels=labels).loss.item()
    return total, reorder_packed(model, gradients, by_rank=False), evaluated


@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    [
        (name, count) for name in LAYOUTS for count in (1, 2) if (name, count) != ("two copies", 2)
    ],  # micro-batches of one row
)
def test_loss_is_the_mean_over_unevenly_distributed_targets(layout: str, micro_batches: int) -> None:
    ranks, parallel = LAYOUTS[layout]
    model = build_plain(LLAMA, read_config(LLAMA), torch.float64)
    rows, labels = labelled_rows()
    loss = model(input_ids=rows, labels=labels).loss
    loss.backward()
    for value, gradients, _ in run_ranks(ranks, custom_step, LLAMA, plan_for("fp64", **parallel), micro_batches):
        assert value == pytest.approx(loss.item(), rel=3e-7)  # float32
        for name, parameter in model.named_parameters():
            compare(name, gradients[name], parameter.grad, 1e-6)  # Transformers computes the loss in float32


def test_evaluation_loss_is_the_mean_over_local_rows() -> None:
    model = build_plain(LLAMA, read_config(LLAMA), torch.float64)
    rows, labels = labelled_rows()
    expected = [model(input_ids=rows[part], labels=labels[part]).loss.item() for part in (slice(2), slice(2, 4))]
    found = run_ranks(2, custom_step, LLAMA, plan_for("fp64", zero=0), 1)
    assert [evaluated for *_, evaluated in found] == pytest.approx(expected, rel=3e-7)


def step_with_items(rank: int, ranks: int, items: tuple[int, ...]) -> None:
    model, _, part, parts = build(LLAMA, plan_for("fp64", zero=0), ranks)
    rows, labels = (tensor.chunk(parts)[part] for tensor in labelled_rows())
    model(input_ids=rows, labels=labels, num_items_in_batch=items[rank])


@pytest.mark.parametrize("items", [(18, 11), (18, 18), (29, 40)], ids=str)
def test_items_of_one_rank_are_refused(items: tuple[int, ...]) -> None:
    with pytest.raises(RankError, match="num_items_in_batch is"):
        run_ranks(2, step_with_items, items)


def step_of_other_loss(rank: int, ranks: int, even: bool) -> float:
    model, *_, part, parts = build(Model(config=shrunk("mvp")), plan_for("fp32", zero=0), ranks)
    rows, labels = (tensor.chunk(parts)[part] for tensor in labelled_rows())
    return model(input_ids=rows, labels=rows if even else labels).loss.item()


def test_inexact_loss_is_refused_for_uneven_targets() -> None:
    """MVP computes the loss inside its forward."""
    assert all(loss > 0 for loss in run_ranks(2, step_of_other_loss, True))
    with pytest.raises(RankError, match=r"between 13 and 20 targets"):
        run_ranks(2, step_of_other_loss, False)
