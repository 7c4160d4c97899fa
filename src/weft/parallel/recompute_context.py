"""State of a parallelized model that recompute must restore: local weights, dropout, router statistics, random numbers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.lanes import Lanes
from weft.device.detect import detect
from weft.memory.offload import build_offload
from weft.memory.recompute import apply_recompute, patch_library_recompute
from weft.parallel.experts.router_stats import RouterStats
from weft.parallel.sequence.dropout import DropoutContext

if TYPE_CHECKING:
    from weft.parallel.build import Build

Weights = list[tuple[dict[str, Any], str, Any]]
"""Parameters of modules: (table of the module, name, value)."""


class RecomputeState:
    """What a model has in a recompute, or outside of it: `swap` exchanges the two."""

    def __init__(
        self,
        router_stats: RouterStats,
        dropout: DropoutContext | None,
        weights: Weights,
        captured: DropoutContext | None,
        generators: dict[str, Tensor],
    ):
        self.router_stats, self.dropout = router_stats, dropout
        self.weights, self.captured, self.generators = weights, captured, generators
        self.recording = False

    def swap(self) -> None:
        """Give the model this state, and keep the state that it had."""
        current = [(table, name, table[name]) for table, name, _ in self.weights]
        for table, name, value in self.weights:
            table[name] = value
        self.weights = current
        if self.dropout is not None:
            values, self.captured = self.captured, replace(self.dropout)
            vars(self.dropout).update(vars(values))
        stats = self.router_stats
        stats.recording, self.recording = self.recording, stats.recording
        numbers, self.generators = self.generators, _states_of(self.generators)
        for device_type, state in numbers.items():
            _generator_module(device_type).set_rng_state(state)


class Recomputes:
    """Recomputes that run in a lane; registers of `weft.comm.lanes`, in which the other lane sees the model without them."""

    def __init__(self) -> None:
        self.running: list[RecomputeState] = []

    def take(self) -> list[RecomputeState]:
        """See `weft.comm.lanes.Registers`."""
        for state in reversed(self.running):
            state.swap()
        running, self.running = self.running, []
        return running

    def give(self, values: list[RecomputeState], other: object) -> None:
        """See `weft.comm.lanes.Registers`."""
        for state in values:
            state.swap()
        self.running = list(values)

    @contextmanager
    def run(self, state: RecomputeState) -> Iterator[None]:
        """Context in which the model has the state of a recompute, unless the lane is suspended."""
        state.swap()
        self.running.append(state)
        try:
            yield
        finally:
            self.running.pop()
            state.swap()


def capture_context(
    router_stats: RouterStats, dropout: DropoutContext | None, recomputes: Recomputes, module: nn.Module
) -> Callable[[], AbstractContextManager[None]]:
    """Capture the context of a module at the beginning of its forward.

    Args:
        router_stats: router statistics of the model.
        dropout: seed and rows of its layout-invariant dropout, if it has dropout.
        recomputes: recomputes of the model that run.
        module: module of the model whose forward is running.

    Returns:
        A function that returns a context manager, which restores the captured context for recompute. Parameters are the local
        weights of forward, not the stored DTensors, which may have another dtype. Dropout gets the rows and seed of this
        forward, and the random number generators their states. Router statistics are not recorded a second time.
    """
    weights = [
        (part._parameters, name, value)
        for part in _own_modules(module)
        for name, value in part._parameters.items()
        if value is not None
    ]
    types = {"cpu"} | {value.device.type for _, _, value in weights if _has_generator(value.device.type)}
    captured, generators = dropout and replace(dropout), _states_of(types)

    def restored() -> AbstractContextManager[None]:
        state = RecomputeState(router_stats, dropout, weights, captured, generators)
        return recomputes.run(state)

    return restored


def capture_held_context(
    capture: Callable[[nn.Module], Callable[[], AbstractContextManager[None]]], lanes: Lanes | None, module: nn.Module
) -> Callable[[], AbstractContextManager[None]]:
    """Like `capture_context`, for a recompute that does not hand over, because it sets random number generators itself.

    Args:
        capture: `capture_context` with all arguments but the last.
        lanes: lanes of joint forwards and backwards.
        module: module of the model whose forward is running.
    """
    return partial(_held, capture(module), lanes)


@contextmanager
def _held(restored: Callable[[], AbstractContextManager[None]], lanes: Lanes | None) -> Iterator[None]:
    with lanes.held() if lanes else nullcontext(), restored():
        yield


def _generator_module(device_type: str) -> Any:
    return torch if device_type == "cpu" else torch.get_device_module(device_type)


def _has_generator(device_type: str) -> bool:
    """True if random numbers may have been drawn on a type of device; a dry run has tensors of devices that do not exist."""
    module = getattr(torch, device_type, None)
    return bool(getattr(module, "is_initialized", bool)())


def _states_of(device_types: Iterable[str]) -> dict[str, Tensor]:
    """State of the default generator of each type of device; of the current device where there are several."""
    return {device_type: _generator_module(device_type).get_rng_state() for device_type in device_types}


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its descendants, except nested FSDP2 units, which gather their own weights."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)


def recompute_blocks(build: "Build") -> None:
    """Step of `parallelize`: recompute and offload, which repeat all forwards that earlier steps have changed."""
    build.begin("recompute_blocks", "spread_experts", "split_rows", "round_layers", "compile_regions")
    model, memory, runtime = build.model, build.plan.memory, build.runtime
    build.recomputes = Recomputes()
    capture = partial(capture_context, runtime.router_stats, runtime.dropout, build.recomputes)
    if memory.recompute or memory.offload:
        runtime.offload = build_offload(memory, detect())
        own_blocks = set(build.anatomy.unit_names)
        apply_recompute(model, build.full_anatomy, own_blocks, memory, capture, runtime.offload)
    patch_library_recompute(model, partial(capture_held_context, capture, build.lanes))
