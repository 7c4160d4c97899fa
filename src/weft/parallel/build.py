"""State between the steps of `parallelize`: what is chosen, and what a step hands to later ones.

A step begins with the names of the steps that it builds on. Two lines of `parallelize` in a wrong order are then an error that
names both, instead of a wrong gradient.
"""

from typing import Any, Generic, TypeVar, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.anatomy.roles import Anatomy
from weft.comm.lanes import Lanes
from weft.parallel.choices import Choices
from weft.parallel.data.parameter_hooks import hooked_parameters
from weft.parallel.experts.router_stats import RouterStats
from weft.parallel.pipeline.partition import StageIO
from weft.parallel.pipeline.weight_gradients import WeightGradientQueue
from weft.parallel.recompute_context import Recomputes
from weft.parallel.runtime import Runtime
from weft.parallel.weights import PackedLayout
from weft.plan import ResolvedPlan
from weft.topology.mesh import build_expert_mesh

T = TypeVar("T")


class Once(Generic[T]):
    """Field of a `Build` that one step sets, and later steps read."""

    def __init__(self, step: str):
        self.step = step

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, build: None, owner: type) -> "Once[T]": ...
    @overload
    def __get__(self, build: "Build", owner: type) -> T: ...
    def __get__(self, build: "Build | None", owner: type) -> "Once[T] | T":
        if build is None:
            return self
        if self.name not in vars(build):
            raise AssertionError(f"{build.step} reads {self.name}, which {self.step} sets: {self.step} comes first")
        value: T = vars(build)[self.name]
        return value

    def __set__(self, build: "Build", value: T) -> None:
        if self.name in vars(build):
            raise AssertionError(f"{build.step} sets {self.name} again, which {self.step} has set")
        vars(build)[self.name] = value


class Build:
    """A model that `parallelize` changes, step by step."""

    anatomy = Once[Anatomy]("cut_stages")
    """Anatomy of the blocks of this rank."""
    stage_io = Once[StageIO | None]("cut_stages")
    """Inputs and outputs of the stages of this rank; None without pipeline parallelism."""
    queue = Once[WeightGradientQueue | None]("cut_stages")
    """Weight gradients that the schedule runs apart; None where they are computed at once."""
    lanes = Once[Lanes | None]("cut_stages")
    """Lanes of joint forwards and backwards; None where they run one after the other."""
    packed = Once[dict[nn.Module, PackedLayout]]("spread_experts")
    """Row orders of experts whose first matrix is split by etp."""
    fp8_layers = Once[list[str]]("round_layers")
    """Linear layers whose matmuls are in FP8."""
    recomputes = Once[Recomputes]("recompute_blocks")
    """Recomputes that run in a lane."""

    def __init__(self, model: Any, choices: Choices, mesh: DeviceMesh, library_num_items: bool):
        """Collective: makes the groups of the experts."""
        self.model, self.choices, self.mesh = model, choices, mesh
        self.library_num_items = library_num_items
        self.plan: ResolvedPlan = choices.plan
        self.full_anatomy = choices.anatomy
        self.hooked = hooked_parameters(model)
        """Hooks that the user has registered on parameters."""
        self.runtime = Runtime(self.plan, mesh, choices.anatomy, RouterStats(model, choices.anatomy, mesh))
        self.runtime.kernels = choices.kernels
        self.expert_mesh = build_expert_mesh(self.plan, mesh) if choices.splits_experts else None
        self.step, self.done = "parallelize", list[str]()

    def begin(self, step: str, *after: str) -> None:
        """Begin a step, which finds the model as other steps have left it.

        Raises:
            AssertionError: one of them has not run.
        """
        self.step = step
        if missing := next((name for name in after if name not in self.done), None):
            raise AssertionError(f"{step} is called before {missing}, on whose result it builds")
        self.done.append(step)
