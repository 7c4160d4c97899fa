"""Offloaded activations: what forward keeps for backward waits on the host, or on a disk (MindSpeed, swap attention).

    forward      block 1 | block 2 | block 3 | ...          ... | block 3 | block 2 | block 1      backward
    away                 | block 1 | block 2 | ...
    back                                                 ... 3 | block 2 | block 1 |

Copies run on streams of their own: out while the next modules compute, and back `ahead` modules before their backward. What
goes is what autograd saves inside chosen modules: every storage once, however many operations keep a view of it; but not
weights, which are at rest elsewhere, nor what is too small to be worth a copy.
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
from weft.errors import PlanError
from weft.memory.pool import Pool, mapped_files, pinned_memory, shaped
from weft.plan import Memory

SMALLEST = 4096  # bytes


class Offload:
    """Where activations of a model wait, and in which order they are wanted again.

    Args:
        device: that they are computed on.
        pool: of the memory where they wait.
        budget: bytes of it that they may take; what finds no room stays on the device. One tensor at least.
        ahead: modules whose activations come back before they are asked for.
    """

    def __init__(self, device: Device, pool: Pool, budget: float = math.inf, ahead: int = 1):
        self.device, self.pool, self.budget, self.ahead = device, pool, budget, ahead
        self.incoming, self.outgoing = device.stream(), device.stream()
        self.last: OffloadGroup | None = None

    def begin_forward(self, *_: object) -> None:
        """What comes now has nothing before it that backward would ask for next."""
        self.last = None

    def begin(self, module: nn.Module) -> Callable[[Tensor], Any]:
        """A module runs forward: what takes the tensors that autograd saves, and gives what stands for them."""
        weights = {id(parameter.untyped_storage()) for parameter in _weights(module)}
        self.last = OffloadGroup(self, self.last, weights)
        return self.last.send

    def check_size(self, size: int) -> None:
        """Raises:
        PlanError: bytes that would not fit if nothing else were there.
        """
        if size > self.budget:
            raise PlanError(
                f"{self.budget} bytes do not hold one activation, of {size} bytes",
                where="plan.memory.offload_bytes",
                rule="a tensor leaves the device as a whole",
                fix=f"set plan.memory.offload_bytes to {size} at least, or leave it out for all activations",
            )


@dataclass(eq=False)
class OffloadGroup:
    """What one module keeps in one forward."""

    offload: Offload
    before: "OffloadGroup | None"
    """Of the module before, in the same forward."""
    weights: set[int]
    """Ids of their storages."""
    boxes: "WeakSet[OffloadedStorage]" = field(default_factory=WeakSet)
    known: dict[int, tuple[Any, int, Any]] = field(default_factory=dict)
    """By id of a storage, which is unique while it lives: itself, the version of what is in it, and its box."""
    is_fetched: bool = False

    def send(self, tensor: Tensor) -> Any:
        """Begin to send a tensor away; what stands for it, which is the tensor itself where it stays."""
        if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided:
            return tensor.detach()
        storage = tensor.untyped_storage()
        if id(storage) in self.weights or storage.nbytes() < SMALLEST:
            return tensor.detach()
        known, version, own = self.known.get(id(storage), (None, 0, None))
        box = own() if known is not None and known() is storage and version == tensor._version else None
        if box is None:
            self.offload.check_size(storage.nbytes())
            if self.offload.pool.live + storage.nbytes() > self.offload.budget:
                return tensor.detach()
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            box = OffloadedStorage(self, whole)
            self.boxes.add(box)
            self.known[id(storage)] = ref(storage), tensor._version, ref(box)
        box.claims += 1
        return OffloadedTensor(box, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def fetch(self) -> None:
        """Begin to bring everything back, once."""
        if not self.is_fetched:
            self.is_fetched = True
            for box in self.boxes:
                box.fetch()


class OffloadedStorage:
    """The contents of one storage, away."""

    def __init__(self, group: OffloadGroup, whole: Tensor):
        offload = self.offload = group.offload
        self.group, self.place = group, whole.device
        self.room = offload.pool.take(whole.nbytes)
        self.home = shaped(self.room, whole)
        self.claims = self.asked = 0
        """How many operations keep it; and how many of them have asked for it in this backward."""
        self.here: Tensor | None = None
        self.arrived: Any = None
        offload.outgoing.wait_stream(offload.device.current_stream())
        offload.outgoing.wait_stream(offload.incoming)  # the room may be where something has just come back from
        with offload.outgoing:
            self.home.copy_(whole, non_blocking=True)
            self.left = offload.outgoing.record_event()
        if self.place.type != "cpu":  # its memory is free when the copy is made
            whole.record_stream(offload.outgoing)

    def fetch(self) -> None:
        """Begin to bring it back."""
        offload = self.offload
        offload.incoming.wait_event(self.left)
        with offload.incoming:
            self.here = torch.empty_like(self.home, device=self.place)
            self.here.copy_(self.home, non_blocking=True)
            self.arrived = offload.incoming.record_event()

    def open(self) -> Tensor:
        """What is in it, for one of the operations that keep it; and begin to bring what will be wanted next."""
        group: OffloadGroup | None = self.group
        for _ in range(self.offload.ahead + 1):
            if group is not None:
                group.fetch()
                group = group.before
        if self.here is None:  # a graph that runs once more
            self.fetch()
        here = self.here
        assert here is not None
        stream = self.offload.device.current_stream()
        stream.wait_event(self.arrived)
        if self.place.type != "cpu":
            here.record_stream(stream)
        self.asked += 1
        if self.asked == self.claims:
            self.asked, self.here = 0, None
        return here

    def __del__(self) -> None:
        self.offload.pool.give(self.room)


class OffloadedTensor(NamedTuple):
    """Stands for a tensor that autograd saved."""

    box: OffloadedStorage
    dtype: torch.dtype
    size: Any
    stride: Any
    offset: Any

    def again(self) -> Tensor:
        return self.box.open().view(self.dtype).as_strided(self.size, self.stride, self.offset)


def build_offload(memory: Memory, device: Device) -> Offload:
    """What `plan.memory` says of activations that wait elsewhere.

    Args:
        memory: of the plan; its files are made when they are needed.
        device: that activations are computed on.
    """
    on_disk = memory.offload_to == "disk"
    make = mapped_files(Path(memory.offload_dir)) if on_disk else pinned_memory(device.type)
    pool = Pool(make, is_off_device=on_disk or device.type != "cpu")
    return Offload(device, pool, memory.offload_bytes or math.inf, memory.offload_prefetch)


def _weights(module: nn.Module) -> list[Tensor]:
    """What stands in the places of parameters now: in forward they may be gathered, cast, or parts."""
    found = [weight for part in module.modules() for weight in part._parameters.values() if weight is not None]
    return [weight for weight in found if not hasattr(weight, "__tensor_flatten__")]
