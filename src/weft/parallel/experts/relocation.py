"""Relocation of experts: every N updates, experts move to other ranks where a skew of the router lasts (`experts/homes.py`).

    forward      the expert that a router chooses is translated to its slot, before dispatch
    update       loads of all steps since the last relocation are all-reduced; all ranks make the same plan
    relocation   all-to-all of the rows of parameters and optimizer states that change their rank, one tensor after the other

Outside of these, experts have their original order: checkpoints and exports do not depend on homes. A checkpoint has the homes
and the loads besides, so that a resumed run continues as it would have.
"""

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weft.anatomy.roles import Anatomy
from weft.comm import collectives
from weft.comm.objects import all_gather_json
from weft.errors import ModelError
from weft.memory.packed import has_values, unpack_tensor
from weft.memory.storages import local_part
from weft.parallel.experts.homes import ExpertHomes, Integers, load_of_ranks, plan_homes
from weft.parallel.experts.router_stats import RouterStats
from weft.topology.mesh import build_layer_group, ranks_along

if TYPE_CHECKING:
    from weft.parallel.build import Build


class Box(NamedTuple):
    """Part of a stacked weight that a rank holds."""

    first: int
    """First slot."""
    slots: int
    rest: tuple[int, ...]
    """Offset and size in the other dims."""


class Relocation:
    """Homes of the experts of this rank's layers, and the exchange of weights and optimizer states that changes them."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        every: int,
        mesh: DeviceMesh,
        expert_mesh: DeviceMesh,
        stats: RouterStats,
    ):
        """
        Args:
            model: full model; its experts are not yet split.
            anatomy: anatomy of the blocks of this rank.
            every: number of updates between relocations.
            mesh: device mesh of all ranks.
            expert_mesh: device mesh of the experts.
            stats: recorder of the load of experts.

        Raises:
            ModelError: weights of experts are frozen.
        """
        self.model, self.every, self.mesh, self.stats = model, every, mesh, stats
        self.ranks, self.group = ranks_along(expert_mesh, "ep"), build_layer_group(expert_mesh)
        self.homes: dict[str, ExpertHomes] = {}
        """By the name of the experts of each layer of this rank."""
        self.moved = 0
        """Experts that the last update has moved, in all layers of the model."""
        self.report = ""
        """Description of the last relocation, the same on all ranks; empty if the last update moved nothing."""
        for name in (name for block in anatomy.blocks for name in block.experts):
            experts: Any = model.get_submodule(name)
            for key, parameter in experts.named_parameters():
                if not parameter.requires_grad:
                    raise ModelError(
                        f"expert_relocate_every = {every} for {name}.{key}, which is frozen",
                        where="plan.parallel.expert_relocate_every",
                        rule="experts move with their weights and optimizer states, and not with adapters",
                        fix="set plan.parallel.expert_relocate_every = 0, or train the weights of experts",
                    )
            self.homes[name] = ExpertHomes(experts.num_experts)
        self.loads = {name: np.zeros(homes.num_experts, np.int64) for name, homes in self.homes.items()}
        """Copies of tokens for each expert since the last relocation, of all ranks, as of the last `collect`."""
        self.updates, self.changes = 0, 0
        """Numbers of updates, and of changes of homes in this process."""
        self.boxes: dict[str, list[Box]] = {}
        """Parts of the ranks of the group, by the name of the parameter."""
        stats.records_window = True

    def collect(self) -> None:
        """Add the loads since the last call, of all ranks, to `loads`. Collective."""
        for name, load in self.stats.take_window().items():
            self.loads[name] += load.cpu().numpy()

    def state(self) -> dict[str, Any]:
        """Number of updates, homes and loads of all layers of the model, for JSON. Collective."""
        self.collect()
        own = {name: [homes.expert_of, self.loads[name].tolist()] for name, homes in self.homes.items()}
        stages = self.mesh.get_group("pp")
        gathered = all_gather_json(own, stages) if stages.size() > 1 else [own]
        return {"updates": self.updates, "layers": {name: pair for part in gathered for name, pair in part.items()}}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from the state of a checkpoint, before its weights are loaded; from the original homes without one.

        Args:
            state: result of `state`.
        """
        state = state or {"updates": 0, "layers": {}}
        self.updates, self.stats.window = state["updates"], {}
        for name, homes in self.homes.items():
            initial = [list(range(homes.num_experts)), [0] * homes.num_experts]
            expert_of, loads = state["layers"].get(name, initial)
            self.loads[name] = np.array(loads, np.int64)
            homes.set(expert_of, self._device(name))
        self.changes += 1

    def count_update(self) -> bool:
        """Count an update; True if `relocate` is due, which a dry run has no loads for."""
        self.updates, self.moved, self.report = self.updates + 1, 0, ""
        return self.updates % self.every == 0 and all(map(has_values, self.stats.window.values()))

    @torch.no_grad()
    def relocate(self, optimizer: torch.optim.Optimizer) -> None:
        """Move experts to the ranks where they even out the load since the last relocation. Collective.

        Args:
            optimizer: its parameters are sharded, and its states where the host can read them.
        """
        self.collect()
        before, after, moved = 1.0, 1.0, 0
        for name, homes in self.homes.items():
            load, old = self.loads[name], np.array(homes.expert_of)
            new = plan_homes(load, old, self.ranks)
            if (new != old).any():
                source = old.argsort()[new].tolist()  # slot in which the expert of each slot was
                for key, parameter in self.model.get_submodule(name).named_parameters():
                    self._move(f"{name}.{key}", parameter, optimizer.state.get(parameter, {}), source)
                homes.set(new.tolist(), self._device(name))
                moved += int((new != old).sum())
                before, after = max(before, self._imbalance(load, old)), max(after, self._imbalance(load, new))
            self.loads[name] = np.zeros_like(load)
        self.changes += moved > 0
        device = next(self.model.parameters()).device
        counts, largest = torch.tensor([moved], device=device), torch.tensor([before, after], device=device)
        (self.moved,) = collectives.all_reduce(counts, self.mesh, ("pp",)).tolist()
        before, after = collectives.all_reduce(largest, self.mesh, ("pp",), "max").tolist()
        if self.moved:
            self.report = f"{self.moved} experts move to other ranks; fullest rank / mean {before:.2f} -> {after:.2f}"

    def _imbalance(self, load: Integers, expert_of: Integers) -> float:
        """Load of the fullest rank, relative to the mean."""
        return float(load_of_ranks(load, expert_of, self.ranks).max() * self.ranks / load.sum())

    def _move(self, name: str, parameter: nn.Parameter, states: dict[str, Any], source: list[int]) -> None:
        """Move the rows of a parameter and of its states; scalars and means over experts stay."""
        if name not in self.boxes:
            box = _box(parameter)
            found = all_gather_json([box.first, box.slots, box.rest], self.group)
            self.boxes[name] = [Box(first, slots, tuple(rest)) for first, slots, rest in found]
        rows = plan_rows(self.boxes[name], source, self.group.rank())
        for key, tensor in (("", parameter), *sorted(states.items())):
            same_dims = isinstance(tensor, Tensor) and tensor.ndim == parameter.ndim
            if not isinstance(tensor, Tensor) or tensor.ndim == 0 or (same_dims and len(tensor) == 1):
                continue
            if not same_dims or len(tensor) != len(parameter):
                raise ModelError(
                    f"the optimizer keeps {key} of shape {tuple(tensor.shape)} for {name} of shape {tuple(parameter.shape)}",
                    where="plan.parallel.expert_relocate_every",
                    rule="states of experts move with them: their first dim is that of the weight",
                    fix="set plan.parallel.expert_relocate_every = 0, or use another optimizer",
                )
            _exchange_rows(local_part(tensor.detach()), rows, self.group, local_part(parameter).device)

    def _device(self, name: str) -> torch.device:
        return local_part(next(self.model.get_submodule(name).parameters())).device


