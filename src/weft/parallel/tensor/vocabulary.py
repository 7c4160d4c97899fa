"""Embedding and head of tensor parallelism: each rank has a part of the vocabulary (Shoeybi et al., Megatron-LM, 2019)."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.comm import collectives
from weft.errors import Refusal, raise_if_refused
from weft.parallel.weights import TensorLayout, TensorSplit, part_bounds, shard_parameter, use_local_weights

# Families that reshape the output of the final norm to the shape of input_ids: the sequence must be gathered before.
RESHAPES_AFTER_NORM = ("gpt2",)

SEQUENCE = 1  # dim of [batch, sequence, hidden]


def split_embedding_and_head(
    model: PreTrainedModel, anatomy: Anatomy, sp: bool, group: dist.ProcessGroup, tp: DeviceMesh, split: TensorSplit
) -> None:
    """Split embedding and head over tp by vocabulary, in place; the logits stay split.

    Args:
        model: model on any device, including meta.
        anatomy: its roles; an embedding or head of another pipeline stage has an empty name.
        sp: True if the residual stream is split along the sequence.
        group: ranks of tp.
        tp: their mesh.
        split: record of changed modules, which is extended.
    """
    embedding: Any = model.get_submodule(anatomy.embedding) if anatomy.embedding else None
    head: Any = model.get_submodule(anatomy.head) if anatomy.head else None
    # With a pipeline, embedding or head may be on another stage.
    for end in (end for end in (embedding, head) if end is not None):
        start, length = part_bounds(end.weight.shape[0], group.size(), group.rank())
        layout = TensorLayout("narrow", 0, ((start, length),))  # stored unsplit, because FSDP2 shards evenly only
        if end.weight.shape[0] % group.size() == 0:
            layout = TensorLayout("shard")
            _shard_vocabulary(model, end, tp, embedding if end is head and anatomy.tied else None)
        use_local_weights(end, {name: layout for name, _ in end.named_parameters()}, group, split)
        if end is embedding:
            _split_lookup(embedding, start, length, group, sp)
    if sp:
        _copy_outer_weights(model, anatomy, group, split)
    _gather_before_head(model, anatomy, sp, group)


def _shard_vocabulary(model: PreTrainedModel, end: Any, tp: DeviceMesh, tied: Any) -> None:
    """Shard the weight and the bias of an embedding or head; `tied` is the embedding, already sharded, of a head tied to it."""
    if tied is not None:
        end._parameters["weight"] = tied._parameters["weight"]
    else:
        shard_parameter(end, "weight", 0, tp)
    bias: Any = getattr(end, "bias", None)
    if bias is not None:
        shard_parameter(end, "bias", 0, tp)
        for module in model.modules():  # the bias of BERT's head is also that of the module around it
            if module._parameters.get("bias") is bias:
                module._parameters["bias"] = end._parameters["bias"]


def _copy_outer_weights(model: PreTrainedModel, anatomy: Anatomy, group: dist.ProcessGroup, split: TensorSplit) -> None:
    """Under sequence parallelism, use copies of the final norm and of embeddings of positions for the tokens of the rank."""
    embedding = model.get_submodule(anatomy.embedding) if anatomy.embedding else None
    for name, module in model.named_modules():
        in_block = any(name.startswith(f"{block.name}.") for block in anatomy.blocks)
        if isinstance(module, nn.Embedding) and module is not embedding and not in_block:
            use_local_weights(module, {"weight": TensorLayout("copy")}, group, split)
            module.register_forward_hook(lambda _, args, out: out.chunk(group.size(), -2)[group.rank()])
    if anatomy.final_norm:
        last = model.get_submodule(anatomy.final_norm)
        use_local_weights(last, {name: TensorLayout("copy") for name, _ in last.named_parameters()}, group, split)


def _gather_before_head(model: PreTrainedModel, anatomy: Anatomy, sp: bool, group: dist.ProcessGroup) -> None:
    """Give the head the hidden states of all tokens of the ranks of tp."""
    head: Any = model.get_submodule(anatomy.head) if anatomy.head else None
    last: Any = model.get_submodule(anatomy.final_norm) if anatomy.final_norm else None

    def gather_sequence(hidden: Tensor) -> Tensor:
        return collectives.gather(hidden, group, SEQUENCE) if sp else collectives.copy(group, hidden)[0]

    # The hook is before the head, not after the final norm: NanoChat uses its norm for the embedding too, and GPT-J reshapes.
    if model.get_output_embeddings() is None:
        if last is not None and sp:  # what follows computes the same on all ranks
            last.register_forward_hook(lambda _, args, out: collectives.unsplit(out, group, SEQUENCE))
    elif anatomy.family in RESHAPES_AFTER_NORM and last is not None:
        last.register_forward_hook(lambda _, args, out: gather_sequence(out))
    elif head is not None:
        head.register_forward_pre_hook(lambda _, args: (gather_sequence(args[0]),))


def _split_lookup(embedding: Any, start: int, length: int, group: dist.ProcessGroup, sp: bool) -> None:
    """Vocabulary-parallel embedding: each rank looks up its part of the vocabulary, and the sum over ranks has every token."""
    is_local: list[Tensor] = []
    if embedding.padding_idx is not None:  # only the rank with the padding row excludes its gradient
        own = embedding.padding_idx - start
        embedding.padding_idx = own if 0 <= own < length else None

    def look_up(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens = args[0] - start
        is_local.append((tokens >= 0) & (tokens < length))
        if sp:
            raise_if_refused(reason_against_length(tokens.shape[-1], group.size()))
        return (torch.where(is_local[-1], tokens, 0), *args[1:])

    def reduce(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        own = out * is_local.pop()[..., None]
        return collectives.reduce_scatter(own, group, SEQUENCE) if sp else collectives.reduce(own, group)

    embedding.register_forward_pre_hook(look_up)
    embedding.register_forward_hook(reduce)


def reason_against_length(tokens: int, ranks: int, axis: Literal["tp", "cp"] = "tp") -> Refusal | None:
    """Reason against a sequence that sequence parallelism, or context parallelism by heads, cannot split evenly."""
    if tokens % ranks:
        setting = "plan.parallel.sp = false" if axis == "tp" else "plan.parallel.cp = 1"
        return Refusal(
            f"a sequence of {tokens} tokens cannot be divided by {axis} = {ranks}",
            where="plan.parallel.sp = true" if axis == "tp" else "plan.parallel.cp",
            rule="every rank that splits sequences has the same number of tokens",
            fix=f"pad rows to a multiple of {ranks} tokens (pad_to_multiple_of of a collator), or set {setting}",
        )
    return None
