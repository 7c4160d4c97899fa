"""Reasons against splitting a model as a whole: its head, its kind of blocks, and what is added to its residual stream."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.errors import ModelError, Refusal
from weft.memory.storages import plain_parts
from weft.parallel.sequence.recurrent_heads import mixer_heads
from weft.parallel.tensor.rules import config_of
from weft.plan import ResolvedPlan


def reason_without_head(anatomy: Anatomy, plan: ResolvedPlan, *, divides_heads: bool) -> Refusal | None:
    """Reason against cp and a backward in fp16 for a classifier or a reward model, which has no output embeddings.

    Args:
        anatomy: roles of the full model.
        plan: plan.
        divides_heads: True if ranks of cp divide the heads of attention, and each has the whole output of the model.
    """
    if anatomy.head:
        return None
    p = plan.parallel
    settings = {
        "parallel.cp": p.cp > 1 and not divides_heads,
        "precision.backward": plan.precision.backward == "fp16",
    }
    for key in (key for key, is_set in settings.items() if is_set):
        return Refusal(
            f"plan.{key} for a {anatomy.family} model without output embeddings",
            where=f"plan.{key}",
            rule="classifiers and reward models run under ZeRO, tensor and pipeline parallelism",
            fix=f"set plan.{key} to {'1' if key.startswith('parallel') else repr('forward')}",
        )
    return None


def reason_against_views(model: nn.Module) -> Refusal | None:
    """Reason against parameters that are views of the same memory, which are updated apart once they are sharded or copied."""
    held: dict[int, list[tuple[int, int, str]]] = {}
    for name, part in ((name, part) for name, parameter in model.named_parameters() for part in plain_parts(parameter)):
        if part.is_meta or not part.numel():
            continue
        begin = part.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        end = begin + (last + 1) * part.element_size()
        others = held.setdefault(part.untyped_storage().data_ptr(), [])
        other = next((other for first, after, other in others if first < end and begin < after), None)
        if other is not None:
            return Refusal(
                f"{other} and {name} are two parameters in the same memory",
                where=type(model).__name__,
                rule="tied weights are one parameter with several names: two parameters would be sharded and updated apart",
                fix="assign one parameter to both modules; of an adapter of PEFT for a tied embedding, leave out "
                "ensure_weight_tying, or train the embedding by modules_to_save",
                error=ModelError,
            )
        others.append((begin, end, name))
    return None


def reason_against_layer_drop(model: nn.Module, plan: ResolvedPlan) -> Refusal | None:
    """Reason against layer drop, by which each rank skips other blocks, where ranks share the weights of blocks."""
    p = plan.parallel
    if not isinstance(model, PreTrainedModel) or p.zero == 0 or p.data_ranks * p.cp == 1:
        return None
    if not (key := layer_drop(model.config.to_dict())):
        return None
    return Refusal(
        f"{key} of the model's configuration under plan.parallel.zero = {p.zero}",
        where=f"model.config.{key}",
        rule="under ZeRO stages 1 to 3, data ranks gather and reduce the weights of a block together, and layer drop skips "
        "other blocks on each rank",
        fix=f"set {key} = 0 in the configuration, or plan.parallel.zero = 0",
    )


def layer_drop(table: dict[str, Any]) -> str:
    """First key of a configuration that drops layers; "" without one."""
    for key, value in table.items():
        if str(key).endswith("layerdrop") and isinstance(value, int | float) and value > 0:
            return key
        if isinstance(value, dict) and (inner := layer_drop(value)):
            return f"{key}.{inner}"
    return ""


def reason_against_decoder(model: PreTrainedModel, anatomy: Anatomy, axis: str, ranks: int = 1) -> Refusal | None:
    """Reason against splitting a model that is not one stack of decoder blocks with one self-attention each.

    Args:
        model: full model.
        anatomy: its roles.
        axis: axis of the plan that would split it ("tp" or "cp").
        ranks: of cp, ranks that divide the heads of recurrent mixers: those of tp and cp together.

    Returns:
        A refusal if a block attends to an encoder, has several attentions, or is recurrent in an unknown way.
    """
    for block in anatomy.blocks:
        unknown = [name for name in block.recurrence if mixer_heads(model.get_submodule(name), ranks) is None]
        if unknown and axis != "tp":
            return Refusal(
                f"{unknown[0]} is recurrent along the sequence",
                where=f"plan.parallel.{axis}, model_type {anatomy.family}",
                rule="ranks of cp divide the heads of recurrent mixers that are gated delta nets, short convolutions or "
                f"Mamba-2, the last with a norm for each group of heads, in numbers that {ranks} ranks of tp and cp divide",
                fix=f"set plan.parallel.{axis} = 1",
            )
        # Under tp, every rank has the outputs of the encoder.
        cross = [] if axis == "tp" else [name.rpartition(".")[2] for name in block.cross_attention]
        several = [name for name in block.attention if isinstance(model.get_submodule(name), nn.ModuleList)]
        if cross or several:
            what = (
                f"{block.name} attends to an encoder ({cross[0]})" if cross else f"{several[0]} is a list of attentions"
            )
            return Refusal(
                what,
                where=f"plan.parallel.{axis}, model_type {anatomy.family}",
                rule="only decoder-only language models are split: one attention per block, over the tokens of the block",
                fix=f"set plan.parallel.{axis} = 1",
            )
    return None


def reason_against_streams(model: Any, anatomy: Anatomy, key: str, fix: str) -> Refusal | None:
    """Reason against splitting the residual stream along the sequence: something is added to it between blocks.

    Args:
        model: full model.
        anatomy: its roles.
        key: key of plan.parallel that splits it.
        fix: what else the plan may say.
    """
    vision, text = getattr(model.config, "vision_config", None), config_of(model, "")
    added = {
        "deepstack_visual_indexes": getattr(vision, "deepstack_visual_indexes", None),
        "hidden_size_per_layer_input": getattr(text, "hidden_size_per_layer_input", None),
    }
    for name in (name for name, value in added.items() if value):
        return Refusal(
            f"splitting the sequence of a {type(model).__name__} with {name}",
            where=f"plan.parallel.{key}, model_type {anatomy.family}",
            rule="features that are added to the residual stream between blocks need whole sequences",
            fix=fix,
        )
    return None
