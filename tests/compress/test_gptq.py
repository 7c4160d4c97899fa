"""Rounding and pruning with compensation, against the definition in float64 and against rounding to the nearest value."""

from functools import partial

import pytest
import torch
from torch import Tensor

from weft.compress.gptq import DAMPING, Grid, compensate, fit_grid
from weft.compute.fake_quantize import LEVELS, to_level


def layer(width: int = 192, rows: int = 24) -> tuple[Tensor, Tensor]:
    """A weight, and inputs that are correlated, as those of a model."""
    chance = torch.Generator().manual_seed(0)
    mixing = torch.randn(width, width, generator=chance) / width**0.5
    inputs = torch.randn(4 * width, width, generator=chance) @ (mixing + 0.3 * torch.eye(width))
    return torch.randn(rows, width, generator=chance), inputs


def output_error(weight: Tensor, changed: Tensor, inputs: Tensor) -> float:
    return float((inputs @ (changed - weight).T).square().sum() / (inputs @ weight.T).square().sum())


def by_definition(weight: Tensor, hessian: Tensor, grid: Grid, group_size: int) -> Tensor:
    """Optimal brain surgeon, one column after the other: the inverse of the Hessian of the remaining columns, each time."""
    weight, order = weight.double().clone(), torch.argsort(hessian.diagonal(), descending=True)
    damped = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    result = torch.empty_like(weight)
    for done, column in enumerate(order):
        left = order[done:]
        inverse = torch.linalg.inv(damped[left][:, left])
        rounded = grid.nearest(weight[:, column].float(), int(column) // group_size).double()
        error = (weight[:, column] - rounded) / inverse[0, 0]
        weight[:, left] -= error[:, None] * inverse[0]
        result[:, column] = rounded
    return result.float()


def test_panels_give_the_result_of_the_definition() -> None:
    weight, inputs = layer(160)
    hessian = inputs.T @ inputs
    grid = fit_grid(weight, 32, LEVELS["int4"], symmetric=True)
    found, _ = compensate(weight, hessian, grid, 32, prune=False)
    expected = by_definition(weight, hessian, grid, 32)
    # A value in the middle between two levels may go either way.
    assert (found - expected).abs().gt(1e-4).float().mean() < 0.01


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_compensation_lowers_the_error_of_the_outputs(weights: str, symmetric: bool) -> None:
    weight, inputs = layer()
    grid = fit_grid(weight, 64, LEVELS[weights], symmetric=symmetric)
    nearest, _ = compensate(weight, None, grid, 64, prune=False)
    found, error = compensate(weight, inputs.T @ inputs, grid, 64, prune=False)
    assert output_error(weight, found, inputs) < 0.7 * output_error(weight, nearest, inputs)
    assert error == pytest.approx(output_error(weight, found, inputs), rel=1e-3)
    assert torch.equal(grid.nearest_of_all(found), found)  # all values are levels


def test_without_inputs_every_weight_gets_its_nearest_level() -> None:
    weight, _ = layer()
    for weights, extra in (("int4", {}), ("fp8", {"to_level": partial(to_level, kind="fp8")})):
        grid = fit_grid(weight, 64, LEVELS[weights], symmetric=True, **extra)
        fast, _ = compensate(weight, None, grid, 64, prune=False)
        slow, _ = compensate(weight, torch.eye(weight.shape[1]), grid, 64, prune=False)
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-6)


def test_two_of_four_weights_are_zero_and_the_others_make_up_for_them() -> None:
    weight, inputs = layer()
    found, _ = compensate(weight, inputs.T @ inputs, None, weight.shape[1], prune=True)
    assert ((found.unflatten(1, (-1, 4)) == 0).sum(2) == 2).all()
    groups = weight.unflatten(1, (-1, 4))
    smallest = groups.abs().topk(2, dim=2, largest=False).indices
    by_magnitude = groups.scatter(2, smallest, 0.0).flatten(1)
    assert output_error(weight, found, inputs) < 0.7 * output_error(weight, by_magnitude, inputs)


def test_pruned_weights_are_levels_too() -> None:
    weight, inputs = layer()
    grid = fit_grid(weight, 64, LEVELS["int4"], symmetric=False)
    found, _ = compensate(weight, inputs.T @ inputs, grid, 64, prune=True)
    assert ((found.unflatten(1, (-1, 4)) == 0).sum(2) >= 2).all()
    torch.testing.assert_close(grid.nearest_of_all(found), found)


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weight, inputs = layer()
    inputs[:, :3] = 0
    grid = fit_grid(weight, 64, LEVELS["int4"], symmetric=True)
    found, _ = compensate(weight, inputs.T @ inputs, grid, 64, prune=False)
    assert torch.isfinite(found).all()
