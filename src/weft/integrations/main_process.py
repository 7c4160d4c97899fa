"""Calls that a script makes on the main process alone, such as `if accelerator.is_main_process: model.save_pretrained(...)`.

With plain data parallelism every rank has the full model, so that scripts save, and sample images, on rank 0 alone. Under a
plan all ranks have to take part. Rank 0 announces each collective call of the script; a rank that comes to another call takes
part in the announced one first:

    rank 0      forward    save_pretrained                               forward
    rank 1      forward    takes part in save_pretrained, then calls     forward
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from weft.comm.objects import all_ranks, broadcast_json
from weft.errors import ModelError, PlanError
from weft.parallel.runtime import runtime

EVALUATION = "a forward without gradients"
MESSAGE_BYTES = 64
"""Size of an announcement; names of calls are shorter."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class MainProcessCalls:
    """Collective calls of a script, in the order of rank 0."""

    def __init__(self, services: Mapping[str, Callable[..., Any]], model_of: Callable[[int], Any]):
        """
        Args:
            services: functions of the other ranks that take part in a call of rank 0 alone, by name of the call, with the
                arguments of rank 0.
            model_of: parallelized model by its index among the prepared ones.
        """
        self.services = {**services, EVALUATION: lambda index: self._begin_evaluation(model_of(index), is_own=False)}
        self.model_of = model_of
        self._group: dist.ProcessGroup | None = None
        """Group of the announcements, apart from other collectives; None: all ranks make the same calls."""
        self._last: tuple[str, int] = "", 0
        """Last call of this rank, or the last one that it took part in, and its key."""
        self._is_inside = False
        self._gathered: list[Any] = []
        """Models whose weights this rank has gathered for forwards of its own."""

    def open(self) -> None:
        """Begin to announce calls. Collective; nothing if calls are announced already, or there is one rank."""
        if self._group is None and dist.get_world_size() > 1:
            # Rank 0 may sample for hours; a lost rank ends the wait at once.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(days=30))

    @contextmanager
    def collective(self, name: str, *arguments: Any, key: int = 0) -> Iterator[None]:
        """Context of a collective call of the script. Calls inside of it are parts of it. Collective.

        Args:
            name: name of the call.
            arguments: arguments for the service of this name, representable in JSON.
            key: number that tells calls with the same name apart.

        Raises:
            ModelError: rank 0 makes another call, in which no other rank can take part; raised on the other ranks.
        """
        if self._is_inside or self._group is None:
            yield
            return
        self._is_inside = True
        try:
            while (announced := self._announce(name, key)) != (name, key):
                self._begin(*announced)
                if announced[0] not in self.services:
                    raise ModelError(
                        f"rank {dist.get_rank()} calls {name}, and rank 0 calls {announced[0]}",
                        where=name,
                        rule=f"ranks make the same calls in the same order; rank 0 alone may call {', '.join(self.services)}",
                        fix="make the calls on all ranks, outside of if accelerator.is_main_process and the like",
                    )
                self.services[announced[0]](*broadcast_json(None, group=self._group))
            self._begin(name, key)
            if name in self.services:
                broadcast_json(arguments, group=self._group)
            yield
        finally:
            self._is_inside = False

    def evaluate(self, index: int) -> None:
        """Prepare for forwards without gradients, on all ranks or on rank 0 alone. Collective after any other call.

        Args:
            index: index of the model among the prepared ones.

        Raises:
            PlanError: rank 0 is alone, and the ranks compute a forward together; the same on every rank.
        """
        if self._group is None or self._is_inside or self._last == (EVALUATION, index):
            return
        core = self.model_of(index)
        parallel = runtime(core).plan.parallel
        if parallel.zero or parallel.tp * parallel.cp * parallel.ep > 1:
            with self.collective(EVALUATION, index, key=index):
                self._begin_evaluation(core, is_own=True)

    def end(self) -> None:
        """Take part in the calls of rank 0 until its script ends. Collective."""
        with self.collective("the end of the script"):
            pass
        self._group = None

    def _announce(self, name: str, key: int) -> tuple[str, int]:
        """Name and key of the call of rank 0, in one message, as most calls have no arguments. Collective."""
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        text = torch.frombuffer(bytearray(f"{key} {name}".encode()), dtype=torch.uint8)
        message[: len(text)] = text
        dist.broadcast(message, group=self._group, group_src=0)
        first, _, announced = message.numpy().tobytes().rstrip(b"\0").decode().partition(" ")
        return announced, int(first)

    def _begin(self, name: str, key: int) -> None:
        self._last = name, key
        while self._gathered:
            core = self._gathered.pop()
            for unit in _units(core):
                unit.reshard()
                unit.set_reshard_after_forward(
                    runtime(core).plan.parallel.zero == 3 and unit is not core, recurse=False
                )

    def _begin_evaluation(self, core: Any, is_own: bool) -> None:
        """Gather all weights of a model on rank 0, unless all ranks run its forward. Collective."""
        if all_ranks(is_own, self._group):
            return
        parallel = runtime(core).plan.parallel
        split = next((axis for axis in ("tp", "cp", "ep") if getattr(parallel, axis) > 1), "")
        if split:
            raise PlanError(
                f"{EVALUATION} on rank 0 alone, with plan.parallel.{split} = {getattr(parallel, split)}",
                where=f"plan.parallel.{split}",
                rule=f"the ranks of {split} compute a forward together",
                fix=f"run it on all ranks, outside of if accelerator.is_main_process; or set plan.parallel.{split} = 1",
            )
        with torch.inference_mode(False), torch.no_grad():
            for unit in _units(core):
                unit.unshard()
                if is_own:
                    unit.set_reshard_after_forward(False, recurse=False)
                else:
                    unit.reshard()
        if is_own:
            self._gathered.append(core)


class AnnouncedRandomStates(list[str]):
    """Kinds of random states that a loader of accelerate copies from rank 0, which is announced, at the start of an epoch."""

    def __init__(self, kinds: Iterable[str], calls: MainProcessCalls):
        """
        Args:
            kinds: `rng_types` of accelerate.
            calls: announced calls.
        """
        super().__init__(kinds)
        self.calls = calls

    def __iter__(self) -> Iterator[str]:
        if self:
            with self.calls.collective("the start of an epoch"):
                pass
        return super().__iter__()

    def copy(self) -> list[str]:
        """Copy that is announced as well, for another loader."""
        return AnnouncedRandomStates(self[:], self.calls)


def collective_call(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Method of an accelerator that all ranks call, or rank 0 alone if there is a service of its name."""

    @wraps(method)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        own: Any = args[0]
        calls: MainProcessCalls = own.main_process_calls
        announced = [[_plain(value) for value in args[1:]], {key: _plain(value) for key, value in kwargs.items()}]
        with calls.collective(method.__name__, *(announced if method.__name__ in calls.services else ())):
            return method(*args, **kwargs)

    return call


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _units(core: Any) -> list[FSDPModule]:
    return [module for module in core.modules() if isinstance(module, FSDPModule)]
