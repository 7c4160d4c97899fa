"""Where the numbers of a tensor are."""

from typing import Any

from torch import Tensor


def plain_parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that hold its numbers: of a DTensor its shard, of a split weight its planes; of another thing none."""
    if not isinstance(tensor, Tensor):
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in plain_parts(getattr(tensor, name))]
    return [tensor]
