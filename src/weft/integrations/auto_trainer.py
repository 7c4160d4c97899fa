"""`--plan auto` under a Trainer: what the planner must know of it, while the Trainer is made and later."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import set_seed

from weft.integrations.auto_plan import AutoPlan, Rows, choose_plan, row_length
from weft.integrations.generation import generates
from weft.integrations.optimizer import refuse_not_elementwise
from weft.plan import Plan, ResolvedPlan

PAIRED = ("DPOTrainer", "RewardTrainer", "CPOTrainer", "ORPOTrainer")
"""Trainers of TRL that run two sequences for each row: the chosen and the rejected one."""


def plan_for_trainer(
    trainer: Any,
    auto: AutoPlan,
    given: Mapping[str, Any],
    requested_precision: str,
    check: Callable[[ResolvedPlan], None],
) -> Plan:
    """Choose the plan of a trainer. Collective.

    Args:
        trainer: trainer that has its arguments.
        auto: as for `choose_plan`.
        given: arguments of `Trainer.__init__` that the trainer has not stored yet.
        requested_precision: "no", "bf16" or "fp16".
        check: raises a WeftError for a resolved plan that the trainer cannot run under.

    Raises:
        PlanError: no plan fits; the same on every rank.
    """

    def of(name: str) -> Any:
        return given.get(name, getattr(trainer, name, None))

    arguments = trainer.args
    model = of("model")
    if model is None:
        model = _first_model(of("model_init"), arguments)
    names = {kind.__name__ for kind in type(trainer).__mro__}
    tokens, source = row_length(arguments, of("train_dataset"), of("processing_class"), getattr(model, "config", None))
    optimizer = _optimizer_name(of, arguments, model)
    has_reference = bool(getattr(arguments, "beta", 0)) and not getattr(arguments, "precompute_ref_log_probs", False)
    has_reference = has_reference and not hasattr(model, "get_base_model")  # its adapter is switched off instead

    def check_all(plan: ResolvedPlan) -> None:
        check(plan)
        refuse_not_elementwise(optimizer, plan.parallel.zero > 0 or plan.parallel.tp > 1)

    return choose_plan(
        auto,
        model,
        Rows(
            arguments.per_device_train_batch_size,
            arguments.gradient_accumulation_steps,
            tokens,
            source,
            2 if names & set(PAIRED) else 1,
        ),
        requested_precision,
        check_all,
        references=sum(parameter.numel() for parameter in model.parameters()) if has_reference else 0,
        generates=generates(type(trainer)),
        recomputes=bool(arguments.gradient_checkpointing),
    )


def _first_model(model_init: Callable[..., Any], arguments: Any) -> Any:
    """Model of `model_init`, which the Trainer calls again; random numbers begin anew as before the call."""
    model = model_init(None) if inspect.signature(model_init).parameters else model_init()
    set_seed(arguments.seed)
    return model


def _optimizer_name(of: Callable[[str], Any], arguments: Any, model: Any) -> str:
    """Class of the optimizer that a trainer has or makes; "" if it is not known yet."""
    own, pair = (of("optimizers") or (None,))[0] or of("optimizer"), of("optimizer_cls_and_kwargs")
    if own is not None:
        return type(own).__name__
    try:
        made: type[torch.optim.Optimizer] = (pair or Trainer.get_optimizer_cls_and_kwargs(arguments, model))[0]
    except (ImportError, ValueError):  # which the Trainer raises when it makes the optimizer
        return ""
    return made.__name__
