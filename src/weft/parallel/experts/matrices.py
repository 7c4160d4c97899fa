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
from torch import Tensor

from weft.comm.collectives import exchange, gather_dim
from weft.parallel.experts.dispatch import Channel
from weft.parallel.experts.path import Exchange, Part
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


class OverMatrices:
    """Another exchange, and after it the rows of all ranks over which the matrices of an expert are split; see `Exchange`."""

    def __init__(self, inside: Exchange, channel: Channel):
        """
        Args:
            inside: exchange that sends each copy to one rank.
            channel: channel of the ranks over which matrices are split. Rows that dispatch has rounded are not changed again.
        """
        self.inside, self.channel = inside, channel

    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], object]
    ) -> tuple[list[Part], Callable[[list[Tensor]], Tensor]]:
        (part,), bring_back = self.inside(hidden, index, weights, meanwhile)
        group, channel, own_rows = self.channel.group, self.channel, len(part.rows)
        ranks, own = group.size(), [own_rows] * group.size()
        sizes = gather_dim(torch.tensor([own_rows], device=index.device), group, 0).tolist()  # waits for the device
        wait = channel.start(part.rows.repeat(ranks, 1), sizes, own)
        all_index = exchange(part.expert.repeat(ranks, 1), group, sizes, own)

        def reduce(outputs: list[Tensor]) -> Tensor:
            sums = channel.to_tokens(own, sizes).send(outputs[0])().view(ranks, own_rows, outputs[0].shape[1]).sum(0)
            return bring_back([sums])

        return [Part(wait(), all_index)], reduce
