"""Measurement of model state on a rank (parameters, gradients, optimizer state), for comparison with the prediction."""

import gc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from weft.data import AnyBatch
from weft.memory.storages import plain_parts
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp import begin_micro_batch, free_gathered_weights
from weft.parallel.runtime import runtime
from weft.training.forward_backward import forward, token_loss

Storages = dict[int, torch.UntypedStorage]
"""Storages by an id that is unique while the storage is alive."""


def measure_model_state(model: Any, optimizer: DistributedOptimizer, batches: Sequence[AnyBatch]) -> dict[str, int]:
    """Bytes of model state on this rank by kind, as predicted by `weft.parallel.data.state_size.model_state_bytes`. Collective.

    Runs two micro-batches and measures between them. With a pipeline, runs one step and measures when the rank has all its
    gradients but has not reduced them yet. Weights do not change.

    Args:
        model: parallelized model without gradients.
        optimizer: optimizer of its parameters, after at least one step.
        batches: micro-batches of one step, on the device.
    """
    free_gathered_weights(model)
    shards = [*optimizer.parameters, *(parameter for parameter in model.parameters() if not parameter.requires_grad)]
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    if feedback := runtime(model).feedback:  # error feedback counts as optimizer state
        states += feedback.all_tensors()
    measured = {
        "parameters": _bytes(_storages(shards)),
        "gathered parameters": 0,
        "gradients": 0,
        "optimizer": _bytes(_storages(state for state in states if state.ndim)),
    }
    before = _live_storages()  # keeps the storages alive, so that new storages cannot reuse their ids

    def measure() -> None:
        gathered = _without(_storages(model.parameters()), _storages(shards))
        # Buckets of replicated gradients outlive the step and are in `before`, so their gradients are added separately.
        own = _storages(shard.grad for shard in shards if shard.grad is not None)
        measured["gathered parameters"] = _bytes(gathered)
        measured["gradients"] = _bytes(_without(_live_storages(), before, gathered) | own)

    _run(model, batches, measure)
    optimizer.zero_grad()
    return measured


def _run(model: Any, batches: Sequence[AnyBatch], measure: Callable[[], None]) -> None:
    """Compute gradients, and call `measure` when gradient memory is at its peak."""
    parallelized = runtime(model)
    if parallelized.pipeline is not None:
        parallelized.pipeline.train(batches, partial(forward, model), partial(token_loss, model), measure)
        return
    batch = batches[0]
    begin_micro_batch(model, parallelized.plan, parallelized.gradient_reducer, last=False)
    token_loss(model, forward(model, batch)).backward()
    measure()
    begin_micro_batch(model, parallelized.plan, parallelized.gradient_reducer, last=True)
    token_loss(model, forward(model, batch)).backward()


def _live_storages() -> Storages:
    """Storages of all live Python tensors and of their gradients, which may not have a Python object yet."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return _storages([*tensors, *gradients])


def _storages(tensors: Iterable[torch.Tensor]) -> Storages:
    """Distinct storages of tensors; for a DTensor, of its local shard."""
    parts = [part for tensor in tensors for part in plain_parts(tensor)]
    storages = (part.untyped_storage() for part in parts)
    # torch.compile keeps fake tensors: theirs are on the meta device, and may have a symbolic size.
    return {storage._cdata: storage for storage in storages if storage.device.type != "meta" and storage.nbytes()}


def _without(storages: Storages, *excluded: Storages) -> Storages:
    return {key: storage for key, storage in storages.items() if not any(key in other for other in excluded)}


def _bytes(storages: Storages) -> int:
    return sum(storage.nbytes() for storage in storages.values())
