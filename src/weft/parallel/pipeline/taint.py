"""What travels between the parts of a model: followed through a forward without numbers (a taint analysis).

Tensors on the meta device have no numbers, but what is computed from what shows there too. What is computed from a weight,
or from what comes of one, belongs to the part of the model that computes it: what is before the blocks, a block, what is
behind them. Shapes, masks and positions belong to no part: each stage has them.
"""

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.anatomy.roles import Anatomy


class BlockChain(NamedTuple):
    """How a model calls its blocks, as a forward without numbers shows."""

    first: tuple[str, ...]
    """Modules with weights that are called before the first block, or not at all."""
    last: tuple[str, ...]
    """Those that are called behind the last block."""
    places: tuple[tuple[int, int] | None, ...]
    """By block: where the hidden states stand in its output, of how many things; None: the output is the hidden states."""
    sizes: tuple[int, ...]
    """Of a hidden state: one, or where it is several streams (hyper-connections) two."""
    width: int
    """Numbers in a hidden state."""
    dtype: torch.dtype
    """Of hidden states between blocks."""


def trace_block_io(probe: Any, anatomy: Anatomy, shape: tuple[int, int]) -> BlockChain:
    """What travels between the parts of a model in one forward on the meta device.

    Args:
        probe: takes no arguments.
        anatomy: its roles.
        shape: rows and tokens of the forward.

    Raises:
        CrossingError: more than hidden states travels between blocks, or a module is called on both sides of one.
    """
    blocks = [block.name for block in anatomy.blocks]
    end = 2 * len(blocks)  # parts: even numbers between blocks, odd ones in them
    names = [part for name in blocks for part in (f"the part before {name}", name)]
    tied = probe.get_submodule(anatomy.head).weight if anatomy.tied else None
    flow = TaintMode(probe.named_parameters(), tied, [*names, "the part behind the blocks"])
    calls: dict[str, set[int]] = {}
    inputs: list[Tensor] = []
    outputs: list[Any] = []

    def enter(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if number != len(outputs):
            raise CrossingError("its blocks are not called one after the other, each once")
        if outputs and not any(hidden is thing for thing in _things(outputs[-1])):
            raise CrossingError(f"{blocks[number]} is not given the hidden states of {blocks[number - 1]}")
        inputs.append(hidden)
        flow.part = 2 * number + 1
        flow.give(hidden, flow.part)

    def leave(number: int, output: Any) -> None:
        outputs.append(output)
        flow.part = 2 * number + 2
        for thing in _things(output) if flow.part == end else ():
            if isinstance(thing, Tensor):
                flow.give(thing, end)

    def call(name: str) -> None:
        calls.setdefault(name, set()).add(flow.part)

    hooks: list[Any] = []
    for number, name in enumerate(blocks):
        block = probe.get_submodule(name)
        hooks += [
            block.register_forward_pre_hook(lambda _, args, kwargs, n=number: enter(n, args, kwargs), with_kwargs=True),
            block.register_forward_hook(lambda _, args, output, n=number: leave(n, output)),
        ]
    outside = _outside(probe, blocks)
    for name in outside:
        hooks.append(probe.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: call(name)))
    with flow:
        probe()
    for hook in hooks:
        hook.remove()
    if len(outputs) != len(blocks):
        raise CrossingError("its blocks are not called one after the other, each once")
    for name, parts in calls.items():
        if parts not in ({0}, {end}):
            raise CrossingError(f"{name} is called in {' and in '.join(flow.parts[part] for part in sorted(parts))}")
    if len({hidden.shape for hidden in inputs}) > 1 or inputs[0].shape[:2] != shape:
        raise CrossingError(f"hidden states have the shape {tuple(inputs[-1].shape)} for tokens of {shape}")
    last = next((thing for thing in _things(outputs[-1]) if getattr(thing, "shape", None) == inputs[-1].shape), None)
    return BlockChain(
        first=tuple(name for name in outside if calls.get(name, {0}) == {0}),
        last=tuple(name for name in outside if calls.get(name) == {end}),
        places=tuple(_place(output, hidden) for output, hidden in zip(outputs, [*inputs[1:], last], strict=True)),
        sizes=tuple(inputs[0].shape[2:]),
        width=prod(inputs[0].shape[2:]),
        dtype=inputs[-1].dtype,
    )


def _outside(probe: nn.Module, blocks: list[str]) -> list[str]:
    """The outermost modules with weights that are not in blocks."""
    inside = tuple(f"{name}." for name in blocks)
    found: list[str] = []
    for name, module in probe.named_modules():
        covered = f"{name}.".startswith((*inside, *(f"{outer}." for outer in found)))
        if covered or not any(True for _ in module.parameters(recurse=False)):
            continue
        if not name or blocks[0].startswith(f"{name}."):
            raise CrossingError(f"{name or 'the model'} has weights of its own around the blocks")
        found.append(name)
    return found


class CrossingError(Exception):
    """A part of a model uses numbers that are not handed to it."""


class TaintMode(TorchDispatchMode):
    """While it is on, raises `CrossingError` where one part uses numbers or weights of another."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], shared: Tensor | None, parts: list[str]):
        """
        Args:
            weights: all of a model on the meta device, with their names.
            shared: the one that the first part and the last may both use.
            parts: names, for messages.
        """
        super().__init__()
        self.part, self.parts = 0, parts
        """The part that computes now, by its place in the list."""
        self.weights = {_memory(weight): name for name, weight in weights}
        self.shared = None if shared is None else _memory(shared)
        self.owners: dict[int, int] = {}
        """Part of all memory whose numbers depend on weights: views have the memory of what they are views of."""
        self.kept: list[Any] = []
        """Memory that may not be freed: other memory would take its address."""

    def give(self, tensor: Tensor, part: int) -> None:
        """Let the numbers of a tensor belong to a part from now on."""
        self.owners[_memory(tensor)] = part
        self.kept.append(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):  # a shape is all that they use
            return result
        used = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor) and self._uses(tensor)]
        for tensor in tree_leaves(result) if used else ():
            if isinstance(tensor, Tensor):
                self.give(tensor, self.part)
        return result

    def _uses(self, tensor: Tensor) -> bool:
        """Whether the numbers of a tensor depend on weights; they must be of the part that computes."""
        memory = _memory(tensor)
        if memory == self.shared and self.part in (0, len(self.parts) - 1):
            return True
        if memory in self.weights:
            self.owners.setdefault(memory, self.part)
        owner = self.owners.get(memory, self.part)
        if owner != self.part:
            what = self.weights.get(memory, "numbers")
            raise CrossingError(f"{self.parts[self.part]} uses {what} of {self.parts[owner]}")
        return memory in self.owners


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _things(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _place(output: Any, hidden: Tensor | None) -> tuple[int, int] | None:
    if not isinstance(output, tuple):
        return None
    return next((i for i, thing in enumerate(output) if thing is hidden), 0), len(output)
