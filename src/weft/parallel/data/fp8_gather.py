"""Gathers of ZeRO 3 in FP8: one byte for each weight that its linear layer rounds to FP8 anyway.

    all-reduce of the largest value of each weight over its shards      4 bytes a weight tensor
    all-gather of a message of bytes                                    1 byte per element of these weights; others as they are
    gathered values times their scale, in the dtype of forward

Scales are powers of two, so that the product is exact in 16 bits, and the layer, which rounds it again, gets the numbers that
it would get from gathered 16-bit weights, bit by bit. Parameters, gradients and the optimizer do not change: FSDP2 gets another
all-gather (`set_custom_all_gather`), not tensors of another class. The largest values are reduced in each gather and not once a
step, because loading, evaluation and pipelines gather at other times too.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.collectives import all_gather_single, all_reduce_group
from weft.compat import DefaultAllocMixin, fsdp_param_groups
from weft.compute.fp8_cast import TENSOR, quantize
from weft.parallel.data.aligned import ALIGNMENT

E4M3 = torch.float8_e4m3fn


def gather_in_fp8(model: nn.Module, layers: Collection[str]) -> dict[nn.Module, "Fp8AllGather"]:
    """Let the FSDP2 units of a model gather the weights of linear layers in FP8, in place.

    Args:
        model: sharded model, without tensor parallelism.
        layers: names of the layers, from `apply_fp8` with one scale a tensor.

    Returns:
        All-gather of each unit that has such weights.
    """
    weights = {id(model.get_submodule(name).weight) for name in layers}
    gathers: dict[nn.Module, Fp8AllGather] = {}
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            parameters = [parameter for group in fsdp_param_groups(unit) for parameter in group.fsdp_params]
            segments = [
                (parameter.padded_sharded_param_size.numel(), id(parameter.sharded_param) in weights)
                for parameter in parameters
            ]
            if any(in_fp8 for _, in_fp8 in segments):
                gathers[unit] = Fp8AllGather(segments)
                unit.set_custom_all_gather(gathers[unit])  # type: ignore[arg-type]
    return gathers


class Fp8AllGather(DefaultAllocMixin):
    """All-gather of an FSDP2 unit, for `set_custom_all_gather`.

    Args:
        segments: for each parameter, in order, the number of elements of a shard and whether it is sent in FP8.
    """

    def __init__(self, segments: Sequence[tuple[int, bool]]):
        self.sizes, self.in_fp8 = zip(*segments, strict=True)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather the shards of all ranks in rank order. Complete on return, on the current stream."""
        if input_tensor.dtype not in (torch.bfloat16, torch.float32):  # bytes of parameters of several dtypes
            all_gather_single(output_tensor, input_tensor, group=group)
            return
        parts = input_tensor.split(self.sizes)
        rounded = [part for part, in_fp8 in zip(parts, self.in_fp8, strict=True) if in_fp8]
        largest = torch.stack([torch.linalg.vector_norm(part, torch.inf) for part in rounded]).float()
        tops = iter(all_reduce_group(largest, group, "max").unbind())
        message, scales = [], []
        for part, in_fp8 in zip(parts, self.in_fp8, strict=True):
            scale = None
            if in_fp8:
                part, scale = quantize(part[None], E4M3, TENSOR, next(tops), power_of_two=True)
            message.append(part.view(torch.uint8).view(-1))
            scales.append(scale)
        sizes = [len(part) for part in message]
        message.append(message[0].new_zeros(-sum(sizes) % ALIGNMENT))
        sent = torch.cat(message)
        received = sent.new_empty(group.size() * len(sent))
        all_gather_single(received, sent, group=group)
        sources = received.view(group.size(), -1)[:, : sum(sizes)].split(sizes, 1)
        targets = output_tensor.view(group.size(), -1).split(self.sizes, 1)
        for source, target, scale in zip(sources, targets, scales, strict=True):
            if scale is None:
                target.copy_(source.contiguous().view(target.dtype))  # its offset may be odd
            else:
                torch.mul(source.view(E4M3).to(target.dtype), scale, out=target)
