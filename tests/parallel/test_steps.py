"""Steps of `parallelize`: their order is checked by the steps themselves, and nothing is refused or changed twice."""

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.model_config import read_config
from weft.device.detect import detect
from weft.job import Model
from weft.parallel import parallelize as line
from weft.parallel.build import Build
from weft.parallel.choices import choose
from weft.plan import Plan, resolve_plan
from weft.topology.mesh import build_mesh

NAMES = [step.__name__ for step in line.STEPS]
INDEPENDENT = {
    ("limit_experts", "relocate_experts"),
    ("relocate_experts", "round_experts"),
    ("adapt_experts", "split_tensors"),
    ("overlap_shared", "divide_heads"),
    ("split_context", "attend_by_documents"),
    ("average_loss", "defer_gradients"),
    ("defer_gradients", "move_loss"),
    ("recompute_blocks", "pack_frozen_weights"),
}
"""Neighbours that may change places: they change other parts of a model."""


class Begun(Exception):
    pass


class Reader:
    """Stands for a `Build` whose steps end after their first line."""

    def begin(self, step: str, *after: str) -> None:
        raise Begun(step, after)


def needs_of(step: Any) -> tuple[str, tuple[str, ...]]:
    with pytest.raises(Begun) as begun:
        step(Reader())
    name, after = begun.value.args
    return name, after


def test_steps_name_the_steps_before_them() -> None:
    found = dict(map(needs_of, line.STEPS))
    assert list(found) == NAMES
    for index, (name, after) in enumerate(found.items()):
        assert set(after) <= set(NAMES[:index]), name
    swappable = {(first, second) for first, second in pairwise(NAMES) if first not in found[second]}
    assert swappable == INDEPENDENT


def build_swapped(rank: int, world_size: int, first: str, second: str) -> str:
    swapped = {first: second, second: first}
    steps = tuple(getattr(line, swapped.get(name, name)) for name in NAMES)
    model = build_on_meta(read_config(Model(config=family("mixtral"))), torch.float32)
    plan = plan_for("fp32", zero=0)
    with mock.patch.object(line, "STEPS", steps), pytest.raises(AssertionError) as error:
        line.parallelize(model, plan, build_mesh(plan, "cpu", world_size))
    return str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ("split_tensors", "spread_experts", "split_tensors is called before spread_experts, on whose result it builds"),
        ("compile_regions", "round_layers", "compile_regions is called before round_layers, on whose result it builds"),
        ("cut_stages", "run_techniques", "run_techniques is called before split_tensors, on whose result it builds"),
    ],
)
def test_two_swapped_lines_are_an_error_with_both_names(first: str, second: str, sentence: str) -> None:
    assert run_ranks(1, build_swapped, first, second) == [sentence]


def read_too_early(rank: int, world_size: int) -> tuple[str, str]:
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    plan = resolve_plan(Plan(), world_size, native_bf16=False)
    build = Build(model, choose(model, plan, "cpu", detect()), build_mesh(plan, "cpu", world_size), False)
    build.step = "split_tensors"
    with pytest.raises(AssertionError) as early:
        build.packed  # noqa: B018
    build.packed = {}
    with pytest.raises(AssertionError) as twice:
        build.packed = {}
    return str(early.value), str(twice.value)


def test_a_field_is_read_after_it_is_set_and_set_once() -> None:
    assert run_ranks(1, read_too_early) == [
        (
            "split_tensors reads packed, which spread_experts sets: spread_experts comes first",
            "split_tensors sets packed again, which spread_experts has set",
        )
    ]


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_choosing_changes_nothing(name: str) -> None:
    """The same choices twice, and a model without a new attribute, hook or forward."""
    model: Any = build_on_meta(read_config(Model(config=family(name))), torch.float32)
    plan = resolve_plan(plan_for("fp32", tp=2), 2, native_bf16=False)

    def state() -> list[Any]:
        return [(path, sorted(vars(module)), len(module._forward_pre_hooks)) for path, module in model.named_modules()]

    before = state()
    found = [choose(model, plan, "cpu", detect()) for _ in range(2)]
    assert state() == before
    assert found[0] == found[1]
