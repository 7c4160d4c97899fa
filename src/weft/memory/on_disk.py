"""Weights and gradients on disk (Rajbhandari et al., ZeRO-Infinity, 2021).

With `plan.memory.parameters_device = "disk"` the shards of FSDP2, and their reduced gradients, are in memory-mapped files:

    file of a unit of FSDP2      weights, in the order of FSDP2
    another                      gradients of those that train

The system keeps pages of these files in memory while there is room, writes them back, and reads them again where they are used:
to gather a unit, and to update it. All operators run on them as they are, so that all results are those of a run in memory,
bit by bit. A unit is read ahead of its use:

    gather and compute      unit 1 | unit 2 | unit 3 | ...
    read                    unit 2 | unit 3 | unit 4 | ...

The order of the units is that in which they followed each other before: forward, backward, the backwards of a pipeline.
"""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from weft.compat import fsdp_param_groups
from weft.memory.packed import copy_parts, has_values, with_parts
from weft.memory.pool import Pool, typed_view
from weft.memory.storages import local_part, plain_parts

ALIGNMENT = 64  # bytes between the tensors of a file


class FileOfUnit:
    """Tensors of a unit of FSDP2 one after the other in a mapped block.

    Args:
        pool: pool of mapped files.
        sizes: bytes of each tensor.
    """

    def __init__(self, pool: Pool, sizes: Sequence[int]):
        self.block = pool.allocate(sum(map(_aligned, sizes)))
        self.end = 0

    def place(self, like: Tensor) -> Tensor:
        """Next tensor of the block: contiguous, with the shape and dtype of a plain tensor."""
        begin, self.end = self.end, self.end + _aligned(like.nbytes)
        part = self.block[begin : begin + like.nbytes]
        if has_values(part):  # a separate storage, since split weights index the storage of a plane
            part = torch.from_numpy(part.numpy())
        return part.view(like.dtype).view(like.shape)

    def read_ahead(self) -> None:
        """Let the system read the block, without waiting for it."""
        if self.block.numel():
            _madvise(self.block.data_ptr(), self.block.numel())


class ShardsOnDisk:
    """Weights and gradients of a model on disk.

    Args:
        pool: pool of mapped files.
        units_ahead: units that are read ahead of their use.
    """

    def __init__(self, pool: Pool, units_ahead: int):
        self.pool, self.units_ahead = pool, units_ahead
        self.weights: dict[FSDPModule, FileOfUnit] = {}
        self.files: dict[Tensor, tuple[FileOfUnit, ...]] = {}
        """Files that the update of a parameter reads."""
        self.following: dict[tuple[Any, Any], FSDPModule] = {}
        """Unit that followed two units, one after the other, when they were used last."""
        self.last: tuple[Any, Any] = (None, None)
        self.read = 0
        """Number of times that a unit was read ahead."""

    def watch(self, model: nn.Module) -> None:
        """Register the hooks of the units of a model that read ahead."""
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                reach = partial(self._reach, unit)
                unit.register_forward_pre_hook(reach, prepend=True)
                unit.register_forward_hook(partial(_before_backward, reach), prepend=True)

    def move(self, model: nn.Module) -> None:
        """Move the shards of a model, which has memory, to files; weights without values are not copied."""
        for unit in model.modules():
            if isinstance(unit, FSDPModule) and unit not in self.weights:
                parameters = [own for group in fsdp_param_groups(unit) for own in group.fsdp_params]
                self.weights[unit] = self._move_weights(parameters)
                trained = [own.sharded_param for own in parameters if own.sharded_param.requires_grad]
                files = self.weights[unit], self._expect_gradients(trained)
                self.files |= dict.fromkeys(trained, files)

    def _move_weights(self, parameters: list[Any]) -> FileOfUnit:
        shards = [_stored(parameter) for parameter in parameters]
        file = FileOfUnit(self.pool, [part.nbytes for shard in shards for part in plain_parts(shard)])
        for parameter, shard in zip(parameters, shards, strict=True):
            moved = with_parts(shard, file.place)
            if has_values(shard):
                copy_parts(moved, shard)
            local = moved
            if type(shard) is Tensor:  # FSDP2 pads it, and the parameter is a part of it
                own = parameter.sharded_param._local_tensor
                offset = moved.storage_offset() + own.storage_offset() - shard.storage_offset()
                local = moved.as_strided(own.shape, own.stride(), offset)
            parameter.sharded_param._local_tensor = local
            parameter._sharded_param_data = moved.view(-1)
        return file

    def _expect_gradients(self, parameters: list[Tensor]) -> FileOfUnit:
        """Let each reduced gradient be moved to a file as soon as it is there; returns the file."""
        locals_ = [local_part(parameter) for parameter in parameters]
        like = [torch.empty(local.shape, dtype=local.dtype, device="meta") for local in locals_]
        file = FileOfUnit(self.pool, [tensor.nbytes for tensor in like])
        for parameter, tensor in zip(parameters, like, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_keep, file.place(tensor)))
        return file

    def read_for_update(self, parameters: Sequence[Tensor]) -> None:
        """Read the weights and gradients of parameters that are updated soon."""
        for file in {file for parameter in parameters for file in self.files.get(parameter, ())}:
            file.read_ahead()

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy of a plain tensor in an unnamed file, which is removed with the copy."""
        block = self.pool.make(max(tensor.nbytes, 1))
        return typed_view(block, tensor).copy_(tensor)

    def _reach(self, unit: FSDPModule, *arguments: Any) -> None:
        """Note that a unit is used now, and read those that will follow."""
        self.following[self.last] = unit
        self.last = self.last[1], unit
        ahead: tuple[Any, Any] = self.last
        for _ in range(self.units_ahead):
            following = self.following.get(ahead)
            if following is None:
                return
            self.weights[following].read_ahead()
            self.read += 1
            ahead = ahead[1], following


def _before_backward(reach: Callable[[Any], None], unit: nn.Module, args: Any, outputs: Any) -> None:
    """Forward hook that calls `reach` when the backward of a unit begins."""
    for value in tree_leaves(outputs):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(reach)
            return


def _keep(place: Tensor, parameter: Tensor) -> None:
    """Move the gradient of a parameter to its place."""
    gradient: Any = parameter.grad
    if gradient._local_tensor.data_ptr() != place.data_ptr():
        place.copy_(gradient._local_tensor)
        gradient._local_tensor = place


def _stored(parameter: Any) -> Tensor:
    """Stored shard of a parameter of FSDP2: padded, or as planes."""
    data = parameter._sharded_param_data
    local: Tensor = parameter.sharded_param._local_tensor
    return data.view(parameter.padded_sharded_param_size) if type(data) is Tensor else local


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _madvise(address: int, size: int) -> None:
    """Ask the system to read mapped pages; pages that it does not read now are read where they are used."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_WILLNEED)
