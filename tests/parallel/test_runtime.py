"""The runtime of a model: found from the model, separate for each model, and nothing is set on the model's modules."""

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.lab.families import family
from tests.lab.parity import plan_for
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.model_config import read_config
from weft.errors import ModelError
from weft.job import Model
from weft.plan import Memory, Plan

EVERYTHING: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_moe", 4, {"ep": 2, "tp": 2, "zero": 1}),
    ("llama", 4, {"pp": 2, "cp": 2, "zero": 2}),
    ("gpt2", 2, {"tp": 2, "zero": 0}),
    ("llama", 2, {"zero": 3}),
]
TORCH = ("training", "forward")
"""What torch and its techniques set themselves: the mode, and the forward of an instance."""


def names_set(rank: int, ranks: int, name: str, plan: Plan) -> list[str]:
    """Attributes that `parallelize` adds to the modules of a model, as "class.attribute"."""
    source = Model(config=family(name))
    plain: Any = build_on_meta(read_config(source), torch.float32)
    before = {module: set(vars(module)) for module in plain.modules()}
    plan = resolved(plan, ranks)
    model = weft.parallelize(plain, plan, weft.build_mesh(plan, "cpu", ranks))
    assert weft.runtime(model).plan.parallel == plan.parallel
    return sorted(
        f"{type(module).__name__}.{attribute}"
        for module in model.modules()
        if module in before
        for attribute in set(vars(module)) - before[module]
        if attribute not in TORCH and not attribute.startswith("_")
    )


@pytest.mark.parametrize(("name", "ranks", "parallel"), EVERYTHING, ids=str)
def test_no_attribute_is_set_on_a_module(name: str, ranks: int, parallel: dict[str, Any]) -> None:
    plan = plan_for("fp32", **parallel)
    plan = plan.model_copy(update={"memory": Memory(recompute=("attention",), offload=("mlp",))})
    assert run_ranks(ranks, names_set, name, plan) == [[]] * ranks


def two_models(rank: int, ranks: int) -> list[int]:
    runtimes = []
    for zero in (0, 3):
        plan = resolved(plan_for("fp32", zero=zero), ranks)
        model: Any = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
        runtimes.append(weft.runtime(weft.parallelize(model, plan, weft.build_mesh(plan, "cpu", ranks))))
    return [runtime.plan.parallel.zero for runtime in runtimes]


def test_each_model_has_its_own_runtime() -> None:
    assert run_ranks(2, two_models) == [[0, 3]] * 2


def test_a_model_that_is_not_parallelized_has_none() -> None:
    with pytest.raises(ModelError, match=r"(?s)Linear is not parallelized.*weft\.parallelize"):
        weft.runtime(nn.Linear(2, 2))
