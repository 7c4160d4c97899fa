"""Layers of a block that the model calls while the block does not run, such as the embedding of time steps in block 0 of DiT.

FSDP2 gathers the weights of a block when the block runs. A layer that is called alone gathers its own here, by an all-gather
whose backward reduce-scatters the gradient to the shards, where that of the block is added.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from weft.anatomy.roles import Anatomy
from weft.plan import Plan
from weft.precision.dtypes import DTYPES


def gather_outside_of_blocks(model: nn.Module, anatomy: Anatomy, plan: Plan) -> None:
    """Let the layers of blocks gather their weights when they are called alone.

    Args:
        model: model after FSDP2.
        anatomy: its blocks.
        plan: resolved.
    """
    for name in anatomy.unit_names:
        block = model.get_submodule(name)
        for layer in block.modules():
            if layer is not block and layer._parameters:
                gather = GatherAlone(layer, plan)
                layer.register_forward_pre_hook(gather.begin)
                layer.register_forward_hook(gather.end, always_call=True)


class GatherAlone:
    """Hooks of a layer that swap sharded weights for gathered ones during a call."""

    def __init__(self, layer: nn.Module, plan: Plan):
        self.table, self.dtype = layer._parameters, DTYPES[plan.precision.param_dtype]
        self.shards: dict[str, Any] = {}

    def begin(self, *_: object) -> None:
        """Gather the weights that are shards: the block does not run."""
        self.shards = {name: value for name, value in self.table.items() if isinstance(value, DTensor)}
        for name, shard in self.shards.items():
            self.table[name] = _gather(shard).to(self.dtype)  # type: ignore[assignment]

    def end(self, *_: object) -> None:
        """Put the shards back."""
        self.table.update(self.shards)
        self.shards = {}


def _gather(shard: DTensor) -> Tensor:
    """Full weight; the gradient of the shard is the mean over the ranks."""
    full = shard.full_tensor(grad_placements=[Partial()] * shard.device_mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / shard.device_mesh.size())
    return full
