"""Operators of one step of a run of `weft train`, with the dtypes and shapes of their tensors."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.compat import is_in_backward
from weft.memory.storages import plain_parts
from weft.training.session import Session

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Operand(NamedTuple):
    """Tensor that an operator takes or makes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """Type of its device."""


class Call(NamedTuple):
    """Call of an operator."""

    name: str
    """Without namespace and overload: mm, round."""
    phase: str
    """FORWARD, BACKWARD or UPDATE."""
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


Stored = Counter[tuple[torch.dtype, str]]
"""Bytes by dtype and device type."""


@dataclass
class StepFacts:
    """Operators of a rank in one step, and its tensors after the run."""

    calls: list[Call]
    """Operators in order."""
    scaled_norm: float
    """Norm of the gradients as backward has made them, with the loss scale."""
    parameters: Stored
    states: Stored
    """Tensors of the optimizer's state."""
    updates: set[float]
    """Numbers of updates that the optimizer has counted for its parameters."""

    def find(self, name: str, phase: str = "") -> list[Call]:
        """Calls of an operator, in one phase or in all."""
        return [call for call in self.calls if call.name == name and phase in ("", call.phase)]

    def dtypes(self, name: str, phase: str = "") -> set[torch.dtype]:
        """Dtypes of the inputs of an operator."""
        return {operand.dtype for call in self.find(name, phase) for operand in call.inputs}

    def copied(self, source: str, target: str, phase: str) -> int:
        """Bytes that are copied from one type of device to another."""
        pairs = [call.inputs for call in self.find("copy_", phase)]
        devices = [(to.device, of.device, math.prod(of.shape) * of.dtype.itemsize) for to, of in pairs]
        return sum(size for *places, size in devices if places == [target, source])


@dataclass
class StepTrace:
    """Recorder of one step of a run: `observe(job, 1, fault=trace.install, probe=trace.facts)`.

    Of a tensor that consists of others, such as a shard or a split weight, the operators of the inner tensors are recorded.
    """

    step: int = 3
    """Counted from 1. Steps 1 and 2 also record messages and memory; the third is an ordinary one."""

    def install(self, session: Session) -> None:
        """Record from the begin of the step to the end of its update. A fault, see `tests.lab.runs.observe`."""
        optimizer, recording, begun = session.optimizer, _Recording(), 0
        self.recording, self.norm = recording, 0.0
        begin_step, share, zero_grad = optimizer.begin_step, optimizer.squared_grad_norm_share, optimizer.zero_grad

        def begin() -> None:
            nonlocal begun
            begun += 1
            begin_step()
            if begun == self.step:
                recording.phase = FORWARD
                recording.__enter__()

        def end_backward() -> Tensor:
            if not recording.phase:
                return share()
            recording.phase = UPDATE
            square = share()
            self.norm = square.item() ** 0.5
            return square

        def end() -> None:
            if recording.phase:
                recording.__exit__(None, None, None)
                recording.phase = ""
            zero_grad()

        vars(optimizer).update(begin_step=begin, squared_grad_norm_share=end_backward, zero_grad=end)

    def facts(self, session: Session) -> StepFacts:
        """Facts of this rank. A probe, see `tests.lab.runs.observe`."""
        assert self.recording.calls, f"the run has no step {self.step}"
        states = session.optimizer.state.values()
        values = (value for state in states for value in state.values())
        updates = {float(state["step"]) for state in states if "step" in state}
        return StepFacts(self.recording.calls, self.norm, stored(session.model.parameters()), stored(values), updates)


def stored(tensors: Iterable[Any]) -> Stored:
    """Bytes of the plain tensors that hold the values of some tensors."""
    bytes_by_place: Stored = Counter()
    for part in (part for tensor in tensors for part in plain_parts(tensor)):
        bytes_by_place[part.dtype, part.device.type] += part.nbytes
    return bytes_by_place


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.phase = ""
        """Empty outside of the step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper runs first; its operations on inner tensors come back here
        inputs = _operands((args, kwargs))
        result = func(*args, **(kwargs or {}))
        phase = BACKWARD if self.phase == FORWARD and is_in_backward() else self.phase
        self.calls.append(Call(func.overloadpacket.__name__, phase, inputs, _operands(result)))
        return result


def _operands(values: Any) -> tuple[Operand, ...]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return tuple(Operand(leaf.dtype, tuple(leaf.shape), leaf.device.type) for leaf in leaves)
