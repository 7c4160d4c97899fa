"""Stand-in for an NPU, for tests on CPU: torch's device type "npu" with host memory, and a process group backend "hccl".

`install` changes the global state of torch, so that it runs in a process without other tests. Operators of npu tensors compute
on CPU tensors with the same memory. Like HCCL, the backend refuses to reduce dtypes that are not in `REDUCED`.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from weft.device.cpu import NoEvent, NoStream

aten = torch.ops.aten
REDUCED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16)
"""Dtypes that HCCL reduces."""
COPIED = (*REDUCED, torch.uint8, torch.bool, torch.float64)
"""Dtypes of its other collectives."""
DLPACK_CPU, DLPACK_NPU = 1, 12  # device types of DLPack: kDLCPU and kDLExtDev
CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
MISSING = ("aten::_grouped_mm",)  # operators that torch has on CPU and CUDA alone
RESIZE_ON_HOST = torch.UntypedStorage.resize_
EMPTY = torch.empty
HAS_COMPILER = shutil.which("g++") is not None
VIEWS = ("as_strided", "view", "_reshape_alias", "unfold")  # their CPU kernels only change metadata


class _DlpackDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DlpackTensor(ctypes.Structure):
    """First fields of a DLPack tensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device", _DlpackDevice)]


def install() -> list[torch.library.Library]:
    """Register the device and the backend, once per process; keep the result alive."""
    _setup_privateuseone_for_python_backend("npu")
    if HAS_COMPILER:  # else a backward that uses streams ends the process
        ctypes.CDLL(str(_compile_guard()))
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]  # of devices from Python, torch has none
    torch.accelerator.max_memory_allocated = lambda *_: 0
    for name, function in _module().items():
        setattr(torch.npu, name, function)  # type: ignore[attr-defined]
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    _device_constructors()  # remembers torch.empty, which `with torch.device("meta")` changes
    torch.empty = _empty  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor: tensor.clone()  # type: ignore[method-assign, assignment]
    fallback, operators = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(_run, "PrivateUse1")
    for name in VIEWS:
        operators.impl(name, _redispatch(getattr(aten, name).default), "PrivateUse1")
    operators.impl("_copy_from", _copy_from, "PrivateUse1")
    operators.impl("record_stream", lambda tensor, stream: None, "PrivateUse1")
    operators.impl("_local_scalar_dense", lambda tensor: on_cpu(tensor).item(), "PrivateUse1")
    dist.Backend.register_backend("hccl", HcclGroup, devices=["npu"])
    return [fallback, operators]


