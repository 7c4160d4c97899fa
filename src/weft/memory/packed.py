"""Tensors that are float32 to all that reads or writes them, and are held in another form."""

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
    """Every operation sees float32 numbers, unpacked for as long as it runs; what it writes is packed again.

    A subclass says how (`joined`, `write`), which plain tensors hold the numbers (`__tensor_flatten__`, `with_parts`), and
    which operations need no unpacking (`OWN`). Views write through.
    """

    OWN: ClassVar[dict[Any, Callable[..., Any]]] = {}

    @abstractmethod
    def joined(self) -> Tensor:
        """The numbers, float32, in memory of their own."""

    @abstractmethod
    def write(self, values: Tensor) -> None:
        """Let it hold other numbers, float32 of the same shape."""

    @abstractmethod
    def with_parts(self, parts: Sequence[Tensor]) -> "PackedTensor":
        """The same, held by other plain tensors, in the order of `plain_parts`."""

    def view_by(self, view: Callable[[Tensor], Any]) -> Any:
        """What a view operation gives of it: one view, or several."""
        found = view(torch.empty(self.shape, device="meta"))
        if isinstance(found, Tensor):
            return Window(self, view, found)

        def part_of(number: int) -> Callable[[Tensor], Tensor]:
            return lambda values: view(values)[number]

        return [Window(self, part_of(number), part) for number, part in enumerate(found)]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.joined()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        own = cls.OWN.get(func)
        if own is not None:
            return own(func, *args, **kwargs)
        if func.is_view and func is not aten.view.dtype:
            return args[0].view_by(lambda values: func(values, *args[1:], **kwargs))
        written: list[tuple[PackedTensor, Tensor]] = []

        def join_argument(value: PackedTensor) -> Tensor:
            written.append((value, value.joined()))
            return written[-1][1]

        found = func(
            *tree_map_only(PackedTensor, join_argument, args), **tree_map_only(PackedTensor, join_argument, kwargs)
        )
        if not func._schema.is_mutable:
            return found
        for packed, values in written:
            packed.write(values)
        # What comes back is what was written into: the caller's, not the joined numbers.
        return tree_map_only(Tensor, lambda value: next((w for w, v in written if v is value), value), found)


class Window(PackedTensor):
    """A view of a packed tensor whose form has no views of its own: reads and writes through the whole of it."""

    @staticmethod
    def __new__(cls, whole: PackedTensor, view: Callable[[Tensor], Tensor], like: Tensor) -> "Window":
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=whole.dtype, device=whole.device)

    def __init__(self, whole: PackedTensor, view: Callable[[Tensor], Tensor], like: Tensor):
        """
        Args:
            whole: the tensor.
            view: gives the part of the numbers of the whole.
            like: of the shape of the part.
        """
        self.whole, self.view_of, self.like = whole, view, like

    def joined(self) -> Tensor:
        return self.view_of(self.whole.joined())

    def write(self, values: Tensor) -> None:
        numbers = self.whole.joined()
        self.view_of(numbers).copy_(values)
        self.whole.write(numbers)

    def with_parts(self, parts: Sequence[Tensor]) -> "Window":
        return Window(self.whole.with_parts(parts), self.view_of, self.like)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole"], None


def join_packed(tensor: Tensor) -> Tensor:
    """The float32 numbers of a packed tensor, in memory of their own; any other tensor as it is."""
    return tensor.joined() if isinstance(tensor, PackedTensor) else tensor


def with_parts(tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor of the same form whose plain parts are others: a plain tensor is its own part.

    Args:
        tensor: plain or packed.
        replace: gives for a plain tensor another of its shape and format.
    """
    if isinstance(tensor, PackedTensor):
        return tensor.with_parts([replace(part) for part in plain_parts(tensor)])
    return replace(tensor)


def copy_parts(target: Tensor, source: Tensor) -> None:
    """Copy what holds the numbers, as it is, on the current stream.

    Args:
        target: of the same form as `source`, on any device.
        source: plain or packed.
    """
    for one, other in zip(plain_parts(target), plain_parts(source), strict=True):
        one.copy_(other, non_blocking=True)


def has_values(tensor: Tensor) -> bool:
    """Not on the meta device, and not in a dry run."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
