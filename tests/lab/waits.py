"""Calls for which the host would wait for an accelerator, counted on CPU ranks."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Waits(TorchFunctionMode):
    """Calls for which the host would wait for a device, by file and function of Weft."""

    METHODS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        masked = name in ("__getitem__", "index_select") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else args[1:])
        )
        if name in self.METHODS or masked:
            self.add(name)
        return func(*args, **(kwargs or {}))

    def add(self, name: str) -> None:
        frame: Any = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.rpartition("src/")[2].startswith("weft/"):
            frame = frame.f_back
        where = "outside" if frame is None else f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        self.calls[f"{where}: {name}"] += 1


class OperatorWaits(TorchDispatchMode):
    """Operators that read a value on the host inside of other operations."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.bincount.default, aten._unique2.default, aten.equal.default, aten.masked_select.default):
            self.waits.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Waits of the host in this thread, by place in Weft and name of the call: `step.read: tolist`."""
    with Waits() as waits, OperatorWaits(waits):
        yield waits.calls
