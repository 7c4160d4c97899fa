"""Grid of context parallelism: which tokens of a sequence each rank holds (drawn in `context.py`)."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import Refusal, raise_if_refused
from weft.topology.mesh import context_rank, ranks_along


@dataclass(frozen=True)
class ContextParallel:
    """Process groups and grid position of one rank for context parallelism."""

    ulysses_group: dist.ProcessGroup | None
    """Ranks of the Ulysses all-to-all, in the order of cp ranks; None if ulysses is 1."""
    ring_group: dist.ProcessGroup | None
    """Ranks of the ring, in the order of cp ranks; None if ring is 1."""
    ulysses: int
    ring: int
    rank: int
    """Rank along cp."""
    ulysses_chunks: int = 1
    """Maximum number of head chunks per Ulysses all-to-all. The number used is the greatest common divisor with the KV heads of
    a rank."""

    @property
    def ulysses_rank(self) -> int:
        return self.rank % self.ulysses

    @property
    def ring_rank(self) -> int:
        return self.rank // self.ulysses


def sequence_parts(ulysses: int, ring: int) -> int:
    """Number of parts that a sequence is cut into; the length of the sequence must be a multiple of it."""
    return 2 * ring * ulysses if ring > 1 else ulysses


def reason_against_length(seq_len: int, ulysses: int, ring: int) -> Refusal | None:
    """Reason against a sequence that cannot be split over the grid."""
    parts = sequence_parts(ulysses, ring)
    if seq_len % parts == 0:
        return None
    return Refusal(
        f"a sequence of {seq_len} tokens cannot be split for ulysses {ulysses} x ring {ring}",
        where="parallel.cp",
        rule=f"seq_len is a multiple of {parts} (ulysses, or 2 x ring x ulysses if ring is larger than 1)",
        fix=f"pad rows to {seq_len + -seq_len % parts} tokens (data.seq_len of a job, or pad_to_multiple_of={parts} of a "
        "collator), or use fewer ranks of cp",
    )


def reason_against_heads(heads: int, kv_heads: int, ulysses: int) -> Refusal | None:
    """Reason against heads that cannot be split over the ranks of Ulysses."""
    if not (heads % kv_heads or heads % ulysses):
        return None
    fewer = f"set plan.parallel.cp_ulysses to {math.gcd(heads, ulysses)}, for a longer ring"
    return Refusal(
        f"{heads} query heads with {kv_heads} KV heads cannot be split over ulysses {ulysses}",
        where="plan.parallel.cp, plan.parallel.cp_ulysses",
        rule="ulysses and the number of KV heads both divide the number of query heads that a rank has after tensor "
        "parallelism",
        fix="set plan.parallel.cp to 1" if heads % kv_heads else fewer,
    )


def ring_chunks(seq_len: int, ring: int, rank: int) -> tuple[range, ...]:
    """Natural positions of the tokens of a ring rank, as one or two ranges."""
    if ring == 1:
        return (range(seq_len),)
    size = seq_len // (2 * ring)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * ring - 1 - rank))


def zigzag_indices(seq_len: int, ranks: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Natural positions of the tokens of a ring rank, int64 [seq_len / ranks], made on a device."""
    chunks = ring_chunks(seq_len, ranks, rank)
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def natural_positions(seq_len: int, ulysses: int, ring: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Natural positions of the tokens of a cp rank, int64 [seq_len / (ulysses * ring)], made on a device.

    Raises:
        PlanError: the sequence cannot be split over this grid.
    """
    raise_if_refused(reason_against_length(seq_len, ulysses, ring))
    return zigzag_indices(seq_len, ring, rank // ulysses, device).chunk(ulysses)[rank % ulysses]


def own_positions(seq_len: int, mesh: DeviceMesh, device: torch.device | None = None) -> Tensor:
    """Natural positions of the tokens of this rank, int64 [seq_len / cp]; see `natural_positions`."""
    ulysses, ring = ranks_along(mesh, "cp_ulysses"), ranks_along(mesh, "cp_ring")
    return natural_positions(seq_len, ulysses, ring, context_rank(mesh), device)
