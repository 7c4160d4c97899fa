"""Models whose experts can be split."""

import inspect
import math
from typing import Any

from torch import nn

from weft.anatomy.roles import Anatomy
from weft.errors import Refusal
from weft.parallel.experts.matrices import split_dims
from weft.parallel.experts.path import unbound_forward
from weft.parallel.tensor.checks import divisors, one_of

# Arguments of the experts modules of Transformers 5.17 to 5.23; the second names are those of GPT-OSS.
SIGNATURES = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)


def reason_against_ep(model: nn.Module, anatomy: Anatomy, ep: int) -> Refusal | None:
    """Reason against expert parallelism: the experts of the model cannot be split.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        ep: expert-parallel degree; 1 is always accepted.
    """
    names = [name for block in anatomy.blocks for name in block.experts]
    if ep == 1:
        return None
    if not names:
        return Refusal(
            f"ep = {ep}, but no block of this {anatomy.family} has an experts module",
            where="plan.parallel.ep",
            rule="expert parallelism splits the experts of Mixture-of-Experts blocks over ranks",
            fix="leave plan.parallel.ep at 1",
        )
    for name in names:
        experts: Any = model.get_submodule(name)
        if problem := _problem(experts):
            return Refusal(
                f"ep = {ep}, but the experts of this model cannot be split: {type(experts).__name__} {problem}",
                where=f"plan.parallel.ep, {name}",
                rule=f"forward({', '.join(SIGNATURES[0])}), num_experts, and parameters [num_experts, ...]",
                fix="leave plan.parallel.ep at 1",
            )
    counts = {name: int(model.get_submodule(name).num_experts) for name in names}  # type: ignore[arg-type]
    for name, num_experts in counts.items():
        if num_experts % ep:
            common = math.gcd(ep, *counts.values())  # divisors of ep still divide the number of ranks
            return Refusal(
                f"ep = {ep} does not divide {num_experts} experts",
                where=f"plan.parallel.ep, {name}",
                rule="every rank holds the same number of complete experts",
                fix=f"set plan.parallel.ep to {one_of(divisors(common))}",
            )
    return None


def takes_indices(experts: nn.Module) -> bool:
    """True if the arguments of an experts module are tokens, expert indices and router weights."""
    return tuple(inspect.signature(experts.forward).parameters) in SIGNATURES


def _problem(experts: Any) -> str:
    """Reason why an experts module cannot be split; "" if it can."""
    num_experts = getattr(experts, "num_experts", 0)
    unstacked = [key for key, p in experts.named_parameters() if p.ndim < 2 or len(p) != num_experts]
    if not takes_indices(experts):
        return f"is called with ({', '.join(inspect.signature(experts.forward).parameters)})"
    if unbound_forward(experts) is None:
        return "has a forward that something else has set"
    if not num_experts:
        return "has no num_experts"
    return f"has a parameter that is not stacked by expert: {unstacked[0]}" if unstacked else ""


def reason_against_etp(model: nn.Module, anatomy: Anatomy, etp: int) -> Refusal | None:
    """Reason against expert tensor parallelism: the experts of the model have unknown parameters, or widths that etp does not
    divide.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        etp: ranks over which each expert is split; 1 is always accepted.
    """
    for name in (name for block in anatomy.blocks for name in block.experts if etp > 1):
        experts: Any = model.get_submodule(name)
        described = all(hasattr(experts, flag) for flag in ("is_transposed", "has_gate", "is_concatenated"))
        dims = split_dims(experts) if described else {}
        unknown = [key for key, dim in dims.items() if dim is None and key != "down_proj_bias"]
        if not described or unknown or "down_proj" not in dims:
            return Refusal(
                f"etp = {etp} for {type(experts).__name__}"
                + (f", which has a parameter {unknown[0]}" if unknown else ""),
                where=f"plan.parallel.etp, {name}",
                rule="the matrices of experts are gate_up_proj or up_proj, and down_proj, as Transformers describes them",
                fix="leave plan.parallel.etp at 1",
            )
        width = experts.down_proj.shape[dims["down_proj"]]
        if width % etp:
            return Refusal(
                f"etp = {etp} does not divide experts that are {width} wide",
                where=f"plan.parallel.etp, {name}",
                rule="each rank of etp holds the same number of columns of an expert's first matrix",
                fix="set plan.parallel.etp to a divisor of the width of an expert",
            )
    return None
