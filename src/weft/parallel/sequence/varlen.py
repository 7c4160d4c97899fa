"""Attention of packed rows by documents, without masks.

A mask of a packed row has tokens^2 elements, and the kernels that take one compute all pairs of tokens. Here each document is
a sequence of a kernel for packed sequences (`weft.compute.varlen_attention`).

The documents of a micro-batch are known on the host, so that no device waits for them. They go through a model in place of its
attention mask. Any other mask, and rows without one, are computed by Transformers' SDPA as before.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from weft.anatomy.documents import check_packing
from weft.anatomy.flops import layer_configs
from weft.anatomy.roles import Anatomy
from weft.anatomy.shrink import memo_of
from weft.anatomy.transformers import read_anatomy
from weft.compat import find_hook
from weft.compute.attention_choice import AttentionShape, refused_kernel
from weft.compute.sequences import VarlenKernel
from weft.compute.varlen_attention import choose_kernel
from weft.device.device import Device
from weft.errors import PlanError, raise_if_refused
from weft.parallel.sequence.attention_interface import reason_against_arguments
from weft.parallel.sequence.attention_plan import AttentionPlans
from weft.parallel.sequence.context import attend
from weft.parallel.sequence.context_grid import ContextParallel
from weft.parallel.sequence.dropout import has_attention_dropout
from weft.parallel.sequence.forward_pass import ForwardSlot
from weft.parallel.sequence.rows import encode_documents, reason_against_context
from weft.plan import Plan, ResolvedPlan
from weft.precision.dtypes import DTYPES

if TYPE_CHECKING:
    from weft.parallel.build import Build

IMPLEMENTATION = "weft_varlen"
"""Name of the function in Transformers' AttentionInterface."""
ONE_RANK = ContextParallel(None, None, 1, 1, 0)


@dataclass
class Varlen:
    """Plans of the documents of a model; a forward pre-hook of model and attention."""

    plans: AttentionPlans
    """Plans that the attention modules of the model share."""
    slot: ForwardSlot
    """Forward that the model runs now; a model without one makes its own masks."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Pass the documents to the model; to an attention module, do nothing but be found."""
        if not isinstance(module, PreTrainedModel) or self.slot.current is None:
            return None
        # Not an argument of the model: FSDP2 moves arguments to the device, before this hook.
        documents = encode_documents(self.slot.current.host_positions(), None, module.config.get_text_config())
        return args, kwargs | {"attention_mask": documents}


def uses_varlen(model: Any, anatomy: Anatomy, plan: ResolvedPlan, device_type: str) -> bool:
    """True if attention by documents replaces the masks of packed rows.

    With `plan.compute.attention = "auto"`, it does so where the device has a fast operator and the result is that of the
    documents alone (tested on a small copy of the model).

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        plan: plan.
        device_type: "cpu", "cuda" or "npu".

    Raises:
        PlanError: the plan asks for it, and it does not apply.
    """
    asked = plan.compute.attention
    if asked not in ("auto", "varlen") or plan.parallel.cp > 1 or has_attention_dropout(model):
        return False  # context parallelism and attention dropout have an attention by documents already
    reason = reason_against(model, anatomy, plan)
    if asked == "auto":
        return not reason and not kernel_of(model, plan, device_type)[1]
    if reason:
        raise PlanError(
            f'attention = "varlen" for {anatomy.family}: {reason}',
            where="plan.compute.attention",
            rule="attention by documents needs causal attention through Transformers' AttentionInterface, with an "
            "implementation sdpa, and its results must be those of each document alone (tested on a small copy of the model)",
            fix='set plan.compute.attention = "auto"',
        )
    return True


def check_attention(plan: Plan, device: Device) -> None:
    """Refuse FlexAttention on a device on which torch has no backward of it, and attention kernels of other devices.

    Raises:
        PlanError: names the device.
    """
    kernel, known = plan.compute.kernels.attention, device.attention_kernels
    if kernel not in ("auto", "reference", *known):
        raise refused_kernel(kernel, device, f"kernels for {device.type}: {', '.join(known) or 'none'}")
    if plan.compute.attention == "flex" and not device.has_flex_attention:
        raise PlanError(
            f'attention = "flex" on {device.type}',
            where="plan.compute.attention",
            rule="torch computes the backward of FlexAttention on cuda alone",
            fix='set plan.compute.attention = "auto", which computes packed rows without masks too',
        )


def kernel_of(model: Any, plan: ResolvedPlan, device_type: str) -> tuple[VarlenKernel, str]:
    """Kernel of most attention modules of a model, and the reason why it is not the fast one of the device.

    Args:
        model: model of Transformers; may be on the meta device.
        plan: plan.
        device_type: "cpu", "cuda" or "npu".
    """
    config = layer_configs(model.config)[0]  # in models with unlike layers the first kind is the frequent one
    return choose_kernel(
        device_type,
        DTYPES[plan.precision.param_dtype],
        *_head_dims(config),
        window=getattr(config, "sliding_window", None),
        ring=plan.parallel.cp // plan.parallel.cp_ulysses,
        softcap=getattr(config, "attn_logit_softcapping", None),
        dropout=1.0 if has_attention_dropout(model) else 0.0,
    )


