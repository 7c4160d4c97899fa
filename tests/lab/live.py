"""Bytes of all live tensor storages, counted exactly, for memory tests."""

import weakref
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageBytes(TorchDispatchMode):
    """Context manager that counts the bytes of tensor storages: `current` bytes, and the `peak` so far.

    It counts the results of every operation inside the context (also in backward), and the tensors passed to `track`. It
    follows frees and `UntypedStorage.resize_`. A storage counts once for all its views; of a DTensor the local shard counts.
    Scratch memory inside a kernel does not count, nor does memory shared by processes, such as the 2 MB slab of a rank's
    collectives. A buffer of gloo counts until its thread frees it, which can be a moment after the collective is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._live: dict[
            int, tuple[weakref.ref[torch.UntypedStorage], int]
        ] = {}  # by id, which is unique while the storage lives

    def track(self, *objects: torch.nn.Module | Any) -> "StorageBytes":
        """Count existing tensors: modules (parameters, buffers, gradients), or any nesting of tensors."""
        for value in objects:
            if isinstance(value, torch.nn.Module):
                value = [*value.parameters(), *value.buffers()]
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            self._count(tensors)
            self._count(tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None)
        return self

    def __enter__(self) -> "StorageBytes":
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if id(storage) in self._live:
                self._update(storage)
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_and_count)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper (DTensor) is dispatched first; its operations on local tensors are dispatched here again.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._count(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if hasattr(tensor, "__tensor_flatten__"):
                inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
                self._count(part for part in inner if isinstance(part, torch.Tensor))
            elif tensor.layout is torch.strided and not tensor.is_shared():
                self._update(tensor.untyped_storage())

    def _update(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        reference, before = self._live.get(key) or (weakref.ref(storage, lambda _: self._free(key)), 0)
        self._live[key] = reference, size
        self.current += size - before
        self.peak = max(self.peak, self.current)

    def _free(self, key: int) -> None:
        self.current -= self._live.pop(key)[1]
