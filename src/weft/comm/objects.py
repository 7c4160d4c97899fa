"""Small Python values from rank to rank, as JSON text: what comes from another process is read, never executed.

torch's object collectives send pickles, which run code when they are opened. JSON holds None, booleans, numbers (NaN and
infinities too, floats in full), strings, lists and dicts with string keys; tuples arrive as lists.

The text travels in CPU tensors. Beside an accelerator the group needs gloo for them, as the groups that
`weft.launch.launcher.connect` opens have it.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import gather_dim


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in the order of ranks. Every rank of the group must call it.

    Args:
        value: this rank's; JSON can hold it.
        group: of some ranks; None for all.

    Raises:
        TypeError: JSON cannot hold the value.
    """
    group = _group(group)
    text = _encode(value)
    sizes = gather_dim(_number(len(text)), group, 0).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(text)] = text
    rows = gather_dim(padded, group, 0).view(len(sizes), -1)
    return [_decode(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def broadcast_json(value: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The value of one rank, on every rank of the group. Every rank of it must call it.

    Args:
        value: that of `src` counts; JSON can hold it.
        src: rank within the group.
        group: of some ranks; None for all.

    Raises:
        TypeError: JSON cannot hold the value; on `src` alone.
    """
    group = _group(group)
    text = _encode(value if group.rank() == src else None)
    size = _number(len(text))
    dist.broadcast(size, group=group, group_src=src)
    if group.rank() != src:
        text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.broadcast(text, group=group, group_src=src)
    return _decode(text)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    assert found is not None, "there is no process group"
    return found


def _number(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())
