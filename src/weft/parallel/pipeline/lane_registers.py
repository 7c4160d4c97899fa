"""State of a parallelized model that belongs to one of two lanes (`weft.comm.lanes`): FSDP2's, and weights in a forward."""

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from weft.compat import FsdpUse, fsdp_use, hook_objects, set_fsdp_use
from weft.parallel.experts.adapters import ExpertAdapters
from weft.parallel.weights import LocalWeights

if TYPE_CHECKING:
    from weft.parallel.build import Build


class FsdpRegisters:
    """State of FSDP2 in a running forward or backward. Keeps the weights of units that the other lane uses."""

    def __init__(self, model: Any):
        self.model = model
        self.kept: dict[int, tuple[bool, Any]] = {}
        """Settings of the groups of parameters whose weights are not freed, because the other lane uses them."""

    def take(self) -> FsdpUse:
        """See `weft.comm.lanes.Registers`."""
        return fsdp_use(self.model)

    def give(self, values: FsdpUse, other: FsdpUse) -> None:
        """See `weft.comm.lanes.Registers`."""
        set_fsdp_use(self.model, values, other, self.kept)


class SwappedWeights(NamedTuple):
    """Weights of the unit whose forward a lane is in: (module, name, weight in forward), and what they replace."""

    used: list[tuple[nn.Module, str, Any]]
    stored: list[list[tuple[nn.Module, str, Any]]]


class WeightsRegisters:
    """Weights that a unit has in its forward only: a lane that is not in it sees the stored ones."""

    def __init__(self, unit: LocalWeights | ExpertAdapters):
        self.unit = unit

    def take(self) -> SwappedWeights:
        """See `weft.comm.lanes.Registers`."""
        stored, self.unit.stored = self.unit.stored, []
        used = [(owner, name, owner._parameters[name]) for owner, name, _ in stored[0]] if stored else []
        for owner, name, value in stored[0] if stored else ():
            owner._parameters[name] = value
        return SwappedWeights(used, stored)

    def give(self, values: SwappedWeights, other: SwappedWeights) -> None:
        """See `weft.comm.lanes.Registers`."""
        for owner, name, value in values.used:
            owner._parameters[name] = value
        self.unit.stored = values.stored


def weights_registers(model: nn.Module) -> list[WeightsRegisters]:
    """Registers of all units of a model with other weights in forward; adapters last, which change local weights."""
    units: list[LocalWeights | ExpertAdapters] = [
        *hook_objects(model, LocalWeights),
        *hook_objects(model, ExpertAdapters),
    ]
    return [WeightsRegisters(unit) for unit in units]


def join_lanes(build: "Build") -> None:
    """Step of `parallelize`: what the lanes of joint forwards and backwards exchange, when all of it exists."""
    build.begin("join_lanes", "overlap_shared", "recompute_blocks", "shard_weights", "run_stages")
    if build.lanes is not None:
        build.lanes.registers += [build.recomputes, build.runtime.forward_slot, *weights_registers(build.model)]
        if build.plan.parallel.zero > 0:
            build.lanes.registers.append(FsdpRegisters(build.model))
