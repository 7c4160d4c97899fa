"""Packed tensors: float32 to every operation, but stored in another format."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from weft.memory.storages import plain_parts

aten = torch.ops.aten


class PackedTensor(Tensor):
    """Tensor that is unpacked to float32 for each operation; in-place results are packed again.

    A subclass defines the conversion (`unpack`, `pack_`), the plain tensors that store the values (`__tensor_flatten__`,
    `with_parts`), and the operations that need no unpacking (`OWN`). Views write through to their base.
    """

    OWN: ClassVar[dict[Any, Callable[..., Any]]] = {}

    @abstractmethod
    def unpack(self) -> Tensor:
        """The values as a new float32 tensor."""

    @abstractmethod
    def pack_(self, values: Tensor) -> None:
        """Replace the values, given as float32 of the same shape, in place."""

    @abstractmethod
    def with_parts(self, parts: Sequence[Tensor]) -> "PackedTensor":
        """Same format and metadata over other plain tensors, in the order of `plain_parts`."""

    def view_by(self, view: Callable[[Tensor], Any]) -> Any:
        """Apply a view operation; returns one view, or a list of views."""
        result = view(torch.empty(self.shape, device="meta"))
        if isinstance(result, Tensor):
            return PackedView(self, view, result)

        def nth(index: int) -> Callable[[Tensor], Tensor]:
            return lambda values: view(values)[index]

        return [PackedView(self, nth(index), part) for index, part in enumerate(result)]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.unpack()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        own = cls.OWN.get(func)
        if own is not None:
            return own(func, *args, **kwargs)
        if func.is_view and func is not aten.view.dtype:
            return args[0].view_by(lambda values: func(values, *args[1:], **kwargs))
        unpacked: list[tuple[PackedTensor, Tensor]] = []

        def unpack(value: PackedTensor) -> Tensor:
            unpacked.append((value, value.unpack()))
            return unpacked[-1][1]

        result = func(*tree_map_only(PackedTensor, unpack, args), **tree_map_only(PackedTensor, unpack, kwargs))
        if not func._schema.is_mutable:
            return result
        for packed, values in unpacked:
            packed.pack_(values)
        # An in-place operation returns its argument: the caller's tensor, not the unpacked values.
        return tree_map_only(Tensor, lambda value: next((p for p, v in unpacked if v is value), value), result)


class PackedView(PackedTensor):
    """View of a packed tensor whose format has no views: reads and writes go through the full tensor."""

    @staticmethod
    def __new__(cls, full: PackedTensor, view: Callable[[Tensor], Tensor], like: Tensor) -> "PackedView":
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=full.dtype, device=full.device)

    def __init__(self, full: PackedTensor, view: Callable[[Tensor], Tensor], like: Tensor):
        """
        Args:
            full: tensor that the view is of.
            view: function from the values of `full` to the values of the view.
            like: tensor with the shape of the view.
        """
        self.full, self.view_of, self.like = full, view, like

    def unpack(self) -> Tensor:
        return self.view_of(self.full.unpack())

    def pack_(self, values: Tensor) -> None:
        all_values = self.full.unpack()
        self.view_of(all_values).copy_(values)
        self.full.pack_(all_values)

    def with_parts(self, parts: Sequence[Tensor]) -> "PackedView":
        return PackedView(self.full.with_parts(parts), self.view_of, self.like)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["full"], None


def unpack_tensor(tensor: Tensor) -> Tensor:
    """Values of a packed tensor as a new float32 tensor; any other tensor unchanged."""
    return tensor.unpack() if isinstance(tensor, PackedTensor) else tensor


def with_parts(tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """Tensor of the same format over other plain tensors; a plain tensor is replaced itself.

    Args:
        tensor: plain or packed tensor.
        replace: maps a plain tensor to another of the same shape and dtype.
    """
    if isinstance(tensor, PackedTensor):
        return tensor.with_parts([replace(part) for part in plain_parts(tensor)])
    return replace(tensor)


def copy_parts(target: Tensor, source: Tensor) -> None:
    """Copy the stored values without conversion, on the current stream.

    Args:
        target: tensor of the same format as `source`, on any device.
        source: plain or packed tensor.
    """
    for target_part, source_part in zip(plain_parts(target), plain_parts(source), strict=True):
        target_part.copy_(source_part, non_blocking=True)


def has_values(tensor: Tensor) -> bool:
    """False on the meta device and in a dry run."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
