"""Counts what a rank holds of the model between two micro-batches, to set beside the prediction."""

import gc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from weft.data import MicroBatch
from weft.memory.storages import plain_parts
from weft.parallel.fsdp import begin_micro_batch
from weft.plan import Plan
from weft.train.step import forward, token_loss

Storages = dict[int, torch.UntypedStorage]
"""By an id that is theirs as long as one holds them."""


def measure_model_state(
    model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[MicroBatch], plan: Plan, mesh: DeviceMesh
) -> dict[str, int]:
    """Bytes on this rank by kind, as `weft.parallel.fsdp.model_state_bytes` predicts them. Every rank must call it.

    Runs two micro-batches and looks between them; of a pipeline, one step, and looks where the rank has all its gradients and
    has not reduced them yet. No weight changes.

    Args:
        model: parallelized, without gradients.
        optimizer: over its parameters, after at least one step.
        batches: micro-batches of one step, on the device.
        plan: resolved.
        mesh: of all ranks.
    """
    shards = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    if getattr(model, "feedback", None) is not None:  # what compressed reductions carry on is state too
        states += model.feedback.all_tensors()
    found = {
        "parameters": _bytes(_storages(shards)),
        "gathered parameters": 0,
        "gradients": 0,
        "optimizer": _bytes(_storages(state for state in states if state.ndim)),
    }
    before = _live_storages()  # held, so that what comes later is no other storage at the same place

    def look() -> None:
        gathered = _without(_storages(model.parameters()), _storages(shards))
        # Buckets of replicated gradients outlive the step: they are counted although they were there before.
        own = _storages(shard.grad for shard in shards if shard.grad is not None)
        found["gathered parameters"] = _bytes(gathered)
        found["gradients"] = _bytes(_without(_live_storages(), before, gathered) | own)

    _run(model, batches, plan, mesh, look)
    optimizer.zero_grad(set_to_none=True)
    return found


def _run(model: Any, batches: Sequence[MicroBatch], plan: Plan, mesh: DeviceMesh, look: Callable[[], None]) -> None:
    """Make gradients of the loss, and look when they are at their largest."""

    def loss(output: Any, batch: MicroBatch, _: torch.Tensor | None) -> torch.Tensor:
        return token_loss(model, output, batch, mesh)

    if plan.parallel.pp > 1:
        model.pipeline.train(batches, partial(forward, model), loss, look)
        return
    batch = batches[0]
    begin_micro_batch(model, plan, last=False)
    loss(forward(model, batch), batch, None).backward()
    look()
    begin_micro_batch(model, plan, last=True)
    loss(forward(model, batch), batch, None).backward()


def _live_storages() -> Storages:
    """Storages of all tensors that Python knows of, and of their gradients, which it may not have met yet."""
    gc.collect()
    known = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    gradients = [tensor.grad for tensor in known if tensor.is_leaf and tensor.grad is not None]
    return _storages([*known, *gradients])


def _storages(tensors: Iterable[torch.Tensor]) -> Storages:
    """The distinct storages behind some tensors; of a DTensor, those of the local shard."""
    parts = [part for tensor in tensors for part in plain_parts(tensor)]
    storages = (part.untyped_storage() for part in parts if part.device.type != "meta")
    return {storage._cdata: storage for storage in storages if storage.nbytes()}


def _without(storages: Storages, *others: Storages) -> Storages:
    return {place: storage for place, storage in storages.items() if not any(place in other for other in others)}


def _bytes(storages: Storages) -> int:
    return sum(storage.nbytes() for storage in storages.values())
