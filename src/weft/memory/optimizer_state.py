"""Optimizer state offload: states on the host or on disk, and on the device only during the update of their parameter.

Adam keeps 8 bytes per parameter that only its update reads. With `plan.memory.optimizer_device = "host"` they are in pinned
host memory (MindSpeed, swap optimizer; Ren et al., ZeRO-Offload, 2021), with "disk" in memory-mapped files (Rajbhandari et
al., ZeRO-Infinity, 2021). The update runs over chunks of parameters (`chunked_step.py`):

    fetch             chunk 1 | chunk 2 | chunk 3 | ...
    update                    | chunk 1 | chunk 2 | chunk 3 | ...
    offload                             | chunk 1 | chunk 2 | ...

Copies overlap with the update, on separate streams. Between two steps `optimizer.state` holds the offloaded tensors, so that
checkpoints and replica checks read them there.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm.objects import all_gather_json, any_rank
from weft.device.device import Device
from weft.device.pinned import pinned_memory
from weft.errors import Refusal, raise_if_refused
from weft.job import states_of
from weft.memory.packed import copy_parts, with_parts
from weft.memory.pool import Pool, mapped_files, reason_against_disk, typed_view
from weft.memory.quantized_state import quantize_states
from weft.memory.storages import local_part, plain_parts, put_local
from weft.plan import ResolvedPlan, bytes_per_state_element

FEWER_STATES = ", or offload fewer states (plan.memory.optimizer_bytes)"


class OffloadedStates:
    """Offloads the states of an optimizer, by hooks around its `step`.

    Each `step` fetches the states of all parameters that have a gradient: `chunked_step` bounds their number, and announces
    the next chunk.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, pool: Pool, budget: float = math.inf):
        """
        Args:
            optimizer: its states may exist already; they are offloaded by its next step, or by `place_state`.
            device: device of the parameters.
            pool: memory pool of the destination.
            budget: maximum bytes of offloaded states; parameters are served in order.
        """
        self.optimizer, self.device, self.pool, self.remaining = optimizer, device, pool, budget
        self.offloaded: dict[Tensor, dict[str, Tensor]] = {}
        """Offloaded states by parameter and name; an empty dict for parameters whose states stay on the device."""
        self.stepping: list[Tensor] = []
        """Parameters of the current step."""
        self.fetched: dict[Tensor, Any] = {}
        """Events of copies to the device."""
        self.stored: dict[Tensor, Any] = {}
        """Events of copies from the device."""
        self.incoming, self.outgoing = device.stream(), device.stream()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def finish(self) -> None:
        """Wait until all states are offloaded, so that the host can read them."""
        self.outgoing.synchronize()

    def _before_step(self, *_: object) -> None:
        self.stepping = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.prefetch(self.stepping)
        for parameter in self.stepping:
            if parameter in self.fetched:
                self.device.current_stream().wait_event(self.fetched.pop(parameter))

    def _after_step(self, *_: object) -> None:
        for parameter in self.stepping:
            self.place_state(parameter)

    def prefetch(self, parameters: list[Tensor]) -> None:
        """Start fetching the states of parameters that step soon."""
        for parameter in parameters:
            offloaded, state = self.offloaded.get(parameter), self.optimizer.state[parameter]
            if not offloaded or parameter in self.fetched:
                continue
            self.incoming.wait_event(self.stored.pop(parameter))
            with self.incoming:
                for name, target in offloaded.items():
                    fetched = torch.empty_like(target, device=local_part(parameter).device)
                    copy_parts(fetched, target)
                    put_local(state, name, fetched)
                self.fetched[parameter] = self.incoming.record_event()

    def place_state(self, parameter: Tensor) -> None:
        """Start offloading the states of a parameter, which are on the device or were made by a checkpoint."""
        state = self.optimizer.state.get(parameter, {})
        tensors = {name: local_part(value) for name, value in state.items() if isinstance(value, Tensor) and value.ndim}
        if parameter not in self.offloaded and tensors:
            self.offloaded[parameter] = self._allocate(tensors)
        offloaded = self.offloaded.get(parameter)
        if not offloaded:
            return
        if not tensors:  # a checkpoint from before the first update was loaded
            del self.offloaded[parameter]
            return
        if added := {name: tensor for name, tensor in tensors.items() if name not in offloaded}:
            offloaded |= self._allocate(added)  # 1-bit Adam has another state after its freeze
        self.outgoing.wait_stream(self.device.current_stream())
        with self.outgoing:
            for name, target in offloaded.items():
                if tensors[name] is not target:
                    copy_parts(target, tensors[name])
                    for part in plain_parts(tensors[name]):
                        if part.device.type != "cpu":  # keeps the memory until the copy is done
                            part.record_stream(self.outgoing)
                    put_local(state, name, target)
            self.stored[parameter] = self.outgoing.record_event()

    def _allocate(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        size = sum(part.nbytes for tensor in tensors.values() for part in plain_parts(tensor))
        if size > self.remaining:
            return {}
        self.remaining -= size

        def allocate(part: Tensor) -> Tensor:
            return typed_view(self.pool.allocate(part.nbytes), part)

        return {name: with_parts(tensor, allocate) for name, tensor in tensors.items()}


class StatePlacement:
    """Placement of an optimizer's states between updates, according to the plan: quantized, on the host or on disk."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plan: ResolvedPlan,
        device: Device,
        stage_rank: int = 0,
        pool: Pool | None = None,
    ):
        """
        Args:
            optimizer: optimizer over local or sharded parameters, before its first step.
            device: device of the parameters. On a CPU, "host" changes nothing.
            stage_rank: this rank on the pp axis.
            pool: memory pool for offloaded states in place of the plan's host memory or disk, for dry runs.

        Raises:
            PlanError: the budget is smaller than the states of any parameter, or the disk is full; the same on every rank.
        """
        memory, state_dtype = plan.memory, plan.precision.optimizer_state_dtype
        self.quantize = None if state_dtype == "update" else quantize_states(optimizer, state_dtype)
        self.offloaded: OffloadedStates | None = None
        """States on the host or on disk; None if all states stay on the device."""
        on_host = memory.optimizer_device == "host" and (device.type != "cpu" or pool is not None)
        if on_host or memory.optimizer_device == "disk":
            budget = offload_budget(plan, stage_rank)
            if pool is None and memory.optimizer_bytes:
                raise_if_refused(_reason_against_budget(optimizer, plan, budget))
            self.offloaded = OffloadedStates(optimizer, device, pool or _pool(optimizer, plan, device, budget), budget)

    def place(self, parameter: Tensor) -> None:
        """Quantize and offload the states of one parameter, which a checkpoint has loaded."""
        if self.quantize is not None:
            self.quantize(parameter)
        if self.offloaded is not None:
            self.offloaded.place_state(parameter)


def _pool(optimizer: torch.optim.Optimizer, plan: ResolvedPlan, device: Device, budget: float) -> Pool:
    """Memory pool of the plan for offloaded states: pinned host memory, or files on a disk with enough space."""
    if plan.memory.optimizer_device == "host":
        return Pool(pinned_memory(device.type))
    size = int(min(budget, sum(_state_sizes(optimizer, plan))))
    raise_if_refused(reason_against_disk(Path(plan.memory.offload_dir), size, "the optimizer states", FEWER_STATES))
    return Pool(mapped_files(Path(plan.memory.offload_dir)))


def offload_budget(plan: ResolvedPlan, stage_rank: int = 0) -> float:
    """Maximum bytes of offloaded states on a rank; arguments as in `StatePlacement`."""
    budgets = plan.memory.optimizer_bytes
    return budgets[stage_rank if len(budgets) > 1 else 0] if budgets else math.inf


def _reason_against_budget(optimizer: torch.optim.Optimizer, plan: ResolvedPlan, budget: float) -> Refusal | None:
    """Reason against a budget that no parameter's states fit into on some rank. Collective."""
    smallest = min(filter(None, _state_sizes(optimizer, plan)), default=0)
    if not any_rank(budget < smallest):
        return None
    found = all_gather_json([budget, smallest] if budget < smallest else None)
    for rank, (limit, size) in ((rank, pair) for rank, pair in enumerate(found) if pair):
        return Refusal(
            f"{limit} bytes cannot hold the states of any parameter of rank {rank}: the smallest need {size} bytes",
            where="plan.memory.optimizer_bytes",
            rule="the states of a parameter are offloaded together",
            fix="set plan.memory.optimizer_bytes to some MiB or more, or remove it to offload all states",
        )
    return None


def _state_sizes(optimizer: torch.optim.Optimizer, plan: ResolvedPlan) -> list[int]:
    """Bytes of the states of each parameter on this rank."""
    bytes_per_element, sizes = bytes_per_state_element(plan.precision), []
    for group in optimizer.param_groups:
        uses_adamw = not group.get("orthogonalize", True)  # a group of Muon that is not orthogonalized
        states = states_of("adamw" if uses_adamw else type(optimizer).__name__)
        sizes += [int(states * bytes_per_element * local_part(parameter).numel()) for parameter in group["params"]]
    return sizes
