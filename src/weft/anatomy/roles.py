"""Anatomy: module names of a model by role. All techniques use the anatomy and never the class of a model."""

import re
from dataclasses import dataclass
from typing import Any

from weft.errors import ModelError

ROLES_KEY = "weft_roles"
"""Key of a model's configuration with roles of modules (`model.roles`): the roles travel with the model."""
STANDARD_NAMES = {
    "attention": "self_attn",
    "recurrence": "linear_attn",
    "mlp": "mlp",
    "router": "router",
    "experts": "experts",
    "shared_experts": "shared_experts",
    "norm": "norm",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""Standard name of a module by its role; techniques recognise modules by such names."""
NAMES_OF_TWO_PARTS = {
    "intermediate.dense": "up_proj",
    "output.dense": "down_proj",
    "to_out.0": "o_proj",
    "0.proj": "up_proj",
    "net.2": "down_proj",
    "feed_forward.intermediate": "up_proj",
    "feed_forward.output": "down_proj",
    "ffn.linear_1": "up_proj",
    "ffn.linear_2": "down_proj",
    "feed_forward.linear_1": "gate_proj",
    "feed_forward.linear_2": "down_proj",
    "feed_forward.linear_3": "up_proj",
    "feed_forward.in_layer": "up_proj",
    "feed_forward.out_layer": "down_proj",
    "mlp.linear_fc2": "down_proj",
    **{
        f"{part}.{name}": standard
        for part in ("ff", "ff_context")
        for name, standard in (
            ("linear_1", "gate_proj"),
            ("linear_2", "up_proj"),
            ("out_projection", "down_proj"),
            ("linear_in", "gate_up_proj"),
            ("linear_out", "down_proj"),
        )
    },
}
"""Standard names of layers that are known by the last two parts of their names: BERT, Diffusers, ProphetNet and Funnel.

Of Diffusers, in this order: most models; Lumina; Kandinsky; ERNIE-Image; AuraFlow (`ff.linear_1`) and FLUX.2 (`ff.linear_in`).
"""


def standard_name(config: Any, name: str) -> str:
    """Last part of a module's name, or the standard name of the role that the configuration gives it.

    Args:
        name: full or relative name of the module.

    Raises:
        ModelError: the configuration gives the module a role that does not exist.
    """
    last = name.rpartition(".")[2]
    two = ".".join(name.rsplit(".", 2)[-2:])
    roles = getattr(config, ROLES_KEY, None) or {}
    role = next((role for pattern, role in roles.items() if re.fullmatch(pattern, last)), None)
    if role is not None and role not in STANDARD_NAMES:
        raise ModelError(
            f"the role {role} of modules named {last}",
            where=f"{ROLES_KEY} of the configuration",
            rule=f"the roles are {', '.join(STANDARD_NAMES)}",
            fix="correct the role, or remove the pattern",
        )
    return STANDARD_NAMES[role] if role else NAMES_OF_TWO_PARTS.get(two, last)


@dataclass(frozen=True)
class Block:
    """Decoder block: full module names by role; a role without modules is an empty tuple."""

    name: str
    attention: tuple[str, ...]
    """Softmax attention."""
    recurrence: tuple[str, ...]
    """Recurrent mixers (state-space, linear-attention or convolution), which carry a state along the sequence."""
    mlp: tuple[str, ...]
    """Feed-forward part, dense or Mixture-of-Experts (contains router and experts)."""
    router: tuple[str, ...]
    experts: tuple[str, ...]
    shared_experts: tuple[str, ...]
    norms: tuple[str, ...]
    cross_attention: tuple[str, ...] = ()
    """Attention to the outputs of an encoder."""

    @property
    def is_moe(self) -> bool:
        return bool(self.experts)


@dataclass(frozen=True)
class Anatomy:
    """Anatomy of a causal language model."""

    family: str
    """model_type of its configuration."""
    embedding: str
    """Input embeddings; "" for a model whose roles are not known."""
    blocks: tuple[Block, ...]
    final_norm: str | None
    head: str
    """Output embeddings; "" for a model without a vocabulary at its end, such as a classifier or a reward model."""
    tied: bool
    """The head shares the embedding's weight."""
    parameters: int
    active_parameters: int
    """Parameters used per token: all except those of experts that are not chosen."""
    vocab_size: int
    max_positions: int | None
    """Longest sequence that the configuration allows; None if it has no limit."""
    is_decoder: bool = False
    """Decoder-only language model, whose embedding and head are split over tp by vocabulary. Encoders and encoder-decoders
    compute their losses from full logits."""
    frozen_parameters: int = 0
    """Parameters that are not trained, such as those beside adapters."""
    encoder_blocks: tuple[Block, ...] = ()
    """Blocks of the encoder of an encoder-decoder model, which runs in every forward."""
    tower_blocks: tuple[Block, ...] = ()
    """Blocks of further lists, such as encoders of images or sounds, which may run in some forwards only. ZeRO gathers their
    weights with those outside of blocks: a rank whose rows have no image would not take part in gathering a single block."""

    @property
    def all_blocks(self) -> tuple[Block, ...]:
        """Blocks of all lists."""
        return (*self.tower_blocks, *self.encoder_blocks, *self.blocks)

    @property
    def chained_blocks(self) -> tuple[Block, ...]:
        """Blocks that run in every forward, in this order; pipeline stages are parts of this chain."""
        return (*self.encoder_blocks, *self.blocks)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Names of the blocks that run in every forward: units of ZeRO, and of the reduction of gradients."""
        return tuple(block.name for block in self.chained_blocks)

    @property
    def has_roles(self) -> bool:
        """True for a model whose roles are known; see `weft.anatomy.plain` for others."""
        return bool(self.vocab_size)  # a middle stage of a pipeline has neither embedding nor head

    @property
    def has_experts(self) -> bool:
        return any(block.is_moe for block in self.blocks)

    def table(self) -> list[tuple[str, str, int]]:
        """Rows (role, module name with * for the block index, number of blocks), in forward order."""
        rows: dict[tuple[str, str], int] = {}
        for block in self.blocks:
            for role in ("attention", "recurrence", "router", "experts", "shared_experts", "mlp", "norms"):
                for name in getattr(block, role):
                    pattern = f"{block.name.rsplit('.', 1)[0]}.*{name.removeprefix(block.name)}"
                    rows[role, pattern] = rows.get((role, pattern), 0) + 1
        first, last = [("embedding", self.embedding, 1)], [("head", self.head + (" (tied)" if self.tied else ""), 1)]
        last = last if self.head else []
        if self.final_norm:
            last.insert(0, ("final norm", self.final_norm, 1))
        return first + [(role, pattern, count) for (role, pattern), count in rows.items()] + last
