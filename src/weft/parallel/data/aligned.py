"""Collectives of FSDP2's flat buffers, whose part of a rank is padded to 16 bytes.

NCCL copies other parts element by element: an all-gather of a few megabytes then takes several times as long
(pytorch#195450, horovod#3727). FSDP2 puts the shards of a unit one after the other, and those of norms and biases are small on
many ranks: a block of Qwen3-8B has 8 bytes too many on 64 ranks, one of Llama-8B on 24. Padding copies the buffer once more.
"""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.comm.collectives import all_gather_single, reduce_scatter_single

ALIGNMENT = 16
"""Bytes."""


def padding(tensor: Tensor) -> int:
    """Elements after which a flat tensor has a multiple of `ALIGNMENT` bytes."""
    return -tensor.nbytes % ALIGNMENT // tensor.element_size()


def gather_aligned(output: Tensor, own: Tensor, *, group: dist.ProcessGroup, async_op: bool = False) -> Any:
    """All-gather of flat tensors, on the current stream; arguments and result as of `dist.all_gather_into_tensor`.

    A padded one is complete on return.
    """
    extra = padding(own)
    if not extra:
        return all_gather_single(output, own, group=group, async_op=async_op)
    received = own.new_empty(group.size(), len(own) + extra)
    all_gather_single(received.view(-1), F.pad(own, (0, extra)), group=group)
    output.view(group.size(), -1).copy_(received[:, : len(own)])
    return None


def reduce_scatter_aligned(
    output: Tensor, parts: Tensor, op: Any, *, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Reduce-scatter of flat tensors, as `gather_aligned`."""
    extra = padding(output)
    if not extra:
        return reduce_scatter_single(output, parts, op, group=group, async_op=async_op)
    result = output.new_empty(len(output) + extra)
    reduce_scatter_single(result, F.pad(parts.view(group.size(), -1), (0, extra)).view(-1), op, group=group)
    output.copy_(result[: len(output)])
    return None
