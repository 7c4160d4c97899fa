"""Context parallelism by heads, for encoders, encoder-decoders, language models beside encoders, and models of diffusion.

Their masks are not causal, or are made from whole rows; so the attention of the library computes whole sequences, each rank its
own heads. In a stack of blocks over the ranks of cp

    first block         each rank takes its part of the sequence
    attention           all-gather of the sequence; query, key and value layers compute the heads of the rank alone
    after attention     reduce-scatter of the outputs of the output layer: the sum over heads
    norms, MLPs         tokens of the rank alone
    last block          all-gather of the sequence

The rows, the loss, and all that is outside of stacks are the same on all ranks of cp. All weights are whole. Every change of
layout has its transpose in backward, so that the mean of the gradients of the ranks is the gradient of the loss, as in data
parallelism. Compared with Ulysses (`context.py`), which exchanges queries, keys, values and outputs by all-to-all, a rank
sends cp / 2 times as many bytes, and the model needs no AttentionInterface. The gather and the scatter are those of Korthikanti
et al., 2022.
"""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy, Block
from weft.comm import collectives
from weft.errors import Refusal, raise_if_refused
from weft.parallel.model_checks import reason_against_streams
from weft.parallel.sequence.recurrent_context import divide_mixer
from weft.parallel.sequence.recurrent_heads import mixer_heads
from weft.parallel.sequence.stacks import Stacks
from weft.parallel.tensor.adapters import has_adapters, linear_parts
from weft.parallel.tensor.boundaries import is_output_layer, map_hidden, map_output
from weft.parallel.tensor.checks import reason_against_blocks
from weft.parallel.tensor.local_heads import gather_for_wide_norms, set_local_heads
from weft.parallel.tensor.rules import (
    DOWN,
    KEY_VALUE,
    PACKED_QUERY_KEY_VALUE,
    PER_HEAD,
    PER_HEAD_COLUMNS,
    QUERY,
    config_of,
    count_heads,
    out_features,
    regions_of,
)
from weft.parallel.tensor.vocabulary import SEQUENCE, reason_against_length
from weft.parallel.weights import LocalWeights, TensorLayout
from weft.plan import ResolvedPlan

if TYPE_CHECKING:
    from weft.parallel.build import Build


def reason_against_stacks(model: Any, anatomy: Anatomy, plan: ResolvedPlan, stacks: Stacks) -> Refusal | None:
    """Reason against context parallelism by heads.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        plan: plan.
        stacks: stacks of blocks whose heads it would divide, of `head_stacks`.

    Returns:
        A refusal if the plan has other axes or a ring beside it, or the model needs whole sequences between blocks.
    """
    if not stacks:
        return None
    name, p, cp = type(model).__name__, plan.parallel, plan.parallel.cp
    where = f"plan.parallel.cp, model_type {anatomy.family}"
    if p.cp_ulysses != cp:
        return Refusal(
            f"a ring of context parallelism for a {name}",
            where=where,
            rule="a ring supports causal attention of decoders of text; in other models, ranks of cp divide the heads",
            fix=f"set plan.parallel.cp_ulysses = {cp}",
        )
    if p.tp * p.pp > 1:
        return Refusal(
            f"context parallelism beside {'tensor' if p.tp > 1 else 'pipeline'} parallelism for a {name}",
            where=where,
            rule="only decoders of text are split over both",
            fix="set plan.parallel.tp = 1 and plan.parallel.pp = 1, or plan.parallel.cp = 1",
        )
    blocks = [block for stack in stacks for block in stack]
    attentions = [model.get_submodule(part) for block in blocks for part in (*block.attention, *block.cross_attention)]
    mixers = [model.get_submodule(part) for block in blocks for part in block.recurrence]
    reasons = {
        "recurrent mixers whose heads cannot be divided": any(mixer_heads(mixer, cp) is None for mixer in mixers),
        "experts": any(block.is_moe for block in blocks),
        "adapters": any(map(has_adapters, attentions)),
        "attention that joins two sequences": any(getattr(each, "to_add_out", None) for each in attentions),
    }
    fix = "set plan.parallel.cp = 1"
    for reason in (reason for reason, is_found in reasons.items() if is_found):
        return Refusal(
            f"context parallelism of a {name} with {reason}",
            where=where,
            rule="ranks of cp have the heads of attention over one sequence, with whole weights",
            fix=fix,
        )
    if against_streams := reason_against_streams(model, anatomy, "cp", fix):
        return against_streams
    against_blocks = reason_against_blocks(model, anatomy, tuple(blocks), cp)
    return Refusal(against_blocks.what, where, against_blocks.rule, fix) if against_blocks else None


def apply_head_context(model: Any, stacks: Stacks, mesh: DeviceMesh) -> None:
    """Split stacks of blocks over cp, in place.

    Args:
        model: model on any device, including meta.
        stacks: result of `head_stacks`.
        mesh: device mesh with the axes of `weft.topology.mesh`.
    """
    group = mesh.get_group("cp_ulysses")
    for stack in stacks:
        model.get_submodule(stack[0].name).register_forward_pre_hook(_enter_stack(group), with_kwargs=True)
        model.get_submodule(stack[-1].name).register_forward_hook(_leave_stack(group))
        for block in stack:
            _divide_heads(model, block, group)


