"""Finds ranks that do not call the same collectives, before a back end that would hang or abort does.

Shared memory compares the ranks at every call by itself. Gloo and nccl do not: two ranks that disagree on a size end in an
abort without a word, or wait for ever. Here each new kind of call on a group (operation, shapes, format) is first compared
through the group's key-value store. A step repeats its calls, so that watching the first one costs milliseconds once.
"""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm.collectives import NAMES, call_site, find_group, find_tensors
from weft.errors import CommunicationError

PATIENCE = timedelta(seconds=60)


class DesyncCheck(TorchDispatchMode):
    """Inside its context, each new kind of collective that goes through torch's operators is compared between ranks.

    All ranks of a group enter and leave the context together.

    Args:
        name: of this context, the same on all ranks and another one each time.
        patience: how long to wait for the other ranks of a call.

    Raises (from the collective):
        CommunicationError: the ranks call different operations, or the same with different shapes or formats, or one
            does not come in time.
    """

    def __init__(self, name: str, patience: timedelta = PATIENCE) -> None:
        super().__init__()
        self.name, self.patience = name, patience
        self.seen: set[tuple[str, str]] = set()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, group = func._schema.name.removeprefix("c10d::"), find_group(args)
            if name in NAMES and name != "send" and group is not None and group.size() > 1:
                self._compare(group, name, args)
        return func(*args, **(kwargs or {}))

    def _compare(self, group: dist.ProcessGroup, name: str, args: Any) -> None:
        # What each rank has of an all_to_all differs by nature; formats and the other dims do not.
        uneven = NAMES[name] == "all_to_all"
        tensors = [f"{list(t.shape[1:] if uneven else t.shape)} {t.dtype}" for t in find_tensors(args)]
        said = f"{NAMES[name]} of {', '.join(tensors)}".replace("torch.", "")
        if (group.group_name, said) in self.seen:
            return
        self.seen.add((group.group_name, said))
        self.counts[group.group_name] += 1
        number, store = self.counts[group.group_name], group.get_group_store()
        store.set(f"{self.name}/{number}/{group.rank()}", said)
        for peer in range(group.size()):
            key = f"{self.name}/{number}/{peer}"
            try:
                store.wait([key], self.patience)
            except RuntimeError:
                raise self._error(group, said, f"rank {peer} of the group did not call anything new") from None
            if (theirs := store.get(key).decode()) != said:
                raise self._error(group, said, f"rank {peer} of the group calls {theirs}")

    def _error(self, group: dist.ProcessGroup, said: str, other: str) -> CommunicationError:
        return CommunicationError(
            f"rank {group.rank()} of the group calls {said}; {other}",
            where=f"{group.group_desc or 'default group'}, called at {call_site()}",
            rule="all ranks of a group call the same collectives in the same order, with the same sizes and formats",
            fix="look for a branch or a size that depends on the rank",
        )