def _head_dims(config: Any) -> tuple[int, int]:
    """Elements of a head of queries and keys, and of values."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    if getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return head_dim, value_dim


def attention_shape(
    model: Any, plan: ResolvedPlan, documents: tuple[tuple[int, ...], ...], kernel: VarlenKernel | None
) -> AttentionShape:
    """Attention of most layers of a model on one rank, for measurements.

    Ranks of cp compute a part of each row; their work is that of full rows with as small a part of the heads.

    Args:
        model: model of Transformers; may be on the meta device.
        plan: plan.
        documents: lengths of the documents of each row of a micro-batch.
        kernel: kernel that computes document by document; None: SDPA.
    """
    config, split = layer_configs(model.config)[0], plan.parallel.tp * plan.parallel.cp
    heads = config.num_attention_heads
    kv_heads = max(1, (getattr(config, "num_key_value_heads", None) or heads) // split)
    return AttentionShape(
        documents,
        max(1, heads // split // kv_heads) * kv_heads,
        kv_heads,
        *_head_dims(config),
        DTYPES[plan.precision.param_dtype],
        getattr(config, "sliding_window", None),
        kernel,
    )


def reason_against(model: Any, anatomy: Anatomy, plan: ResolvedPlan) -> str:
    """Reason why attention by documents does not apply to a model; "" if it does. Arguments as for `uses_varlen`."""
    if not anatomy.head:
        return "the model has no output embeddings, with which rows and documents are compared"
    if model.config._attn_implementation != "sdpa":
        return f"the attention of the model is {model.config._attn_implementation}"
    if refusal := reason_against_context(model, anatomy, plan):
        return refusal.what
    memo = memo_of(model)
    if "documents" not in memo:
        checks = (check_packing(model, anatomy, None, run_documents, packed=packed) for packed in (True, False))
        memo["documents"] = next((check.problem for check in checks if check.problem), "")
    return str(memo["documents"])


def run_documents(model: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of rows of documents, by the attention of this file."""
    install_varlen(model, read_anatomy(model), AttentionPlans("cpu"), ForwardSlot())
    documents = encode_documents(position_ids, None, model.config.get_text_config())
    return model(input_ids=input_ids, position_ids=position_ids, attention_mask=documents, use_cache=False).logits


def install_varlen(model: Any, anatomy: Anatomy, plans: AttentionPlans, slot: ForwardSlot) -> Varlen:
    """Let the attention modules of a model compute `document_attention`, in place.

    Args:
        model: model for which `uses_varlen` is true.
        anatomy: its roles; in a pipeline, those of the blocks of this rank.
        plans: empty plans.
        slot: slot of the runtime of the model.
    """
    AttentionInterface.register(IMPLEMENTATION, document_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    model.set_attn_implementation(IMPLEMENTATION)
    varlen = Varlen(plans, slot)
    for name in (name for block in anatomy.blocks for name in block.attention):
        attention: Any = model.get_submodule(name)
        attention.register_forward_pre_hook(varlen, with_kwargs=True)
        attention.config._attn_implementation = IMPLEMENTATION  # tensor parallelism may have given it a copy
    model.register_forward_pre_hook(varlen, with_kwargs=True)
    return varlen


@torch.compiler.disable
def document_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for Transformers' AttentionInterface.

    Args:
        module: attention module of `install_varlen`.
        query, key, value: [B, H, S, D].
        attention_mask: document indices, int64 [B, 1, 1, S] in host memory; or any mask of Transformers' SDPA, or None.
        scaling: factor on the scores; 1 / sqrt(D) by default.
        dropout: ignored with documents: a model with attention dropout has another attention.
        kwargs: see `weft.parallel.sequence.attention_interface.context_attention`.

    Returns:
        [B, S, Hq, Dv], and None for the probabilities.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    varlen = find_hook(module, Varlen)
    assert varlen is not None
    raise_if_refused(reason_against_arguments(module, kwargs))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, softcap, sinks = kwargs.get("sliding_window") or None, kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is None and sinks is None and (window is None or window >= query.shape[2]):
        shape = len(query), query.shape[2]
        (own,) = varlen.plans.steps(attention_mask, *shape, 1, 0, window, query.device)
        if len(own[0].sequences.queries) == len(query) + 1:  # each row is one document
            return sdpa_attention_forward(module, query, key, value, None, 0.0, scaling, is_causal=True)
    out = attend(
        query,
        key,
        value,
        attention_mask,
        ONE_RANK,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        plans=varlen.plans,
    )
    return out.transpose(1, 2).contiguous(), None


def attend_by_documents(build: "Build") -> None:
    """Step of `parallelize`: attention by documents; before `split_rows`, which makes masks where there are none."""
    build.begin("attend_by_documents", "split_tensors")
    if build.choices.attention == "documents":
        plans, slot = AttentionPlans(build.mesh.device_type), build.runtime.forward_slot
        build.runtime.attention_plans = plans
        build.runtime.varlen = install_varlen(build.model, build.anatomy, plans, slot)
