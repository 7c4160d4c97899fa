"""Predicted bytes of the model state of a rank under ZeRO; `fsdp.py` has the formulas for Adam."""

from torch import nn
from torch.distributed.tensor import DTensor

from weft.memory.nf4 import is_nf4
from weft.parallel.data.fsdp import keeps_frozen_weights
from weft.plan import BYTES, ResolvedPlan, bytes_per_state_element
from weft.topology.mesh import EXPERT_AXES


def model_state_bytes(
    parameters: int, plan: ResolvedPlan, experts: int = 0, states: int | None = None, frozen: tuple[int, int] = (0, 0)
) -> dict[str, float]:
    """Predicted peak of the model state between micro-batches in bytes per rank, by kind (formulas of `fsdp.py`).

    Args:
        parameters: trainable parameters of one rank after tensor parallelism and before ZeRO sharding, except experts with
            their own mesh; see `count_local_parameters`.
        plan: plan.
        experts: the same count for experts with their own mesh.
        states: elements of optimizer state per element of a matrix, see `weft.job.states_of`; None: those of Adam.
        frozen: both counts for frozen parameters, which have neither gradients nor optimizer state.
    """
    states = 2 + (plan.comm.compression == "1-bit") if states is None else states
    p, precision = plan.parallel, plan.precision
    shards = 1 if p.zero == 0 else p.dp_shard * p.cp
    expert_shards = 1 if p.zero == 0 else p.dp_shard * p.cp * p.tp // (p.ep * p.etp)
    sharded = parameters / shards + experts / expert_shards
    unsharded = float(parameters + experts)
    keeps = keeps_frozen_weights(plan)
    frozen_shards = sum(frozen) if keeps else frozen[0] / shards + frozen[1] / expert_shards
    gathered = 0.0 if p.zero in (0, 3) else unsharded + sum(frozen) * (not keeps)
    return {
        "parameters": BYTES[precision.update] * (sharded + frozen_shards),
        "gathered parameters": BYTES[precision.param_dtype] * gathered,
        "gradients": BYTES[precision.reduce_dtype] * (unsharded if p.zero <= 1 or p.pp > 1 else sharded),
        "optimizer": states * bytes_per_state_element(precision) * sharded + _feedback_bytes(plan) * unsharded,
    }


def _feedback_bytes(plan: ResolvedPlan) -> float:
    """Bytes of error feedback and momentum per gradient element of a rank, an upper bound with replicas of shards."""
    comm, p = plan.comm, plan.parallel
    if comm.compression == "none" or p.gradient_ranks == 1:
        return 0.0
    shards, takes_momentum = (p.dp_shard * p.cp if p.zero else 1), comm.compression == "1-bit"
    local = 8.0 * (comm.error_feedback + takes_momentum)
    mean = 8.0 * (comm.error_feedback and takes_momentum) / shards
    replicas = 8.0 * comm.error_feedback / shards if p.zero and p.dp_replicate > 1 else 0.0
    return (local + mean) * (p.zero == 0 or shards > 1) + replicas


def count_local_parameters(model: nn.Module, *, frozen: bool = False) -> tuple[int, int]:
    """Trained parameters of one rank before ZeRO sharding: (without experts with their own mesh, experts with their own mesh).

    Args:
        model: parallelized model with sharded parameters, between steps.
        frozen: True for the parameters that are not trained, without those in 4 bits.
    """
    totals = {False: 0, True: 0}
    for parameter in model.parameters():
        if parameter.requires_grad == frozen or is_nf4(parameter):
            continue
        size = parameter.numel()
        names: tuple[str, ...] = ()
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            for name, placement in zip(names, parameter.placements, strict=True):
                if name in ("tp", "ep", "etp") and not placement.is_replicate():
                    size //= parameter.device_mesh[name].size()
        totals[any(name in EXPERT_AXES[1:] for name in names)] += size
    return totals[False], totals[True]