def _enter_stack(group: dist.ProcessGroup) -> Any:
    def own_part(hidden: Tensor) -> Tensor:
        raise_if_refused(reason_against_length(hidden.shape[SEQUENCE], group.size(), "cp"))
        return hidden.chunk(group.size(), SEQUENCE)[group.rank()]

    return lambda _, args, kwargs: map_hidden(args, kwargs, own_part)


def _leave_stack(group: dist.ProcessGroup) -> Any:
    return lambda _, args, out: map_output(out, lambda x: collectives.gather(x, group, SEQUENCE))


def _divide_heads(model: Any, block: Block, group: dist.ProcessGroup) -> None:
    """Let the attentions of a block compute the heads of this rank, over whole sequences."""
    config = config_of(model, block.name)
    layouts: dict[str, TensorLayout] = {}
    parts = (*block.attention, *block.cross_attention)
    for name in (name for part in parts for name in regions_of(model.get_submodule(part), part)):
        attention = model.get_submodule(name)
        layouts |= _own_heads(name.removeprefix(f"{block.name}."), attention, config, group)
        gather_for_wide_norms(attention, config, group)
        set_local_heads(attention, group.size(), *count_heads(config))
        if not is_output_layer(attention, config, name):
            attention.register_forward_pre_hook(
                lambda _, args, kwargs: map_hidden(args, kwargs, lambda x: collectives.gather(x, group, SEQUENCE)),
                with_kwargs=True,
            )
        for part in linear_parts(attention, config, name):
            if DOWN.fullmatch(part.last):
                part.module.register_forward_hook(lambda _, args, out: collectives.reduce_scatter(out, group, SEQUENCE))
    LocalWeights(model.get_submodule(block.name), layouts, group, sums_gradients=False)
    for name in block.recurrence:
        divide_mixer(
            model.get_submodule(name),
            group,
            lambda x: collectives.gather(x, group, SEQUENCE),
            lambda x: collectives.reduce_scatter(x, group, SEQUENCE),
        )


def _own_heads(prefix: str, attention: nn.Module, config: Any, group: dist.ProcessGroup) -> dict[str, TensorLayout]:
    """Slices of the weights of one attention that compute the heads of this rank; by parameter name relative to the block."""
    rank, ranks = group.rank(), group.size()
    heads, kv_heads = count_heads(config)

    def own(size: int, units: int) -> tuple[int, int]:
        """Slice of this rank of `size` rows of `units` heads; ranks share heads if there are fewer than ranks."""
        width = size // units
        return rank * units // ranks * width, max(units // ranks, 1) * width

    layouts: dict[str, TensorLayout] = {}
    for name, linear, last, *_ in linear_parts(attention, config, prefix):
        module: Any = linear
        full = f"{prefix}.{name}" if name else prefix
        rows, columns = (1, 0) if isinstance(module, Conv1D) else (0, 1)
        size = out_features(module)
        parts: tuple[tuple[int, int], ...] = ()
        if DOWN.fullmatch(last):
            layouts[f"{full}.weight"] = TensorLayout("narrow", columns, (own(module.weight.shape[columns], heads),))
            layouts |= {f"{full}.bias": TensorLayout("once")} if module.bias is not None else {}
        elif QUERY.fullmatch(last):
            parts = (own(size, heads),)
        elif KEY_VALUE.fullmatch(last):
            parts = (own(size, kv_heads),)
        elif PACKED_QUERY_KEY_VALUE.fullmatch(last):
            width = size // (heads + 2 * kv_heads)
            starts = (0, heads * width, (heads + kv_heads) * width)
            slices = (own(units * width, units) for units in (heads, kv_heads, kv_heads))
            parts = tuple((begin + start, length) for begin, (start, length) in zip(starts, slices, strict=True))
        if parts:
            layouts[f"{full}.weight"] = TensorLayout("narrow", rows, parts)
            layouts |= {f"{full}.bias": TensorLayout("narrow", 0, parts)} if module.bias is not None else {}
    for name, parameter in attention.named_parameters():
        if PER_HEAD_COLUMNS.fullmatch(name):
            layouts[f"{prefix}.{name}"] = TensorLayout("narrow", 1, (own(parameter.shape[1], heads),))
        elif PER_HEAD.fullmatch(name):
            layouts[f"{prefix}.{name}"] = TensorLayout("narrow", 0, (own(parameter.shape[0], heads),))
    return layouts


def divide_heads(build: "Build") -> None:
    """Step of `parallelize`: heads of the model's own attention over the ranks of cp."""
    build.begin("divide_heads", "cut_stages", "split_tensors")
    if stacks := build.choices.head_stacks:
        apply_head_context(build.model, stacks, build.mesh)
        build.runtime.loss_copies = build.plan.parallel.cp
