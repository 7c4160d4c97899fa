"""Private parts of torch that Weft uses; tests/test_compat.py fails with a clear text when a version of torch changes one.

Private names that only an import needs, such as the runtime of pipeline schedules, are imported where they are used; the same
test lists them.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin as DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.nn import attention
from torch.testing._internal.distributed import fake_pg

from weft.group_progress import GroupProgress

Hook = TypeVar("Hook")


def find_hook(module: nn.Module, kind: type[Hook]) -> Hook | None:
    """The first forward pre-hook of a class that is registered on a module; None without one.

    Objects of Weft that belong to a module are registered on it as hooks, so that no attribute is set on a user's module.
    """
    hooks: Any = module._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, kind)), None)


def hook_objects(model: nn.Module, kind: type[Hook]) -> list[Hook]:
    """Objects of a class whose methods are forward pre-hooks of modules of a model."""
    owners = (
        getattr(hook, "__self__", None) for module in model.modules() for hook in module._forward_pre_hooks.values()
    )
    return [owner for owner in owners if isinstance(owner, kind)]


def inductor(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """The default backend of torch.compile; imported where a block is first compiled, because that import takes a second."""
    return import_module("torch._inductor.compile_fx").compile_fx(graph, inputs)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Functions that `optimizer.step` calls before and after the update, those of all optimizers included."""
    shared: Any = import_module("torch.optim.optimizer")
    own: Any = optimizer
    tables = [own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks]
    tables += [shared._global_optimizer_pre_hooks, shared._global_optimizer_post_hooks]
    return [hook for table in tables for hook in table.values()]


def call_before_post_hooks(optimizer: torch.optim.Optimizer, function: Callable[[], None]) -> Any:
    """Let `optimizer.step` call a function after the update, before all step hooks; returns a handle with `remove`."""
    own: Any = optimizer
    handle = own.register_step_post_hook(lambda *_: function())
    own._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    return handle


# Autograd


def call_after_backward(callback: Callable[[], None]) -> None:
    """Let the backward that is running call a function at its end; only inside of a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """True if this thread is running a backward."""
    return torch._C._current_graph_task_id() != -1


# Attention


def varlen_operators() -> tuple[Any, Any]:
    """Operators of `torch.nn.attention.varlen.varlen_attn`, forward and backward, as a dispatch mode sees them."""
    import_module("torch.nn.attention.varlen")  # defines them
    return torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward


def flash_implementations() -> list[str]:
    """Implementations of the flash operators that torch knows, such as FA3, whether their package is installed or not.

    None in versions of torch that cannot go back to their own implementation.
    """
    names = getattr(attention, "list_flash_attention_impls", list)
    return names() if hasattr(attention, "restore_flash_attention_impl") else []


@contextmanager
def flash_implementation(name: str) -> Iterator[None]:
    """Context in which the flash operators, of rows and of documents, have an implementation; for the whole process.

    Args:
        name: of `flash_implementations`; "" for torch's own.

    Raises:
        ImportError: its package is not installed.
        RuntimeError: the package has no such kernels.
    """
    before = attention.current_flash_attention_impl() if flash_implementations() else None
    try:
        _activate_flash(name)
        yield
    finally:
        _activate_flash(before or "")


def _activate_flash(name: str) -> None:
    if name:
        attention.activate_flash_attention_impl(name)
    elif flash_implementations() and attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()


# FSDP2


def fsdp_param_groups(unit: Any) -> list[Any]:
    """Parameter groups of a unit of FSDP2: several since torch 2.13, one in earlier versions."""
    return _param_groups(unit._get_fsdp_state())


def all_fsdp_param_groups(model: Any) -> list[Any]:
    """Parameter groups of all units of a model; known after its first forward."""
    return [group for state in model._get_fsdp_state()._state_ctx.all_states for group in _param_groups(state)]


def _param_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reduce_unused_parameters(model: Any) -> bool:
    """Let the unit of a model itself reduce zeros for weights without a gradient; False before torch 2.13, which cannot."""
    setter = getattr(model, "set_reduce_scatter_unused_params", None)
    if setter is not None:
        setter(True, recurse=False)
    return setter is not None


def begin_fsdp(model: Any) -> None:
    """Let a model be the root of its units of FSDP2, also if a part of it is called first. Its weights are on their device."""
    model._get_fsdp_state()._lazy_init()


def add_to_accumulated_gradients(model: Any) -> None:
    """Add the gradients of gathered weights to their sums in the dtype of reduction."""
    for group in all_fsdp_param_groups(model):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def end_fsdp_backward(model: Any) -> None:
    """Reduce gradients and free gathered weights, as the hook at the end of the backward of a whole model does."""
    for group in all_fsdp_param_groups(model):
        group.post_backward()
    model._get_fsdp_state()._root_post_backward_final_callback()


class FsdpUse(NamedTuple):
    """State of FSDP2 in a running forward or backward."""

    root: Any
    """Module state that began the forward."""
    ends: bool
    """True if the end of the backward is arranged."""
    states: list[Any]
    """Training state of each unit."""
    groups: list[Any]
    """Training state of each group of parameters."""


def fsdp_use(model: Any) -> FsdpUse:
    """State of FSDP2 in the running forward or backward."""
    shared = model._get_fsdp_state()._state_ctx
    return FsdpUse(
        shared.iter_forward_root,
        shared.post_backward_final_callback_queued,
        [state._training_state for state in shared.all_states],
        [group._training_state for group in all_fsdp_param_groups(model)],
    )


def set_fsdp_use(model: Any, use: FsdpUse, other: FsdpUse, kept: dict[int, tuple[bool, Any]]) -> None:
    """Continue a forward or backward beside another one, which is suspended.

    Args:
        model: model of which a forward and a backward run in turns.
        use: what FSDP2 has noted about the one that continues.
        other: the same about the one that is suspended; the weights that it uses are not freed.
        kept: settings of the groups whose weights are not freed, by index; updated.
    """
    shared = model._get_fsdp_state()._state_ctx
    shared.iter_forward_root, shared.post_backward_final_callback_queued = use.root, use.ends
    for state, value in zip(shared.all_states, use.states, strict=True):
        state._training_state = value
    groups = all_fsdp_param_groups(model)
    for index, (group, value, others) in enumerate(zip(groups, use.groups, other.groups, strict=True)):
        group._training_state = value
        if others in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD):
            kept.setdefault(index, (group.reshard_after_backward, group.post_forward_mesh_info))
            group.reshard_after_backward, group.post_forward_mesh_info = False, None
        elif index in kept:
            group.reshard_after_backward, group.post_forward_mesh_info = kept.pop(index)


# Process groups


def is_registered(backend: str) -> bool:
    """True if `dist.Backend.register_backend` knows the name of a backend."""
    return backend.upper() in dist.Backend._plugins


def extend_fake_backend(device_type: str) -> None:
    """Let torch's backend "fake", which sends nothing, also serve tensors on a type of device that torch knows here."""
    devices = dist.Backend.backend_capability["fake"]
    if device_type not in devices:
        devices = [*devices, device_type]
        dist.Backend.register_backend("fake", fake_pg._create_fake_pg, extended_api=True, devices=devices)


