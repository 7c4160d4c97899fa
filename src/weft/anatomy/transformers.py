"""Anatomy of any Hugging Face causal language model, read from the library's metadata and the module tree."""

import re
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_CTC_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from weft.anatomy.classes import WORDS
from weft.anatomy.plain import block_names, read_plain_anatomy
from weft.anatomy.roles import Anatomy, Block, standard_name
from weft.errors import ModelError

# Last part of module names by role, in the families of Transformers 5.17 to 5.23.
ATTENTION = re.compile(r"(self_)?(attn|attention|att)|multi_head_attention|SelfAttention|attn1")
CROSS_ATTENTION = re.compile(r"encoder_attn|cross_?att(entio)?n|EncDecAttention|attn2")
RECURRENCE = re.compile(r"linear_attn|mamba|mixer|conv|temporal_block|mlstm_layer")
MLP = re.compile(
    r"mlps?|ffn([12]|_output)?|feed_forward[12]?|moe|block_sparse_moe|shared_mlp|fc1|fc2|pwconv[12]|intermediate|output"
    r"|DenseReluDense|ff(_context)?|(img|txt)_mlp"
)
ROUTER = re.compile(r"gate|router")
EXPERTS = re.compile(r"experts")
SHARED_EXPERTS = re.compile(r"shared_experts?|shared_mlp")
MASKED_WORDS = frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
"""Classes of Transformers with a loss over masked words."""
DUAL_ENCODERS = set(MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES) - set(
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
)
"""Model types with an encoder of images beside one of text, as CLIP."""
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_k", "moe_topk")


def read_anatomy(model: PreTrainedModel) -> Anatomy:
    """Read the anatomy of a causal language model; the model may be on the meta device.

    Raises:
        ModelError: a role is missing; the message has the names that were searched.
    """
    # The causal class of an encoder attends to later tokens, unless its configuration makes it a decoder.
    is_causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    is_encoder = model.config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    sees_later_tokens = is_causal and is_encoder and not getattr(model.config, "is_decoder", True)
    if model.config.model_type in DUAL_ENCODERS or sees_later_tokens:
        raise unknown_kind(model.config)
    names = {id(module): name for name, module in model.named_modules()}
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # of Transformers, for a model without a module that it takes for embeddings
        embedding = None
    head = model.get_output_embeddings()
    if embedding is None or (head is not None and not hasattr(embedding, "weight")):
        raise _unreadable(model, "embedding", "get_input_embeddings() to name a module with a weight")
    stack_name, stack = _find_blocks(model)
    config = model.config.get_text_config()
    if getattr(config, "vocab_size", None) is None:
        raise _unreadable(model, "vocabulary", "vocab_size in its configuration")
    blocks = tuple(_read_block(f"{stack_name}.{index}", block, config) for index, block in enumerate(stack.children()))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    others = tuple(_read_block(name, model.get_submodule(name), config) for name in block_names(model, stack_name))
    return Anatomy(
        family=model.config.model_type,
        embedding=names[id(embedding)],
        blocks=blocks,
        final_norm=_find_final_norm(model, stack_name),
        head=names[id(head)] if head is not None else "",
        tied=head is not None and head.weight is embedding.weight,
        parameters=parameters,
        active_parameters=parameters - _inactive_parameters(model, blocks),
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
        is_decoder=_is_decoder(model),
        frozen_parameters=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        encoder_blocks=others if model.config.is_encoder_decoder else (),
        tower_blocks=() if model.config.is_encoder_decoder else others,
    )


def _is_decoder(model: PreTrainedModel) -> bool:
    is_causal = (
        kind_of_model(model.config) is None or type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )
    return is_causal and not model.config.is_encoder_decoder


