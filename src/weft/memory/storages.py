"""Where the numbers of a tensor are."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def plain_parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that hold its numbers: of a DTensor its shard, of a split weight its planes; of another thing none."""
    if not isinstance(tensor, Tensor):
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in plain_parts(getattr(tensor, name))]
    return [tensor]


def local_part(tensor: Tensor) -> Tensor:
    """Of a DTensor the shard itself, of which no operation is recorded; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def put_local(state: dict[str, Any], name: str, local: Tensor) -> None:
    """Let an optimizer's state be another local tensor, which may be on another device than its mesh."""
    if isinstance(state[name], DTensor):
        state[name]._local_tensor = local
    else:
        state[name] = local
