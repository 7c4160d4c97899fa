"""Silent corruption: ranks that hold the same part of a model must hold the same bits of it.

A chip that computes wrongly now and then, or a flipped bit in memory, leaves no trace in the loss at first. Copies give it
away: their gradients are reduced together and their updates are the same, so that after every step their bits are equal.
`check_replicas` digests what each rank holds and names the rank, the parameter and the state that differ. Large runs meet
such faults every week or two (Gemini Team, Gemini, 2023; Dixit et al., Silent Data Corruptions at Scale, 2021).

Whether a fault is transient or stays with a device shows when the step is run again from the last good state.

Who holds copies: with zero = 0 the ranks of dp_replicate and cp have the whole of what tp and ep leave of a model; with
zero >= 1 those along dp_replicate have the same shards. What tp does not split, norms say, has copies on its ranks too, and a
tied weight has one on the first and one on the last stage of a pipeline. Experts have copies along edp_replicate.
Copies along tp and pp are made equal by reductions of separate groups. On CPU, groups of one size add up in one order. Other
back ends do not promise that, so that there only copies of the same tp and pp place are compared.
"""

import hashlib
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.checkpoint.slices import reshard
from weft.comm.objects import all_gather_json, broadcast_json
from weft.errors import PlanError
from weft.parallel.weights import to_local
from weft.plan import Plan

MOST = 8  # parts, versions of a part, and parameters that one report goes into
Table = list[tuple[str, str, int]]
"""(parameter, "" or the name of a state of the optimizer, digest) of everything in a part."""


def check_sdc_plan(plan: Plan) -> None:
    """Refuse to look for differences between copies where matrices have none.

    Args:
        plan: resolved.

    Raises:
        PlanError: each matrix, or each shard of it, is on one rank.
    """
    p = plan.parallel
    if (p.data_ranks * p.cp if p.zero == 0 else p.dp_replicate) == 1:
        raise PlanError(
            "there are no replicas to compare: the plan keeps every matrix, or every shard of it, on one rank",
            where="plan.parallel",
            rule="ranks of dp_replicate hold the same shards; with zero = 0 all data and cp ranks hold the same weights",
            fix="set plan.parallel.dp_replicate to 2 or more, or do not ask for the comparison",
        )


@torch.no_grad()
def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> str | None:
    """Compare parameters and optimizer state between the ranks that hold the same. Every rank must call it, between steps.

    Each rank reads all it holds once and sends some hundred bytes; only where digests differ, a few ranks send them tensor by
    tensor. Of three or more copies the majority is taken to be right; with two, both ranks are named. Tensors in
    `optimizer.state[parameter]` are compared; buffers are not, since some are a rank's own.

    Args:
        model: parallelized.
        optimizer: of its parameters.
        mesh: of all ranks.

    Returns:
        None where all copies are equal, or where there are none. Else, the same on all ranks, a line for each culprit:
        "rank 2: model.norm.weight, also exp_avg; ranks 0, 1, 3 agree".
    """
    reshard(model, optimizer)
    held = _digest_parts(model, optimizer, mesh)
    said = all_gather_json({part: _sum_up(table) for part, table in held.items()})
    versions: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(said):
        for part, total in sums.items():
            versions[part][total].append(rank)
    differing = {part: list(ranks.values()) for part, ranks in versions.items() if len(ranks) > 1}
    lines: list[str] = []
    for part, holders in list(differing.items())[:MOST]:
        lines += _name_culprits(held.get(part), sorted(holders, key=len, reverse=True)[:MOST])
    if len(differing) > MOST:
        lines.append(f"and {len(differing) - MOST} more parts of the model differ")
    return "\n".join(lines) or None