def _compile_guard() -> Path:
    """Compile the device guard, once for each version of it and of torch."""
    source, folder = Path(__file__).with_name("npu_guard.cpp"), Path(torch.__file__).parent
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode() + str(folder).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"weft-npu-guard-{os.getuid()}-{key}.so"
    if not library.exists():
        draft = library.with_suffix(f".{os.getpid()}")
        options = ["-std=c++17", "-shared", "-fPIC", f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-lc10"]
        subprocess.run(["g++", str(source), "-o", str(draft), *options], check=True)
        draft.rename(library)
    return library


def _module() -> dict[str, Any]:
    """Functions of torch.npu that torch's placeholder lacks; streams are synchronous."""
    return {
        "is_bf16_supported": lambda: True,
        "get_device_properties": lambda *_: SimpleNamespace(name="stand-in", total_memory=2**34),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "Stream": lambda *_, **__: NoStream(),
        "Event": lambda *_, **__: NoEvent(),
        "current_stream": lambda *_: NoStream(),
        "stream": lambda stream: stream,
    }


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """FSDP frees gathered weights by a size of 0; storages of devices from Python keep their memory."""
    if storage.device.type != "npu":
        return RESIZE_ON_HOST(storage, size)
    assert size in (0, storage.nbytes())
    return storage


def _empty(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
    """Pinned memory is plain memory of the host: devices from Python have no allocator of it."""
    return EMPTY(*arguments, **options)


def on_cpu(value: Any) -> Any:
    """CPU tensor with the memory of an npu tensor, and the CPU for the device; other values unchanged."""
    if isinstance(value, Tensor) and value.device.type == "npu":
        return _moved(value, DLPACK_CPU)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def on_npu(tensor: Tensor) -> Tensor:
    """Npu tensor with the memory of a CPU tensor."""
    return _moved(tensor, DLPACK_NPU)


def _moved(tensor: Tensor, device_type: int) -> Tensor:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    device = _DlpackTensor.from_address(pointer(capsule, b"dltensor")).device
    device.type, device.index = device_type, 0
    return torch.utils.dlpack.from_dlpack(capsule)


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operator on CPU tensors with the memory of its npu tensors."""
    if operator._schema.name in MISSING:
        raise NotImplementedError(f"{operator._schema.name} is not implemented for the npu")
    known: dict[int, Tensor] = {}  # npu tensor of each CPU tensor, by id
    kept: list[Tensor] = []

    def to_cpu(value: Any) -> Any:
        moved = on_cpu(value)
        if moved is not value and isinstance(value, Tensor):
            known[id(moved)] = value
            kept.append(moved)
        return moved

    empty = {name: kwargs[name] for name in _outputs(operator) if name in kwargs and kwargs[name].numel() == 0}
    with torch.no_grad():
        own_args, own_kwargs = tree_map(to_cpu, (args, kwargs))
        own_args = [
            _as_tensor(value, wanted) for value, wanted in zip(own_args, operator._schema.arguments, strict=False)
        ]
        own_kwargs |= {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in empty.items()}
        result = operator(*own_args, **own_kwargs)
        for name, tensor in empty.items():  # memory of DLPack cannot grow
            made = own_kwargs[name]
            _redispatch(aten.set_.source_Storage_storage_offset)(
                tensor, on_npu(made).untyped_storage(), 0, made.shape, made.stride()
            )
            known[id(made)] = tensor

    def to_npu(value: Any) -> Any:
        return known.get(id(value), on_npu(value)) if isinstance(value, Tensor) else value

    return tree_map(to_npu, result)


def _as_tensor(value: Any, argument: torch.Argument) -> Any:
    """A number that torch has passed for a tensor (`bits & 1`) as a tensor; other values unchanged."""
    return torch.tensor(value) if isinstance(value, int | float) and str(argument.type) == "Tensor" else value


def _outputs(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments if argument.is_out]


def _redispatch(operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: operator.redispatch(CPU_KERNEL, *args, **kwargs)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    on_cpu(target).copy_(on_cpu(source))
    return target


def _by_gloo(name: str) -> Any:
    """Method that sends npu tensors by gloo, if HCCL has their dtype."""

    known = REDUCED if "reduce" in name else COPIED

    def call(self: "HcclGroup", *args: Any, **options: Any) -> dist.Work:
        def checked(value: Any) -> Any:
            if isinstance(value, Tensor) and value.device.type == "npu" and value.dtype not in known:
                raise TypeError(f"HCCL has no {name} of {value.dtype}")
            return on_cpu(value)

        return getattr(self.gloo, name)(*tree_map(checked, args), **options)

    return call


class HcclGroup(dist.ProcessGroup):
    """Group for "cpu:gloo,npu:hccl": a Python group replaces all backends of a group, so that it sends CPU tensors as well."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.gloo, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
        backend = ProcessGroupGloo(store, rank, size, timeout=timeout)
        for group in (self.gloo, self):
            group._set_default_backend(kind)
            group._register_backend(torch.device("cpu"), kind, backend)

    allreduce, broadcast, allgather, reduce_scatter, alltoall, barrier, send, recv = map(
        _by_gloo, ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier", "send", "recv")
    )
    # Names of torch 2.13, and the earlier names.
    all_gather_single = _allgather_base = _by_gloo("_allgather_base")
    reduce_scatter_single = _reduce_scatter_base = _by_gloo("_reduce_scatter_base")
    all_to_all_single = alltoall_base = _by_gloo("alltoall_base")
    allreduce_coalesced = _by_gloo("allreduce_coalesced")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _by_gloo("allgather_into_tensor_coalesced")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _by_gloo("reduce_scatter_tensor_coalesced")

    def getBackendName(self) -> str:
        return "hccl"
