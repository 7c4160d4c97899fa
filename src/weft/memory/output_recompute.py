"""Output recompute: outputs of cheap operations are not saved for backward, but recomputed from their inputs.

Ordinary recompute of an activation function saves no memory: its output is the input of the next matmul, which saves it for
its own backward. MindSpeed empties the storage of the output after that matmul, and refills it in a hook before the matmul's
backward. Here nothing is emptied: instead of the output, autograd saves a record of the operation that made it, so that the
storage is freed when forward no longer uses it. The first backward operation that needs the output recomputes it, once.

    tape = Tape()
    with tape.packing():             # around a block: intercepts the tensors that its operations save for backward
        ...
        with tape.recording():          # around a norm or an activation function: records its cheap operations
            ...
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.compute import dropout, gated_activation, rms_norm  # noqa: F401, these modules register operators of CHEAP

aten, fused = torch.ops.aten, torch.ops.weft
CHEAP = {
    *(aten._to_copy.default, aten.mean.dim, aten.sum.dim_IntList, aten.var_mean.correction),
    *(aten.native_layer_norm.default, aten._fused_rms_norm.default, fused.rms_norm.default),
    *(fused.gated_activation.default, fused.packed_gated_activation.default, fused.dropout.default),
}
"""Cheap operations besides the pointwise ones, which torch tags; each reads its input once."""


class RecomputedTensor(NamedTuple):
    """Handle that autograd saves in place of an output: a view of a result of a recorded operation."""

    record: "OpRecord"
    result: int
    """Index among the results of the operation."""
    size: Any
    stride: Any
    offset: Any

    def of(self, results: Any) -> Tensor:
        return results[self.result].as_strided(self.size, self.stride, self.offset)

    def restore(self) -> Tensor:
        """Recompute the tensor, for one of the operations that saved it; the results are kept until the last of them."""
        record = self.record
        made = record.make() if record.made is None else record.made
        record.pending_uses -= 1
        record.made = made if record.pending_uses > 0 or record.permanent else None
        return self.of(made)


class OpRecord:
    """Operation and arguments that made some tensors."""

    def __init__(self, operation: Any, arguments: Any):
        self.operation = operation
        self._set_arguments(arguments)
        self.detached = False
        self.pending_uses = 0
        """Number of saved handles whose tensors have not been restored yet."""
        self.made: list[Tensor] | None = None
        """Recomputed results, while uses are pending; kept permanently if they cannot be recomputed a second time."""
        self.permanent = False

    def _set_arguments(self, arguments: Any) -> None:
        leaves = _leaves(arguments)  # computed once, because chains are walked for every saved tensor
        self.arguments = arguments
        """(args, kwargs); a recorded tensor is replaced by a `RecomputedTensor`, an offloaded one by its own handle."""
        self.before = [leaf.record for leaf in leaves if isinstance(leaf, RecomputedTensor)]
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.versions = [tensor._version for tensor in self.inputs]

    def chain(self) -> list["OpRecord"]:
        """Records needed to recompute the results, inputs first and this record last, up to results already recomputed."""
        found: dict[OpRecord, None] = {}
        self._visit(found)
        return list(found)

    def _visit(self, found: dict["OpRecord", None]) -> None:
        if self not in found and self.made is None:
            for record in self.before:
                record._visit(found)
            found[self] = None

    def is_valid(self) -> bool:
        """True if no tensor at the start of the chain was changed in place."""
        return all([tensor._version for tensor in record.inputs] == record.versions for record in self.chain())

    def starts_from(self, storages: set[int]) -> bool:
        """True if a tensor at the start of the chain is in one of these storages."""
        return any(id(tensor.untyped_storage()) in storages for record in self.chain() for tensor in record.inputs)

    def detach_inputs(self, pack: Callable[[Tensor], Any]) -> None:
        """Detach the inputs from their graph, which may be the graph that holds this record.

        Args:
            pack: returns the form in which an input is saved.
        """
        for record in self.chain():
            if not record.detached:
                record._set_arguments(
                    _map_leaves(record.arguments, lambda leaf: pack(leaf) if isinstance(leaf, Tensor) else leaf)
                )
                record.detached = True

    def make(self) -> list[Tensor]:
        """Recompute the results."""
        if not self.is_valid():
            raise RuntimeError(
                f"the output of {self.operation} cannot be recomputed: an input was changed in place after forward; "
                "remove this role from plan.memory.recompute"
            )
        made: dict[OpRecord, list[Tensor]] = {}

        def resolve(leaf: Any) -> Any:
            if isinstance(leaf, RecomputedTensor):
                return leaf.of(made.get(leaf.record) or leaf.record.made)
            return leaf.restore() if hasattr(leaf, "restore") else leaf

        with torch.no_grad():
            for record in self.chain():
                args, kwargs = _map_leaves(record.arguments, resolve)
                made[record] = _tensors(record.operation(*args, **kwargs))
                if record.pending_uses > 0:  # its results are saved themselves
                    record.made = made[record]
        return made[self]


class Tape:
    """Records of one forward of a block. Backward reads them in any order, and each time the graph runs."""

    def __init__(self) -> None:
        self.records: dict[int, tuple[ref[torch.UntypedStorage], int, OpRecord, int]] = {}
        """(weak reference to the storage, its version, record, index of the result) by id of the storage of a result."""
        self.used: list[OpRecord] = []
        self.pack_other: Callable[[Tensor], Any] = torch.Tensor.detach
        """Pack hook for saved tensors without a record."""

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Save recorded outputs as handles that recompute them. A context manager."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self.records.clear()  # the graph holds the records that it needs
        self.used.clear()

    def recording(self) -> TorchDispatchMode:
        """Record cheap operations. A context manager, used inside `packing`."""
        return _RecordMode(self)

    @contextmanager
    def packing_others_with(self, pack: Callable[[Tensor], Any]) -> Iterator[None]:
        """Use another pack hook for saved tensors without a record. A context manager."""
        before, self.pack_other = self.pack_other, pack
        try:
            yield
        finally:
            self.pack_other = before

    def find(self, tensor: Tensor) -> RecomputedTensor | None:
        """Handle of a recorded tensor; None if the tensor has no record or was changed in place."""
        if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided:
            return None
        storage, version, record, result = self.records.get(id(tensor.untyped_storage()), (None, 0, None, 0))
        if record is None or storage is None or storage() is None or tensor._version != version:
            return None
        return RecomputedTensor(record, result, tensor.shape, tensor.stride(), tensor.storage_offset())

    def record(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation with its results."""
        read: set[int] = set()

        def resolve(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            read.add(id(leaf.untyped_storage()))
            return self.find(leaf) or leaf

        record = OpRecord(operation, _map_leaves((args, kwargs), resolve))
        for index, tensor in enumerate(_tensors(result)):
            storage = tensor.untyped_storage()
            if id(storage) not in read:  # otherwise the result is a view of an input
                self.records[id(storage)] = ref(storage), tensor._version, record, index

    def before_mutation(self, tensors: list[Tensor]) -> None:
        """Recompute immediately what could not be recomputed after an operation has changed these tensors in place."""
        storages = {id(tensor.untyped_storage()) for tensor in tensors}
        for record in self.used:
            if not record.permanent and record.starts_from(storages):
                record.made, record.permanent = record.make(), True

    def _pack(self, tensor: Tensor) -> Any:
        view = self.find(tensor)
        if view is None or not view.record.is_valid():
            return self.pack_other(tensor)
        view.record.detach_inputs(self.pack_other)
        view.record.pending_uses += 1
        if view.record.pending_uses == 1:
            self.used.append(view.record)
        return view


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.restore()


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to each leaf of an operation's arguments, which are plain lists, tuples and dicts.

    This runs for every operation, and torch's pytrees, which support any container, take three to ten times as long.
    """
    if type(value) in (list, tuple):
        return type(value)([_map_leaves(item, change) for item in value])
    if type(value) is dict:
        return {name: _map_leaves(item, change) for name, item in value.items()}
    return change(value)


def _leaves(value: Any) -> list[Any]:
    """Leaves of arguments or results."""
    if type(value) in (list, tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return _leaves(list(value.values())) if type(value) is dict else [value]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


class _RecordMode(TorchDispatchMode):
    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor) runs first; its operations on local tensors come back here
        kwargs = kwargs or {}
        if func._schema.is_mutable and self.tape.used:
            self.tape.before_mutation(_tensors((args, kwargs)))
        result = func(*args, **kwargs)
        if is_cheap(func) and all(tensor.is_floating_point() for tensor in _tensors(result)):
            self.tape.record(func, args, kwargs, result)
        return result


def is_cheap(operation: Any) -> bool:
    """True if an operation is recomputed: it is cheap, deterministic, and changes none of its inputs."""
    tags = operation.tags
    if operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or operation in CHEAP
