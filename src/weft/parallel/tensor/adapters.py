"""Linear layers of tensor-parallel regions, with the adapters of PEFT around them: LoRA (Hu et al., 2021) and DoRA (Liu et al.,
2024).

PEFT puts a linear layer W into a wrapper that computes W x + scaling B A x. In a tensor-parallel region

    column-parallel W     A is the same on all ranks, its gradients are summed; B is split by rows, like W
    row-parallel W        A is split by columns, like W; B is the same on all ranks; the sum over ranks comes after the wrapper

DoRA scales row i of W + scaling B A to the norm m_i, a trained magnitude:

    column-parallel W     m is split, like the rows of W
    row-parallel W        m is the same on all ranks; the squared norms of the rows are summed over ranks
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import standard_name
from weft.comm import collectives

BASE = "base_layer"
MATRIX = re.compile(r"(?P<layer>.*?)\.?lora_(?P<matrix>[AB])\.[^.]+")
MAGNITUDE = re.compile(r"(?P<layer>.*?)\.?lora_magnitude_vector\.[^.]+")
DROPOUT = re.compile(r"(?P<layer>.*?)\.?lora_dropout\.[^.]+")
GATED = ("GEGLU", "SwiGLU")
"""Activations of Diffusers with a linear layer, whose rows are those of the hidden units and then those of their gates."""


class LinearPart(NamedTuple):
    """Linear layer of a region, or a matrix of an adapter around one."""

    name: str
    """Name of the module, relative to the region."""
    module: nn.Module
    last: str
    """Standard name of the layer, such as q_proj; for a matrix of an adapter, that of the layer that it adapts."""
    matrix: Literal["weight", "A", "B", "magnitude"]
    layer: nn.Module
    """Module that computes the output: the layer, or the wrapper around it."""


def linear_parts(region: nn.Module, config: Any, own_name: str = "") -> Iterator[LinearPart]:
    """Linear layers inside of a region, and the matrices and magnitudes of their adapters.

    Args:
        region: attention or MLP; it may be a linear layer itself.
        config: configuration of the model.
        own_name: name of the region, for the role of a region that is a linear layer, or whose name is a part of its name.
    """
    for name, module in region.named_modules():
        magnitude = MAGNITUDE.fullmatch(name)
        if not magnitude and not isinstance(module, nn.Linear | Conv1D):
            continue
        found = magnitude or MATRIX.fullmatch(name)
        layer = found["layer"] if found else name.removesuffix(BASE).removesuffix(".")
        matrix: Any = "magnitude" if magnitude else found["matrix"] if found else "weight"
        last = standard_name(config, f"{own_name}.{layer}" if layer else own_name)
        if type(region.get_submodule(layer.rpartition(".")[0])).__name__ in GATED:
            last = "gate_up_proj"
        yield LinearPart(name, module, last, matrix, region.get_submodule(layer))


def is_magnitude(name: str) -> bool:
    """True for the name of a module with the magnitudes of DoRA."""
    return MAGNITUDE.fullmatch(name) is not None


def has_adapters(region: nn.Module) -> bool:
    """True if a linear layer of a region has an adapter."""
    return any(name.rpartition(".")[2] == BASE for name, _ in region.named_modules())


def adapter_dropouts(region: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """Dropout modules of the adapters around a layer."""
    found = [(DROPOUT.fullmatch(name), module) for name, module in region.named_modules()]
    return [module for match, module in found if match and region.get_submodule(match["layer"]) is layer]


def sum_row_norms(magnitude: Any, group: dist.ProcessGroup) -> None:
    """Let DoRA around a row-parallel layer compute the norms of complete rows, of which each rank has a part.

    Args:
        magnitude: module of PEFT (`DoraLinearLayer`) with the magnitudes; its method for the norms is replaced on this object,
            because the norms are computed between two matmuls, where no hook runs.
        group: tp ranks.
    """
    own_norms = magnitude.get_weight_norm

    def get_weight_norm(*args: Any, **kwargs: Any) -> Tensor:
        norms = own_norms(*args, **kwargs).detach()  # a constant in backward, as in PEFT
        wide = torch.promote_types(norms.dtype, torch.float32)
        return collectives.reduce(norms.to(wide) ** 2, group).sqrt().to(norms.dtype)

    magnitude.get_weight_norm = get_weight_norm
