"""Stage of updates: clipped AdamW of all weights of a model, by torch and in one kernel."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bench import Bench, Rows
from torch import Tensor, nn

from weft.compute.jit import has_triton
from weft.memory.chunked_step import chunked_step
from weft.memory.quantized_state import quantize_states
from weft.memory.weights import split_weights
from weft.optimizers.one_pass import divisor, update_in_one_pass
from weft.parallel.data.gradients import scale_gradients

UPDATED_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}
"""Bytes per element of a moment."""


def updates(bench: Bench) -> Rows:
    """Clipped updates of AdamW of all weights of a Llama of 1.2 billion parameters: ms, and TB/s of the bytes to be moved.

    Error: largest difference of a weight after three updates, relative to the largest update, of kernel and torch.
    """
    for weights in ("whole", "split", "split_even"):
        for states in UPDATED_BYTES:
            row: dict[str, Any] = {"weights": weights, "moments": states}
            size = 0
            for title, run in _update_functions(bench).items():
                model, optimizer, quantize = _make_update(bench, weights, states)
                gradients = [torch.randn(p.shape, device=bench.torch_device) for p in model.parameters()]
                size = sum(gradient.numel() for gradient in gradients)
                seconds = bench.seconds(run, optimizer, gradients, quantize, weights != "whole" or states != "fp32")
                row[f"{title}, ms"] = seconds * 1e3
                del model, optimizer, gradients
                bench.free()
            moved = size * (12 + 4 * UPDATED_BYTES[states])
            row["bytes per element"] = 12 + 4 * UPDATED_BYTES[states]
            row["TB/s"] = moved / seconds / 1e12  # of the last function
            row["error"] = _update_error(bench, weights, states) if _runs_triton(bench) else "-"
            yield row


def _runs_triton(bench: Bench) -> bool:
    return has_triton() and bench.device.type == "cuda"


def _update_functions(bench: Bench) -> dict[str, Callable[..., None]]:
    found: dict[str, Callable[..., None]] = {"clip, then AdamW": _clip_first, "clip inside of AdamW": _clip_inside}
    return found | ({"Triton": _by_kernel} if _runs_triton(bench) else {})


def _make_update(bench: Bench, weights: str, states: str) -> Any:
    """Weights, their optimizer, and the function that quantizes its states."""
    width, hidden, vocabulary, layers = (64, 128, 512, 2) if bench.small else (2048, 8192, 128256, 16)
    block = (
        [(width, width)] * 2 + [(width // 4, width)] * 2 + [(hidden, width)] * 2 + [(width, hidden), (width,), (width,)]
    )
    shapes = [(vocabulary, width), *block * layers, (width,)]
    generator = torch.Generator(bench.torch_device).manual_seed(0)
    tensors = (torch.randn(shape, generator=generator, device=bench.torch_device) for shape in shapes)
    model = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])
    if weights != "whole":
        split_weights(model, even=weights == "split_even")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    quantize = None if states == "fp32" else quantize_states(optimizer, states)  # type: ignore[arg-type]
    return model, optimizer, quantize


def _set_gradients(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> list[Tensor]:
    parameters: list[Tensor] = optimizer.param_groups[0]["params"]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def _clip_first(optimizer: Any, gradients: list[Tensor], _: Any, in_chunks: bool) -> None:
    scale_gradients(_set_gradients(optimizer, gradients), 0.999)
    chunked_step(optimizer) if in_chunks else optimizer.step()


def _clip_inside(optimizer: Any, gradients: list[Tensor], _: Any, in_chunks: bool) -> None:
    _set_gradients(optimizer, gradients)
    with divisor(optimizer, 0.999):
        chunked_step(optimizer) if in_chunks else optimizer.step()


def _by_kernel(optimizer: Any, gradients: list[Tensor], quantize: Any, _: bool) -> None:
    _set_gradients(optimizer, gradients)
    update_in_one_pass(optimizer, 0.999, quantize)


def _update_error(bench: Bench, weights: str, states: str) -> str:
    sides = []
    for run in (_by_kernel, _clip_first):
        model, optimizer, quantize = _make_update(replace(bench, small=True), weights, states)
        before = [parameter.detach() + 0 for parameter in model.parameters()]
        for step in range(3):
            generator = torch.Generator(bench.torch_device).manual_seed(step)
            make = partial(torch.randn, generator=generator, device=bench.torch_device)
            run(optimizer, [make(parameter.shape) for parameter in before], quantize, False)
        sides.append([after.detach() - value for after, value in zip(model.parameters(), before, strict=True)])
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(*sides, strict=True)]
    return f"{max(error.item() for error in errors):.1e}"
