"""The path of an experts module: what it replaces, and what it leaves as it was."""

from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.lab.experts import split_experts
from tests.lab.pool import run_ranks
from tests.parallel.test_expert import HIDDEN, build_model, experts_of
from weft.anatomy.transformers import read_anatomy
from weft.errors import PlanError, raise_if_refused
from weft.parallel.experts.checks import reason_against_ep
from weft.parallel.experts.dispatch import Channel
from weft.parallel.experts.path import ExpertPath, run_experts, stand_in, unbound_forward


def changed_by_a_forward(rank: int, ranks: int) -> list[str]:
    """Attributes of an experts module that differ after it has been split and called."""
    group = dist.group.WORLD
    assert group is not None
    experts = experts_of(build_model("mixtral", torch.float32, "grouped_mm"))[-1]
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))
    before = dict(vars(experts)), dict(experts._parameters)
    split_experts(experts, (Channel(group),))
    experts(torch.ones(6, HIDDEN), torch.arange(12).view(6, 2) % 4, torch.ones(6, 2)).sum().backward()
    after = vars(experts), experts._parameters
    return [key for old, new in zip(before, after, strict=True) for key in new if new[key] is not old.get(key)]


def test_only_the_forward_of_a_users_module_changes() -> None:
    assert run_ranks(2, changed_by_a_forward) == [["forward"]] * 2


def test_a_path_without_changes_leaves_the_forward() -> None:
    experts = experts_of(build_model("mixtral", torch.float32, "eager"))[-1]
    ExpertPath(experts).attach()
    assert "forward" not in vars(experts)


def test_a_stand_in_computes_with_other_weights() -> None:
    experts = experts_of(build_model("mixtral", torch.float32, "eager"))[-1]
    hidden, index = torch.randn(5, HIDDEN), torch.tensor([[0], [1], [1], [0], [1]])
    two = {name: parameter[2:] for name, parameter in experts.named_parameters()}
    found = stand_in(experts, two)
    assert (found.num_experts, experts.num_experts, type(found)) == (2, 4, type(experts))
    ones = torch.ones(5, 1)
    assert torch.equal(type(experts).forward(found, hidden, index, ones), experts(hidden, index + 2, ones))


@pytest.mark.parametrize("bind", [MethodType, partial])
def test_a_forward_that_is_bound_to_the_module_is_a_function_of_it(bind: Any) -> None:
    experts = experts_of(build_model("mixtral", torch.float32, "eager"))[-1]
    assert unbound_forward(experts) is type(experts).forward

    def doubled(module: Any, *arguments: Tensor) -> Tensor:
        return 2 * type(module).forward(module, *arguments)

    experts.forward = bind(doubled, experts)
    assert unbound_forward(experts) is doubled
    experts.forward = lambda *arguments: arguments[0]
    assert unbound_forward(experts) is None


def test_experts_run_without_rows() -> None:
    """Their parameters get gradients of zero, and the rows none."""
    experts = experts_of(build_model("mixtral", torch.float32, "eager"))[-1]
    rows = torch.zeros(0, HIDDEN, requires_grad=True)
    out = run_experts(experts, rows, torch.zeros(0, 1, dtype=torch.int64))
    out.sum().backward()
    assert out.shape == (0, HIDDEN)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


def test_a_forward_of_another_library_is_refused_under_ep() -> None:
    model = build_model("mixtral", torch.float32, "eager")
    experts_of(model)[-1].forward = lambda hidden_states, top_k_index, top_k_weights: hidden_states
    with pytest.raises(PlanError, match="MixtralExperts has a forward that something else has set"):
        raise_if_refused(reason_against_ep(model, read_anatomy(model), 2))
