"""State of a parallelized model that belongs to one of two lanes (`weft.comm.lanes`): FSDP2's, and local weights."""

from typing import Any, NamedTuple

from torch import nn

from weft.compat import FsdpUse, fsdp_use, hook_objects, set_fsdp_use
from weft.parallel.weights import LocalWeights


class FsdpRegisters:
    """What FSDP2 notes about a running forward or backward. Keeps the weights of units that the other lane uses."""

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


class StoredWeights(NamedTuple):
    """Local weights of the unit whose forward a lane is in: (module, name, local weight), and the stored ones."""

    local: list[tuple[nn.Module, str, Any]]
    stored: list[list[tuple[nn.Module, str, Any]]]


class LocalWeightsRegisters:
    """Local weights of a unit: a lane that is not in its forward sees the stored weights."""

    def __init__(self, unit: LocalWeights):
        self.unit = unit

    def take(self) -> StoredWeights:
        """See `weft.comm.lanes.Registers`."""
        stored = list(self.unit.stored)
        local = [(owner, name, owner._parameters[name]) for owner, name, _ in stored[0]] if stored else []
        return StoredWeights(local, stored)

    def give(self, values: StoredWeights, other: StoredWeights) -> None:
        """See `weft.comm.lanes.Registers`."""
        for owner, name, value in other.stored[0] if other.stored else ():
            owner._parameters[name] = value
        for owner, name, value in values.local:
            owner._parameters[name] = value
        self.unit.stored = values.stored


def local_weights_registers(model: nn.Module) -> list[LocalWeightsRegisters]:
    """Registers of all units of a model with local weights."""
    return [LocalWeightsRegisters(unit) for unit in hook_objects(model, LocalWeights)]
