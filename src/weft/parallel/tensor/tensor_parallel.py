"""Tensor and sequence parallelism of any decoder (Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., 2022).

The linear layers of attention and MLP are split over the tp axis. The first layers are column-parallel: each rank computes its
own heads or hidden units. The last layer is row-parallel: each rank computes a partial sum of every output. Such an attention
or MLP is called a region. Outside of the regions every rank holds the full residual stream or, with sequence parallelism, a
part of the sequence:

                     input of a region                 output of its row-parallel layer
    sp = true        all-gather                        reduce-scatter
    sp = false       none (all-reduce in backward)     all-reduce

Recurrent mixers compute whole sequences. Those of known kinds are split by heads (`recurrent_heads.py`); all ranks compute the
others. So is an attention or MLP with a weight whose role is not known (`replicated_parts`), if other parts of the blocks are
split.

In a decoder of text, sequence parallelism begins at the embedding and ends before the head. In models with parts outside of
blocks, such as features of images or norms of embeddings, it begins at the first block of a stack and ends after the last.

The model keeps its modules and their forward; forward hooks at the boundaries of the regions run the collectives. Where the
collectives can be hidden, they overlap with the matmuls of the region instead (`async_tp.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy, Block, standard_name
from weft.comm import collectives
from weft.comm.overlap import Overlap
from weft.parallel.pipeline.weight_gradients import WeightGradientQueue
from weft.parallel.sequence.recurrent_heads import MixerHeads, mixer_heads, set_local_mixer
from weft.parallel.sequence.stacks import sequence_stacks
from weft.parallel.tensor.adapters import BASE, adapter_dropouts, has_adapters, linear_parts, sum_row_norms
from weft.parallel.tensor.async_tp import RegionBoundary, build_overlap
from weft.parallel.tensor.boundaries import (
    FIRST_OF_ATTENTION,
    FIRST_OF_MLP,
    gather_hook,
    input_hook,
    is_output_layer,
    map_hidden,
    map_output,
    own_part_hook,
    own_tokens_hook,
    positions_hook,
    reduce_output,
    split_hook,
    unsplit_hook,
    unsplit_tokens_hook,
)
from weft.parallel.tensor.checks import replicated_parts, splittable
from weft.parallel.tensor.local_heads import gather_for_wide_norms, set_local_heads
from weft.parallel.tensor.rules import (
    DOWN,
    KEY_VALUE,
    LATENT_KEY_VALUE,
    PACKED_QUERY_KEY_VALUE,
    PACKED_UP,
    PER_HEAD,
    PER_HEAD_COLUMNS,
    QUERY,
    SHARED_POSITIONS,
    UP,
    config_of,
    count_heads,
    out_features,
    regions_of,
)
from weft.parallel.tensor.vocabulary import SEQUENCE, split_embedding_and_head
from weft.parallel.weights import PackedLayout, TensorLayout, TensorSplit, shard_parameter, use_local_weights
from weft.plan import ResolvedPlan

if TYPE_CHECKING:
    from weft.parallel.build import Build


def apply_tp(
    model: PreTrainedModel,
    anatomy: Anatomy,
    plan: ResolvedPlan,
    mesh: DeviceMesh,
    queue: WeightGradientQueue | None = None,
) -> TensorSplit:
    """Apply tensor parallelism to the blocks, the embedding and the head, in place.

    The logits of the model are split by vocabulary, as `weft.parallel.loss.cross_entropy.cross_entropy_sum` expects them.

    Args:
        model: model on any device, including meta.
        anatomy: its roles.
        plan: plan that is accepted by `reason_against_tp`.
        mesh: device mesh with the axes of `weft.topology.mesh`.
        queue: queue of deferred weight gradients, if the pipeline schedule splits backward.

    Returns:
        What has changed in the model.
    """
    tp, sp, split = mesh["tp"], plan.parallel.sp, TensorSplit()
    group = tp.get_group()
    overlap = build_overlap(plan, group, mesh.device_type)
    others = splittable(model, anatomy, tp.size())
    stacks = [others, anatomy.blocks] if anatomy.has_roles else [others]
    within = sequence_stacks(model, anatomy, tp.size()) if sp else ()
    if plan.parallel.pp > 1 and sp:  # accepted for streams that are split in all stages
        within = None
    for block in (block for stack in stacks for block in stack):
        splits_sequence = sp and (within is None or any(block in stack for stack in within))
        whole = replicated_parts(model, anatomy, block, tp.size())
        _BlockSplit(model, block, whole, splits_sequence, tp, overlap, queue, split).apply()
    for stack in within or ():
        model.get_submodule(stack[0].name).register_forward_pre_hook(split_hook(group), with_kwargs=True)
        model.get_submodule(stack[-1].name).register_forward_hook(unsplit_hook(group))
    if anatomy.is_decoder:
        split_embedding_and_head(model, anatomy, sp and within is None, group, tp, split)
    return split


@dataclass(frozen=True)
class _BlockSplit:
    """One block that is split over tp; each method changes modules and returns layouts by parameter name within the block."""

    model: PreTrainedModel
    block: Block
    whole: tuple[str, ...]
    """Attentions and MLP that each rank computes in full."""
    sp: bool
    """True if the residual stream is split along the sequence."""
    tp: DeviceMesh
    overlap: Overlap | None
    queue: WeightGradientQueue | None
    split: TensorSplit

    @property
    def config(self) -> Any:
        return config_of(self.model, self.block.name)

    def apply(self) -> None:
        """Split the block, in place."""
        block, group, unit = self.block, self.tp.get_group(), self.model.get_submodule(self.block.name)
        mixers = {
            name: heads
            for name in block.recurrence
            if (heads := mixer_heads(self.model.get_submodule(name), self.tp.size()))
        }
        layouts = self.split_attentions() | self.split_mlps()
        for (name, module), heads in zip(self.relative(mixers), mixers.values(), strict=True):
            layouts |= _split_mixer(name, module, heads, self.tp, self.split)
            _sum_over_ranks(module, group, self.sp)
        whole_mixers = [name for name in block.recurrence if name not in mixers]
        for _, module in self.relative((*whole_mixers, *self.whole) if self.sp else ()):
            module.register_forward_pre_hook(gather_hook(group), with_kwargs=True)
            module.register_forward_hook(own_part_hook(group))
        experts = tuple(f"{name}." for name, _ in self.relative(block.experts))
        found = self.relative(self.regions(block.attention + block.cross_attention + block.mlp))
        inside = tuple(f"{name}." if name else "" for name, _ in (*found, *self.relative(mixers)))
        for name, _ in unit.named_parameters():
            in_region = name.startswith(inside)
            # Without sequence parallelism, modules outside of the regions compute the same on all ranks.
            if name not in layouts and not name.startswith(experts or ("/",)) and (self.sp or in_region):
                layouts[name] = TensorLayout("copy")
        use_local_weights(unit, layouts, group, self.split)

    def split_attentions(self) -> dict[str, TensorLayout]:
        block, config, group, sp = self.block, self.config, self.tp.get_group(), self.sp
        layouts: dict[str, TensorLayout] = {}
        attends_to_encoder = tuple(f"{name}." for name in block.cross_attention)
        for name, module in self.relative(self.regions(block.attention + block.cross_attention)):
            layouts |= _split_attention(name, module, config, self.tp, self.split)
            joins = getattr(module, "to_add_out", None) is not None  # attention over two sequences, as in Flux
            has_two_inputs = joins or f"{block.name}.{name}.".startswith(attends_to_encoder)
            edge = None if has_two_inputs or has_adapters(module) else self.boundary(SEQUENCE)
            if not is_output_layer(module, config, name):
                hook = input_hook(module, config, group, sp, SEQUENCE, FIRST_OF_ATTENTION, edge)
                module.register_forward_pre_hook(hook, with_kwargs=True)
            if getattr(config, "model_type", None) in SHARED_POSITIONS:
                module.register_forward_pre_hook(positions_hook(group), with_kwargs=True)
            reduce_output(module, config, group, sp, SEQUENCE, edge, name)
        return layouts

    def split_mlps(self) -> dict[str, TensorLayout]:
        config, group, sp = self.config, self.tp.get_group(), self.sp
        layouts: dict[str, TensorLayout] = {}
        for name, module in self.relative(self.regions(self.block.mlp)):
            if self.block.is_moe:  # experts need complete tokens: each rank routes its own part of the sequence
                if not sp:
                    module.register_forward_pre_hook(split_hook(group), with_kwargs=True)
                    module.register_forward_hook(unsplit_tokens_hook(group), with_kwargs=True)
                module.register_forward_pre_hook(own_tokens_hook(group), with_kwargs=True)
                continue
            layouts |= _split_mlp(name, module, config, self.tp, self.split)
            # An MLP is computed per token: concatenation along the batch dim needs no copy. Adapters' dropout needs whole rows.
            dim, edge = (SEQUENCE, None) if has_adapters(module) else (0, self.boundary(0))
            alone = isinstance(module, nn.Linear | Conv1D) or hasattr(module, BASE)
            if not alone or UP.fullmatch(standard_name(config, name)):
                hook = input_hook(module, config, group, sp, dim, FIRST_OF_MLP, edge, name)
                module.register_forward_pre_hook(hook, with_kwargs=True)
            reduce_output(module, config, group, sp, dim, edge, name)
        return layouts

    def boundary(self, dim: int) -> RegionBoundary | None:
        return RegionBoundary(self.overlap, self.sp, dim, self.queue, self.split) if self.overlap else None

    def relative(self, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
        """Names within the block, "" for a block that is an attention or MLP itself (XLM)."""
        prefix = self.block.name
        return [(name.removeprefix(prefix).removeprefix("."), self.model.get_submodule(name)) for name in names]

    def regions(self, parts: tuple[str, ...]) -> list[str]:
        own = (part for part in parts if part not in self.whole)
        return [name for part in own for name in regions_of(self.model.get_submodule(part), part)]


def _split_attention(
    prefix: str, attention: nn.Module, config: Any, tp: DeviceMesh, split: TensorSplit
) -> dict[str, TensorLayout]:
    """Split the linear layers of one attention; returns layouts by parameter name relative to the block."""
    ranks, (heads, kv_heads) = tp.size(), count_heads(config)
    layouts: dict[str, TensorLayout] = {}
    for name, module, last, matrix, layer in linear_parts(attention, config, prefix):
        full: str = _join(prefix, name)
        weights: Any = module
        if DOWN.fullmatch(last):
            layouts |= _split_row(full, module, matrix, tp)
            split.split_inputs.update(adapter_dropouts(attention, layer))
        elif matrix == "A":
            continue  # a copy
        elif KEY_VALUE.fullmatch(last) and kv_heads % ranks:
            width = weights.weight.shape[0] // kv_heads
            start = tp.get_local_rank() * kv_heads // ranks * width
            own = TensorLayout("narrow", 0, ((start, width),))
            layouts |= {f"{full}.{p}": own for p, _ in module.named_parameters()}
        elif QUERY.fullmatch(last) or KEY_VALUE.fullmatch(last) or LATENT_KEY_VALUE.fullmatch(last):
            layouts |= _split_column(full, module, tp, split)
        elif PACKED_QUERY_KEY_VALUE.fullmatch(last):
            width = out_features(module) // (heads + 2 * kv_heads)
            sizes = (heads * width, kv_heads * width, kv_heads * width)
            layouts |= _split_column(full, module, tp, split, sizes)
    for name in [name for name, _ in attention.named_parameters(recurse=False) if PER_HEAD.fullmatch(name)]:
        shard_parameter(attention, name, 0, tp)
        layouts[_join(prefix, name)] = TensorLayout("shard")
    for name in [name for name, _ in attention.named_parameters() if PER_HEAD_COLUMNS.fullmatch(name)]:
        shard_parameter(attention.get_submodule(name.rpartition(".")[0]), "weight", 1, tp)
        layouts[_join(prefix, name)] = TensorLayout("shard")
    gather_for_wide_norms(attention, config, tp.get_group())
    set_local_heads(attention, ranks, heads, kv_heads)
    return layouts


def _split_mixer(
    prefix: str, mixer: nn.Module, heads: MixerHeads, tp: DeviceMesh, split: TensorSplit
) -> dict[str, TensorLayout]:
    """Split the heads of a recurrent mixer; returns layouts by parameter name relative to the block."""
    rank, ranks = tp.get_local_rank(), tp.size()
    layouts = _split_row(_join(prefix, heads.output), mixer.get_submodule(heads.output), "weight", tp)
    buffers = {name for name, _ in mixer.named_buffers()}
    for name, segments in heads.rows.items():
        owner, _, last = name.rpartition(".")
        module, sizes = mixer.get_submodule(owner), tuple(size for size, _ in segments)
        if name in buffers or not heads.is_even(ranks):
            dim = -1 if name in buffers else 0
            layouts[_join(prefix, name)] = TensorLayout("narrow", dim, heads.own_rows(name, rank, ranks))
            continue
        packed = PackedLayout({"weight": 0, "bias": 0}, sizes, ranks) if len(sizes) > 1 else None
        if packed:
            split.packed[module] = packed
        shard_parameter(module, last, 0, tp, packed)
        layouts[_join(prefix, name)] = TensorLayout("shard")
    set_local_mixer(mixer, heads, ranks)
    return layouts


def _sum_over_ranks(mixer: nn.Module, group: dist.ProcessGroup, sp: bool) -> None:
    """Let a split mixer see whole sequences, and sum its outputs over ranks."""

    def enter(hidden: Tensor) -> Tensor:
        return collectives.gather(hidden, group, SEQUENCE) if sp else collectives.copy(group, hidden)[0]

    def leave(out: Tensor) -> Tensor:
        return collectives.reduce_scatter(out, group, SEQUENCE) if sp else collectives.reduce(out, group)

    mixer.register_forward_pre_hook(lambda _, args, kwargs: map_hidden(args, kwargs, enter), with_kwargs=True)
    mixer.register_forward_hook(lambda _, args, out: map_output(out, leave))


def _join(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def _split_mlp(prefix: str, mlp: nn.Module, config: Any, tp: DeviceMesh, split: TensorSplit) -> dict[str, TensorLayout]:
    layouts: dict[str, TensorLayout] = {}
    for name, convolution in mlp.named_modules():
        if isinstance(convolution, nn.Conv1d | nn.Conv2d):  # of each hidden unit alone, see `is_depthwise`
            layouts |= _split_column(_join(prefix, name), convolution, tp, split)
            channels = convolution.groups // tp.size()
            convolution.groups = convolution.in_channels = convolution.out_channels = channels
    for name, module, last, matrix, layer in linear_parts(mlp, config, prefix):
        full = _join(prefix, name)
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


def split_tensors(build: "Build") -> None:
    """Step of `parallelize`: tensor and sequence parallelism, which leave experts alone."""
    build.begin("split_tensors", "replace_operators", "spread_experts")
    runtime = build.runtime
    if build.plan.parallel.tp > 1:
        runtime.tensor_split = apply_tp(build.model, build.anatomy, build.plan, build.mesh, build.queue)
    runtime.tensor_split.packed |= build.packed
