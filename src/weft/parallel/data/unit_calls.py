"""Calls of FSDP2 units: in the same order on all data ranks, and weights that no rank has used keep no gradient.

A unit gathers its weights and reduces its gradients together with the other ranks. If ranks skip different blocks of the same
size (layer drop, routed modules), the messages of different blocks meet without an error, and numbers are mixed.
"""

import zlib
from functools import partial
from itertools import combinations, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from weft.comm.collectives import all_reduce
from weft.comm.objects import all_gather_json
from weft.compat import fsdp_param_groups, is_in_backward, reduce_unused_parameters
from weft.errors import ModelError
from weft.memory.packed import has_values
from weft.topology.mesh import AXES, CONTEXT_AXES, DATA_AXES, data_rank

SHARING_AXES = (*DATA_AXES, *CONTEXT_AXES)


class UnitCalls:
    """Order of the units in the forwards of a step."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh):
        """
        Args:
            model: model after FSDP2.
            mesh: device mesh of all ranks.
        """
        self.mesh = mesh
        self.names = [name or "the rest" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        self.calls: list[int] = []
        self.compared: list[int] = []
        """Calls of the step that `compare` has compared."""
        self.differs: Tensor | None = None
        """Result of `compare`."""
        units = (module for module in model.modules() if isinstance(module, FSDPModule))
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._note, index))

    def _note(self, index: int, *_: Any) -> None:
        if torch.is_grad_enabled() and not is_in_backward():  # not of recompute
            self.calls.append(index)

    def compare(self, device: torch.device) -> Tensor:
        """Compare the units that the data ranks have called in a step, and their order. Collective; the host does not wait.

        Args:
            device: device of this rank.

        Returns:
            bool scalar on the device: True if they differ; the same on every rank.
        """
        self.compared, self.calls = self.calls, []
        digest = zlib.crc32(repr(self.compared).encode())
        largest, smallest = all_reduce(torch.tensor([digest, -digest], device=device), self.mesh, SHARING_AXES, "max")
        self.differs = largest != -smallest
        return self.differs

    def refuse_different(self) -> None:
        """Refuse a step in which the data ranks have called other units, after `compare`. Collective.

        Raises:
            ModelError: names the first unit that differs; the same on every rank.
        """
        if self.differs is None or not all_reduce(self.differs.int(), self.mesh, AXES, "max"):  # not finite otherwise
            return  # all stages alike: those whose own ranks agree take part in the message, too
        stage = [self.mesh.get_local_rank(axis) for axis in ("pp", "tp")]
        own = stage, data_rank(self.mesh), [self.names[index] for index in self.compared]
        raise _different_calls(all_gather_json(own))


def _different_calls(ranks: list[Any]) -> ModelError:
    """Error that names two ranks of one stage with different units; (stage, data rank, units) of all ranks."""
    first, other = next(
        pair for pair in combinations(ranks, 2) if pair[0][0] == pair[1][0] and pair[0][2] != pair[1][2]
    )
    units = zip_longest(first[2], other[2], fillvalue="nothing more")
    name, other_name = next((one, two) for one, two in units if one != two)
    return ModelError(
        f"data rank {first[1]} has run {name} where data rank {other[1]} has run {other_name}",
        where="forward",
        rule="under ZeRO stages 1 to 3, data ranks gather and reduce the weights of a block together: all of them run the same "
        "blocks in the same order",
        fix="set plan.parallel.zero = 0, where ranks may skip blocks; or choose the skipped blocks by a random generator that "
        "has the same seed on all ranks",
    )


class UnusedWeights:
    """Weights outside of blocks that a rank has not used in a step, such as the vision tower of a rank without images.

    FSDP2 reduces zeros for them. If no rank has used a weight, its gradient is removed before the update, so that it neither
    decays nor moves by its momentum.
    """

    def __init__(self, model: Any, mesh: DeviceMesh):
        """
        Args:
            model: model after FSDP2.
            mesh: device mesh of all ranks.
        """
        self.mesh, self.model = mesh, model
        self.used: set[int] = set()
        self.gathered: list[Any] = []
        """Parameters of the unit of the model itself with their hooks; empty before the first forward."""
        reduce_unused_parameters(model)
        model.register_forward_pre_hook(self._watch)

    def _watch(self, *_: Any) -> None:
        """Forward pre-hook: note from now on which gathered weights get a gradient."""
        if self.gathered:
            return
        groups = fsdp_param_groups(self.model)
        self.gathered = [p for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
        for index, parameter in enumerate(self.gathered):
            parameter.unsharded_param.register_post_accumulate_grad_hook(partial(self._mark, index))

    def _mark(self, index: int, _: Tensor) -> None:
        self.used.add(index)

    @torch.no_grad()
    def drop(self, device: torch.device) -> None:
        """Remove the gradients of weights that no data rank has used in this step. Collective.

        Args:
            device: device of this rank.
        """
        used, self.used = self.used, set()
        if not self.gathered:  # parts of the model were called alone
            return
        flags = torch.tensor([int(index in used) for index in range(len(self.gathered))], device=device)
        for index, parameter in enumerate(self.gathered):
            gradient = parameter.sharded_param.grad
            # A layer that is called alone reduces its gradient itself.
            if index not in used and gradient is not None and has_values(gradient.to_local()):
                flags[index] = gradient.to_local().any()
        for index, flag in enumerate(all_reduce(flags, self.mesh, SHARING_AXES, "max").tolist()):
            if not flag:
                self.gathered[index].sharded_param.grad = None
