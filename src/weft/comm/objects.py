"""Collectives of small Python values as JSON text, which cannot execute code of another process.

Callers that only compare the ranks use `any_rank`, `all_ranks` and `same_on_all`, which send 8 to 32 bytes, and gather values
where these differ: on 10,240 ranks a gather is 10,240 texts for each of them to parse.

The object collectives of torch send pickles, which run code when they are loaded. JSON supports None, booleans, numbers (also
NaN and infinities, and floats in full precision), strings, lists and dicts with string keys; tuples arrive as lists.

The text is sent in CPU tensors. On accelerators the group therefore needs gloo as an additional backend, which the groups of
`weft.launch.rank_entry.connect` have.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from weft import errors
from weft.comm.few_rounds import gather_rows, largest

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
    sizes = gather_rows(_scalar(len(text)), group).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(text)] = text
    rows = gather_rows(padded, group)
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


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """True on all ranks if it is true on one. Collective; no rank returns before all ranks have called it.

    Args:
        flag: of this rank.
        group: group of ranks; None for all ranks.
    """
    return largest([int(flag)], group) == [1]


def all_ranks(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """True on all ranks if it is true on every rank. Collective, as `any_rank`."""
    return not any_rank(not flag, group)


def same_on_all(value: Any, group: dist.ProcessGroup | None = None, *, counts: bool = True) -> bool:
    """True, on all ranks, if they have the same value, by a digest of 126 bits of its JSON text. Collective.

    Args:
        value: value of this rank, representable in JSON; entries of dicts in the same order are the same.
        group: group of ranks; None for all ranks.
        counts: False if the value of this rank is not compared; True on at least one rank.

    Raises:
        TypeError: the value is not representable in JSON.
    """
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()
    words = [word >> 1 for word in struct.unpack("<2q", digest)]  # the negative of each is of 64 bits, too
    first, second, *negative = largest([*words, *(-word for word in words)] if counts else [-(2**63)] * 4, group)
    return [-first, -second] == negative


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
    if not any_rank(failure is not None):
        return result
    problem: list[str | None] | None = None
    if isinstance(failure, errors.WeftError):
        problem = [type(failure).__name__, failure.what, failure.where, failure.rule, failure.fix]
    elif failure is not None:
        problem = ["WeftError", f"{type(failure).__name__}: {failure}", None, None, None]
    found = all_gather_json(problem)
    first = next(rank for rank, text in enumerate(found) if text)
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
