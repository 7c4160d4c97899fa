"""Expert tensor parallelism: the matrices of each expert are split over a few ranks, for more ranks than experts (Liu et al.,
MoE Parallel Folding, 2025).

    dispatch    to the rank of ep that holds the expert, among the ranks with the same index in their etp group
    gather      each etp rank gets the rows of all etp ranks
                forward of the experts module: columns of the first matrix, rows of the second
    reduce      partial sums go back to the etp rank that had the row, and are added there
    combine     back to the rank of the token

Gather and reduce are all-to-alls, because ranks have different numbers of rows: the first is an all-gather, the second a
reduce-scatter, and backward is their transpose. A bias after the second matrix is added on the first etp rank alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.anatomy.roles import Anatomy
from weft.comm.collectives import exchange, gather_dim
from weft.errors import PlanError
from weft.parallel.experts.dispatch import Channel
from weft.parallel.weights import PackedLayout


def split_dims(experts: Any) -> dict[str, int | None]:
    """Tensor dim over which each parameter of an experts module is split; None for a bias after the second matrix."""
    first, second = (2, 1) if experts.is_transposed else (1, 2)
    known = {"gate_up_proj": first, "up_proj": first, "gate_up_proj_bias": 1, "up_proj_bias": 1, "down_proj": second}
    return {name: known.get(name) for name, _ in experts.named_parameters()}


def packed_layout(experts: Any, ranks: int) -> PackedLayout | None:
    """Order of the columns of gate and up in the stored first matrix; None if it does not hold one after the other."""
    if not (experts.has_gate and experts.is_concatenated):
        return None
    dims = {name: dim for name, dim in split_dims(experts).items() if name.startswith("gate_up_proj") and dim}
    size = experts.gate_up_proj.shape[dims["gate_up_proj"]] // 2
    return PackedLayout(dims, (size, size), ranks)


def split_matrices(experts: Any, channel: Channel) -> None:
    """Let an experts module gather the rows of the ranks of a group, and reduce the partial sums, in place.

    The forward takes rows of one expert each, without router weights, as in `expert.run_experts`. The caller
    shards the parameters along `split_dims`.

    Args:
        experts: experts module accepted by `check_expert_tensor`, before expert parallelism.
        channel: channel of the ranks over which the matrices of an expert are split. Rows that dispatch has rounded are not
            changed again.
    """
    forward = experts.forward

    def split_forward(rows: Tensor, index: Tensor, _: Tensor) -> Tensor:
        return _gather_and_reduce(forward, rows, index, channel)

    experts.forward = split_forward


def _gather_and_reduce(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, index: Tensor, channel: Channel
) -> Tensor:
    """Outputs of the rows of this rank, [R, H]: `forward` on the rows of all ranks, and the sum of its results over them."""
    group = channel.group
    ranks, own = group.size(), [len(rows)] * group.size()
    sizes = gather_dim(torch.tensor([len(rows)], device=rows.device), group, 0).tolist()  # synchronises with the device
    wait = channel.start(rows.repeat(ranks, 1), sizes, own)
    all_index = exchange(index.repeat(ranks, 1), group, sizes, own)
    all_rows = wait()
    partial = forward(all_rows, all_index, all_rows.new_ones(len(all_rows), 1))
    return channel.to_tokens(own, sizes).send(partial)().view(ranks, len(rows), -1).sum(0)


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
