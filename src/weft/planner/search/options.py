"""Settings of a search: degrees, memory options and expert options of a layout."""

from typing import NamedTuple

from weft.planner.costmodel.layout import Schedule
from weft.planner.costmodel.shape import Recompute

Value = int | tuple[str, int]
Setting = tuple[str, Value]
"""Name and value of a setting; the value of a schedule is its name and the stages per rank."""


class Degrees(NamedTuple):
    """A layout without its memory options; the names are those of `TrainingLayout`."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    zero: int
    shard: int
    micro_batch: int
    schedule: Schedule
    vpp: int

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Settings that `sensitivity` varies."""
        numbers = ((name, getattr(self, name)) for name in ("tp", "cp", "pp", "ep", "zero", "micro_batch"))
        return *numbers, ("schedule", (self.schedule, self.vpp)), ("shard", self.shard)


class MemoryOptions(NamedTuple):
    """Memory-saving options of a layout."""

    recompute: Recompute
    interval: int
    """Recompute interval: every n-th layer is recomputed."""
    offload: bool
    optimizer_on_host: bool

    def dominates(self, other: "MemoryOptions") -> bool:
        """True if these options are certainly at least as fast as `other`, because `other` includes all of them.

        With offload, the recompute options must be the same: recomputed activations need not be offloaded.
        """
        if self.offload:
            less = (self.recompute, self.interval) == (other.recompute, other.interval) and other.offload
        else:
            less = RECOMPUTED_PARTS[self.recompute] <= RECOMPUTED_PARTS[other.recompute]
            less = less and (self.recompute == "none" or self.interval >= other.interval)
        return less and self.optimizer_on_host <= other.optimizer_on_host


class ExpertOptions(NamedTuple):
    """What hides and balances the messages of experts."""

    joint: bool = False
    """Joint forwards and backwards; in a pipeline, those of the joint schedules."""
    slots: int = 0
    """Slots for replicas of hot experts; 0: none."""


RECOMPUTED_PARTS: dict[str, set[str]] = {  # recomputed parts of a layer
    "none": set(),
    "light": {"light"},
    "attention": {"light", "attention"},
    "mlp": {"mlp"},
    "full": {"light", "attention", "mlp"},
}
RECOMPUTE_OPTIONS: tuple[tuple[Recompute, int], ...] = (
    ("none", 1),
    ("light", 1),
    ("full", 4),
    ("full", 3),
    ("attention", 1),
    ("full", 2),
    ("mlp", 1),
    ("full", 1),
)
# With offload, only the recompute options none, light and full are searched.
MEMORY_OPTIONS = [
    MemoryOptions(recompute, interval, offload, on_host)
    for on_host in (False, True)
    for offload in (False, True)
    for recompute, interval in (RECOMPUTE_OPTIONS[:2] + RECOMPUTE_OPTIONS[-1:] if offload else RECOMPUTE_OPTIONS)
]


NO_EXPERT_OPTIONS = (ExpertOptions(),)
"""Expert options of layouts without ep."""