def read_blocks(model: nn.Module) -> Anatomy:
    """Read the blocks of a model without the embedding and the head of a language model, such as an encoder of images.

    The blocks of a model of Transformers or Diffusers have the roles that the names of their parts tell.
    """
    plain = read_plain_anatomy(model)
    if not isinstance(model, PreTrainedModel) and not is_diffusers(model):
        return plain
    read = _read_block if is_diffusers(model) else _read_stage
    found = [read(block.name, model.get_submodule(block.name), model.config) for block in plain.blocks]
    named = [
        block
        if own.is_moe or (own.recurrence and not own.attention)
        else replace(block, attention=own.attention, cross_attention=own.cross_attention, mlp=own.mlp)
        for block, own in zip(plain.blocks, found, strict=True)
    ]
    return replace(plain, blocks=tuple(named))


def is_diffusers(model: nn.Module) -> bool:
    """True for a model of Diffusers, which is not imported."""
    return any(base.__module__.startswith("diffusers.") for base in type(model).__mro__)


def read_any_anatomy(model: Any, *, needs_roles: bool) -> Anatomy:
    """Read the anatomy of a model; without roles, if they cannot be read.

    Args:
        model: model of any library; it may be on the meta device.
        needs_roles: refuse a model of Transformers whose roles cannot be read, as of a causal language model.

    Raises:
        ModelError: a needed role is missing.
    """
    if isinstance(model, PreTrainedModel):
        try:
            return read_anatomy(model)
        except ModelError:
            if needs_roles:
                raise
    return read_blocks(model)


def row_arguments(model: PreTrainedModel, position_ids: torch.Tensor, masks: bool = True) -> dict[str, Any]:
    """Keyword arguments, besides `input_ids`, for running rows of documents in training.

    Rows with a single document get no mask; the model builds its own mask, including family-specific parts. Packed rows get
    the masks of `document_masks`; `weft.anatomy.documents` checks at startup that these masks are correct for the model.

    Args:
        model: causal language model, parallelized or not.
        position_ids: [rows, seq_len]; a document starts where they do not increase by one.
        masks: build masks for packed rows; False for a model that builds masks from full rows itself.
    """
    made = document_masks(model, position_ids) if masks and not bool((position_ids.diff() == 1).all()) else None
    arguments: dict[str, Any] = {"position_ids": position_ids, "attention_mask": made, "use_cache": False}
    # `weft.parallel.experts.router_stats` computes the auxiliary loss.
    if getattr(model.config, "output_router_logits", False):
        arguments["output_router_logits"] = False
    return arguments


