"""Dispatch modes of a dry run: fake data tensors, real control tensors, fake collectives and even routing.

Data tensors (weights, activations, gradients) are fake: shapes without memory. Control tensors (tokens, positions, document
ids, expert indices) are real, so that the host reads the same values, and Transformers takes the same branches, as in a real
run.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from weft.anatomy.roles import Anatomy
from weft.comm.recorder import find_group, find_tensors
from weft.compat import extend_fake_backend
from weft.compute.kernels import OPERATORS, ForwardOperator, find_kernels, replace_forwards
from weft.compute.varlen_attention import FLASH_HEAD_DIM
from weft.errors import JobError
from weft.parallel.experts.checks import takes_indices
from weft.plan import Kernels, Plan, ResolvedPlan

LARGEST_CONTROL_BYTES = 2**26  # largest real tensor; masks of long rows are larger, but the host never reads them
aten = torch.ops.aten


@contextmanager
def fake_world(rank: int, world_size: int, device_type: str = "cpu") -> Iterator[None]:
    """Default process group of `world_size` ranks that sends nothing; this process is one of the ranks.

    Raises:
        JobError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise JobError(
            "this process is in a process group already",
            where="weft.planner.dryrun.trace.trace_rank",
            rule="a dry run initializes its own fake process group",
            fix="call weft.planner.dryrun.trace.trace, which starts one process per rank",
        )
    extend_fake_backend(device_type)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class RealControlTensors(TorchDispatchMode):
    """Keep integer tensors real inside a FakeTensorMode: new integer tensors and results of operations on real tensors.

    An operation on real and fake tensors gives fake results. A collective on real tensors assumes the same values on all ranks
    as on this one. A fake scalar that the host reads (a loss, the gradient norm) is 1.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # shortcut for the most frequent call
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor dispatches first; its operations on local tensors then reach this mode
        tensors = find_tensors((*args, *kwargs.values()))
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return _call_on_fakes(func, args, kwargs)
        largest = math.prod(max(tensor.numel(), 1) for tensor in tensors)  # upper bound of a broadcast result
        if not tensors or largest * 8 > LARGEST_CONTROL_BYTES:
            fake = func(*args, **kwargs)
            made = find_tensors(fake)
            size = sum(tensor.numel() * tensor.element_size() for tensor in made)
            if size > LARGEST_CONTROL_BYTES or (not tensors and any(tensor.is_floating_point() for tensor in made)):
                return fake
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
            if func.namespace == "c10d":
                _apply_uniform_collective(func._schema.name.removeprefix("c10d::"), args)
        return result


def _call_on_fakes(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of an operation on fake tensors, for some of which torch has no value or shape."""
    if func is aten._local_scalar_dense.default and args[0].is_floating_point():
        return 1.0
    if func is aten._grouped_mm.default:
        return _grouped_matmul(*args)
    if func is aten.index.Tensor and all(_is_real(index) for index in args[1]):
        return func(args[0], _without_masks(args[1]))
    return func(*args, **kwargs)


def _is_real(index: Tensor | None) -> bool:
    return index is None or not (isinstance(index, FakeTensor) or index.is_meta)


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Indices in place of real masks, such as that of the image tokens of a row: fake tensors need the number of results."""
    with unset_fake_temporarily():
        parts = [
            index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else (index,)
            for index in indices
        ]
    return [index for part in parts for index in part]


def _grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor | None = None, *_: Any) -> Tensor:
    """Fake grouped matmul: for dtypes other than bf16, torch 2.13 computes it on CPU but has no shape function."""
    groups = () if offsets is None or x.ndim != weight.ndim else (len(offsets),)
    return x.new_empty((*groups, x.shape[-2], weight.shape[-1]))


def _apply_uniform_collective(operation: str, args: Any) -> None:
    """Apply a collective to real tensors, assuming that all ranks have the same values."""
    group = find_group(args)
    assert group is not None
    if operation == "allreduce_":  # of counts: sums
        for tensor in args[0]:
            tensor.mul_(group.size())
    elif operation == "_allgather_base_":
        args[0].view(group.size(), -1).copy_(args[1].reshape(1, -1))
    elif operation == "alltoall_base_":
        args[0].view(group.size(), -1).copy_(args[1].view(group.size(), -1)[group.rank()])


# Attention operators of an absent accelerator


def fuse_attention(model: nn.Module, anatomy: Anatomy) -> None:
    """Run the attention modules of a model under `FusedAttention`, in place, so that recomputation uses it too.

    Of a block whose attention is not known, the whole block.
    """
    for block in anatomy.all_blocks:
        for name in (*block.attention, *block.cross_attention) or (block.name,) * (not anatomy.has_roles):
            attention = model.get_submodule(name)
            attention.forward = partial(_fused, attention.forward)


def without_device(plan: ResolvedPlan) -> ResolvedPlan:
    """Plan without what fake tensors on a CPU cannot run: torch.compile, and FP8 matmuls of a device.

    Compiled blocks save about what fused operators save.
    """
    compute = plan.compute.model_copy(update={"compile": "off"})
    precision = plan.precision.model_copy(update={"emulate_fp8": plan.precision.matmul != "forward"})
    return plan.model_copy(update={"compute": compute, "precision": precision})


def fuse_operators(model: nn.Module, anatomy: Anatomy, plan: ResolvedPlan) -> Plan:
    """Let a model compute with the Triton operators of CUDA, in place; on fake tensors only their shapes are computed.

    Returns:
        The plan for `parallelize`, which would refuse these operators on a CPU.
    """
    settings = {"linear_cross_entropy": plan.compute.kernel("linear_cross_entropy")}
    for name, operator in OPERATORS.items():
        if isinstance(operator, ForwardOperator) and plan.compute.kernel(name) != "reference":
            replace_forwards(model, find_kernels(model, anatomy, name, "triton"))
        settings[name] = "reference"
    compute = plan.compute.model_copy(update={"kernels": Kernels.model_validate(settings)})
    return plan.model_copy(update={"compute": compute})


def _fused(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with FusedAttention():
        return forward(*args, **kwargs)


class FusedAttention(TorchFunctionMode):
    """Replace attention by the operators that torch chooses on CUDA, so that a CPU build counts their memory.

    Flash attention is used for 16-bit dtypes without a mask, with equal head dimensions of keys and values. Otherwise it is
    memory-efficient attention; float64 is unchanged.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention and args[0].dtype != torch.float64:
            return _attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    size = q.shape[-1]
    if attn_mask is None and q.element_size() == 2 and size == v.shape[-1] and size <= FLASH_HEAD_DIM:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*q.shape[:2], q.shape[2], k.shape[2])
    needs_lse = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, needs_lse, dropout_p, is_causal, scale=scale
    )[0]


# Routing


def route_evenly(model: nn.Module, anatomy: Anatomy) -> None:
    """Replace the expert indices of all routers by round-robin indices, in place.

    Args:
        model: full model; may be parallelized afterwards.
    """
    for name in (name for block in anatomy.blocks for name in block.experts):
        experts: Any = model.get_submodule(name)
        if takes_indices(experts):
            experts.register_forward_pre_hook(
                partial(_round_robin, experts.num_experts), prepend=True, with_kwargs=True
            )


def _round_robin(num_experts: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = next((key for key in kwargs if "ind" in key), None)
    index = args[1] if name is None else kwargs[name]
    indices = torch.arange(index.numel(), dtype=index.dtype, device=index.device) % num_experts
    indices = indices.view(index.shape)
    return ((args[0], indices, *args[2:]), kwargs) if name is None else (args, kwargs | {name: indices})
