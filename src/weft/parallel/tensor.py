"""Tensor and sequence parallelism of any decoder (Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., 2022).

The matrices of attention and MLP are split over the tp axis: the first ones by rows of the weight (column-parallel: each rank
makes its own heads or hidden units), the last one by columns (row-parallel: each rank makes a share of every output, and the
shares add up). Between those regions ranks hold all of the residual stream, or, with sequence parallelism, a part of the
sequence each:

                     enter a region                    leave it, behind the row-parallel matrix
    sp = true        all-gather the sequence           reduce-scatter it
    sp = false       nothing (backward: all-reduce)    all-reduce

The model keeps its modules and their forward; collectives stand in hooks at the borders of the regions. Where they can be
hidden, products and collectives of a region run beside each other instead (`fan.py`).
"""

import re
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy, Block
from weft.comm import collectives
from weft.comm.overlap import Overlap, can_overlap
from weft.comm.symmetric import find_fused
from weft.errors import PlanError
from weft.parallel.async_tp import RegionBoundary, is_plain, reduce_at_once, share_gather
from weft.parallel.pipeline.weight_gradients import WeightGradients
from weft.parallel.tp_rules import (
    DOWN,
    KEY_VALUE,
    LATENT_KEY_VALUE,
    PACKED_QUERY_KEY_VALUE,
    PACKED_UP,
    PER_HEAD,
    QUERY,
    UP,
    count_heads,
    count_kv_heads,
    out_features,
    wide_norms,
)
from weft.parallel.weights import LocalWeights, Packed, TensorLayout, part_bounds, shard_parameter
from weft.plan import Plan

# Families that give what the final norm makes the shape of their input_ids: the sequence must be whole by then.
RESHAPED_TO_ROWS = ("gpt2",)

SEQUENCE = 1  # dim of [batch, sequence, hidden]
# Matrices whose input is that of the region they are in.
FIRST_OF_ATTENTION = (QUERY, KEY_VALUE, PACKED_QUERY_KEY_VALUE)
FIRST_OF_MLP = (UP, PACKED_UP)


def split_tensors(
    model: PreTrainedModel, anatomy: Anatomy, plan: Plan, mesh: DeviceMesh, queue: WeightGradients | None = None
) -> None:
    """Split every block, the embedding and the head over the tp axis, in place.

    Logits come out split by vocabulary: `weft.parallel.loss.cross_entropy_sum` takes them as they are.

    The plan has passed `check_tensors`.

    Args:
        model: with its blocks, on any device.
        anatomy: its roles.
        plan: resolved.
        mesh: with the axes of `weft.topology.mesh`.
        queue: of the gradients of matrices, where backward is split.
    """
    tp, sp = mesh["tp"], plan.parallel.sp
    group = tp.get_group()
    overlap = _overlap_of(plan, group, mesh.device_type)
    for block in anatomy.blocks:
        _split_block(model, block, sp, tp, overlap, queue)
    _split_ends(model, anatomy, sp, group, tp)


def _overlap_of(plan: Plan, group: dist.ProcessGroup, device_type: str) -> Overlap | None:
    """How products are cut into chunks; None where they are not."""
    chunks = plan.comm.overlap_chunks
    if chunks == "auto" and dist.get_backend(group) == "fake":  # a dry run measures nothing
        return None if device_type == "cpu" else Overlap(group, 1)
    if chunks == 1 or (chunks == "auto" and not can_overlap(group)):
        return None
    return Overlap(group, chunks, fused=find_fused(group, device_type) if chunks == "auto" else None)


