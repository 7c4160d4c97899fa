"""Collectives of small Python values as JSON text, which cannot execute code of another process.

The object collectives of torch send pickles, which run code when they are loaded. JSON supports None, booleans, numbers (also
NaN and infinities, and floats in full precision), strings, lists and dicts with string keys; tuples arrive as lists.

The text is sent in CPU tensors. On accelerators the group therefore needs gloo as an additional backend, which the groups of
`weft.launch.rank_entry.connect` have.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from weft import errors
from weft.comm.collectives import gather_dim

Result = TypeVar("Result")


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather the values of all ranks in rank order. Every rank of the group must call it.

    Args:
        value: value of this rank, representable in JSON.
        group: group of ranks; None for all ranks.

    Raises:
        TypeError: the value is not representable in JSON.
    """
    group = _group(group)
    text = _encode(value)
    sizes = gather_dim(_scalar(len(text)), group, 0).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(text)] = text
    rows = gather_dim(padded, group, 0).view(len(sizes), -1)
    return [_decode(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def broadcast_json(value: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast the value of one rank. Every rank of the group must call it.

    Args:
        value: value of `src`, representable in JSON; ignored on other ranks.
        src: source rank within the group.
        group: group of ranks; None for all ranks.

    Raises:
        TypeError: the value is not representable in JSON; raised on `src` alone.
    """
    group = _group(group)
    text = _encode(value if group.rank() == src else None)
    size = _scalar(len(text))
    dist.broadcast(size, group=group, group_src=src)
    if group.rank() != src:
        text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.broadcast(text, group=group, group_src=src)
    return _decode(text)


def run_together(attempt: Callable[[], Result]) -> Result:
    """Run a function without collectives on every rank; if it fails on any rank, raise an error on all ranks. Collective.

    Raises:
        WeftError: the error of the first rank that failed, with its class and text; an exception of another type is named.
        Exception: the exception of this rank, if its own attempt failed first.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = attempt()
    except Exception as error:  # of any type: the other ranks must not wait for this rank
        failure = error
    problem: list[str | None] | None = None
    if isinstance(failure, errors.WeftError):
        problem = [type(failure).__name__, failure.what, failure.where, failure.rule, failure.fix]
    elif failure is not None:
        problem = ["WeftError", f"{type(failure).__name__}: {failure}", None, None, None]
    found = all_gather_json(problem)
    first = next((rank for rank, text in enumerate(found) if text), None)
    if first is None:
        return result
    if failure is not None and first == dist.get_rank():
        raise failure
    kind, what, where, rule, fix = found[first]
    raise getattr(errors, kind)(what, where=where or f"rank {first}", rule=rule, fix=fix)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    result = dist.group.WORLD if group is None else group
    assert result is not None, "there is no process group"
    return result


def _scalar(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())
