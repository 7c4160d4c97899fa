"""All ranks begin with the weights of rank 0, and end each step with the buffers of data rank 0."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import weft
from tests.lab.families import family
from tests.lab.parity import full_tensor, plan_for
from tests.lab.pool import run_ranks
from weft.errors import ModelError

WITHOUT_SEED: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 2": (2, {"zero": 2}),
    "zero 3": (2, {"zero": 3}),
    "tp 2 x zero 3": (4, {"zero": 3, "tp": 2}),
}


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("llama")))
    model.register_buffer("own", torch.full((2,), float(seed)))
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: full_tensor(tensor.detach()).clone()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def prepare_without_seed(rank: int, ranks: int, parallel: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make = torch.optim.AdamW
        run = weft.prepare(llama(seed=rank), optimizer=make, plan=plan_for("fp32", **parallel))
    return tensors_of(run.model), [str(one.message) for one in caught if "rank 0" in str(one.message)]


@pytest.mark.must("the weights of rank 0 count where ranks begin with different ones", case="zero 0")
@pytest.mark.parametrize("layout", WITHOUT_SEED)
def test_all_ranks_begin_with_the_weights_of_rank_0(layout: str) -> None:
    ranks, parallel = WITHOUT_SEED[layout]
    found = run_ranks(ranks, prepare_without_seed, parallel)
    expected = tensors_of(llama(seed=0))
    for weights, _ in found:
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert [len(lines) for _, lines in found] == [1] + [0] * (ranks - 1)
    assert "different weights" in found[0][1][0]


def adapters_of_a_script(rank: int, ranks: int) -> dict[str, Tensor]:
    accelerator = weft.WeftAccelerator(plan=plan_for("fp32", zero=2))
    base = llama(seed=0)
    torch.manual_seed(rank)  # the matrices A of LoRA
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=2))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return tensors_of(base)


def test_adapters_of_a_script_are_those_of_rank_0() -> None:
    first, second = run_ranks(2, adapters_of_a_script)
    assert any("lora_A" in name for name in first)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def other_model(rank: int, ranks: int, difference: str) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2 + rank * (difference == "shape")))
    model[0].bias.requires_grad = not (rank and difference == "frozen")
    try:
        weft.prepare(model, optimizer=torch.optim.AdamW, plan=plan_for("fp32", zero=2))
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("difference", "name"), [("shape", "1.weight is [2, 4]"), ("frozen", "0.bias is [4]")])
def test_other_models_of_ranks_are_refused_on_all_ranks(difference: str, name: str) -> None:
    messages = run_ranks(2, other_model, difference)
    assert messages[0] == messages[1]
    assert name in messages[0]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(64, 3))
    model[4].eval()  # the user has frozen it
    return model


def images(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


def statistics(rank: int, ranks: int, zero: int | None) -> dict[str, Tensor]:
    """Buffers after three steps, by DistributedDataParallel if zero is None."""
    model = convolutions()
    if zero is None:
        copies, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            copies(images(step, rank)).square().mean().backward()
            optimizer.step()
        for buffer in model.buffers():  # as its next forward does
            dist.broadcast(buffer, 0)
        return tensors_of(model)
    run = weft.prepare(model, optimizer=lambda own: torch.optim.SGD(own, lr=0.1), plan=plan_for("fp32", zero=zero))
    for step in range(3):
        with run.accumulate():
            run.backward(run.model(images(step, rank)).square().mean())
        run.step()
    return tensors_of(run.model)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_batch_norms_are_those_of_data_parallelism_in_torch(zero: int) -> None:
    expected = run_ranks(2, statistics, None)[0]
    assert not torch.equal(expected["1.running_mean"], convolutions().state_dict()["1.running_mean"])
    torch.testing.assert_close(expected["4.running_mean"], torch.zeros(4))
    for found in run_ranks(2, statistics, zero):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def modes_after(rank: int, ranks: int) -> list[dict[str, bool]]:
    model = llama(seed=0).train()
    model.model.layers[0].eval()
    run = weft.prepare(model, optimizer=torch.optim.AdamW, plan=plan_for("fp32", zero=2))
    ids = torch.arange(3, 11).view(1, -1)
    found = [{name: module.training for name, module in run.model.named_modules()}]
    run.evaluate([{"input_ids": ids, "labels": ids}])
    return [*found, {name: module.training for name, module in run.model.named_modules()}]


def test_modules_keep_their_modes() -> None:
    for before, after in run_ranks(2, modes_after):
        assert before == after
        assert [before[name] for name in ("model", "model.layers.0", "model.layers.0.mlp")] == [True, False, False]
