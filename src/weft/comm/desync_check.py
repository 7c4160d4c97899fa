"""Detect mismatched collectives before the backend hangs or aborts.

Shared-memory groups compare the calls of all ranks themselves. Gloo and NCCL do not: ranks with different sizes abort without
a message or wait forever. Here each new kind of call on a group (operation, shapes, dtypes) is first compared between the
ranks through the group's key-value store: its first rank reads the calls of all, and publishes the result, so that the requests
grow with the ranks and not with their square. All steps make the same calls, so that checking the first step is enough and
costs milliseconds.
"""

import json
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm.recorder import NAMES, call_site, find_group, find_tensors
from weft.errors import CommunicationError

TIMEOUT = timedelta(seconds=60)


class DesyncCheck(TorchDispatchMode):
    """Context manager that compares each new kind of collective of torch's operators between the ranks.

    All ranks of a group enter and leave the context together.

    Args:
        name: unique name of this context, the same on all ranks.
        timeout: maximum wait for the other ranks of a call.

    Raises (from the collective):
        CommunicationError: the ranks call different operations, shapes or dtypes, or a rank makes no new call within the
            timeout.
    """

    def __init__(self, name: str, timeout: timedelta = TIMEOUT) -> None:
        super().__init__()
        self.name, self.timeout = name, timeout
        self.seen: set[tuple[str, str]] = set()
        self.counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay out of compiled regions, which call no collectives: torch would not compile inside of another mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, group = func._schema.name.removeprefix("c10d::"), find_group(args)
            if name in NAMES and name != "send" and group is not None and group.size() > 1:
                self._compare(group, name, args)
        return func(*args, **(kwargs or {}))

    def _compare(self, group: dist.ProcessGroup, name: str, args: Any) -> None:
        # The number of rows of an all_to_all may differ between ranks; dtypes and the other dims may not.
        uneven = NAMES[name] == "all_to_all"
        tensors = [f"{list(t.shape[1:] if uneven else t.shape)} {t.dtype}" for t in find_tensors(args)]
        call = f"{NAMES[name]} of {', '.join(tensors)}".replace("torch.", "")
        if (group.group_name, call) in self.seen:
            return
        self.seen.add((group.group_name, call))
        self.counts[group.group_name] += 1
        index, store = self.counts[group.group_name], group.get_group_store()
        keys = [f"{self.name}/{index}/{peer}" for peer in range(group.size())]
        result = f"{self.name}/{index}/result"
        store.set(keys[group.rank()], call)
        try:
            if group.rank() == 0:
                store.wait(keys, self.timeout)
                calls = [value.decode() for value in store.multi_get(keys)]
                different = [[peer, other] for peer, other in enumerate(calls) if other != call]
                store.set(result, json.dumps([call, *different[:1]]))
            store.wait([result], self.timeout)
        except RuntimeError:
            late = next((peer for peer, key in enumerate(keys) if not store.check([key])), 0)
            raise self._error(group, call, f"rank {late} of the group made no new call") from None
        first, *different = json.loads(store.get(result))
        if call != first:
            different = [[0, first]]
        for peer, other in different:
            raise self._error(group, call, f"rank {peer} of the group calls {other}")

    def _error(self, group: dist.ProcessGroup, call: str, problem: str) -> CommunicationError:
        return CommunicationError(
            f"rank {group.rank()} of the group calls {call}; {problem}",
            where=f"{group.group_desc or 'default group'}, called at {call_site()}",
            rule="all ranks of a group call the same collectives in the same order, with the same sizes and dtypes",
            fix="look for a branch or a size that depends on the rank",
        )
