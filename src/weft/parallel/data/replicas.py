"""Equal replicas: the weights of rank 0 on all ranks at the start, and the buffers that a forward changes after each step.

A script without a seed builds other weights on every rank, and a batch norm counts the rows of its rank. As under
DistributedDataParallel (Li et al., PyTorch Distributed, 2020), the weights and buffers of rank 0 are those of all ranks.
"""

import hashlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.objects import all_gather_json, same_on_all
from weft.errors import ModelError, Refusal, raise_if_refused
from weft.memory.packed import has_values
from weft.memory.storages import plain_parts, saved_buffers
from weft.parallel.data.tensor_digest import Digester, fetch_digests
from weft.topology.mesh import CONTEXT_AXES, DATA_AXES, ranks_along

SHOWN = 3  # names in a message


@torch.no_grad()
def share_weights(model: nn.Module) -> list[str]:
    """Copy the parameters and buffers of rank 0 to all ranks, if those of a rank differ. Collective.

    Each rank reads its tensors once, and sends 16 bytes; only tensors that differ are sent.

    Args:
        model: model before it is parallelized. Weights on the meta device are left alone: they are not loaded yet.

    Returns:
        Names of the tensors that differed, the same on every rank. Rank 0 warns if there are some.

    Raises:
        ModelError: the ranks have different models: other names, shapes, dtypes or frozen weights; the same on every rank.
    """
    tensors = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    kinds = {
        name: f"{list(tensor.shape)}, {tensor.dtype}{', frozen' * (name in frozen)}" for name, tensor in tensors.items()
    }
    parts = {name: plain_parts(tensor) for name, tensor in tensors.items() if has_values(tensor)}
    digesters = {device: Digester(device) for device in {part.device for own in parts.values() for part in own}}
    values = fetch_digests([digesters[part.device](part) for own in parts.values() for part in own])
    digests = {name: [next(values) for _ in own] for name, own in parts.items()}
    table = hashlib.blake2b(repr((kinds, digests)).encode(), digest_size=16).hexdigest()
    if same_on_all(table):
        return []
    found = all_gather_json([kinds, digests])
    raise_if_refused(_reason_against_other_models([own for own, _ in found]))
    differing = [name for name, digest in found[0][1].items() if any(own[name] != digest for _, own in found)]
    for part in (part for name in differing for part in parts[name]):
        sent = part.contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
        if sent is not part:
            part.copy_(sent)
    if dist.get_rank() == 0:
        warnings.warn(
            f"the ranks began with different weights ({_some(differing)}): all of them have those of rank 0 now. A seed before "
            "the model is built makes them equal",
            stacklevel=2,
        )
    return differing


def _reason_against_other_models(kinds: list[dict[str, str]]) -> Refusal | None:
    """Reason against models of ranks that differ from that of rank 0."""
    for rank, own in enumerate(kinds):
        wrong = [name for name in (*kinds[0], *own) if own.get(name) != kinds[0].get(name)]
        if wrong:
            first, other = (table.get(wrong[0], "no such tensor") for table in (kinds[0], own))
            return Refusal(
                f"{wrong[0]} is {first} on rank 0, and {other} on rank {rank}",
                where="weft.parallelize",
                rule="all ranks build the same model, with the same weights frozen",
                fix="look for a branch or a size that depends on the rank or on its data",
                error=ModelError,
            )
    return None


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


class SharedBuffers:
    """Saved buffers that forwards change, such as the statistics of batch norms: after each step those of data rank 0 on all.

    Which buffers change is known after the first step, in which any rank may change them; those of norms with running
    statistics belong to them even if the norm is frozen at first.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh):
        """
        Args:
            model: parallelized model.
            mesh: device mesh of all ranks.
        """
        self.model, self.mesh = model, mesh
        model.register_forward_pre_hook(self.begin)
        self.before: dict[str, tuple[Tensor, int]] | None = None
        """Each buffer, and its version, before the first forward of training."""
        self.names: list[str] | None = None if saved_buffers(self.model) else []
        """Buffers that are shared; None before the first step."""

    def begin(self, *_: Any) -> None:
        """Forward pre-hook: note the versions of the buffers before the first forward with gradients."""
        if self.before is None and torch.is_grad_enabled():
            self.before = {name: (buffer, buffer._version) for name, buffer in saved_buffers(self.model).items()}

    @torch.no_grad()
    def share(self) -> None:
        """Copy the buffers of data rank 0 to the other data ranks. Collective, once after each step."""
        if self.names == []:
            return
        groups = [self.mesh.get_group(axis) for axis in (*CONTEXT_AXES, *DATA_AXES) if ranks_along(self.mesh, axis) > 1]
        buffers = saved_buffers(self.model)
        if self.names is None:
            statistics = {
                name
                for prefix, module in self.model.named_modules()
                if getattr(module, "track_running_stats", False)
                for name, _ in module.named_buffers(prefix, recurse=False)
            }
            # Not buffers that are replaced, which may be of another size on each rank.
            before = (self.before or {}).items()
            changed = {name for name, (own, version) in before if own is buffers.get(name) and own._version != version}
            shared: Any = sorted(statistics | changed)
            for group in groups:  # not all ranks: another stage of a pipeline may have no buffers
                shared = sorted({name for names in all_gather_json(shared, group) for name in names})
            self.names, self.before = shared, {}
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name in self.names:
            by_dtype.setdefault(buffers[name].dtype, []).append(buffers[name])
        for same in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in same])
            for group in groups:
                dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
            for buffer, values in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
                buffer.copy_(values.view_as(buffer))
