"""Muon: momentum of hidden matrices, orthogonalized (Jordan et al., Muon: An optimizer for hidden layers, 2024).

    momentum    m = momentum * m + (1 - momentum) * gradient
    update      weight -= lr * 0.2 * sqrt(larger side) * orthogonal(gradient + momentum * (m - gradient))

The factor 0.2 * sqrt(larger side) gives updates the size of AdamW's, so that its learning rate and weight decay can be reused
(Liu et al., Muon is Scalable for LLM Training, 2025). All other parameters (embedding, head, norms, biases) are updated by
AdamW.

Orthogonalization needs whole matrices. ZeRO and tensor parallelism shard each matrix over n ranks, so n matrices are exchanged:
each rank gets one whole matrix, orthogonalizes it, and returns the shards to their ranks. So a matrix is orthogonalized by one
rank, and each shard is sent twice, in the dtype of the iteration:

    rank 0    a0 b0      all-to-all      a0 a1      orthogonalize, and all-to-all back
    rank 1    a1 b1         ---->        b0 b1

Matrices that are sharded over two axes of the mesh are exchanged along one axis after the other.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.memory.packed import unpack_tensor
from weft.memory.storages import local_part, sharded_axes
from weft.optimizers.adamw import update_with_adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7
MATRIX_DIMS = 2
ADAMW_UPDATE_RMS = 0.2  # typical root mean square of an AdamW update, divided by the learning rate
LARGEST_BATCH = 2**24  # elements of the shards of a rank that are exchanged at once


class Muon(torch.optim.Optimizer):
    """Muon for the groups with "orthogonalize", and AdamW for the others; parameters may be sharded.

    Args:
        groups: parameter groups. "orthogonalize" marks groups of matrices [..., rows, columns]; leading dims, such as experts,
            are separate matrices. "weight_decay" is decoupled.
        lr: learning rate.
        betas: decay rates of AdamW.
        eps: term added to the root of AdamW's second moment.
        momentum: decay rate of the momentum of matrices.
        dtype: dtype of the orthogonalization; None: the dtype of the parameter.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        dtype: torch.dtype | None = None,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "momentum": momentum}
        super().__init__(groups, {**defaults, "orthogonalize": False})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient. Collective over the ranks that share a matrix."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["orthogonalize"]:
                self._update_matrices(parameters, group)
            else:
                update_with_adamw(self, parameters, group)

    def _update_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        by_groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_groups[tuple(sharding.group for sharding in shardings_of(parameter))].append(parameter)
        for batch in (batch for own in by_groups.values() for batch in _batches(own, ranks_of(own[0]))):
            shards = [MatrixShard(self._direction(p, group["momentum"]), shardings_of(p)) for p in batch]
            for parameter, update in zip(batch, orthogonalize(shards), strict=True):
                size = ADAMW_UPDATE_RMS * math.sqrt(max(parameter.shape[-MATRIX_DIMS:]))
                weight = local_part(parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update.to(weight.dtype), alpha=-group["lr"] * size)

    def _direction(self, parameter: Tensor, decay: float) -> Tensor:
        """Update the momentum of a parameter; return this rank's shard of the Nesterov direction."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        held = local_part(state["momentum_buffer"])
        momentum = unpack_tensor(held)
        gradient = local_part(parameter.grad).to(momentum.dtype)  # type: ignore[arg-type]
        momentum.lerp_(gradient, 1 - decay)
        if momentum is not held:
            held.copy_(momentum)
        return gradient.lerp(momentum, decay).to(self.dtype or momentum.dtype)


class Sharding(NamedTuple):
    """Sharding of a matrix over the ranks of a group."""

    group: dist.ProcessGroup
    dim: int
    """Sharded dim, counted from the end: -2 for rows, -1 for columns."""
    sizes: tuple[int, ...]
    """Size of the shard of each rank along the dim."""


class MatrixShard(NamedTuple):
    """Shard of a matrix, or of several matrices of one shape."""

    values: Tensor
    """[..., rows, columns] of this rank."""
    shardings: tuple[Sharding, ...]
    """Shardings that are to be undone, in this order."""


def shardings_of(parameter: Tensor) -> tuple[Sharding, ...]:
    """Shardings of the matrices of a parameter, in the order in which they are undone: ZeRO first, tp last."""
    axes = [(axis, dim - parameter.ndim) for axis, dim in sharded_axes(parameter)]
    axes = [(axis, dim) for axis, dim in axes if dim >= -MATRIX_DIMS]  # other dims separate matrices
    shardings = []
    for index, (axis, dim) in enumerate(axes):
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        earlier = math.prod(mesh.size(other) for other, same in axes[index + 1 :] if same == dim)
        size, ranks = parameter.shape[dim] // earlier, mesh.size(axis)
        most = -(-size // ranks)  # as torch.chunk: the last ranks may have less, or nothing
        sizes = tuple(min(most, max(0, size - rank * most)) for rank in range(ranks))
        shardings.append(Sharding(mesh.get_group(axis), dim, sizes))
    return tuple(shardings)


def ranks_of(parameter: Tensor) -> int:
    """Number of ranks that share the matrices of a parameter."""
    return math.prod(len(sharding.sizes) for sharding in shardings_of(parameter))


def _batches(parameters: Sequence[Tensor], ranks: int) -> Iterator[list[Tensor]]:
    """Batches that bound the temporary memory, the same on every of the `ranks` that share the parameters.

    Matrices of similar size are together, and at least one for each rank that shares them, so that all ranks have work.
    """
    batch: list[Tensor] = []
    for parameter in sorted(parameters, key=torch.Tensor.numel):
        if len(batch) >= ranks and parameter.numel() * (len(batch) + 1) > LARGEST_BATCH * ranks:
            yield batch
            batch = []
        batch.append(parameter)
    yield batch


def orthogonalize(shards: Sequence[MatrixShard]) -> list[Tensor]:
    """Orthogonalize matrices of which each rank has a shard; returns this rank's shards of the results.

    Rows of a matrix that is sharded twice may arrive in another order than that of the matrix: orthogonalization commutes with
    permutations.

    Args:
        shards: shards of this rank, all over the same groups; the same matrices in the same order on the ranks of a group.
    """
    if not shards or not shards[0].shardings:
        return [newton_schulz(shard.values) for shard in shards]
    group = shards[0].shardings[0].group
    ranks, like = range(group.size()), shards[0].values
    owned = [shards[owner :: len(ranks)] for owner in ranks]
    mine = owned[group.rank()]
    send = [[shard.values for shard in own] for own in owned]
    received = _exchange(send, [[_shape_on(rank, shard) for shard in mine] for rank in ranks], like, group)
    whole = [
        MatrixShard(torch.cat(parts, shard.shardings[0].dim), shard.shardings[1:])
        for shard, *parts in zip(mine, *received, strict=True)
    ]
    results = [
        result.split(shard.shardings[0].sizes, shard.shardings[0].dim)
        for shard, result in zip(mine, orthogonalize(whole), strict=True)
    ]
    back = [[parts[rank] for parts in results] for rank in ranks]
    returned = _exchange(back, [[values.shape for values in own] for own in send], like, group)
    return [returned[index % len(ranks)][index // len(ranks)] for index in range(len(shards))]


def _shape_on(rank: int, shard: MatrixShard) -> torch.Size:
    """Shape of the shard of another rank, of the first sharding."""
    sharding, sizes = shard.shardings[0], list(shard.values.shape)
    sizes[sharding.dim] = sharding.sizes[rank]
    return torch.Size(sizes)


def _exchange(
    send: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]], like: Tensor, group: dist.ProcessGroup
) -> list[tuple[Tensor, ...]]:
    """All-to-all of tensors.

    Args:
        send: tensors for each rank.
        shapes: shapes of the tensors from each rank.
        like: tensor of their dtype and device.
        group: ranks.
    """
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in send for tensor in tensors)])
    sizes = [[shape.numel() for shape in own] for own in shapes]
    received = like.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(received, flat, [*map(sum, sizes)], [sum(t.numel() for t in own) for own in send], group)
    parts = iter(received.split([size for own in sizes for size in own]))
    return [tuple(next(parts).view(shape) for shape in own) for own in shapes]


def newton_schulz(matrices: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrices.

    Singular values above about 0.002 of the Frobenius norm become about 1 (0.7 to 1.2); smaller ones grow by up to 485 times.

    Args:
        matrices: [..., rows, columns], of any floating-point dtype.

    Returns:
        Tensor of the same shape and dtype.
    """
    a, b, c = COEFFICIENTS
    x = matrices.reshape(-1, *matrices.shape[-MATRIX_DIMS:])
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x  # the products are over the smaller side
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape)
