"""Taint analysis of a model: which values cross the borders between its blocks.

The model runs forward on the meta device, where tensors have no values but operations still show their inputs. A result that
depends on a weight belongs to a part of the model: the part before the blocks, a block, the part between two blocks, or the
part after the blocks. Inside a block it is the part of the block. Outside of blocks it is the part of the values that an
operation uses, whenever it runs: the embedding of a decoder belongs to the part before the blocks of the encoder. Shapes,
masks and positions belong to no part, because every stage has them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.anatomy.roles import Anatomy

Path = tuple[int | str, ...]
"""Place of a tensor in the arguments of a block: position or name of the argument, and position in it if that is a tuple."""


@dataclass(frozen=True)
class Value:
    """Tensor that a block gets from another part of the model, such as hidden states or the output of an encoder."""

    part: int
    """Part that computes it: 2 i for the part before block i, which is the part after block i - 1; 2 i + 1 for block i."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class BlockChain:
    """Calling structure of a model's blocks, from a forward on the meta device."""

    first: tuple[str, ...]
    """Modules with weights that run before the first block, or not at all."""
    between: tuple[tuple[str, int], ...]
    """Modules with weights that run between two blocks, such as the last norm of an encoder; with the index of the first."""
    last: tuple[str, ...]
    """Modules with weights that run after the last block."""
    values: tuple[Value, ...]
    """Values that blocks get from other parts."""
    inputs: tuple[tuple[tuple[Path, int], ...], ...]
    """Per block: where its arguments have values, and the indices of these."""
    hidden_positions: tuple[tuple[int, int] | None, ...]
    """Per block: index of the hidden states in its output tuple, and length of the tuple; None: the output is no tuple."""

    def outside(self) -> tuple[str, ...]:
        """Modules with weights outside of the blocks."""
        return (*self.first, *(name for name, _ in self.between), *self.last)

    def into(self, block: int) -> tuple[int, ...]:
        """Indices of the values that cross the border before a block: made before it, and used by it or a later one."""
        used = {value for inputs in self.inputs[block:] for _, value in inputs}
        return tuple(sorted(value for value in used if self.values[value].part <= 2 * block))


