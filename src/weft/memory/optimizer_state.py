"""Optimizer states off the device: on the host, or on a disk, and on the device only around their own update.

Adam keeps 8 bytes a parameter that nothing reads but its update. With `plan.memory.optimizer_device = "host"` they live in pinned
host memory (MindSpeed, swap optimizer; Ren et al., ZeRO-Offload, 2021), with "disk" in files that are mapped into memory
(Rajbhandari et al., ZeRO-Infinity, 2021). The update goes through the parameters a part at a time (`update.py`):

    to the device     part 1 | part 2 | part 3 | ...
    update                   | part 1 | part 2 | part 3 | ...
    back home                         | part 1 | part 2 | ...

Copies run beside the update, on streams of their own. Between two steps `optimizer.state` holds the tensors at home, so that
checkpoints and replicas find them there.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm.objects import all_gather_json
from weft.device.device import Device
from weft.errors import PlanError
from weft.memory.packed import copy_parts, with_parts
from weft.memory.pool import Pool, mapped_files, pinned_memory, shaped
from weft.memory.quantized_state import keep_states_small
from weft.memory.storages import local_part, plain_parts, put_local
from weft.plan import Memory, Plan, state_bytes

STATES = 2  # tensors that Adam keeps, of the size of a parameter


class OffloadedStates:
    """Keeps states of an optimizer at home, by hooks around its `step`, which brings those of all that have gradients to the
    device at once: `step_in_parts` bounds that, and says what comes next.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, pool: Pool, budget: float = math.inf):
        """
        Args:
            optimizer: its states may exist already; they move at its next step, or at `settle`.
            device: that the parameters are on.
            pool: where homes are.
            budget: bytes of states that live there, of the first parameters that find room.
        """
        self.optimizer, self.device, self.pool, self.room = optimizer, device, pool, budget
        self.homes: dict[Tensor, dict[str, Tensor]] = {}
        """By parameter and name of the state; empty of a parameter whose state stays on the device."""
        self.part: list[Tensor] = []
        """That steps now."""
        self.arrived: dict[Tensor, Any] = {}
        """Events after which states are on the device."""
        self.left: dict[Tensor, Any] = {}
        """Events after which they are at home."""
        self.incoming, self.outgoing = device.stream(), device.stream()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.away_states = self  # type: ignore[attr-defined]  # `step_in_parts` says what comes next

    def finish(self) -> None:
        """Wait for what is on its way home: the host reads it."""
        self.outgoing.synchronize()

    def _before_step(self, *_: object) -> None:
        self.part = [parameter for parameter in _parameters(self.optimizer) if parameter.grad is not None]
        self.expect(self.part)
        for parameter in self.part:
            if parameter in self.arrived:
                self.device.current_stream().wait_event(self.arrived.pop(parameter))

    def _after_step(self, *_: object) -> None:
        for parameter in self.part:
            self.settle(parameter)

    def expect(self, parameters: list[Tensor]) -> None:
        """Begin to bring the states of parameters that step soon to the device."""
        for parameter in parameters:
            homes, state = self.homes.get(parameter), self.optimizer.state[parameter]
            if not homes or parameter in self.arrived:
                continue
            self.incoming.wait_event(self.left.pop(parameter))
            with self.incoming:
                for name, home in homes.items():
                    here = torch.empty_like(home, device=local_part(parameter).device)
                    copy_parts(here, home)
                    put_local(state, name, here)
                self.arrived[parameter] = self.incoming.record_event()

    def settle(self, parameter: Tensor) -> None:
        """Begin to bring the states of a parameter home: from the device, or from where a checkpoint made them."""
        state = self.optimizer.state.get(parameter, {})
        tensors = {name: local_part(value) for name, value in state.items() if isinstance(value, Tensor) and value.ndim}
        if parameter not in self.homes and tensors:
            self.homes[parameter] = self._find_homes(tensors)
        homes = self.homes.get(parameter)
        if not homes:
            return
        self.outgoing.wait_stream(self.device.current_stream())
        with self.outgoing:
            for name, home in homes.items():
                if tensors[name] is not home:
                    copy_parts(home, tensors[name])
                    for part in plain_parts(tensors[name]):
                        if part.device.type != "cpu":  # its memory is free when the copy is made
                            part.record_stream(self.outgoing)
                    put_local(state, name, home)
            self.left[parameter] = self.outgoing.record_event()

    def _find_homes(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        size = sum(part.nbytes for tensor in tensors.values() for part in plain_parts(tensor))
        if size > self.room:
            return {}
        self.room -= size

        def home_of(part: Tensor) -> Tensor:
            return shaped(self.pool.take(part.nbytes), part)

        return {name: with_parts(tensor, home_of) for name, tensor in tensors.items()}


def place_states(
    optimizer: torch.optim.Optimizer, plan: Plan, device: Device, stage_rank: int = 0
) -> Callable[[Tensor], None]:
    """Let an optimizer's states rest in the form, and in the place, that a plan says.

    Args:
        optimizer: over local or sharded parameters, before its first step.
        plan: resolved.
        device: that the parameters are on. The host is the CPU's own memory.
        stage_rank: this rank on the pp axis.

    Returns:
        What does the same for the states of a parameter that were made elsewhere, by a checkpoint say.

    Raises:
        PlanError: the budget is smaller than the states of every parameter; or a disk is full, on every rank the same.
    """
    settlers: list[Callable[[Tensor], None]] = []
    if plan.precision.optimizer_state_dtype != "update":
        settlers.append(keep_states_small(optimizer, plan.precision.optimizer_state_dtype))
    memory = plan.memory
    if memory.optimizer_device == "disk" or (memory.optimizer_device == "host" and device.type != "cpu"):
        budget = budget_of(optimizer, memory, stage_rank)
        pool = Pool(pinned_memory(device.type))
        if memory.optimizer_device == "disk":
            numbers = sum(local_part(parameter).numel() for parameter in _parameters(optimizer))
            states = STATES + (plan.comm.compression == "1-bit")  # and the momentum from before the freeze
            _check_disk(Path(memory.offload_dir), int(min(budget, states * state_bytes(plan.precision) * numbers)))
            pool = Pool(mapped_files(Path(memory.offload_dir)))
        settlers.append(OffloadedStates(optimizer, device, pool, budget).settle)

    def settle(parameter: Tensor) -> None:
        for one in settlers:
            one(parameter)

    return settle


def budget_of(optimizer: torch.optim.Optimizer, memory: Memory, stage_rank: int = 0) -> float:
    """Bytes of states that leave the device. Arguments and errors as of `place_states`."""
    if not memory.optimizer_bytes:
        return math.inf
    budget = memory.optimizer_bytes[stage_rank if len(memory.optimizer_bytes) > 1 else 0]
    sizes = (local_part(parameter).nbytes for parameter in _parameters(optimizer))
    smallest = min(filter(None, sizes), default=0)
    if budget < smallest:
        raise PlanError(
            f"{budget} bytes hold the state of no parameter: the smallest one has {smallest} bytes itself",
            where="plan.memory.optimizer_bytes",
            rule="the states of a parameter leave the device together",
            fix="set plan.memory.optimizer_bytes to some MiB at least, or leave it out for all states",
        )
    return budget


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_disk(folder: Path, size: int) -> None:
    """Find out now, not in the middle of the first update. Every rank must call it: they may share the disk."""
    problem, held = "", []
    try:
        held.append(mapped_files(folder)(max(size, 1)))  # until all ranks have theirs
    except OSError as error:
        problem = error.strerror or str(error)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(all_gather_json(problem)) if text]
    if problems:
        raise PlanError(
            f"{folder} has no room for the optimizer's states: {problems[0]} ({size / 2**20:.1f} MiB a rank are needed)",
            where="plan.memory.offload_dir",
            rule="states on a disk need a file of their size for each rank of the host",
            fix="make room, name a folder on another disk, or keep a part of them there (plan.memory.optimizer_bytes)",
        )
