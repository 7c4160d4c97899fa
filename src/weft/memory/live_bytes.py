"""Memory by counting: the bytes of all live tensor storages, by what they hold, in a real run and in a dry one."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from weft.anatomy.roles import Anatomy
from weft.comm.collectives import find_tensors
from weft.memory.pool import pools_of
from weft.memory.storages import plain_parts

Kind = Literal["parameters", "buffers", "optimizer", "gradients", "gathered parameters", "activations"]
OUTSIDE = "casts, loss, backward and update"
Moment = tuple[str, bool]
"""The part of the model whose forward it is in, and whether it is in backward."""
Reference = weakref.ref[torch.UntypedStorage]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensor storages inside its context: `current` by kind now, `at_peak` by kind at the fullest moment.

    Seen are the results of every operation, also in backward, and what `track` and `track_training` were given. A storage
    counts once, however many views it has; of a DTensor the local shard counts. Kinds go by identity: what was not named
    is "activations", with temporaries and the buffers of communication. Not seen are scratch memory inside one operation,
    what an allocator rounds up or keeps, and memory that processes share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: Counter[Kind] = Counter()
        self.moments: dict[Moment, Counter[Kind]] = {}
        """The fullest moment of each part of the model, in forward and in backward."""
        self.roles: Counter[str] = Counter()
        self.roles_at_peak: Counter[str] = Counter()
        """Of "activations": by the part of the model in whose forward they were made, if `watch_roles` was called."""
        self.made_peak: tuple[str, list[tuple[int, ...]], str] = "", [], OUTSIDE
        """The operation that made the fullest moment, the shapes of its results, and in which part of the model."""
        self.total = self.peak = 0
        self._totals: Counter[Moment] = Counter()
        """Of `moments`."""
        self._inside: list[str] = []
        # By id of the storage, which is unique while it lives.
        self._live: dict[int, tuple[Reference, int, Kind, str]] = {}
        self._resizable: set[int] = set()
        """Storages that FSDP2 frees, and allocates again, by resizing them: no operation tells of it."""
        self._left_out: dict[int, torch.UntypedStorage] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def at_peak(self) -> Counter[Kind]:
        """Of the fullest moment."""
        return max(self.moments.values(), key=Counter.total, default=Counter())

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        self._settle()

    def track(self, kind: Kind, tensors: Iterable[Tensor | None]) -> None:
        """Count tensors that exist already, or give those that are counted another kind."""
        for tensor in tensors:
            for part in plain_parts(tensor):
                self._set(part.untyped_storage(), kind)
        self._note_peak("what was there before")

    def watch_roles(self, model: nn.Module, anatomy: Anatomy) -> None:
        """Tell activations apart by the part of the model that makes them.

        Args:
            model: parallelized; a pipeline may have left some of it.
            anatomy: of the whole model.
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

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count what is elsewhere, though in a dry run it looks as if it were here: on the host, or on a disk."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._left_out[id(storage)] = storage

    def track_training(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Count what a model holds between two steps, and know its gradients when they come.

        Gathers the weights of each unit of FSDP2 once: every rank must call it, after the first step.

        Args:
            model: parallelized.
            optimizer: over its parameters.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for pool in pools_of(model, optimizer).values():
            if pool.is_off_device:
                self.leave_out(pool.rooms)
        self.track("parameters", parameters)
        self.track("buffers", model.buffers())
        reducer: Any = getattr(model, "gradient_reducer", None)  # of zero = 0, whose gradients are in buckets that stay
        self.track("gradients", (bucket.flat for bucket in (reducer.buckets if reducer else ())))
        self.track("optimizer", (value for state in optimizer.state.values() for value in state.values()))
        feedback: Any = getattr(model, "feedback", None)  # of compressed reductions
        self.track("optimizer", feedback.all_tensors() if feedback else ())
        known = set(map(id, parameters))
        for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
            unit.unshard()
            gathered = [parameter for parameter in unit.parameters() if id(parameter) not in known]
            self.track("gathered parameters", gathered)
            self._resizable.update(id(part.untyped_storage()) for p in gathered for part in plain_parts(p))
            known.update(map(id, gathered))
            parameters += gathered
            unit.reshard()
        self._settle()
        self.peak, self.moments = self.total, {}
        self._totals.clear()
        self._note_peak("what was there before")
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(lambda p: self.track("gradients", [p.grad]))
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _settle(self) -> None:
        """Look at the storages that may have been resized without an operation."""
        for key in self._resizable:
            reference, size, kind, _ = self._live[key]
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._set(storage, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor) goes first; its operations on local tensors come back here
        result = func(*args, **(kwargs or {}))
        if func.namespace == "fsdp":  # what it copies into was allocated a moment ago
            self._settle()
        kind: Kind = "activations"
        if func is torch.ops.aten._to_copy.default and self._kind_of(args[0]) == "gradients":
            kind = "gradients"  # in another format, where FSDP2 adds them up over micro-batches
        made = find_tensors(result)
        for tensor in made:
            self._see(tensor, kind)
        self._note_peak(func, made)
        return result

    def _kind_of(self, tensor: Tensor) -> Kind | None:
        entry = self._live.get(id(tensor.untyped_storage()))
        return entry and entry[2]

    def _see(self, tensor: Tensor, kind: Kind) -> None:
        """Count the storage of a result, unless it is that of an input."""
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
        elif key in self._left_out or (storage.device.type == "cpu" and storage.is_shared()):
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

    def _note_peak(self, operation: Any, made: Sequence[Tensor] = ()) -> None:
        moment = (self._inside or [OUTSIDE])[-1], torch._C._current_graph_task_id() >= 0
        if self.total > self._totals[moment]:
            self._settle()
        if self.total > self._totals[moment]:
            self._totals[moment], self.moments[moment] = self.total, self.current.copy()
        if self.total > self.peak:
            self.peak, self.roles_at_peak = self.total, self.roles.copy()
            self.made_peak = str(operation), [tuple(tensor.shape) for tensor in made], moment[0]

    def _free(self, key: int) -> None:
        self._add(key, -1)
        del self._live[key]
        self._resizable.discard(key)


def _parts_of(anatomy: Anatomy) -> dict[str, list[str]]:
    """Names of modules by role; one may be inside another, and then counts by itself."""
    found: dict[str, list[str]] = {"embedding": [anatomy.embedding], "head": [anatomy.head]}
    for block in anatomy.blocks:
        own = {"attention": block.attention, "recurrence": block.recurrence, "mlp": block.mlp, "experts": block.experts}
        for role, names in {"block": (block.name,), **own, "norm": block.norms}.items():
            found.setdefault(role, []).extend(names)
    if anatomy.final_norm:
        found.setdefault("norm", []).append(anatomy.final_norm)
    return found
