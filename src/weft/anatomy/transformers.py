"""Reads the anatomy of any Hugging Face causal language model from what the library publishes and from its module tree."""

import re
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from weft.anatomy.roles import Anatomy, Block
from weft.errors import ModelError

# Names (last part of a module's name) by role, as found in the families of Transformers 5.17 to 5.23.
ATTENTION = re.compile(r"(self_)?(attn|attention|att)|multi_head_attention")
RECURRENCE = re.compile(r"linear_attn|mamba|mixer|conv|temporal_block|mlstm_layer")
MLP = re.compile(r"mlps?|ffn|feed_forward|moe|block_sparse_moe|shared_mlp|fc1|fc2")
ROUTER = re.compile(r"gate|router")
EXPERTS = re.compile(r"experts")
SHARED_EXPERTS = re.compile(r"shared_experts?|shared_mlp")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_k", "moe_topk")


def read_anatomy(model: PreTrainedModel) -> Anatomy:
    """The anatomy of a causal language model; the meta device is enough.

    Raises:
        ModelError: a role is missing; the message says what was looked for.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        missing = "embedding" if embedding is None else "head"
        raise _unreadable(
            model, missing, f"get_{'in' if missing == 'embedding' else 'out'}put_embeddings() to name a module"
        )
    stack_name, stack = _find_blocks(model)
    blocks = tuple(_read_block(f"{stack_name}.{index}", block) for index, block in enumerate(stack.children()))
    config = model.config.get_text_config()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Anatomy(
        family=model.config.model_type,
        embedding=names[id(embedding)],
        blocks=blocks,
        final_norm=_find_final_norm(model, stack_name),
        head=names[id(head)],
        tied=head.weight is embedding.weight,
        parameters=parameters,
        active_parameters=parameters - _idle_parameters(model, blocks),
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def row_arguments(model: PreTrainedModel, position_ids: torch.Tensor, masks: bool = True) -> dict[str, Any]:
    """Keyword arguments, besides `input_ids`, with which a model runs rows of documents in training.

    Rows of one document each get no mask: the model's own code makes it, with all that a family adds. Other rows get the
    masks of `document_masks`; `weft.anatomy.documents` tries at start whether these are right for a model.

    Args:
        model: a causal language model, parallelized or not.
        position_ids: [rows, seq_len]; a document starts wherever they do not grow by one.
        masks: make them, where rows need them; False for a model that makes its own from whole rows.
    """
    made = document_masks(model, position_ids) if masks and not bool((position_ids.diff() == 1).all()) else None
    arguments: dict[str, Any] = {"position_ids": position_ids, "attention_mask": made, "use_cache": False}
    if getattr(model.config, "output_router_logits", False):  # the auxiliary loss is ours: `weft.parallel.moe_aux_loss`
        arguments["output_router_logits"] = False
    return arguments


def document_masks(
    model: PreTrainedModel, position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> Any:
    """The attention masks of packed rows, for the model's `attention_mask`, made by the library itself.

    Most families build these masks from position ids on their own; some (GPT-OSS in 5.17 to 5.23) forget to, and attend
    across documents without a word. Masks made ahead of the forward, as `generate` makes them, are honoured by all.

    Args:
        model: a causal language model, parallelized or not.
        position_ids: [rows, seq_len]; a document starts wherever they do not grow by one.
        attention_mask: [rows, seq_len], 0 for padding, or None.

    Returns:
        One mask, a mask for each kind of layer, or None where plain causal attention is all that is needed.
    """
    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    shape_only = torch.empty((*position_ids.shape, 0), dtype=model.dtype, device=position_ids.device)
    return make(
        config=model.config,
        inputs_embeds=shape_only,
        attention_mask=attention_mask,
        past_key_values=None,
        position_ids=position_ids,
    )


def _find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The list of decoder blocks: the one of the library's pipeline plan, else the largest list of blocks."""

    def is_block(module: nn.Module) -> bool:
        children = [name for name, _ in module.named_children()]
        mixes_tokens = any(map(ATTENTION.fullmatch, children))
        has_state = any(map(RECURRENCE.fullmatch, children))
        return has_state or (mixes_tokens and any(map(MLP.fullmatch, children)))

    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    stacks = [name for name, module in lists.items() if all(map(is_block, module))]
    planned = [f"{model.base_model_prefix}.{key}" for key in getattr(model.config, "base_model_pp_plan", None) or ()]
    found = [name for name in stacks if name in planned] or stacks
    if not found and kind_of_model(model.config):
        raise refuse_kind(model.config)
    if not found:
        wanted = f"a list of blocks whose children match {ATTENTION.pattern} and {MLP.pattern}, or {RECURRENCE.pattern}"
        raise _unreadable(model, "blocks", f"{wanted}; module lists there are: {', '.join(lists) or 'none'}")
    largest = max(found, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return largest, lists[largest]


def _read_block(name: str, block: nn.Module) -> Block:
    def find(pattern: re.Pattern[str], inside: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Modules whose last name matches: children of the block, or anything below the given parts of it."""
        if inside is None:
            return tuple(f"{name}.{child}" for child, _ in block.named_children() if pattern.fullmatch(child))
        found: list[str] = []
        for child, _ in block.named_modules():
            full = f"{name}.{child}"
            below = full in inside or full.startswith(tuple(f"{part}." for part in inside))
            nested = full.startswith(tuple(f"{outer}." for outer in found))  # the outermost module plays the role
            if below and not nested and pattern.fullmatch(child.rsplit(".", 1)[-1]):
                found.append(full)
        return tuple(found)

    mlp = find(MLP)
    experts = find(EXPERTS, mlp)
    return Block(
        name=name,
        attention=find(ATTENTION),
        recurrence=find(RECURRENCE),
        mlp=mlp,
        router=find(ROUTER, mlp) if experts else (),
        experts=experts,
        shared_experts=find(SHARED_EXPERTS, mlp) if experts else (),
        norms=tuple(f"{name}.{child}" for child, module in block.named_modules() if "Norm" in type(module).__name__),
    )


def _find_final_norm(model: PreTrainedModel, stack_name: str) -> str | None:
    """The last part of the library's pipeline plan, else the last norm beside the blocks."""
    parent_name = stack_name.rpartition(".")[0]
    plan = list(getattr(model.config, "base_model_pp_plan", None) or ())
    if plan and hasattr(model.get_submodule(parent_name), plan[-1]):
        return f"{parent_name}.{plan[-1]}"
    siblings = [
        name for name, module in model.get_submodule(parent_name).named_children() if "Norm" in type(module).__name__
    ]
    return f"{parent_name}.{siblings[-1]}".lstrip(".") if siblings else None


def experts_per_token(config: Any) -> int | None:
    """Experts that each token visits, by the configuration of a language model; None where it does not say."""
    return next((getattr(config, key) for key in TOP_K if isinstance(getattr(config, key, None), int)), None)


def _idle_parameters(model: PreTrainedModel, blocks: tuple[Block, ...]) -> int:
    """Parameters of experts that one token does not visit (fused experts: the first dim counts the experts)."""
    config = model.config.get_text_config()
    top_k = experts_per_token(config)
    idle = 0
    for name in (name for block in blocks for name in block.experts):
        experts = model.get_submodule(name)
        separate = len(list(experts.children())) if isinstance(experts, nn.ModuleList) else 0
        for parameter in experts.parameters():
            num_experts = separate or parameter.shape[0]
            share = 1 - min(top_k or num_experts, num_experts) / num_experts
            idle += round(prod(parameter.shape) * share)
    return idle


def kind_of_model(config: PretrainedConfig) -> str | None:
    """The kind of a model that is not decoder-only, by the library's lists of models; None where these say nothing."""
    if config.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "an encoder-decoder model"
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "an encoder-only model"
    return None


def refuse_kind(config: PretrainedConfig) -> ModelError:
    """The error about a model that is not a decoder-only language model."""
    kind = kind_of_model(config)
    return ModelError(
        f"{config.model_type} is {kind}"
        if kind
        else f"Transformers cannot build a causal language model of {config.model_type}: it has none of this family",
        where=f"model_type {config.model_type}",
        rule="Weft trains decoder-only (causal) language models of Transformers",
        fix="name a causal model, such as llama, qwen3 or gpt2; docs/families.md lists all families",
    )


def _unreadable(model: PreTrainedModel, role: str, looked_for: str) -> ModelError:
    return ModelError(
        f"cannot read the anatomy of {type(model).__name__}: no {role} found",
        where=f"model_type {model.config.model_type}",
        rule=f"looked for {looked_for}",
        fix="use a decoder-only model of Transformers, or teach src/weft/anatomy/transformers.py this family's names",
    )