def _split_block(
    model: PreTrainedModel,
    block: Block,
    sp: bool,
    tp: DeviceMesh,
    overlap: Overlap | None,
    queue: WeightGradients | None,
) -> None:
    group, unit = tp.get_group(), model.get_submodule(block.name)
    layouts: dict[str, TensorLayout] = {}

    def border(dim: int) -> RegionBoundary | None:
        return RegionBoundary(overlap, sp, dim, queue) if overlap else None

    def inside(names: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
        return [(name.removeprefix(f"{block.name}."), model.get_submodule(name)) for name in names]

    for name, module in inside(block.attention):
        layouts |= _split_attention(name, module, model.config.get_text_config(), tp)
        enter = _enter(module, group, sp, SEQUENCE, FIRST_OF_ATTENTION, border(SEQUENCE))
        module.register_forward_pre_hook(enter, with_kwargs=True)
        _leave_behind(module, group, sp, SEQUENCE, border(SEQUENCE))
    for name, module in inside(block.mlp):
        if block.is_moe:  # experts take whole tokens, of which every rank has its own
            if not sp:
                module.register_forward_pre_hook(_take_part(group), with_kwargs=True)
                module.register_forward_hook(_put_together(group))
            continue
        layouts |= _split_mlp(name, module, tp)
        # An MLP works row by row: the parts of the sequence may stand one below the other, in place of side by side.
        enters = module if not isinstance(module, nn.Linear | Conv1D) or UP.fullmatch(name) else None
        if enters is not None:
            enter = _enter(module, group, sp, 0, FIRST_OF_MLP, border(0), name)
            enters.register_forward_pre_hook(enter, with_kwargs=True)
        _leave_behind(module, group, sp, 0, border(0), name)
    experts = tuple(f"{name}." for name, _ in inside(block.experts))
    for name, _ in unit.named_parameters():
        in_region = any(name.startswith(f"{part}.") for part, _ in inside(block.attention + block.mlp))
        # Without sequence parallelism, what is outside of the regions does the same work on all ranks.
        if name not in layouts and not name.startswith(experts or ("/",)) and (sp or in_region):
            layouts[name] = TensorLayout("copy")
    LocalWeights(unit, layouts, group)


def _split_attention(prefix: str, attention: nn.Module, config: Any, tp: DeviceMesh) -> dict[str, TensorLayout]:
    """Cut the matrices of one attention; layouts by name of the parameter inside the block."""
    ranks, heads, kv_heads = tp.size(), count_heads(config), count_kv_heads(config)
    layouts: dict[str, TensorLayout] = {}
    for name, module in attention.named_modules():
        last, full = name.rpartition(".")[2], f"{prefix}.{name}"
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        if KEY_VALUE.fullmatch(last) and kv_heads % ranks:
            width = (module.weight.shape[0]) // kv_heads
            start = tp.get_local_rank() * kv_heads // ranks * width
            layouts |= {f"{full}.{p}": TensorLayout("narrow", 0, start, width) for p, _ in module.named_parameters()}
        elif QUERY.fullmatch(last) or KEY_VALUE.fullmatch(last) or LATENT_KEY_VALUE.fullmatch(last):
            layouts |= _split_column(full, module, tp)
        elif PACKED_QUERY_KEY_VALUE.fullmatch(last):
            width = out_features(module) // (heads + 2 * kv_heads)
            sizes = (heads * width, kv_heads * width, kv_heads * width)
            layouts |= _split_column(full, module, tp, sizes)
        elif DOWN.fullmatch(last):
            layouts |= _split_row(full, module, tp)
    for name in [name for name, _ in attention.named_parameters(recurse=False) if PER_HEAD.fullmatch(name)]:
        shard_parameter(attention, name, 0, tp)
        layouts[f"{prefix}.{name}"] = TensorLayout("shard")
    _tell_heads(attention, ranks, heads, kv_heads)
    _gather_for_wide_norms(attention, tp.get_group())
    return layouts


def _split_mlp(prefix: str, mlp: nn.Module, tp: DeviceMesh) -> dict[str, TensorLayout]:
    layouts: dict[str, TensorLayout] = {}
    for name, module in mlp.named_modules():
        full = f"{prefix}.{name}" if name else prefix
        last = full.rpartition(".")[2]
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        if PACKED_UP.fullmatch(last):
            half = out_features(module) // 2
            layouts |= _split_column(full, module, tp, (half, half))
        elif UP.fullmatch(last):
            layouts |= _split_column(full, module, tp)
        elif DOWN.fullmatch(last):
            layouts |= _split_row(full, module, tp)
    return layouts


def _split_column(name: str, module: Any, tp: DeviceMesh, packed: tuple[int, ...] = ()) -> dict[str, TensorLayout]:
    """Each rank makes a part of the outputs."""
    dim = 1 if isinstance(module, Conv1D) else 0
    if packed:
        module.packed = Packed({"weight": dim, "bias": 0}, packed, tp.size())
    shard_parameter(module, "weight", dim, tp)
    if module.bias is not None:
        shard_parameter(module, "bias", 0, tp)
    if isinstance(module, Conv1D):
        module.nf //= tp.size()
    return {f"{name}.{parameter}": TensorLayout("shard") for parameter, _ in module.named_parameters()}


def _split_row(name: str, module: Any, tp: DeviceMesh) -> dict[str, TensorLayout]:
    """Each rank takes a part of the inputs; the outputs of all ranks add up."""
    shard_parameter(module, "weight", 0 if isinstance(module, Conv1D) else 1, tp)
    layouts = {f"{name}.weight": TensorLayout("shard")}
    return layouts | ({f"{name}.bias": TensorLayout("once")} if module.bias is not None else {})


def _tell_heads(attention: Any, ranks: int, heads: int, kv_heads: int) -> None:
    """Where an attention counts heads by itself, in place of reading them from shapes, tell it how many a rank has."""
    own_kv = max(kv_heads // ranks, 1)
    own = {"num_heads": heads // ranks, "num_attention_heads": heads // ranks, "num_key_value_heads": own_kv}
    for module in attention.modules():  # GPT-Neo's counts inside
        for name in own:
            if hasattr(module, name):
                setattr(module, name, own[name])
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = heads // ranks // own_kv
    if hasattr(attention, "split_size"):  # GPT-2
        attention.split_size //= ranks
    if any(
        PACKED_QUERY_KEY_VALUE.fullmatch(name) for name, _ in attention.named_children()
    ):  # Phi-3 asks its configuration
        attention.config = copy(attention.config)
        attention.config.num_attention_heads, attention.config.num_key_value_heads = heads // ranks, own_kv


def _gather_for_wide_norms(attention: nn.Module, group: dist.ProcessGroup) -> None:
    """Let a norm over all heads see the outputs of all ranks."""
    for norm in wide_norms(attention):
        norm.register_forward_pre_hook(lambda _, args: (collectives.gather(args[0], group, -1), *args[1:]))
        norm.register_forward_hook(lambda _, args, out: out.chunk(group.size(), -1)[group.rank()])


# Borders of regions


def _enter(
    region: nn.Module,
    group: dist.ProcessGroup,
    sp: bool,
    dim: int,
    first: tuple[re.Pattern[str], ...],
    border: RegionBoundary | None,
    own_name: str = "",
) -> Callable[..., Any]:
    """Before a region: every rank gets all of the sequence; the gradients that come back add up."""
    if border is not None and share_gather(region, own_name, first, DOWN):
        return lambda _, args, kwargs: _change_hidden(args, kwargs, border.enter)

    def enter(hidden: Tensor) -> Tensor:
        return collectives.gather(hidden, group, dim) if sp else collectives.copy(group, hidden)[0]

    return lambda _, args, kwargs: _change_hidden(args, kwargs, enter)


def _change_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> Any:
    """Change the hidden states among a module's arguments: the first one, by position or by name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}


def _leave_behind(
    region: nn.Module, group: dist.ProcessGroup, sp: bool, dim: int, border: RegionBoundary | None, own_name: str = ""
) -> None:
    """Behind the row-parallel matrices of a region: shares add up, and each rank keeps its part of the sequence.

    Right there, and not at the region's end: what follows (GPT-2's dropout) works on sums.
    """

    def leave(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        return collectives.reduce_scatter(out, group, dim) if sp else collectives.reduce(out, group)

    for name, module in region.named_modules():
        last = (name or own_name).rpartition(".")[2]
        if isinstance(module, nn.Linear | Conv1D) and DOWN.fullmatch(last):
            if border is not None and is_plain(module):
                reduce_at_once(module, border)
            else:
                module.register_forward_hook(leave)


def _take_part(group: dist.ProcessGroup) -> Callable[..., Any]:
    return lambda _, args, kwargs: _change_hidden(args, kwargs, lambda x: collectives.split(x, group, SEQUENCE))


def _put_together(group: dist.ProcessGroup) -> Callable[..., Any]:
    def put(_: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):  # GPT-OSS also returns what its router scored
            return (collectives.unsplit(out[0], group, SEQUENCE), *out[1:])
        return collectives.unsplit(out, group, SEQUENCE)

    return put


# Embedding and head


def _split_ends(model: PreTrainedModel, anatomy: Anatomy, sp: bool, group: dist.ProcessGroup, tp: DeviceMesh) -> None:
    embedding: Any = model.get_submodule(anatomy.embedding) if anatomy.embedding else None
    head: Any = model.get_submodule(anatomy.head) if anatomy.head else None
    for end in (end for end in (embedding, head) if end is not None):  # a pipeline may have them elsewhere
        start, length = part_bounds(end.weight.shape[0], group.size(), group.rank())
        if end.weight.shape[0] % group.size() == 0:
            layout = TensorLayout("shard")
            if end is head and anatomy.tied:
                head._parameters["weight"] = embedding._parameters["weight"]
            else:
                shard_parameter(end, "weight", 0, tp)
            if getattr(end, "bias", None) is not None:
                shard_parameter(end, "bias", 0, tp)
        else:  # whole at rest, as FSDP2 splits evenly only; the work is split all the same
            layout = TensorLayout("narrow", 0, start, length)
        LocalWeights(end, {name: layout for name, _ in end.named_parameters()}, group)
        if end is embedding:
            _embed_own_tokens(embedding, start, length, group, sp)

    for name, module in model.named_modules():
        in_block = any(name.startswith(f"{block.name}.") for block in anatomy.blocks)
        if isinstance(module, nn.Embedding) and module is not embedding and not in_block and sp:
            LocalWeights(module, {"weight": TensorLayout("copy")}, group)
            module.register_forward_hook(lambda _, args, out: out.chunk(group.size(), -2)[group.rank()])
    last: Any = model.get_submodule(anatomy.final_norm) if anatomy.final_norm else None
    if last is not None and sp:
        LocalWeights(last, {name: TensorLayout("copy") for name, _ in last.named_parameters()}, group)

    def whole_sequence(hidden: Tensor) -> Tensor:
        return collectives.gather(hidden, group, SEQUENCE) if sp else collectives.copy(group, hidden)[0]

    # Not behind the final norm: NanoChat uses it for the embedding too, and GPT-J gives what it makes a shape of its own.
    if anatomy.family in RESHAPED_TO_ROWS and last is not None:
        last.register_forward_hook(lambda _, args, out: whole_sequence(out))
    elif head is not None:
        head.register_forward_pre_hook(lambda _, args: (whole_sequence(args[0]),))


def _embed_own_tokens(embedding: Any, start: int, length: int, group: dist.ProcessGroup, sp: bool) -> None:
    """Each rank looks up the tokens of its part of the vocabulary; the others are zero, and the sum has each once."""
    found: list[Tensor] = []
    if embedding.padding_idx is not None:  # its row gets no gradient: on the rank that has it
        own = embedding.padding_idx - start
        embedding.padding_idx = own if 0 <= own < length else None

    def look_up(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens = args[0] - start
        found.append((tokens >= 0) & (tokens < length))
        if sp and tokens.shape[-1] % group.size():
            raise PlanError(
                f"a sequence of {tokens.shape[-1]} tokens cannot be divided by tp = {group.size()}",
                where="plan.parallel.sp = true",
                rule="sequence parallelism gives every tp rank as many tokens",
                fix=f"pad rows to a multiple of {group.size()} tokens (pad_to_multiple_of of a collator), or set "
                "plan.parallel.sp = false",
            )
        return (torch.where(found[-1], tokens, 0), *args[1:])

    def add_up(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        own = out * found.pop()[..., None]
        return collectives.reduce_scatter(own, group, SEQUENCE) if sp else collectives.reduce(own, group)

    embedding.register_forward_pre_hook(look_up)
    embedding.register_forward_hook(add_up)
