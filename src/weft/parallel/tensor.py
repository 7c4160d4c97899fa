"""Tensor and sequence parallelism of any decoder (Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., 2022).

The linear layers of attention and MLP are split over the tp axis. The first layers are column-parallel: each rank computes its
own heads or hidden units. The last layer is row-parallel: each rank computes a partial sum of every output. Such an attention
or MLP is called a region. Outside of the regions every rank holds the full residual stream or, with sequence parallelism, a
part of the sequence:

                     input of a region                 output of its row-parallel layer
    sp = true        all-gather                        reduce-scatter
    sp = false       none (all-reduce in backward)     all-reduce

The model keeps its modules and their forward; forward hooks at the boundaries of the regions run the collectives. Where the
collectives can be hidden, they overlap with the matmuls of the region instead (`async_tp.py`).
"""

import re
from collections.abc import Callable
from copy import copy
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy, Block, standard_name
from weft.comm import collectives
from weft.comm.overlap import Overlap, can_overlap
from weft.comm.symmetric import find_fused_matmuls
from weft.parallel.adapters import BASE, adapter_dropouts, has_adapters, linear_parts, sum_row_norms
from weft.parallel.async_tp import RegionBoundary, fuse_reduction, is_plain, share_gather
from weft.parallel.checks import splittable
from weft.parallel.pipeline.weight_gradients import WeightGradientQueue
from weft.parallel.tensor_vocabulary import SEQUENCE, split_embedding_and_head
from weft.parallel.tp_rules import (
    DOWN,
    KEY_VALUE,
    LATENT_KEY_VALUE,
    PACKED_QUERY_KEY_VALUE,
    PACKED_UP,
    PER_HEAD,
    QUERY,
    UP,
    config_of,
    count_heads,
    count_kv_heads,
    out_features,
    splits_vocabulary_of,
    wide_norms,
)
from weft.parallel.weights import PackedLayout, TensorLayout, TensorSplit, shard_parameter, use_local_weights
from weft.plan import Plan

# Linear layers whose input is the input of their region.
FIRST_OF_ATTENTION = (QUERY, KEY_VALUE, PACKED_QUERY_KEY_VALUE)
FIRST_OF_MLP = (UP, PACKED_UP)


def apply_tp(
    model: PreTrainedModel, anatomy: Anatomy, plan: Plan, mesh: DeviceMesh, queue: WeightGradientQueue | None = None
) -> TensorSplit:
    """Apply tensor parallelism to the blocks, the embedding and the head, in place.

    The logits of the model are split by vocabulary, as `weft.parallel.loss.cross_entropy_sum` expects them.

    Args:
        model: model on any device, including meta.
        anatomy: its roles.
        plan: resolved, and accepted by `check_tp`.
        mesh: device mesh with the axes of `weft.topology.mesh`.
        queue: queue of deferred weight gradients, if the pipeline schedule splits backward.

    Returns:
        What has changed in the model.
    """
    tp, sp, split = mesh["tp"], plan.parallel.sp, TensorSplit()
    group = tp.get_group()
    overlap = _build_overlap(plan, group, mesh.device_type)
    others = () if sp else splittable(model, anatomy, tp.size())  # with sp, there are none
    for block in (*others, *anatomy.blocks):
        _split_block(model, block, sp, tp, overlap, queue, split)
    if splits_vocabulary_of(model):
        split_embedding_and_head(model, anatomy, sp, group, tp, split)
    return split


def _build_overlap(plan: Plan, group: dist.ProcessGroup, device_type: str) -> Overlap | None:
    """Chunking of the matmuls; None if they do not overlap with collectives."""
    chunks = plan.comm.overlap_chunks
    if chunks == "auto" and dist.get_backend(group) == "fake":  # a dry run cannot measure whether overlap helps
        return None if device_type == "cpu" else Overlap(group, 1)
    if chunks == 1 or (chunks == "auto" and not can_overlap(group)):
        return None
    return Overlap(group, chunks, fused=find_fused_matmuls(group, device_type) if chunks == "auto" else None)