def _digest_parts(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> dict[str, Table]:
    """Digests of everything that this rank holds, by part: what is the same wherever a rank holds any of it."""
    place = () if mesh.device_type == "cpu" else (mesh.get_local_rank("pp"), mesh.get_local_rank("tp"))
    digesters: dict[torch.device, Digester] = {}
    found: dict[str, list[tuple[str, str, Tensor]]] = defaultdict(list)
    for name, parameter, is_tied in _named_parameters(model):
        part = f"{'tied ' if is_tied else ''}{_layout(parameter)} {place}"
        states = {
            kind: state for kind, state in optimizer.state.get(parameter, {}).items() if isinstance(state, Tensor)
        }
        for kind, tensor in {"": parameter, **states}.items():
            local = to_local(tensor.detach())
            if local.device not in digesters:
                digesters[local.device] = Digester(local.device)
            found[part].append((name, kind, digesters[local.device](local)))
    values = _fetch([digest for rows in found.values() for _, _, digest in rows])
    tables: dict[str, Table] = {}
    for part, rows in found.items():
        names = "\n".join(dict.fromkeys(name for name, _, _ in rows)).encode()  # stages of a pipeline hold others
        key = f"{part} {hashlib.blake2b(names, digest_size=8).hexdigest()}"
        tables[key] = [(name, kind, next(values)) for name, kind, _ in rows]
    return tables


def _named_parameters(model: Any) -> list[tuple[str, nn.Parameter, bool]]:
    """Names, parameters, and whether another stage of a pipeline has a copy, which then goes by the embedding's name."""
    pipeline = getattr(model, "pipeline", None)
    if pipeline is None or not pipeline.shares_tied:
        return [(name, parameter, False) for name, parameter in model.named_parameters()]
    embedding = f"{pipeline.ends[0]}.weight"
    tied = [name == embedding or p is pipeline.tied_copy for name, p in model.named_parameters()]
    return [
        (embedding if is_tied else name, p, is_tied)
        for (name, p), is_tied in zip(model.named_parameters(), tied, strict=True)
    ]


def _layout(parameter: Tensor) -> str:
    """Which part of the whole this rank holds; the same text on two ranks means the same part."""
    if not isinstance(parameter, DTensor):
        return "whole"
    mesh, places = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert places is not None
    split = [None if p.is_replicate() else at for p, at in zip(parameter.placements, places, strict=True)]
    return f"{mesh.mesh_dim_names} {parameter.placements} {split}"


def _fetch(digests: list[Tensor]) -> Any:
    """The values of numbers on any devices, in their order, with one wait for each device."""
    values: dict[int, int] = {}
    for device in {digest.device for digest in digests}:
        here = [index for index, digest in enumerate(digests) if digest.device == device]
        values.update(zip(here, torch.stack([digests[index] for index in here]).tolist(), strict=True))
    return iter([values[index] for index in range(len(digests))])


def _sum_up(table: Table) -> str:
    return hashlib.blake2b(repr(table).encode(), digest_size=8).hexdigest()


def _name_culprits(table: Table | None, holders: list[list[int]]) -> list[str]:
    """A line for each rank, or each set of ranks, whose copies of a part differ from the majority's.

    Args:
        table: of this rank, where it holds the part.
        holders: the ranks of each version of the part; the first of them sends its table to all.
    """
    votes: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for ranks in holders:
        own = table if dist.get_rank() == ranks[0] else None
        for name, kind, digest in broadcast_json(own, ranks[0]):
            votes[name, kind][digest] += ranks
    everyone = sorted(rank for ranks in holders for rank in ranks)
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (name, kind), versions in votes.items():
        largest = max(versions.values(), key=len)
        others = [rank for rank in everyone if rank not in largest]
        if others and 2 * len(largest) > len(everyone):
            for rank in others:
                found[f"rank {rank}", f"{_ranks(largest)} agree{'s' * (len(largest) == 1)}"][name].append(kind)
        elif others:
            found[_ranks(everyone), "they differ, and no majority says which is right"][name].append(kind)
    return [f"{culprit}: {_names(names)}; {verdict}" for (culprit, verdict), names in found.items()]


def _ranks(ranks: list[int]) -> str:
    shown = sorted(ranks)[:MOST]
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, shown))}{more}"


def _names(kinds: dict[str, list[str]]) -> str:
    """Parameters, each with what differs of it: "" is the parameter itself."""
    texts = []
    for name, differing in list(kinds.items())[:MOST]:
        states = ", ".join(kind for kind in differing if kind)
        texts.append((f"{name}, also {states}" if states else name) if "" in differing else f"{states} of {name}")
    more = f"; and {len(kinds) - MOST} more parameters" if len(kinds) > MOST else ""
    return "; ".join(texts) + more


class Digester:
    """Digests the exact bits of tensors on one device, in 64 bits; never waits for the device, and copies no tensor.

    A tensor is read as 32-bit numbers x, in rows; its digest is the sum of w_j r_k x_jk modulo 2^64, with a weight for each
    column and each row (Lemire and Kaser, Strongly universal string hashing is fast, 2014). Weights are odd: one flipped bit,
    wherever it is, changes the digest for certain. They are random: any other change, also of the order, escapes with a
    probability of about 2^-32.
    """

    def __init__(self, device: torch.device, row_bytes: int | None = None):
        """
        Args:
            device: of the tensors.
            row_bytes: read at once, a multiple of 8; None for what stays in cache on CPU, and keeps an accelerator busy.
        """
        row_bytes = row_bytes or (2**19 if device.type == "cpu" else 2**23)
        self.low, self.high = (_odd_numbers(row_bytes // 8, seed).to(device) for seed in (0, 1))
        self.words, self.products = torch.empty_like(self.low), torch.empty_like(self.low)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The digest of a tensor of any format and shape, in the order of its elements: an int64 scalar on its device."""
        flat = tensor.reshape(-1).view(torch.uint8)  # a shard is contiguous; any other tensor is copied here
        rows = [self._digest_row(row) for row in flat.split(self.words.nbytes)]
        if len(rows) == 1:
            return rows[0]
        return (torch.stack(rows) * _odd_numbers(len(rows), 2).to(tensor.device)).sum()

    def _digest_row(self, row: Tensor) -> Tensor:
        size = -(-len(row) // 8)
        words, products = self.words[:size], self.products[:size]
        words[-1:] = 0
        words.view(torch.uint8)[: len(row)].copy_(row)
        torch.mul(words, self.low[:size], out=products)
        low = products.sum()
        # The low half of a word counts w times, and the upper half 2^32 w + w' times: both are odd.
        words.bitwise_right_shift_(32).mul_(self.high[:size])
        return low + words.sum()


def _odd_numbers(count: int, seed: int) -> Tensor:
    """Random odd numbers of 64 bits, [count] int64, always the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) | 1
