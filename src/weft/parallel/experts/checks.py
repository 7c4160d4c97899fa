"""Models whose experts can be split."""

import inspect
import math
from typing import Any

from torch import nn

from weft.anatomy.roles import Anatomy
from weft.errors import PlanError
from weft.parallel.experts.matrices import split_dims
from weft.parallel.experts.path import unbound_forward
from weft.parallel.tensor.checks import divisors, one_of

# Arguments of the experts modules of Transformers 5.17 to 5.23; the second names are those of GPT-OSS.
SIGNATURES = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)


def check_experts(model: nn.Module, anatomy: Anatomy, ep: int) -> None:
    """Refuse expert parallelism if the experts of the model cannot be split.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        ep: expert-parallel degree; 1 is always accepted.

    Raises:
        PlanError: the model has no experts; an experts module has an unknown signature, no `num_experts`, or parameters that
            are not stacked by expert; or ep does not divide the number of experts.
    """
    names = [name for block in anatomy.blocks for name in block.experts]
    if ep > 1 and not names:
        raise PlanError(
            f"ep = {ep}, but no block of this {anatomy.family} has an experts module",
            where="plan.parallel.ep",
            rule="expert parallelism splits the experts of Mixture-of-Experts blocks over ranks",
            fix="leave plan.parallel.ep at 1",
        )
    for name in names if ep > 1 else ():
        _check_module(name, model.get_submodule(name), ep)
    counts = {name: int(model.get_submodule(name).num_experts) for name in names} if ep > 1 else {}  # type: ignore[arg-type]
    for name, num_experts in counts.items():
        if num_experts % ep:
            common = math.gcd(ep, *counts.values())  # divisors of ep still divide the number of ranks
            raise PlanError(
                f"ep = {ep} does not divide {num_experts} experts",
                where=f"plan.parallel.ep, {name}",
                rule="every rank holds the same number of complete experts",
                fix=f"set plan.parallel.ep to {one_of(divisors(common))}",
            )


def takes_indices(experts: nn.Module) -> bool:
    """True if the arguments of an experts module are tokens, expert indices and router weights."""
    return tuple(inspect.signature(experts.forward).parameters) in SIGNATURES


def _check_module(name: str, experts: Any, ep: int) -> None:
    signature = tuple(inspect.signature(experts.forward).parameters)
    num_experts = getattr(experts, "num_experts", 0)
    unstacked = [key for key, p in experts.named_parameters() if p.ndim < 2 or len(p) != num_experts]
    problem = ""
    if not takes_indices(experts):
        problem = f"is called with ({', '.join(signature)})"
    elif unbound_forward(experts) is None:
        problem = "has a forward that something else has set"
    elif not num_experts:
        problem = "has no num_experts"
    elif unstacked:
        problem = f"has a parameter that is not stacked by expert: {unstacked[0]}"
    if problem:
        raise PlanError(
            f"ep = {ep}, but the experts of this model cannot be split: {type(experts).__name__} {problem}",
            where=f"plan.parallel.ep, {name}",
            rule=f"forward({', '.join(SIGNATURES[0])}), num_experts, and parameters [num_experts, ...]",
            fix="leave plan.parallel.ep at 1",
        )


def check_expert_tensor(model: nn.Module, anatomy: Anatomy, etp: int) -> None:
    """Refuse expert tensor parallelism if the experts of the model cannot be split.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        etp: ranks over which each expert is split; 1 is always accepted.

    Raises:
        PlanError: an experts module has unknown parameters, or etp does not divide the width of its experts.
    """
    names = [name for block in anatomy.blocks for name in block.experts] if etp > 1 else []
    for name in names:
        experts: Any = model.get_submodule(name)
        described = all(hasattr(experts, flag) for flag in ("is_transposed", "has_gate", "is_concatenated"))
        dims = split_dims(experts) if described else {}
        unknown = [key for key, dim in dims.items() if dim is None and key != "down_proj_bias"]
        if not described or unknown or "down_proj" not in dims:
            raise PlanError(
                f"etp = {etp} for {type(experts).__name__}"
                + (f", which has a parameter {unknown[0]}" if unknown else ""),
                where=f"plan.parallel.etp, {name}",
                rule="the matrices of experts are gate_up_proj or up_proj, and down_proj, as Transformers describes them",
                fix="leave plan.parallel.etp at 1",
            )
        width = experts.down_proj.shape[dims["down_proj"]]
        if width % etp:
            raise PlanError(
                f"etp = {etp} does not divide experts that are {width} wide",
                where=f"plan.parallel.etp, {name}",
                rule="each rank of etp holds the same number of columns of an expert's first matrix",
                fix="set plan.parallel.etp to a divisor of the width of an expert",
            )
