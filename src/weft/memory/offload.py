"""Activation offload: tensors saved for backward are kept on the host or on disk (MindSpeed, swap attention).

    forward      block 1 | block 2 | block 3 | ...          ... | block 3 | block 2 | block 1      backward
    offload              | block 1 | block 2 | ...
    prefetch                                             ... 3 | block 2 | block 1 |

Copies run on separate streams: to the host while the next modules compute, and back `prefetch` modules before their backward.
Offloaded is what autograd saves inside the chosen modules: each storage once, however many operations save a view of it.
Weights and tensors too small to be worth a copy stay on the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from weft.device.device import Device
from weft.device.pinned import pinned_memory
from weft.errors import PlanError
from weft.memory.pool import Pool, mapped_files, typed_view
from weft.plan import Memory

SMALLEST = 4096  # bytes


class Offload:
    """Offload manager of a model: destination, budget and prefetch order of its activations.

    Args:
        device: device that computes the activations.
        pool: memory pool of the destination.
        budget: maximum bytes of offloaded activations; the rest stays on the device. Must hold at least one tensor.
        prefetch: number of modules whose activations are fetched ahead of their backward.
    """

    def __init__(self, device: Device, pool: Pool, budget: float = math.inf, prefetch: int = 1):
        self.device, self.pool, self.budget, self.prefetch = device, pool, budget, prefetch
        self.incoming, self.outgoing = device.stream(), device.stream()
        self.reads: dict[int, Any] = {}
        """Event after the last fetch from a block, by its address."""
        self.last: OffloadGroup | None = None

    def begin_forward(self, *_: object) -> None:
        """Reset the prefetch order at the start of a forward."""
        self.last = None

    def begin_module(self, module: nn.Module) -> Callable[[Tensor], Any]:
        """Start a module's forward; return the pack hook for the tensors that autograd saves in it."""
        weights = {id(parameter.untyped_storage()) for parameter in _weights(module)}
        self.last = OffloadGroup(self, self.last, weights)
        return self.last.offload_tensor


