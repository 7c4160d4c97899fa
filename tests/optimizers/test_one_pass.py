"""The factor of the gradients inside of the update: by torch's fused AdamW, and by the Triton kernel in its interpreter."""

import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.compute.interpreter import assert_within, needs_triton, relative_error, run_interpreted
from tests.lab.families import family
from tests.lab.parity import ParityRecord, assert_parity, packed_batches, plan_for, run_plan
from tests.lab.plans import resolved
from tests.lab.pool import close_pools, run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.model_config import read_config
from weft.compute import kernels
from weft.compute.kernels import Operator
from weft.device.cpu import Cpu
from weft.errors import PlanError
from weft.job import Model
from weft.memory.quantized_state import quantize_states
from weft.memory.weights import split_weights
from weft.optimizers import one_pass
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Compute, Kernels, Memory, Parallel, Plan, Precision
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh

Make = Callable[..., torch.optim.Optimizer]


# Plain torch


def trained(make: Make, update: Callable[[Any, float], None]) -> list[Tensor]:
    """Weights and last gradients after updates with gradients of many magnitudes."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in ((33, 17), (5,), (1,))]
    optimizer = make([{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "lr": 1e-3}], lr=1e-2)
    for step in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0**step
        update(optimizer, 0.37 / 10**step)
    return [value for parameter in parameters for value in (parameter.detach(), parameter.grad)]  # type: ignore[misc]


def multiply(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(factor)
    optimizer.step()


def divide_first(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.div_(torch.tensor(1 / factor))
    optimizer.step()


def divide(optimizer: torch.optim.Optimizer, factor: float) -> None:
    assert one_pass.takes_factor(optimizer)
    assert one_pass.divides(optimizer, factor)
    with one_pass.divisor(optimizer, factor):
        optimizer.step()
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
def test_divisor_of_torch_equals_a_separate_pass(make: Make) -> None:
    """Weights, and the gradients that the update leaves."""

    def fused(groups: Any, lr: float) -> torch.optim.Optimizer:
        return make(groups, lr=lr, eps=1e-3, fused=True)

    inside, before, multiplied = (trained(fused, update) for update in (divide, divide_first, multiply))
    assert all(map(torch.equal, inside, before))
    assert all(map(torch.equal, inside, trained(fused, divide_on_device)))
    for found, expected in zip(inside, multiplied, strict=True):
        assert relative_error(found, expected) < 1e-6


def divide_on_device(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Divide by a factor that only the device knows, after an overflow that only the device has seen."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, torch.nan)
    before = [parameter.detach().clone() for parameter in parameters]
    with one_pass.divisor(optimizer, torch.tensor(torch.nan, dtype=torch.float64), torch.ones(())):
        optimizer.step()
    assert all(map(torch.equal, parameters, before))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with one_pass.divisor(optimizer, torch.tensor(factor, dtype=torch.float64), torch.zeros(())):
        optimizer.step()
    assert not hasattr(optimizer, "found_inf")


class Own(torch.optim.AdamW):
    """Optimizer of a user, whose update may read gradients."""


def test_updates_that_take_no_factor() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    parameters[0].grad = torch.ones(3)
    for optimizer in (
        torch.optim.AdamW(parameters),
        torch.optim.SGD(parameters, fused=True),
        Own(parameters, fused=True),
    ):
        assert not one_pass.is_fused_adam(optimizer)
    fused = torch.optim.AdamW(parameters, fused=True)
    quantize_states(fused, "int8")  # a hook of Weft
    assert one_pass.takes_factor(fused)
    assert not one_pass.divides(fused, 1e-39)  # its inverse is not float32
    for register in (fused.register_step_pre_hook, fused.register_step_post_hook):
        handle = register(lambda *_: None)
        assert not one_pass.takes_factor(fused)
        handle.remove()
    assert one_pass.takes_factor(fused)
    double = torch.optim.AdamW([nn.Parameter(torch.ones(3, dtype=torch.float64))], fused=True)
    double.param_groups[0]["params"][0].grad = torch.ones(3, dtype=torch.float64)
    assert not one_pass.divides(double, 0.5)  # the divisor is float32
    assert not one_pass.takes_factor(double)


def seen_by_a_hook(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Gradients in a step hook of a user, and weights with and without the hook; gradients have a loss scale."""
    plan = resolved(plan_for("fp32", zero=3), world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    seen, weights = [], []
    for hooked in (True, False):
        torch.manual_seed(0)
        model = parallelize(nn.Sequential(nn.Linear(8, 8, bias=False)), plan, mesh)
        inner = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0, fused=True)
        optimizer = DistributedOptimizer(inner, model, Cpu())
        optimizer.loss_scale = LossScale(8.0)
        model(torch.ones(2, 8)).sum().mul(8.0).backward()
        if hooked:
            parameter = optimizer.parameters[0]
            inner.register_step_pre_hook(lambda *_, p=parameter: seen.append(p.grad.to_local().max().item()))
        optimizer.step(0.25)
        weights.append(optimizer.parameters[0].full_tensor().sum().item())
    return seen, weights


def test_step_hooks_see_unscaled_and_clipped_gradients() -> None:
    for seen, weights in run_ranks(2, seen_by_a_hook):
        assert seen == [0.5]  # two rows of ones, times 0.25
        assert weights[0] == weights[1]


