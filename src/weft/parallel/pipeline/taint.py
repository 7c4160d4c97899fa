"""Taint analysis of a model: which values cross the borders between its blocks.

The model runs forward on the meta device, where tensors have no values but operations still show their inputs. A result that
depends on a weight belongs to the part of the model that computes it: the part before the blocks, a block, or the part after
the blocks. Shapes, masks and positions belong to no part, because every stage has them.
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
    """Calling structure of a model's blocks, from a forward on the meta device."""

    first: tuple[str, ...]
    """Modules with weights that run before the first block, or not at all."""
    last: tuple[str, ...]
    """Modules with weights that run after the last block."""
    hidden_positions: tuple[tuple[int, int] | None, ...]
    """Per block: index of the hidden states in its output tuple, and length of the tuple; None: the output is no tuple."""
    sizes: tuple[int, ...]
    """Shape of a hidden state: one dim, or two with several streams (hyper-connections)."""
    width: int
    """Elements per hidden state."""
    dtype: torch.dtype
    """Dtype of hidden states between blocks."""


def trace_block_io(probe: Any, anatomy: Anatomy, shape: tuple[int, int]) -> BlockChain:
    """Trace the values that cross block borders in one forward on the meta device.

    Args:
        probe: model that runs without arguments.
        anatomy: anatomy of the model.
        shape: rows and tokens of the forward.

    Raises:
        TaintError: other values than hidden states cross a border, or a module runs on both sides of one.
    """
    blocks = [block.name for block in anatomy.blocks]
    end = 2 * len(blocks)  # parts: even indices between blocks, odd indices inside blocks
    names = [part for name in blocks for part in (f"the part before {name}", name)]
    tied = probe.get_submodule(anatomy.head).weight if anatomy.tied else None
    taint = TaintMode(probe.named_parameters(), tied, [*names, "the part after the blocks"])
    calls: dict[str, set[int]] = {}
    inputs: list[Tensor] = []
    outputs: list[Any] = []

    def enter(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if index != len(outputs):
            raise TaintError("its blocks do not run one after the other, each once")
        if outputs and not any(hidden is value for value in _outputs(outputs[-1])):
            raise TaintError(f"{blocks[index]} is not given the hidden states of {blocks[index - 1]}")
        inputs.append(hidden)
        taint.part = 2 * index + 1
        taint.set_part(hidden, taint.part)

    def leave(index: int, output: Any) -> None:
        outputs.append(output)
        taint.part = 2 * index + 2
        for value in _outputs(output) if taint.part == end else ():
            if isinstance(value, Tensor):
                taint.set_part(value, end)

    def call(name: str) -> None:
        calls.setdefault(name, set()).add(taint.part)

    hooks: list[Any] = []
    for index, name in enumerate(blocks):
        block = probe.get_submodule(name)
        hooks += [
            block.register_forward_pre_hook(lambda _, args, kwargs, n=index: enter(n, args, kwargs), with_kwargs=True),
            block.register_forward_hook(lambda _, args, output, n=index: leave(n, output)),
        ]
    outside = _outside(probe, blocks)
    for name in outside:
        hooks.append(probe.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: call(name)))
    with taint:
        probe()
    for hook in hooks:
        hook.remove()
    if len(outputs) != len(blocks):
        raise TaintError("its blocks do not run one after the other, each once")
    for name, parts in calls.items():
        if parts not in ({0}, {end}):
            raise TaintError(f"{name} runs in {' and in '.join(taint.parts[part] for part in sorted(parts))}")
    if len({hidden.shape for hidden in inputs}) > 1 or inputs[0].shape[:2] != shape:
        raise TaintError(f"hidden states have the shape {tuple(inputs[-1].shape)} for tokens of {shape}")
    last = next((value for value in _outputs(outputs[-1]) if getattr(value, "shape", None) == inputs[-1].shape), None)
    return BlockChain(
        first=tuple(name for name in outside if calls.get(name, {0}) == {0}),
        last=tuple(name for name in outside if calls.get(name) == {end}),
        hidden_positions=tuple(
            _hidden_position(output, hidden) for output, hidden in zip(outputs, [*inputs[1:], last], strict=True)
        ),
        sizes=tuple(inputs[0].shape[2:]),
        width=prod(inputs[0].shape[2:]),
        dtype=inputs[-1].dtype,
    )


def _outside(probe: nn.Module, blocks: list[str]) -> list[str]:
    """Outermost modules with weights outside the blocks."""
    inside = tuple(f"{name}." for name in blocks)
    found: list[str] = []
    for name, module in probe.named_modules():
        covered = f"{name}.".startswith((*inside, *(f"{outer}." for outer in found)))
        if covered or not any(True for _ in module.parameters(recurse=False)):
            continue
        if not name or blocks[0].startswith(f"{name}."):
            raise TaintError(f"{name or 'the model'} has weights outside its submodules")
        found.append(name)
    return found


class TaintError(Exception):
    """A part of a model uses values of another part that are not hidden states."""


class TaintMode(TorchDispatchMode):
    """Dispatch mode that raises `TaintError` if a part uses values or weights of another part."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], shared: Tensor | None, parts: list[str]):
        """
        Args:
            weights: named parameters of the model, on the meta device.
            shared: weight that both the first and the last part may use.
            parts: names of the parts, for messages.
        """
        super().__init__()
        self.part, self.parts = 0, parts
        """Index of the part that runs now."""
        self.weights = {_storage_key(weight): name for name, weight in weights}
        self.shared = None if shared is None else _storage_key(shared)
        self.owners: dict[int, int] = {}
        """Part by storage, for storages whose values depend on weights; views share the storage of their base."""
        self.kept: list[Any] = []
        """Storages kept alive, because a new storage could reuse the address of a freed one."""

    def set_part(self, tensor: Tensor, part: int) -> None:
        """Assign the values of a tensor to a part."""
        self.owners[_storage_key(tensor)] = part
        self.kept.append(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):  # these use only the shape of their input
            return result
        used = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor) and self._uses(tensor)]
        for tensor in tree_leaves(result) if used else ():
            if isinstance(tensor, Tensor):
                self.set_part(tensor, self.part)
        return result

    def _uses(self, tensor: Tensor) -> bool:
        """True if the values of a tensor depend on weights; raises `TaintError` if they belong to another part."""
        key = _storage_key(tensor)
        if key == self.shared and self.part in (0, len(self.parts) - 1):
            return True
        if key in self.weights:
            self.owners.setdefault(key, self.part)
        owner = self.owners.get(key, self.part)
        if owner != self.part:
            what = self.weights.get(key, "values")
            raise TaintError(f"{self.parts[self.part]} uses {what} of {self.parts[owner]}")
        return key in self.owners


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _outputs(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _hidden_position(output: Any, hidden: Tensor | None) -> tuple[int, int] | None:
    if not isinstance(output, tuple):
        return None
    return next((i for i, value in enumerate(output) if value is hidden), 0), len(output)