def describe_group(group: Any, description: str) -> None:
    """Change the description of a process group, which names it in errors and records."""
    group._set_group_desc(description)


def has_cpu_backend(group: Any) -> bool:
    """True if a process group sends tensors in host memory, as Weft's small messages are."""
    try:
        return group._get_backend(torch.device("cpu")) is not None
    except RuntimeError:
        return False


def issued_by_group(device: torch.device) -> list[GroupProgress]:
    """Collectives that this process has issued on a type of device, for each group with several ranks.

    Does not wait for the device. Groups whose backend does not count are left out.
    """
    found = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # the group has no backend for the device, or one that does not count
            if group.size() > 1:
                backend: Any = group._get_backend(device)
                issued = backend._get_sequence_number_for_group()
                found.append(GroupProgress(group.group_name, group.group_desc, issued))
    return found


def add_pending(groups: list[GroupProgress], device: torch.device) -> list[GroupProgress]:
    """Add what torch's flight recorder knows about collectives that are not complete, if this build of torch has one.

    Takes up to a few milliseconds. Messages between two ranks are left out.

    Args:
        groups: from `issued_by_group`.
        device: type of device.
    """
    functions: Any = torch._C._distributed_c10d
    dump = getattr(functions, "_dump_nccl_trace_json" if device.type == "cuda" else "_dump_fr_trace_json", None)
    if dump is None:
        return groups
    oldest: dict[str, dict[str, Any]] = {}
    try:
        entries = json.loads(dump(True, True)).get("entries", [])
    except RuntimeError:  # the recorder is switched off
        return groups
    for entry in entries:
        if not (entry.get("is_p2p") or entry.get("retired") or entry["state"] == "completed"):
            oldest.setdefault(entry["process_group"][0], entry)
    found = []
    for group in groups:
        entry = oldest.get(group.name)
        if entry is None:
            found.append(group._replace(started=group.issued))
        else:
            started = int(entry["collective_seq_id"]) - (entry["state"] == "scheduled")
            found.append(group._replace(pending=entry["profiling_name"], started=started))
    return found


def finished_work(result: Any) -> dist.Work:
    """Handle of a collective that is complete."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


# Processor


def has_amx() -> bool:
    """True if the processor has tiles of AMX."""
    return torch.cpu._is_amx_tile_supported()


def onednn_accepts(dtype: torch.dtype) -> bool:
    """True if oneDNN computes bfloat16 or float16 on this processor, natively or not."""
    if not torch.backends.mkldnn.is_available():
        return False
    checks = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(checks[dtype]())
