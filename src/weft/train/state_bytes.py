"""Counts what a rank holds of the model between two micro-batches, to set beside the prediction."""

import gc
from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from weft.data import MicroBatch
from weft.parallel.data import begin_micro_batch
from weft.plan import Plan
from weft.train.step import forward, token_loss


def measure_model_state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: MicroBatch, plan: Plan, mesh: DeviceMesh
) -> dict[str, int]:
    """Bytes on this rank by kind, as `weft.parallel.data.model_state_bytes` predicts them. Every rank must call it.

    Runs two micro-batches and looks between them; no weight changes.

    Args:
        model: parallelized, without gradients.
        optimizer: over its parameters, after at least one step.
        batch: one micro-batch, on the device.
        plan: resolved.
        mesh: of all ranks.
    """
    shards = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    before = _live_storages()
    begin_micro_batch(model, plan, last=False)
    token_loss(model, forward(model, batch), batch, mesh).backward()
    gathered = _storages(parameter for parameter in model.parameters()).keys() - _storages(shards).keys()
    # Buckets of replicated gradients outlive the step: they are counted although they were there before.
    own = _storages(shard.grad for shard in shards if shard.grad is not None)
    after = _live_storages()
    gradients = sum(size for place, size in after.items() if place in own or place not in before.keys() | gathered)
    gathered_bytes = sum(after[place] for place in gathered)
    begin_micro_batch(model, plan, last=True)
    token_loss(model, forward(model, batch), batch, mesh).backward()
    optimizer.zero_grad(set_to_none=True)
    return {
        "parameters": sum(_storages(shards).values()),
        "gathered parameters": gathered_bytes,
        "gradients": gradients,
        "optimizer": sum(_storages(state for state in states if state.ndim).values()),
    }


def _live_storages() -> dict[int, int]:
    """Storages of all tensors that Python knows of, and of their gradients, which it may not have met yet."""
    gc.collect()
    known = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    gradients = [tensor.grad for tensor in known if tensor.is_leaf and tensor.grad is not None]
    return _storages([*known, *gradients])


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address and bytes of the distinct storages behind some tensors; of a DTensor, those of the local shard."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in local if tensor.device.type != "meta")
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