def kernel_by_name(rank: int, world_size: int, kind: type[torch.optim.Optimizer], fused: bool) -> str:
    """Refusal of an optimizer under a plan with the kernel by name; "" without one."""
    plan = resolved(Plan(compute=Compute(kernels=Kernels(adamw="triton")), parallel=Parallel(zero=0)), 1)
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    with mock.patch.dict(kernels.OPERATORS, {"adamw": Operator({"triton": lambda _: ""})}):
        parallelize(model, plan, build_mesh(plan, "cpu", 1))
    try:
        DistributedOptimizer(kind(model.parameters(), lr=1.0, fused=fused), model, Cpu())  # type: ignore[call-arg]
    except PlanError as error:
        return str(error)
    return ""


def test_the_kernel_by_name_needs_adamw() -> None:
    refusals = [run_ranks(1, kernel_by_name, *given)[0] for given in REFUSED]
    assert "for SGD" in refusals[0]
    assert "for AdamW without fused=True" in refusals[1]
    assert not refusals[2]


REFUSED = ((torch.optim.SGD, True), (torch.optim.AdamW, False), (torch.optim.AdamW, True))


# Triton


def check_states() -> dict[str, float]:
    """Errors of weights after steps by the kernel, by format of weights and states; and whether it updated all of them."""
    errors = {}
    for weights, states in ((w, s) for w in (None, False, True) for s in (None, "bf16", "int8", "int4")):
        sides = []
        for by_kernel in (True, False):
            generator = torch.Generator().manual_seed(0)
            model = nn.Sequential(nn.Linear(80, 64), nn.Linear(64, 3))
            for parameter in model.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
            if weights is not None:
                split_weights(model, even=weights)
            parameters = list(model.parameters())
            optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), fused=True)
            quantize = quantize_states(optimizer, states) if states else None  # type: ignore[arg-type]
            for _ in range(4):
                for parameter in parameters:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                if by_kernel:
                    updated = one_pass.update_in_one_pass(optimizer, 0.5, quantize)
                    kept = 1 if states == "int4" and parameters[0].numel() else 0  # the matrix with int4 states
                    assert len(updated) == len(parameters) - kept
                    assert all((p.grad is None) == (p in updated) for p in parameters)
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
                optimizer.step()
            sides.append([parameter.detach() + 0 for parameter in parameters])
            assert (
                type(optimizer.state[parameters[0]]["exp_avg"]).__name__
                == {None: "Tensor", "bf16": "HalfState", "int8": "BlockState", "int4": "BlockState"}[states]
            )
        for index, (found, expected) in enumerate(zip(*sides, strict=True)):
            tolerance = 2e-2 if states == "bf16" else 1e-3 if states == "int8" else 2e-6
            errors[f"{weights} {states} {index}"] = relative_error(found, expected) / tolerance
    return errors


def run_with_kernel(rank: int, world_size: int, *args: Any) -> ParityRecord:
    """Run a plan whose updates are by the kernel alone."""
    updated: list[int] = []

    def record(optimizer: Any, *given: Any) -> Any:
        found = one_pass.update_in_one_pass(optimizer, *given)
        updated.append(len(found))
        assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        return found

    with (
        mock.patch.dict(kernels.OPERATORS, {"adamw": Operator({"triton": lambda _: ""})}),
        mock.patch("weft.parallel.data.distributed_optimizer.update_in_one_pass", record),
    ):
        found = run_plan(rank, world_size, *args)
    assert sum(updated) > 0
    return found


def check_training() -> dict[str, float]:
    """Parity of plans with the untouched model; and errors of split weights and int8 states against updates by torch."""
    source = Model(config=family("llama"))
    assert_parity(source, plan_for("fp32", zero=0), 1, 1, run=run_with_kernel)
    assert_parity(source, plan_for("fp32", zero=3), 2, 1, run=run_with_kernel)
    assert_parity(source, plan_for("fp32", zero=1, tp=2), 2, 1, run=run_with_kernel)
    errors = {"parity": 0.0}
    wide = {**family("llama"), "hidden_size": 64, "intermediate_size": 128}
    with tempfile.TemporaryDirectory() as folder:
        disk = Memory(optimizer_device="disk", offload_dir=folder)
        for name, (weights, states, memory) in {
            "split": ("split", "update", Memory()),
            "split_even, int8": ("split_even", "int8", Memory()),
            "split, int8, disk": ("split", "int8", disk),
        }.items():
            precision = Precision(param_dtype="bf16", weights=weights, optimizer_state_dtype=states)  # type: ignore[arg-type]
            plan = Plan(parallel=Parallel(zero=3), precision=precision, memory=memory)
            given = Model(config=wide), plan, packed_batches(96), 1
            found, expected = (run_ranks(2, run, *given, timeout=120)[0] for run in (run_with_kernel, run_plan))
            pairs = zip(found.losses, expected.losses, strict=True)
            errors[f"{name}: losses"] = max(abs(a / b - 1) for a, b in pairs) / 2e-3
            for key, weight in expected.weights.items():
                errors[f"{name}: {key}"] = relative_error(found.weights[key], weight) / 2e-2
    close_pools()
    return errors


@needs_triton
def test_kernel_updates_every_format_as_torch_does() -> None:
    errors = run_interpreted(check_states)
    assert len(errors) == 48
    assert_within(errors)


@pytest.mark.timeout(600)
@needs_triton
def test_training_by_the_kernel_equals_the_untouched_model() -> None:
    assert_within(run_interpreted(check_training))
