"""Attention that computes the heads of one rank: numbers of heads, norms over all heads, and rotary embeddings."""

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.comm import collectives
from weft.parallel.tensor.rules import PACKED_QUERY_KEY_VALUE, READS_HEADS, wide_norms

ROTARY = ("image_rotary_emb", "query_rotary_emb", "key_rotary_emb")
"""Arguments of attentions of Diffusers with cosines and sines."""


def set_local_heads(attention: Any, ranks: int, heads: int, kv_heads: int) -> None:
    """Set the numbers of local heads in an attention that stores them, instead of reading them from shapes."""
    own_kv = max(kv_heads // ranks, 1)
    own = {"num_heads": heads // ranks, "num_attention_heads": heads // ranks, "num_key_value_heads": own_kv}
    for module in attention.modules():  # GPT-Neo stores them in a submodule
        for name in own:
            if hasattr(module, name):
                setattr(module, name, own[name])
    if hasattr(attention, "kv_heads"):  # ACE-Step
        attention.kv_heads = own_kv
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = heads // ranks // own_kv
    for name in (name for name in ("n_heads", "heads") if hasattr(attention, name)):  # T5, XLM, Diffusers
        setattr(attention, name, heads // ranks)
        if hasattr(attention, "inner_dim"):
            attention.inner_dim //= ranks
        if hasattr(attention, "inner_kv_dim"):
            attention.inner_kv_dim = attention.inner_kv_dim // kv_heads * own_kv
    width = heads * getattr(attention, "head_dim", getattr(attention, "attention_head_size", 0))
    for name in ("all_head_size", "embed_dim"):  # width of all heads, to which BERT's descendants and MVP reshape
        if getattr(attention, name, None) == width:
            setattr(attention, name, width // ranks)
    if hasattr(attention, "split_size"):  # GPT-2
        attention.split_size //= ranks
    # Phi-3 and Moonshine read them from their configuration.
    reads_config = getattr(getattr(attention, "config", None), "model_type", None) in READS_HEADS
    if reads_config or any(PACKED_QUERY_KEY_VALUE.fullmatch(name) for name, _ in attention.named_children()):
        attention.config = copy(attention.config)
        attention.config.num_attention_heads, attention.config.num_key_value_heads = heads // ranks, own_kv


def gather_for_wide_norms(attention: nn.Module, config: Any, group: dist.ProcessGroup) -> None:
    """Gather the input of norms over all heads, and split their output; of rotary embeddings, see `split_wide_rotary`."""
    width = 0
    for norm in wide_norms(attention, config):
        norm.register_forward_pre_hook(lambda _, args: (collectives.gather(args[0], group, -1), *args[1:]))
        norm.register_forward_hook(lambda _, args, out: out.chunk(group.size(), -1)[group.rank()])
        width = max(width, *(weight.numel() for weight in norm.parameters()))
    heads: Any = getattr(attention, "heads", None)
    if heads is not None:
        split_wide_rotary(attention, heads, width, group)


def split_wide_rotary(attention: nn.Module, heads: int, width: int, group: dist.ProcessGroup) -> None:
    """Let an attention of Diffusers use its part of rotary embeddings over all heads (LTX), or of each head (Mochi).

    Args:
        attention: attention of which each rank has a part of the heads.
        heads: number of all heads.
        width: features of all heads; 0 without a norm over them, and then no embedding has them either.
        group: ranks that divide the heads.
    """

    def own_part(turn: torch.Tensor) -> torch.Tensor:
        if turn.requires_grad:  # learned for each head: gradients are sums over ranks
            turn = collectives.copy(group, turn)[0]
            return turn.chunk(group.size(), -2)[group.rank()] if turn.shape[-2] == heads else turn
        return turn.chunk(group.size(), -1)[group.rank()] if turn.shape[-1] == width else turn

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = {name: kwargs[name] for name in ROTARY if isinstance(kwargs.get(name), tuple)}
        return args, kwargs | {name: tuple(map(own_part, turns)) for name, turns in found.items()}

    attention.register_forward_pre_hook(enter, with_kwargs=True)