def _split_block(
    model: PreTrainedModel,
    block: Block,
    sp: bool,
    tp: DeviceMesh,
    overlap: Overlap | None,
    queue: WeightGradientQueue | None,
    split: TensorSplit,
) -> None:
    group, unit = tp.get_group(), model.get_submodule(block.name)
    layouts: dict[str, TensorLayout] = {}
    config = config_of(model, block.name)

    def boundary(dim: int) -> RegionBoundary | None:
        return RegionBoundary(overlap, sp, dim, queue, split) if overlap else None

    def relative(names: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
        return [(name.removeprefix(f"{block.name}."), model.get_submodule(name)) for name in names]

    for name, module in relative(block.attention + block.cross_attention):
        layouts |= _split_attention(name, module, config, tp, split)
        has_two_inputs = f"{block.name}.{name}" in block.cross_attention
        edge = None if has_two_inputs or has_adapters(module) else boundary(SEQUENCE)
        hook = _input_hook(module, config, group, sp, SEQUENCE, FIRST_OF_ATTENTION, edge)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        _reduce_output(module, config, group, sp, SEQUENCE, edge)
    for name, module in relative(block.mlp):
        if block.is_moe:  # experts need complete tokens: each rank routes its own part of the sequence
            if not sp:
                module.register_forward_pre_hook(_split_hook(group), with_kwargs=True)
                module.register_forward_hook(_unsplit_hook(group))
            continue
        layouts |= _split_mlp(name, module, config, tp, split)
        # An MLP is computed per token: concatenation along the batch dim needs no copy. Adapters' dropout needs whole rows.
        dim, edge = (SEQUENCE, None) if has_adapters(module) else (0, boundary(0))
        alone = isinstance(module, nn.Linear | Conv1D) or hasattr(module, BASE)
        is_first = not alone or UP.fullmatch(standard_name(config, name))
        entry = module if is_first else None
        if entry is not None:
            hook = _input_hook(module, config, group, sp, dim, FIRST_OF_MLP, edge, name)
            entry.register_forward_pre_hook(hook, with_kwargs=True)
        _reduce_output(module, config, group, sp, dim, edge, name)
    experts = tuple(f"{name}." for name, _ in relative(block.experts))
    regions = tuple(f"{name}." for name, _ in relative(block.attention + block.cross_attention + block.mlp))
    for name, _ in unit.named_parameters():
        in_region = name.startswith(regions)
        # Without sequence parallelism, modules outside of the regions compute the same on all ranks.
        if name not in layouts and not name.startswith(experts or ("/",)) and (sp or in_region):
            layouts[name] = TensorLayout("copy")
    use_local_weights(unit, layouts, group, split)


def _split_attention(
    prefix: str, attention: nn.Module, config: Any, tp: DeviceMesh, split: TensorSplit
) -> dict[str, TensorLayout]:
    """Split the linear layers of one attention; returns layouts by parameter name relative to the block."""
    ranks, heads, kv_heads = tp.size(), count_heads(config), count_kv_heads(config)
    layouts: dict[str, TensorLayout] = {}
    for name, module, last, matrix, layer in linear_parts(attention, config, prefix):
        full: str = f"{prefix}.{name}"
        weights: Any = module
        if DOWN.fullmatch(last):
            layouts |= _split_row(full, module, matrix, tp)
            split.split_inputs.update(adapter_dropouts(attention, layer))
        elif matrix == "A":
            continue  # a copy
        elif KEY_VALUE.fullmatch(last) and kv_heads % ranks:
            width = weights.weight.shape[0] // kv_heads
            start = tp.get_local_rank() * kv_heads // ranks * width
            layouts |= {f"{full}.{p}": TensorLayout("narrow", 0, start, width) for p, _ in module.named_parameters()}
        elif QUERY.fullmatch(last) or KEY_VALUE.fullmatch(last) or LATENT_KEY_VALUE.fullmatch(last):
            layouts |= _split_column(full, module, tp, split)
        elif PACKED_QUERY_KEY_VALUE.fullmatch(last):
            width = out_features(module) // (heads + 2 * kv_heads)
            sizes = (heads * width, kv_heads * width, kv_heads * width)
            layouts |= _split_column(full, module, tp, split, sizes)
    for name in [name for name, _ in attention.named_parameters(recurse=False) if PER_HEAD.fullmatch(name)]:
        shard_parameter(attention, name, 0, tp)
        layouts[f"{prefix}.{name}"] = TensorLayout("shard")
    _set_local_heads(attention, ranks, heads, kv_heads)
    _gather_for_wide_norms(attention, config, tp.get_group())
    return layouts


def _split_mlp(prefix: str, mlp: nn.Module, config: Any, tp: DeviceMesh, split: TensorSplit) -> dict[str, TensorLayout]:
    layouts: dict[str, TensorLayout] = {}
    for name, module, last, matrix, layer in linear_parts(mlp, config, prefix):
        full = f"{prefix}.{name}" if name else prefix
        if DOWN.fullmatch(last):
            layouts |= _split_row(full, module, matrix, tp)
            split.split_inputs.update(adapter_dropouts(mlp, layer))
        elif matrix == "A":
            continue  # a copy
        elif PACKED_UP.fullmatch(last):
            half = out_features(module) // 2
            layouts |= _split_column(full, module, tp, split, (half, half))
        elif UP.fullmatch(last):
            layouts |= _split_column(full, module, tp, split)
    return layouts


def _split_column(
    name: str, module: Any, tp: DeviceMesh, split: TensorSplit, sizes: tuple[int, ...] = ()
) -> dict[str, TensorLayout]:
    """Split a column-parallel linear layer: each rank computes a part of the outputs."""
    dim = 1 if isinstance(module, Conv1D) else 0
    packed = PackedLayout({"weight": dim, "bias": 0}, sizes, tp.size()) if sizes else None
    if packed:
        split.packed[module] = packed
    shard_parameter(module, "weight", dim, tp, packed)
    if getattr(module, "bias", None) is not None:  # magnitudes of DoRA have none
        shard_parameter(module, "bias", 0, tp, packed)
    if isinstance(module, Conv1D):
        module.nf //= tp.size()
    return {f"{name}.{parameter}": TensorLayout("shard") for parameter, _ in module.named_parameters()}


def _split_row(name: str, module: Any, matrix: str, tp: DeviceMesh) -> dict[str, TensorLayout]:
    """Split a row-parallel linear layer: each rank uses a part of the inputs, and outputs are summed over ranks."""
    if matrix == "magnitude":
        sum_row_norms(module, tp.get_group())
    if matrix in ("B", "magnitude"):  # a copy: the sum over ranks comes after it
        return {}
    shard_parameter(module, "weight", 0 if isinstance(module, Conv1D) else 1, tp)
    layouts = {f"{name}.weight": TensorLayout("shard")}
    return layouts | ({f"{name}.bias": TensorLayout("once")} if module.bias is not None else {})


def _set_local_heads(attention: Any, ranks: int, heads: int, kv_heads: int) -> None:
    """Set the numbers of local heads in an attention that stores them, instead of reading them from shapes."""
    own_kv = max(kv_heads // ranks, 1)
    own = {"num_heads": heads // ranks, "num_attention_heads": heads // ranks, "num_key_value_heads": own_kv}
    for module in attention.modules():  # GPT-Neo stores them in a submodule
        for name in own:
            if hasattr(module, name):
                setattr(module, name, own[name])
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = heads // ranks // own_kv
    if hasattr(attention, "split_size"):  # GPT-2
        attention.split_size //= ranks
    # Phi-3 reads them from its configuration.
    if any(PACKED_QUERY_KEY_VALUE.fullmatch(name) for name, _ in attention.named_children()):
        attention.config = copy(attention.config)
        attention.config.num_attention_heads, attention.config.num_key_value_heads = heads // ranks, own_kv


def _gather_for_wide_norms(attention: nn.Module, config: Any, group: dist.ProcessGroup) -> None:
    """Gather the input of norms over all heads, and split their output."""
    for norm in wide_norms(attention, config):
        norm.register_forward_pre_hook(lambda _, args: (collectives.gather(args[0], group, -1), *args[1:]))
        norm.register_forward_hook(lambda _, args, out: out.chunk(group.size(), -1)[group.rank()])


# Boundaries of regions


def _input_hook(
    region: nn.Module,
    config: Any,
    group: dist.ProcessGroup,
    sp: bool,
    dim: int,
    first: tuple[re.Pattern[str], ...],
    boundary: RegionBoundary | None,
    own_name: str = "",
) -> Callable[..., Any]:
    """Forward pre-hook of a region: gather the sequence in forward, sum gradients over ranks in backward."""
    if boundary is not None and share_gather(region, config, own_name, first, DOWN, boundary.split):
        return lambda _, args, kwargs: _map_hidden(args, kwargs, boundary.enter)

    def enter(hidden: Tensor) -> Tensor:
        return collectives.gather(hidden, group, dim) if sp else collectives.copy(group, hidden)[0]

    return lambda _, args, kwargs: _map_hidden(args, kwargs, enter)


def _map_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the hidden states in the arguments of a module: the first argument, positional or by name.

    Also to the outputs of an encoder that an attention gets.
    """
    if isinstance(encoded := kwargs.get("key_value_states"), Tensor):
        kwargs = kwargs | {"key_value_states": change(encoded)}
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}


def _reduce_output(
    region: nn.Module,
    config: Any,
    group: dist.ProcessGroup,
    sp: bool,
    dim: int,
    boundary: RegionBoundary | None,
    own_name: str = "",
) -> None:
    """Reduce the outputs of the row-parallel layers of a region over ranks (reduce-scatter with sequence parallelism).

    The reduction comes directly after the layer, not at the end of the region: the following modules (dropout in GPT-2) need
    complete sums.
    """

    def reduce(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        return collectives.reduce_scatter(out, group, dim) if sp else collectives.reduce(out, group)

    for _, module, last, matrix, layer in linear_parts(region, config, own_name):
        if matrix == "weight" and DOWN.fullmatch(last):
            if boundary is not None and is_plain(module):
                fuse_reduction(module, boundary)
            else:
                layer.register_forward_hook(reduce)


def _split_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    return lambda _, args, kwargs: _map_hidden(args, kwargs, lambda x: collectives.split(x, group, SEQUENCE))


def _unsplit_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    def unsplit(_: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):  # GPT-OSS also returns router scores
            return (collectives.unsplit(out[0], group, SEQUENCE), *out[1:])
        return collectives.unsplit(out, group, SEQUENCE)

    return unsplit
