"""Memory by counting: the bytes of all live tensor storages, exact where the resident set tells little."""

import weakref
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Context manager that counts the bytes of tensor storages: `current` now, `peak` so far.

    Seen are the results of every operation inside the context (also in backward), and what `track` was given. Frees and
    `UntypedStorage.resize_` are followed. Views count once; of a DTensor the local shard counts. Scratch memory inside
    one kernel is not seen, nor is memory that processes share: the slabs of their collectives, 2 MB a rank. A buffer of
    gloo counts until its thread drops it, which can be a moment after the collective is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._live: dict[
            int, tuple[weakref.ref[torch.UntypedStorage], int]
        ] = {}  # by id, which is unique while it lives

    def track(self, *things: torch.nn.Module | Any) -> "LiveBytes":
        """Count what exists already: modules (parameters, buffers, gradients), or any nesting of tensors."""
        for thing in things:
            if isinstance(thing, torch.nn.Module):
                thing = [*thing.parameters(), *thing.buffers()]
            tensors = [leaf for leaf in tree_leaves(thing) if isinstance(leaf, torch.Tensor)]
            self._see(tensors)
            self._see(tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None)
        return self

    def __enter__(self) -> "LiveBytes":
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if id(storage) in self._live:
                self._set(storage)
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_and_count)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor) goes first; its operations on local tensors come back here
        result = func(*args, **(kwargs or {}))
        self._see(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _see(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if hasattr(tensor, "__tensor_flatten__"):
                inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
                self._see(part for part in inner if isinstance(part, torch.Tensor))
            elif tensor.layout is torch.strided and not tensor.is_shared():
                self._set(tensor.untyped_storage())

    def _set(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        reference, before = self._live.get(key) or (weakref.ref(storage, lambda _: self._free(key)), 0)
        self._live[key] = reference, size
        self.current += size - before
        self.peak = max(self.peak, self.current)

    def _free(self, key: int) -> None:
        self.current -= self._live.pop(key)[1]