class Rows(NamedTuple):
    """Rows of this rank's part that an exchange sends and replaces."""

    sent: list[int]
    """Indices of rows, in the order of the ranks that get them."""
    received: list[int]
    """Indices of rows, in the order of the ranks that send them."""
    input_splits: list[int]
    output_splits: list[int]


def plan_rows(boxes: list[Box], source: list[int], rank: int) -> Rows:
    """Rows that a rank sends and receives when the slots of a stacked weight change their experts.

    Args:
        boxes: part of each rank. Several ranks may hold the same part: their copies are sent by different ranks.
        source: slot in which the new content of each slot was.
        rank: this rank.
    """
    sends: list[list[int]] = [[] for _ in boxes]
    receives: list[list[int]] = [[] for _ in boxes]

    def holders(slot: int) -> dict[tuple[int, ...], list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for other, box in enumerate(boxes):
            if box.first <= slot < box.first + box.slots:
                found.setdefault(box.rest, []).append(other)
        return found

    for slot, old in enumerate(source):
        if old == slot:
            continue
        givers = holders(old)
        for rest, takers in holders(slot).items():
            for index, taker in enumerate(takers):
                giver = givers[rest][index % len(givers[rest])]
                if giver == rank:
                    sends[taker].append(old - boxes[rank].first)
                if taker == rank:
                    receives[giver].append(slot - boxes[rank].first)
    sent, received = (list(chain.from_iterable(parts)) for parts in (sends, receives))
    return Rows(sent, received, list(map(len, sends)), list(map(len, receives)))


def _exchange_rows(local: Tensor, rows: Rows, group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange rows of a local tensor, which may be packed or in host memory, in place."""
    values = unpack_tensor(local)
    sent = values[torch.tensor(rows.sent, dtype=torch.int64, device=values.device)]
    received = collectives.exchange(sent.to(device), group, rows.output_splits, rows.input_splits)
    if rows.received:
        values[torch.tensor(rows.received, device=values.device)] = received.to(values.device)
        if values is not local:
            local.copy_(values)


def _box(parameter: Tensor) -> Box:
    shape, offset = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return Box(offset[0], shape[0], (*offset[1:], *shape[1:]))


def relocate_experts(build: "Build") -> None:
    """Step of `parallelize`: homes of the experts, before they are split."""
    build.begin("relocate_experts", "replace_operators")
    every, runtime = build.plan.parallel.expert_relocate_every, build.runtime
    if build.expert_mesh is not None and every:
        meshes = build.mesh, build.expert_mesh
        runtime.relocation = Relocation(build.model, build.anatomy, every, *meshes, runtime.router_stats)
        for name, path in build.runtime.experts.items():
            path.homes = runtime.relocation.homes[name]
