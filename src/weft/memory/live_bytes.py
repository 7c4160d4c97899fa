"""Exact accounting of memory: bytes of all live tensor storages by kind, in a real run or a dry run."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from weft.anatomy.roles import Anatomy
from weft.comm.recorder import find_tensors
from weft.compat import is_in_backward
from weft.memory.storages import plain_parts

Kind = Literal["parameters", "buffers", "optimizer", "gradients", "gathered parameters", "activations"]
OUTSIDE = "casts, loss, backward and update"
Moment = tuple[str, bool]
"""(part of the model whose forward is running, True in backward)."""
Reference = weakref.ref[torch.UntypedStorage]


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts live tensor storages: `current` by kind, and `at_peak` by kind at the peak.

    Counted are the results of every operation, in backward too, and the tensors given to `track` and `track_training`. A
    storage counts once, however many views it has; of a DTensor, the local shard counts. Storages of kinds that were not given
    are "activations", including temporaries and communication buffers. Not counted are scratch memory inside an operation,
    allocator rounding and caches, and memory shared between processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: Counter[Kind] = Counter()
        self.moments: dict[Moment, Counter[Kind]] = {}
        """Bytes by kind at the peak of each part of the model, in forward and in backward."""
        self.roles: Counter[str] = Counter()
        self.roles_at_peak: Counter[str] = Counter()
        """Bytes of "activations" at the peak, by the part of the model that made them, if `track_roles` was called."""
        self.peak_operation: tuple[str, list[tuple[int, ...]], str] = "", [], OUTSIDE
        """Operation at the peak, shapes of its results, and part of the model."""
        self.total = self.peak = 0
        self._totals: Counter[Moment] = Counter()
        """Total bytes at the peaks in `moments`."""
        self._inside: list[str] = []
        # Keys are ids of storages, which are unique during the lifetime of a storage.
        self._live: dict[int, tuple[Reference, int, Kind, str]] = {}
        self._resizable: set[int] = set()
        """Storages that FSDP2 frees and reallocates by resizing them, which no operation shows."""
        self._excluded: dict[int, torch.UntypedStorage] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def at_peak(self) -> Counter[Kind]:
        """Bytes by kind at the peak."""
        return max(self.moments.values(), key=Counter.total, default=Counter())

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        self._update_resized()

    def track(self, kind: Kind, tensors: Iterable[Tensor | None]) -> None:
        """Count existing tensors, or change the kind of tensors that are already counted."""
        for tensor in tensors:
            for part in plain_parts(tensor):
                self._set(part.untyped_storage(), kind)
        self._update_peak("existing tensors")

    def track_roles(self, model: nn.Module, anatomy: Anatomy) -> None:
        """Attribute activations to the parts of the model that make them.

        Args:
            model: parallelized model; a pipeline may have removed parts of it.
            anatomy: anatomy of the full model.
        """

        def enter(role: str) -> Callable[..., None]:
            return lambda *_: self._inside.append(role)

        def leave(*_: object) -> None:
            self._inside.pop()

        modules = dict(model.named_modules())
        for role, names in _parts_of(anatomy).items():
            for module in (modules[name] for name in names if name in modules):
                self._hooks.append(module.register_forward_pre_hook(enter(role), prepend=True))
                self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that are on the host or on disk, which a dry run cannot tell from tensors on the device."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._excluded[id(storage)] = storage

    def track_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        excluded: Iterable[Tensor] = (),
        buckets: Iterable[Tensor] = (),
        feedback: Iterable[Tensor] = (),
    ) -> None:
        """Count the persistent tensors of a training, and label its gradients as they are computed.

        Gathers the weights of each FSDP2 unit once, so every rank must call it, after the first step.

        Args:
            model: parallelized model whose weights are not gathered.
            optimizer: optimizer over the trained parameters of the model.
            excluded: offloaded tensors, which are not on the device.
            buckets: persistent buffers of gradients, as with zero = 0.
            feedback: error feedback of compressed reductions; counts as optimizer state.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters += [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self.exclude(excluded)
        self.track("parameters", parameters)
        self.track("buffers", model.buffers())
        self.track("gradients", buckets)
        self.track("optimizer", (value for state in optimizer.state.values() for value in state.values()))
        self.track("optimizer", feedback)
        known = set(map(id, parameters))
        for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
            unit.unshard()
            gathered = [parameter for parameter in unit.parameters() if id(parameter) not in known]
            self.track("gathered parameters", gathered)
            self._resizable.update(id(part.untyped_storage()) for p in gathered for part in plain_parts(p))
            known.update(map(id, gathered))
            parameters += gathered
            unit.reshard()
        self._update_resized()
        self.peak, self.moments = self.total, {}
        self._totals.clear()
        self._update_peak("existing tensors")
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(lambda p: self.track("gradients", [p.grad]))
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _update_resized(self) -> None:
        """Recount the storages that may have been resized without an operation."""
        for key in self._resizable:
            reference, size, kind, _ = self._live[key]
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._set(storage, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor) runs first; its operations on local tensors come back here
        result = func(*args, **(kwargs or {}))
        if func.namespace == "fsdp":  # its output was just allocated by a resize
            self._update_resized()
        kind: Kind = "activations"
        if func is torch.ops.aten._to_copy.default and self._kind_of(args[0]) == "gradients":
            kind = "gradients"  # cast by FSDP2 to the dtype in which it accumulates over micro-batches
        made = find_tensors(result)
        for tensor in made:
            self._count(tensor, kind)
        self._update_peak(func, made)
        return result

    def _kind_of(self, tensor: Tensor) -> Kind | None:
        entry = self._live.get(id(tensor.untyped_storage()))
        return entry and entry[2]

    def _count(self, tensor: Tensor, kind: Kind) -> None:
        """Count the storage of a result, unless it is the storage of an input."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        known = self._live.get(id(storage))
        if known is None or known[1] != storage.nbytes():
            self._set(storage, known[2] if known else kind)

    def _set(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        key, size = id(storage), storage.nbytes()
        role = self._inside[-1] if self._inside else OUTSIDE
        if key in self._live:
            reference, _, _, role = self._live[key]
            self._add(key, -1)
        elif key in self._excluded or (storage.device.type == "cpu" and storage.is_shared()):
            return
        else:
            reference = weakref.ref(storage, lambda _: self._free(key))
        self._live[key] = reference, size, kind, role
        self._add(key, 1)

    def _add(self, key: int, sign: int) -> None:
        _, size, kind, role = self._live[key]
        self.current[kind] += sign * size
        self.total += sign * size
        if kind == "activations":
            self.roles[role] += sign * size

    def _update_peak(self, operation: Any, made: Sequence[Tensor] = ()) -> None:
        moment = (self._inside or [OUTSIDE])[-1], is_in_backward()
        if self.total > self._totals[moment]:
            self._update_resized()
        if self.total > self._totals[moment]:
            self._totals[moment], self.moments[moment] = self.total, self.current.copy()
        if self.total > self.peak:
            self.peak, self.roles_at_peak = self.total, self.roles.copy()
            self.peak_operation = str(operation), [tuple(tensor.shape) for tensor in made], moment[0]

    def _free(self, key: int) -> None:
        self._add(key, -1)
        del self._live[key]
        self._resizable.discard(key)


def _parts_of(anatomy: Anatomy) -> dict[str, list[str]]:
    """Names of modules by role; a module inside another counts for its own role."""
    ends = {"embedding": anatomy.embedding, "head": anatomy.head}
    modules = {role: [name] if name else [] for role, name in ends.items()}
    for block in anatomy.blocks:
        own = {"attention": block.attention, "recurrence": block.recurrence, "mlp": block.mlp, "experts": block.experts}
        for role, names in {"block": (block.name,), **own, "norm": block.norms}.items():
            modules.setdefault(role, []).extend(names)
    if anatomy.final_norm:
        modules.setdefault("norm", []).append(anatomy.final_norm)
    return modules
