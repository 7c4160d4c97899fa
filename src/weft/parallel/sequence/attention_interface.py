"""Attention function for Transformers' AttentionInterface, which calls `weft.parallel.sequence.context.attend`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from weft.compat import find_hook
from weft.errors import ModelError, Refusal, raise_if_refused
from weft.parallel.sequence.attention_plan import AttentionPlans
from weft.parallel.sequence.context import attend
from weft.parallel.sequence.context_grid import ContextParallel
from weft.parallel.sequence.dropout import DropoutContext

IMPLEMENTATION = "weft_context"
"""Name of the function in Transformers' AttentionInterface."""
# Arguments of attention functions in Transformers 5.17 to 5.23 that change the result and are not supported.
UNKNOWN_ARGUMENTS = ("position_bias", "indices", "block_indices", "sinks")


@dataclass
class AttentionSettings:
    """Settings of `context_attention` for one attention module, registered on it as a forward pre-hook."""

    name: str
    """Name of the module in its model."""
    context: ContextParallel
    plans: AttentionPlans
    """Plans that the attention modules of the model share."""
    dropout: DropoutContext | None = None
    """Seed and rows of layout-invariant dropout; None: seeds come from the default generator of torch on the host."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Leave the arguments unchanged; as a hook, the settings are attached to their module."""


def replace_attention(
    model: PreTrainedModel,
    names: list[str],
    context: ContextParallel,
    plans: AttentionPlans,
    dropout: DropoutContext | None = None,
) -> None:
    """Let the attention modules of a model compute `context_attention`, in place.

    Args:
        model: model whose attention goes through Transformers' AttentionInterface.
        names: names of its attention modules.
        context: groups and position of this rank.
        plans: empty plans.
        dropout: seed and rows of layout-invariant dropout.
    """
    AttentionInterface.register(IMPLEMENTATION, context_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)  # document indices replace masks
    model.set_attn_implementation(IMPLEMENTATION)
    for name in names:
        attention: Any = model.get_submodule(name)
        attention.register_forward_pre_hook(AttentionSettings(name, context, plans, dropout))
        # Tensor parallelism may have given the module a copy of the configuration.
        attention.config._attn_implementation = IMPLEMENTATION


@torch.compiler.disable
def context_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for Transformers' AttentionInterface that calls `attend`.

    Args:
        module: attention module of `replace_attention`.
        query, key, value: tokens of this rank, [B, H, S / cp, D].
        attention_mask: document indices of the full rows in place of a mask: integers [B, 1, 1, S], preferably in host
            memory, or None. Transformers passes four-dimensional masks through unchanged.
        scaling: factor on the scores; 1 / sqrt(D) by default.
        dropout: fraction of the probabilities to drop. The `DropoutContext` of the module says which; without one, the index in
            this batch and a seed from the default generator of torch on the host.
        kwargs: `sliding_window`, `softcap` and `s_aux` (sinks) are supported; see `reason_against_arguments` for others.

    Returns:
        [B, S / cp, Hq, Dv], and None for the probabilities, which no rank has in full.

    Raises:
        ModelError: the attention of the model has a feature that this function does not support.
        PlanError: see `attend`.
    """
    raise_if_refused(reason_against_arguments(module, kwargs))
    settings = find_hook(module, AttentionSettings)
    if settings is None:
        raise ModelError(
            f"{type(module).__name__} has the attention of Weft without its settings",
            where="context parallelism",
            rule="parallelize changes the attention of a model through its configuration object",
            fix="give each model its own configuration: copy.deepcopy(config)",
        )
    drop: dict[str, Any] = {}
    if dropout > 0 and settings.dropout is None:
        drop = {"seed": int(torch.randint(2**31, (), device="cpu"))}
    elif dropout > 0 and settings.dropout is not None:
        drop = settings.dropout.attention_arguments(settings.name, query.shape[1])
    out = attend(
        query,
        key,
        value,
        attention_mask,
        settings.context,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window") or None,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
        plans=settings.plans,
        **drop,
    )
    return out.transpose(1, 2).contiguous(), None


def reason_against_arguments(module: Any, kwargs: dict[str, Any]) -> Refusal | None:
    """Reason against an attention with a feature that `attend` would ignore.

    Such a feature is an unknown argument of the attention function, or a rule that only the attention mask contains.
    """
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    causal = kwargs.get("is_causal")
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[layer] if layer_types and layer is not None else None
    window_in_mask_only = not kwargs.get("sliding_window") and (
        kind == "sliding_attention" or ("sliding_window" not in kwargs and kind is None and _has_window(config))
    )
    problems = {
        "attention that is not causal": not (getattr(module, "is_causal", True) if causal is None else causal),
        "a sliding window that is only in its mask": window_in_mask_only,
        # "hybrid": attention beside a recurrent mixer (Falcon-H1)
        f"{kind} layers": kind not in (None, "full_attention", "sliding_attention", "hybrid"),
        **{f"the argument {name}": kwargs.get(name) is not None for name in UNKNOWN_ARGUMENTS},
        "probabilities as an output": bool(kwargs.get("output_attentions")),
    }
    unsupported = [name for name, is_used in problems.items() if is_used]
    if unsupported:
        return Refusal(
            f"{type(module).__name__} uses {' and '.join(unsupported)}",
            where="context parallelism",
            rule="attention over a split sequence supports causality, documents, sliding windows, softcaps and sinks",
            fix="run this model with cp = 1",
            error=ModelError,
        )
    return None


def _has_window(config: Any) -> bool:
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
