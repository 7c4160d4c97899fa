"""Linear layers of tensor-parallel regions, with the low-rank adapters of PEFT around them (Hu et al., LoRA, 2021).

PEFT puts a linear layer W into a wrapper that computes W x + scaling B A x. In a tensor-parallel region

    column-parallel W     A is the same on all ranks, its gradients are summed; B is split by rows, like W
    row-parallel W        A is split by columns, like W; B is the same on all ranks; the sum over ranks comes after the wrapper
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import standard_name

BASE = "base_layer"
MATRIX = re.compile(r"(?P<layer>.*?)\.?lora_(?P<matrix>[AB])\.[^.]+")
DROPOUT = re.compile(r"(?P<layer>.*?)\.?lora_dropout\.[^.]+")


class LinearPart(NamedTuple):
    """Linear layer of a region, or a matrix of an adapter around one."""

    name: str
    """Name of the module, relative to the region."""
    module: nn.Module
    last: str
    """Standard name of the layer, such as q_proj; for a matrix of an adapter, that of the layer that it adapts."""
    matrix: Literal["weight", "A", "B"]
    layer: nn.Module
    """Module that computes the output: the layer, or the wrapper around it."""


def linear_parts(region: nn.Module, config: Any, own_name: str = "") -> Iterator[LinearPart]:
    """Linear layers inside of a region, and the matrices of their adapters.

    Args:
        region: attention or MLP; it may be a linear layer itself.
        config: configuration of the model.
        own_name: name of the region, for the role of a region that is a linear layer.
    """
    for name, module in region.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        found = MATRIX.fullmatch(name)
        layer = found["layer"] if found else name.removesuffix(BASE).removesuffix(".")
        matrix: Any = found["matrix"] if found else "weight"
        yield LinearPart(name, module, standard_name(config, layer or own_name), matrix, region.get_submodule(layer))


def has_adapters(region: nn.Module) -> bool:
    """True if a linear layer of a region has an adapter."""
    return any(name.rpartition(".")[2] == BASE for name, _ in region.named_modules())


def adapter_dropouts(region: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """Dropout modules of the adapters around a layer."""
    found = [(DROPOUT.fullmatch(name), module) for name, module in region.named_modules()]
    return [module for match, module in found if match and region.get_submodule(match["layer"]) is layer]