def document_masks(
    model: PreTrainedModel, position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> Any:
    """Attention masks of packed rows for the argument `attention_mask`, built by Transformers.

    Most families build these masks from position ids themselves; some (GPT-OSS in 5.17 to 5.23) do not, and silently attend
    across documents. All families use masks that are built before the forward pass, as `generate` does.

    Args:
        model: causal language model, parallelized or not.
        position_ids: [rows, seq_len]; a document starts where they do not increase by one.
        attention_mask: [rows, seq_len], 0 in padding; or None.

    Returns:
        One mask, a dictionary with a mask per kind of layer, or None where plain causal attention is sufficient.
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
    """Find the list of decoder blocks: the list in the library's pipeline plan, else the largest list of blocks."""
    config = model.config.get_text_config()

    def is_block(module: nn.Module) -> bool:
        children = [standard_name(config, name) for name in _parts(module)]
        mixes_tokens = any(map(ATTENTION.fullmatch, children))
        has_state = any(map(RECURRENCE.fullmatch, children))
        return has_state or (mixes_tokens and any(map(MLP.fullmatch, children)))

    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    stacks = [name for name, module in lists.items() if all(map(is_block, module))]
    planned = [f"{model.base_model_prefix}.{key}" for key in getattr(model.config, "base_model_pp_plan", None) or ()]
    own_decoder = model.get_decoder()
    decoder = next((name for name, module in model.named_modules() if module is own_decoder), "")
    inside = [name for name in stacks if decoder and name.startswith(f"{decoder}.")]
    found = [name for name in stacks if name in planned] or inside or stacks
    if not found and kind_of_model(model.config):
        raise unknown_kind(model.config)
    if not found:
        wanted = f"a list of blocks whose children match {ATTENTION.pattern} and {MLP.pattern}, or {RECURRENCE.pattern}"
        raise _unreadable(model, "blocks", f"{wanted}; the module lists are: {', '.join(lists) or 'none'}")
    largest = max(found, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return largest, lists[largest]


def _parts(block: nn.Module) -> list[str]:
    """Relative names of the parts of a block: its children; in T5, those of the members of its list of sublayers."""
    if not isinstance(sublayers := getattr(block, "layer", None), nn.ModuleList):
        return [name for name, _ in block.named_children()]
    return [
        f"layer.{index}.{name}" for index, sublayer in enumerate(sublayers) for name, _ in sublayer.named_children()
    ]


def _read_stage(name: str, block: nn.Module, config: Any) -> Block:
    """Read a block that may also be one part of a layer (XLM), or a stage of several layers (SegFormer)."""
    list_name = name.rpartition(".")[0].rpartition(".")[2].removesuffix("s")
    attention = (name,) if ATTENTION.fullmatch(list_name) else ()
    mlp = (name,) if MLP.fullmatch(list_name) else ()
    found = _read_block(name, block, config)
    if attention or mlp:
        return replace(found, attention=attention, mlp=mlp)
    if found.attention or found.mlp or found.recurrence:
        return found
    layers = [
        f"{child}.{index}.{part}"
        for child, members in block.named_children()
        if isinstance(members, nn.ModuleList | nn.Sequential)
        for index, member in members.named_children()
        for part, _ in member.named_children()
    ]
    return _read_block(name, block, config, layers)


def _read_block(name: str, block: nn.Module, config: Any, own_parts: list[str] | None = None) -> Block:
    """Read a block; `own_parts` are the relative names of its parts, by default those of `_parts`."""

    def find(pattern: re.Pattern[str], inside: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Modules whose last name matches: parts of the block, or any module inside the parts `inside`."""
        if inside is None:
            own = _parts(block) if own_parts is None else own_parts
            parts = [part for part in own if pattern.fullmatch(standard_name(config, part))]
            return tuple(f"{name}.{part}" for part in parts)
        found: list[str] = []
        for child, _ in block.named_modules():
            full = f"{name}.{child}"
            below = full in inside or full.startswith(tuple(f"{part}." for part in inside))
            # Only the outermost matching module has the role.
            nested = full.startswith(tuple(f"{outer}." for outer in found))
            if below and not nested and pattern.fullmatch(standard_name(config, child)):
                found.append(full)
        return tuple(found)

    def without_wrappers(full: str) -> str:
        """Name of the module with the weights, inside of the wrappers of PEFT around it."""
        while f"{full}.base_layer" in modules:
            full = f"{full}.base_layer"
        return full

    modules = {f"{name}.{child}" for child, _ in block.named_modules()}
    mixers = {part: _role_of_mixer(block.get_submodule(part.removeprefix(f"{name}."))) for part in find(RECURRENCE)}
    attention, recurrence, mlp = (
        (*found, *(part for part, own in mixers.items() if own == role))
        for role, found in (("attention", find(ATTENTION)), ("recurrence", ()), ("mlp", find(MLP)))
    )
    experts = tuple(map(without_wrappers, find(EXPERTS, mlp)))
    return Block(
        name=name,
        attention=attention,
        recurrence=recurrence,
        mlp=mlp,
        router=find(ROUTER, mlp) if experts else (),
        experts=experts,
        shared_experts=find(SHARED_EXPERTS, mlp) if experts else (),
        cross_attention=find(CROSS_ATTENTION),
        norms=tuple(f"{name}.{child}" for child, module in block.named_modules() if _is_norm(child, module, config)),
    )


def _role_of_mixer(mixer: nn.Module) -> str:
    """Role of a part with the name of a recurrent mixer; all parts of Nemotron-H have the same name."""
    children = {name for name, _ in mixer.named_children()}
    if {"q_proj", "k_proj", "o_proj"} <= children and "conv1d" not in children:
        return "attention"
    return "mlp" if children & {"experts", "down_proj"} else "recurrence"


def _find_final_norm(model: PreTrainedModel, stack_name: str) -> str | None:
    """Find the final norm: the last module of the library's pipeline plan, else the last norm next to the blocks."""
    parent_name = stack_name.rpartition(".")[0]
    plan = list(getattr(model.config, "base_model_pp_plan", None) or ())
    if plan and hasattr(model.get_submodule(parent_name), plan[-1]):
        return f"{parent_name}.{plan[-1]}"
    config = model.config.get_text_config()
    children = model.get_submodule(parent_name).named_children()
    siblings = [name for name, module in children if _is_norm(name, module, config)]
    return f"{parent_name}.{siblings[-1]}".lstrip(".") if siblings else None


def _is_norm(name: str, module: nn.Module, config: Any) -> bool:
    return "Norm" in type(module).__name__ or standard_name(config, name) in ("norm", "q_norm", "k_norm")


def experts_per_token(config: Any) -> int | None:
    """Number of experts per token in the configuration of a language model; None if the configuration has no such key."""
    return next((getattr(config, key) for key in TOP_K if isinstance(getattr(config, key, None), int)), None)


def _inactive_parameters(model: PreTrainedModel, blocks: tuple[Block, ...]) -> int:
    """Number of expert parameters that a token does not use (fused experts are stacked along the first dim)."""
    config = model.config.get_text_config()
    top_k = experts_per_token(config)
    inactive = 0
    for name in (name for block in blocks for name in block.experts):
        experts = model.get_submodule(name)
        separate = len(list(experts.children())) if isinstance(experts, nn.ModuleList) else 0
        for parameter in experts.parameters():
            num_experts = separate or parameter.shape[0]
            share = 1 - min(top_k or num_experts, num_experts) / num_experts
            inactive += round(prod(parameter.shape) * share)
    return inactive


def kind_of_model(config: PretrainedConfig) -> str | None:
    """Kind of a model that is not decoder-only, from the model lists of Transformers; None if it is in none of them."""
    if config.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "an encoder-decoder model"
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "an encoder-only model"
    if config.model_type in DUAL_ENCODERS:
        return "a dual encoder of images and text"
    if config.model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "an encoder of images"
    if config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES and config.is_encoder_decoder:
        return "an encoder-decoder model"
    if config.model_type in (*MODEL_FOR_CTC_MAPPING_NAMES, *MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES):
        return "an encoder of audio"
    return None


def unknown_kind(config: PretrainedConfig, task: str = "causal") -> ModelError:
    """Error for a model that has no class for a task."""
    kind, wanted = kind_of_model(config), WORDS[task]
    return ModelError(
        f"{config.model_type} is {kind}"
        if kind and task == "causal"
        else f"Transformers cannot build a {wanted} of {config.model_type}: the family has none",
        where=f"model_type {config.model_type}",
        rule=f'task.kind = "{task}" trains a {wanted} of Transformers',
        fix="name a causal model, such as llama, qwen3 or gpt2, or set task.kind; docs/families.md lists all families"
        if task == "causal"
        else "name a model that has one, or set task.kind",
    )


def _unreadable(model: PreTrainedModel, role: str, looked_for: str) -> ModelError:
    return ModelError(
        f"cannot read the anatomy of {type(model).__name__}: no {role} found",
        where=f"model_type {model.config.model_type}",
        rule=f"looked for {looked_for}",
        fix="use a decoder-only model of Transformers, or give its modules roles in [model.roles] (docs/extending.md)",
    )
