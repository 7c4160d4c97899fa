"""Access to the plain tensors inside DTensors and tensor subclasses."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def plain_parts(tensor: Any) -> list[Tensor]:
    """Plain tensors that hold the values: the shard of a DTensor, the planes of a split weight; [] if it is no tensor."""
    if not isinstance(tensor, Tensor):
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in plain_parts(getattr(tensor, name))]
    return [tensor]


def local_part(tensor: Tensor) -> Tensor:
    """Shard of a DTensor, without recording an operation; any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def map_local(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Tensor with a changed local part: a DTensor keeps its mesh, placements and shape.

    Args:
        tensor: plain tensor or DTensor.
        change: function of the local part, which keeps its shape.
    """
    if not isinstance(tensor, DTensor):
        return change(tensor)
    mesh, placements, local = tensor.device_mesh, tensor.placements, change(tensor.to_local())
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def sharded_axes(tensor: Tensor) -> list[tuple[int, int]]:
    """Axes of the mesh that shard a DTensor over several ranks, and the dim that each shards; [] for any other tensor."""
    if not isinstance(tensor, DTensor):
        return []
    sizes = tensor.device_mesh.shape
    return [(axis, p.dim) for axis, p in enumerate(tensor.placements) if not p.is_replicate() and sizes[axis] > 1]  # type: ignore[attr-defined]


def put_local(state: dict[str, Any], name: str, local: Tensor) -> None:
    """Replace the local tensor of an optimizer state, possibly on another device than the mesh of its DTensor."""
    if isinstance(state[name], DTensor):
        state[name]._local_tensor = local
    else:
        state[name] = local


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a folder has beside the weights, such as the biases that balance experts; not caches, such as frequencies.

    `state_dict` would give the same names, but hooks of FSDP2 free gathered weights there.
    """
    caches = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in caches}
