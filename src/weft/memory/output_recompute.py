"""Recompute without keeping the output: what cheap operations made is not kept for backward, but made again from their inputs.

Ordinary recompute of an activation function saves nothing: its output is the input of the next matrix, which keeps it for its
own backward. MindSpeed empties the storage of the output after that matrix has run, and fills it again in a hook in front of
the matrix's backward. Here nothing is emptied: in the place of the output, autograd keeps a note of how it was made, so that
the storage goes when forward has no more use for it. Whatever needs it in backward gets it made again, once.

    tape = Tape()
    with tape.keeping():             # around a block: what its operations keep for backward passes by the tape
        ...
        with tape.recording():          # around a norm, or an activation function: notes which cheap operation made what
            ...
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CHEAP = {
    *(aten._to_copy.default, aten.mean.dim, aten.sum.dim_IntList, aten.var_mean.correction),
    *(aten.native_layer_norm.default, aten._fused_rms_norm.default),
}
"""Operations that are as cheap as those on single elements, which torch marks; each looks at its input once."""


class View(NamedTuple):
    """A tensor by what it looks at."""

    note: "OpRecord"
    result: int
    """Which one of the operation."""
    size: Any
    stride: Any
    offset: Any

    def of(self, results: Any) -> Tensor:
        return results[self.result].as_strided(self.size, self.stride, self.offset)

    def again(self) -> Tensor:
        """The tensor, for one of the places that claim it; its note keeps it until the last."""
        note = self.note
        made = note.make() if note.made is None else note.made
        note.claims -= 1
        note.made = made if note.claims > 0 or note.for_good else None
        return self.of(made)


class OpRecord:
    """How some tensors were made."""

    def __init__(self, operation: Any, arguments: Any):
        self.operation = operation
        self._start_from(arguments)
        self.settled = False
        self.claims = 0
        """How many places in the graph have still to be given one of the results."""
        self.made: list[Tensor] | None = None
        """The results again, while there are claims; for good, where they cannot be made once more."""
        self.for_good = False

    def _start_from(self, arguments: Any) -> None:
        leaves = _flat(arguments)  # once: chains are walked for whatever is kept
        self.arguments = arguments
        """(args, kwargs); in the place of a tensor that is noted itself, a `View`; or what else has a tensor `again`."""
        self.before = [leaf.note for leaf in leaves if isinstance(leaf, View)]
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.versions = [tensor._version for tensor in self.inputs]

    def chain(self) -> list["OpRecord"]:
        """The notes that it takes to make the results, inputs first, this one last; none beyond what is made already."""
        found: dict[OpRecord, None] = {}
        self._visit(found)
        return list(found)

    def _visit(self, found: dict["OpRecord", None]) -> None:
        if self not in found and self.made is None:
            for note in self.before:
                note._visit(found)
            found[self] = None

    def is_valid(self) -> bool:
        """Whether all that it starts from is what it was."""
        return all([tensor._version for tensor in note.inputs] == note.versions for note in self.chain())

    def starts_from(self, storages: set[int]) -> bool:
        """Whether something that it starts from lies in one of these storages."""
        return any(id(tensor.untyped_storage()) in storages for note in self.chain() for tensor in note.inputs)

    def settle(self, keep: Callable[[Tensor], Any]) -> None:
        """Let go of the graph that inputs are a part of, which may be the one that keeps this note.

        Args:
            keep: what becomes of an input.
        """
        for note in self.chain():
            if not note.settled:
                note._start_from(_each(note.arguments, lambda leaf: keep(leaf) if isinstance(leaf, Tensor) else leaf))
                note.settled = True

    def make(self) -> list[Tensor]:
        """The results, made again."""
        if not self.is_valid():
            raise RuntimeError(
                f"what {self.operation} made in forward cannot be made again: an input was changed in place since; "
                "leave this role out of plan.memory.recompute"
            )
        made: dict[OpRecord, list[Tensor]] = {}

        def look(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return leaf.of(made.get(leaf.note) or leaf.note.made)
            return leaf.again() if hasattr(leaf, "again") else leaf

        with torch.no_grad():
            for note in self.chain():
                args, kwargs = _each(note.arguments, look)
                made[note] = _tensors(note.operation(*args, **kwargs))
                if note.claims > 0:  # it will be asked for itself
                    note.made = made[note]
        return made[self]


class Tape:
    """Notes of one forward of one block. Backward reads them, in any order, and as often as a graph is run."""

    def __init__(self) -> None:
        self.notes: dict[int, tuple[ref[torch.UntypedStorage], int, OpRecord, int]] = {}
        """By id of the storage of a result, which is unique while it lives: with the version of what is in it."""
        self.claimed: list[OpRecord] = []
        self.keep: Callable[[Tensor], Any] = torch.Tensor.detach
        """What becomes of a tensor that is kept, and is not noted: itself, or something that has it `again`."""

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Let what is kept for backward, and was noted, be made again."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self.notes.clear()  # the graph has those that it needs
        self.claimed.clear()

    def recording(self) -> TorchDispatchMode:
        """OpRecord cheap operations. A context manager, inside of `keeping`."""
        return _Noting(self)

    @contextmanager
    def keeping_by(self, keep: Callable[[Tensor], Any]) -> Iterator[None]:
        """Let what is kept, and is not noted, be kept in another way."""
        before, self.keep = self.keep, keep
        try:
            yield
        finally:
            self.keep = before

    def find(self, tensor: Tensor) -> View | None:
        """How a tensor was made, if that is known."""
        if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided:
            return None
        storage, version, note, result = self.notes.get(id(tensor.untyped_storage()), (None, 0, None, 0))
        if note is None or storage is None or storage() is None or tensor._version != version:  # changed in place since
            return None
        return View(note, result, tensor.shape, tensor.stride(), tensor.storage_offset())

    def note(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keep how a result was made."""
        taken: set[int] = set()

        def look(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            taken.add(id(leaf.untyped_storage()))
            return self.find(leaf) or leaf

        note = OpRecord(operation, _each((args, kwargs), look))
        for number, tensor in enumerate(_tensors(result)):
            storage = tensor.untyped_storage()
            if id(storage) not in taken:  # else the operation has only looked at an input
                self.notes[id(storage)] = ref(storage), tensor._version, note, number

    def before_change(self, tensors: list[Tensor]) -> None:
        """Make at once what could not be made any more when an operation has changed these tensors in place."""
        storages = {id(tensor.untyped_storage()) for tensor in tensors}
        for note in self.claimed:
            if not note.for_good and note.starts_from(storages):
                note.made, note.for_good = note.make(), True

    def _pack(self, tensor: Tensor) -> Any:
        view = self.find(tensor)
        if view is None or not view.note.is_valid():
            return self.keep(tensor)
        view.note.settle(self.keep)
        view.note.claims += 1
        if view.note.claims == 1:
            self.claimed.append(view.note)
        return view


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.again()


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments of an operation with each leaf changed. They are plain lists, tuples and dicts, and come with every operation:
    torch's own trees, which can be of anything, take three to ten times as long."""
    if type(value) in (list, tuple):
        return type(value)([_each(item, change) for item in value])
    if type(value) is dict:
        return {name: _each(item, change) for name, item in value.items()}
    return change(value)


def _flat(value: Any) -> list[Any]:
    """The leaves of arguments, or of results."""
    if type(value) in (list, tuple):
        return [leaf for item in value for leaf in _flat(item)]
    return _flat(list(value.values())) if type(value) is dict else [value]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _flat(value) if isinstance(leaf, Tensor)]


class _Noting(TorchDispatchMode):
    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor) goes first; its operations on local tensors come back here
        kwargs = kwargs or {}
        if func._schema.is_mutable and self.tape.claimed:
            self.tape.before_change(_tensors((args, kwargs)))
        result = func(*args, **kwargs)
        if is_cheap(func) and all(tensor.is_floating_point() for tensor in _tensors(result)):
            self.tape.note(func, args, kwargs, result)
        return result


def is_cheap(operation: Any) -> bool:
    """Whether an operation is made again rather than its result kept: it reads its inputs once, changes none, and is exact."""
    tags = operation.tags
    if operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or operation in CHEAP