@dataclass(eq=False)
class OffloadGroup:
    """Offloaded activations of one module in one forward."""

    offload: Offload
    before: "OffloadGroup | None"
    """Group of the previous module in the same forward."""
    weights: set[int]
    """Ids of the storages of the module's weights."""
    storages: "WeakSet[OffloadedStorage]" = field(default_factory=WeakSet)
    known: dict[int, tuple[Any, int, Any]] = field(default_factory=dict)
    """(weak reference to the storage, its version, weak reference to its `OffloadedStorage`) by id of a live storage."""
    is_fetched: bool = False

    def offload_tensor(self, tensor: Tensor) -> Any:
        """Start offloading a tensor. Returns an `OffloadedTensor`, or the tensor itself if it stays on the device."""
        if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided:
            return tensor.detach()
        storage = tensor.untyped_storage()
        if id(storage) in self.weights or storage.nbytes() < SMALLEST:
            return tensor.detach()
        known, version, reference = self.known.get(id(storage), (None, 0, None))
        offloaded = reference() if known is not None and known() is storage and version == tensor._version else None
        if offloaded is None:
            size, budget = storage.nbytes(), self.offload.budget
            if size > budget:
                raise PlanError(
                    f"{budget} bytes cannot hold one activation of {size} bytes",
                    where="plan.memory.offload_bytes",
                    rule="the budget must hold at least one tensor",
                    fix=f"set plan.memory.offload_bytes to {size} or more, or to 0 for all activations",
                )
            if self.offload.pool.live + size > budget:
                return tensor.detach()
            full = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            offloaded = OffloadedStorage(self, full)
            self.storages.add(offloaded)
            self.known[id(storage)] = ref(storage), tensor._version, ref(offloaded)
        offloaded.uses += 1
        return OffloadedTensor(offloaded, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def fetch(self) -> None:
        """Start fetching all activations of the group, once."""
        if not self.is_fetched:
            self.is_fetched = True
            for storage in self.storages:
                storage.fetch()


class OffloadedStorage:
    """Contents of one storage, on the host or on disk."""

    def __init__(self, group: OffloadGroup, full: Tensor):
        offload = self.offload = group.offload
        self.group, self.device = group, full.device
        self.block = offload.pool.allocate(full.nbytes)
        self.contents = typed_view(self.block, full)
        self.uses = self.restored = 0
        """Number of operations that saved it, and number of operations that have restored it in this backward."""
        self.on_device: Tensor | None = None
        self.fetched: Any = None
        offload.outgoing.wait_stream(offload.device.current_stream())
        # The block may still be the source of a fetch. Other fetches go on: copies in both directions at once.
        if (read := offload.reads.pop(self.block.data_ptr(), None)) is not None:
            offload.outgoing.wait_event(read)
        with offload.outgoing:
            self.contents.copy_(full, non_blocking=True)
            self.offloaded = offload.outgoing.record_event()
        if self.device.type != "cpu":  # keeps the memory until the copy is done
            full.record_stream(offload.outgoing)

    def fetch(self) -> None:
        """Start fetching it to the device."""
        offload = self.offload
        offload.incoming.wait_event(self.offloaded)
        with offload.incoming:
            self.on_device = torch.empty_like(self.contents, device=self.device)
            self.on_device.copy_(self.contents, non_blocking=True)
            self.fetched = offload.reads[self.block.data_ptr()] = offload.incoming.record_event()

    def restore(self) -> Tensor:
        """Wait for the fetched contents, for one of the operations that saved it; start fetching the next groups."""
        group: OffloadGroup | None = self.group
        for _ in range(self.offload.prefetch + 1):
            if group is not None:
                group.fetch()
                group = group.before
        if self.on_device is None:  # backward runs a second time over the same graph
            self.fetch()
        restored = self.on_device
        assert restored is not None
        stream = self.offload.device.current_stream()
        stream.wait_event(self.fetched)
        if self.device.type != "cpu":
            restored.record_stream(stream)
        self.restored += 1
        if self.restored == self.uses:
            self.restored, self.on_device = 0, None
        return restored

    def __del__(self) -> None:
        self.offload.pool.release(self.block)


class OffloadedTensor(NamedTuple):
    """Handle that autograd saves in place of an offloaded tensor."""

    storage: OffloadedStorage
    dtype: torch.dtype
    size: Any
    stride: Any
    offset: Any

    def restore(self) -> Tensor:
        return self.storage.restore().view(self.dtype).as_strided(self.size, self.stride, self.offset)


def explain_host_memory(memory: Memory, device_type: str) -> list[str]:
    """Line that says that memory of the host frees nothing on ranks of a CPU; empty where it does."""
    given = {'optimizer_device = "host"': memory.optimizer_device == "host"}
    given['offload_to = "host"'] = bool(memory.offload) and memory.offload_to == "host"
    keys = [f"plan.memory.{key}" for key, is_given in given.items() if is_given]
    if device_type != "cpu" or not keys:
        return []
    return [f'{"memory":<12}{" and ".join(keys)}: frees no memory on CPU ranks, which are on the host; "disk" does']


def build_offload(memory: Memory, device: Device) -> Offload:
    """Offload manager for `plan.memory`.

    Args:
        memory: memory settings of the plan; spill files are created when they are needed.
        device: device that computes the activations.
    """
    on_disk = memory.offload_to == "disk"
    make = mapped_files(Path(memory.offload_dir)) if on_disk else pinned_memory(device.type)
    pool = Pool(make, is_off_device=on_disk or device.type != "cpu")
    return Offload(device, pool, memory.offload_bytes or math.inf, memory.offload_prefetch)


def _weights(module: nn.Module) -> list[Tensor]:
    """Tensors now in place of the parameters: in forward they may be gathered, cast or sharded."""
    weights = [weight for part in module.modules() for weight in part._parameters.values() if weight is not None]
    return [weight for weight in weights if not hasattr(weight, "__tensor_flatten__")]