def trace_block_io(probe: Any, anatomy: Anatomy) -> BlockChain:
    """Trace the values that cross block borders in one forward on the meta device.

    Args:
        probe: model that runs without arguments.
        anatomy: anatomy of the model.

    Raises:
        TaintError: a part uses values of another one that are not floating-point arguments of a block, or a module runs in
            several parts.
    """
    blocks = [block.name for block in anatomy.chained_blocks]
    names = [part for name in blocks for part in (f"the part before {name}", name)]
    tied = probe.get_submodule(anatomy.head).weight if anatomy.tied else None
    taint = TaintMode(probe.named_parameters(), tied, [*names, "the part after the blocks"])
    calls, outside = _Calls(taint), _outside(probe, blocks)
    hooks = _observe(probe, blocks, outside, calls)
    with taint:
        probe()
    for hook in hooks:
        hook.remove()
    if len(calls.outputs) != len(blocks):
        raise TaintError("its blocks do not run one after the other, each once")
    part_of = {name: calls.part_of(name) for name in (*calls.parts, *outside)}
    end, following = 2 * len(blocks), [*calls.hidden[1:], None]
    return BlockChain(
        first=tuple(name for name in outside if part_of[name] == 0),
        between=tuple((name, part_of[name] // 2 - 1) for name in outside if 0 < part_of[name] < end),
        last=tuple(name for name in outside if part_of[name] == end),
        values=tuple(value for _, value in calls.values.values()),
        inputs=tuple(calls.inputs),
        hidden_positions=tuple(map(_hidden_position, calls.outputs, calls.hidden, following)),
    )


@dataclass
class _Calls:
    """Calls of blocks and of the modules outside of them in a traced forward; its methods are their hooks."""

    taint: "TaintMode"
    outputs: list[Any] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    inputs: list[tuple[tuple[Path, int], ...]] = field(default_factory=list)
    values: dict[tuple[Any, ...], tuple[int, Value]] = field(default_factory=dict)
    """By `TaintMode.place_of`."""
    parts: dict[str, set[int]] = field(default_factory=dict)
    """Parts in which each module outside of blocks runs."""

    def enter_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taint, values = self.taint, self.values
        if index != len(self.outputs):
            raise TaintError("its blocks do not run one after the other, each once")
        taint.part, found = 2 * index + 1, []
        for path, tensor in tensors_of(args, kwargs):
            part = taint.part_of(tensor)
            if part is None or part == taint.part or not tensor.is_floating_point():
                continue  # integers of another part may not be used
            place = taint.place_of(tensor)
            value = values.setdefault(place, (len(values), Value(part, tuple(tensor.shape), tensor.dtype)))
            found.append((path, value[0]))
            taint.allow(tensor)
        self.inputs.append(tuple(found))
        self.hidden.append(hidden_of(args, kwargs))

    def leave_block(self, index: int, output: Any) -> None:
        taint = self.taint
        self.outputs.append(output)
        for value in _outputs(output):
            if isinstance(value, Tensor) and value.is_floating_point() and taint.part_of(value) == 2 * index + 1:
                taint.set_part(value, 2 * index + 2)
        taint.part = None

    def enter_outside(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module outside of blocks begins."""
        taint = self.taint
        if taint.part is None:  # not called by a block
            found = [taint.part_of(tensor) for _, tensor in tensors_of(args, kwargs)]
            taint.part = max((part for part in found if part is not None), default=0)
        self.parts.setdefault(name, set()).add(taint.part)

    def leave_outside(self) -> None:
        part = self.taint.part
        self.taint.part = None if part is not None and part % 2 == 0 else part

    def enter_inner(self, name: str) -> None:
        """A module within one that is outside of blocks begins."""
        if self.taint.part is None:
            raise TaintError(f"{name} runs without the module around it, which has weights too")

    def part_of(self, name: str) -> int:
        """Part of a module outside of blocks."""
        parts = sorted(self.parts.get(name, {0}))
        if len(parts) > 1 or parts[0] % 2:
            raise TaintError(f"{name} runs in {' and in '.join(self.taint.parts[part] for part in parts)}")
        return parts[0]


def _observe(probe: Any, blocks: list[str], outside: list[str], calls: _Calls) -> list[Any]:
    """Register the hooks of `calls`; returns handles to remove them."""
    hooks: list[Any] = []
    for index, name in enumerate(blocks):
        block = probe.get_submodule(name)
        hooks += [
            block.register_forward_pre_hook(lambda _, *given, n=index: calls.enter_block(n, *given), with_kwargs=True),
            block.register_forward_hook(lambda _, args, output, n=index: calls.leave_block(n, output)),
        ]
    for name in outside:
        module = probe.get_submodule(name)
        hooks += [
            module.register_forward_pre_hook(
                lambda _, *given, n=name: calls.enter_outside(n, *given), with_kwargs=True
            ),
            module.register_forward_hook(lambda *_: calls.leave_outside()),
        ]
        for inner, child in (pair for pair in module.named_modules(prefix=name) if pair[0] != name):
            hooks.append(child.register_forward_pre_hook(lambda *_, n=inner: calls.enter_inner(n)))
    return hooks


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Hidden states in the arguments of a block."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Tensor]]:
    """Tensors in the arguments of a module, and in tuples and lists among them."""
    places: dict[int | str, Any] = dict(enumerate(args)) | kwargs
    for key, argument in places.items():
        if isinstance(argument, Tensor):
            yield (key,), argument
        elif isinstance(argument, tuple | list):
            yield from (((key, index), item) for index, item in enumerate(argument) if isinstance(item, Tensor))


def replace_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], new: Iterable[tuple[Path, Tensor]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other tensors at some places."""
    changed: dict[int | str, Any] = dict(enumerate(args)) | kwargs
    for (key, *inner), tensor in new:
        if inner:
            items = list(changed[key])
            items[int(inner[0])] = tensor
            changed[key] = type(changed[key])(items)
        else:
            changed[key] = tensor
    return tuple(changed[index] for index in range(len(args))), {name: changed[name] for name in kwargs}


def _outside(probe: nn.Module, blocks: list[str]) -> list[str]:
    """Outermost modules with weights outside the blocks."""
    inside = tuple(f"{name}." for name in blocks)
    found: list[str] = []
    for name, module in probe.named_modules():
        covered = f"{name}.".startswith((*inside, *(f"{outer}." for outer in found)))
        if covered or not any(True for _ in module.parameters(recurse=False)):
            continue
        if not name or any(block.startswith(f"{name}.") for block in blocks):
            raise TaintError(f"{name or 'the model'} has weights outside its submodules")
        found.append(name)
    return found


class TaintError(Exception):
    """A part of a model uses values of another part that a stage cannot receive."""


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
        self.part: int | None = None
        """Index of the block, or of the part of a module outside of blocks, that runs now; else None."""
        self.parts = parts
        self.weights = {_storage_key(weight): name for name, weight in weights}
        self.shared = None if shared is None else _storage_key(shared)
        self.owners: dict[int, int] = {}
        """Part by storage, for storages whose values depend on weights; views share the storage of their base."""
        self.allowed: set[tuple[int, int]] = set()
        """(part, storage) of values of other parts that the part gets as arguments."""
        self.versions: Counter[int] = Counter()
        """Number of in-place operations by storage."""
        self.kept: list[Any] = []
        """Storages kept alive, because a new storage could reuse the address of a freed one."""

    def set_part(self, tensor: Tensor, part: int) -> None:
        """Assign the values of a tensor to a part."""
        self.owners[_storage_key(tensor)] = part
        self.kept.append(tensor.untyped_storage())

    def part_of(self, tensor: Tensor) -> int | None:
        """Part of the values of a tensor; None if they depend on no weight."""
        return self.owners.get(_storage_key(tensor))

    def place_of(self, tensor: Tensor) -> tuple[Any, ...]:
        """Key of the values of a tensor: equal for two tensors with the same elements of a storage."""
        key = _storage_key(tensor)
        return key, self.versions[key], tensor.storage_offset(), tensor.shape, tensor.stride()

    def allow(self, tensor: Tensor) -> None:
        """Let the part that runs now use a tensor of another part."""
        assert self.part is not None
        self.allowed.add((self.part, _storage_key(tensor)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):  # these use only the shape of their input
            return result
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        part = self.part if self.part is not None else self._part_of_inputs(tensors)
        used = [self._check(tensor, part) for tensor in tensors]
        changes = func._schema.is_mutable
        for tensor in tree_leaves(result) if any(used) else ():
            if isinstance(tensor, Tensor) and (changes or (part, _storage_key(tensor)) not in self.allowed):
                self.set_part(tensor, part)  # a view of another part's value stays a value of that part
                self.versions[_storage_key(tensor)] += changes
        return result

    def _part_of_inputs(self, tensors: list[Tensor]) -> int:
        """Part of an operation outside of blocks: the latest of those whose values it uses."""
        found = [self.part_of(tensor) for tensor in tensors if _storage_key(tensor) not in self.weights]
        return max((part for part in found if part is not None), default=0)

    def _check(self, tensor: Tensor, part: int) -> bool:
        """True if the values of a tensor depend on weights; raises `TaintError` if they belong to another part."""
        key = _storage_key(tensor)
        if (key == self.shared and part in (0, len(self.parts) - 1)) or (part, key) in self.allowed:
            return True
        if key in self.weights:
            self.owners.setdefault(key, part)
        owner = self.owners.get(key, part)
        if owner != part:
            what = self.weights.get(key) or _kind(tensor)
            raise TaintError(f"{self.parts[part]} uses {what} of {self.parts[owner]}")
        return key in self.owners


def _kind(tensor: Tensor) -> str:
    return "values" if tensor.is_floating_point() else "choices"


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _outputs(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _hidden_position(output: Any, hidden: Tensor, following: Tensor | None) -> tuple[int, int] | None:
    """Place of the hidden states in the output of a block: what the next block gets, else the first of the same shape."""
    if not isinstance(output, tuple):
        return None
    passed_on = [index for index, value in enumerate(output) if value is following and value is not None]
    alike = [index for index, value in enumerate(output) if getattr(value, "shape", None) == hidden.shape]
    return next(iter((*passed_on, *alike)), 0), len(output)
