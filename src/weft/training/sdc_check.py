"""Detection of silent data corruption (SDC): replicas of a parameter on different ranks must be bit-equal.

A chip that computes wrongly from time to time, or a flipped bit in memory, does not show in the loss at first. Replicas reveal
it: their gradients are reduced together and their updates are the same, so that they are bit-equal after every step.
`check_replicas` compares digests of the tensors of each rank and reports the rank, the parameter and the optimizer state that
differ. Large runs have such faults every one or two weeks (Gemini Team, Gemini, 2023; Dixit et al., Silent Data Corruptions
at Scale, 2021). To tell a transient fault from a defective device, run the step again from the last good state.

Ranks with replicas:

    zero = 0                    ranks along dp_replicate and cp hold the same parameters
    zero >= 1                   ranks along dp_replicate hold the same shards
    parameters without tp       such as norms: also ranks along tp
    tied embedding and head     also the first and last pipeline stage
    experts                     ranks along edp_replicate

Replicas along tp and pp are kept equal by reductions of separate groups. On CPU, groups of the same size add in the same order.
Other backends do not guarantee that, so that on other devices only replicas with the same tp and pp rank are compared.
"""

import hashlib
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.comm.objects import all_gather_json, broadcast_json
from weft.errors import Refusal
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp import free_gathered_weights
from weft.parallel.data.tensor_digest import Digester, fetch_digests
from weft.parallel.runtime import runtime
from weft.parallel.weights import to_local
from weft.plan import ResolvedPlan

MAX_REPORTED = 8  # limit of one report for parts, for versions of a part, and for parameters
DigestTable = list[tuple[str, str, int]]
"""Digests of all tensors in a part of the model: (parameter, "" or name of an optimizer state, digest)."""


def reason_against_sdc_checks(plan: ResolvedPlan) -> Refusal | None:
    """Reason against SDC checks for a plan that has no replicas of weight matrices."""
    p = plan.parallel
    if (p.data_ranks * p.cp if p.zero == 0 else p.dp_replicate) == 1:
        return Refusal(
            "there are no replicas to compare: the plan keeps every matrix, or every shard of it, on one rank",
            where="plan.parallel",
            rule="ranks of dp_replicate hold the same shards; with zero = 0 all data and cp ranks hold the same weights",
            fix="set plan.parallel.dp_replicate to 2 or more, or disable the SDC check",
        )
    return None


@torch.no_grad()
def check_replicas(model: nn.Module, optimizer: DistributedOptimizer) -> str | None:
    """Compare replicas of parameters and optimizer states between ranks. Every rank must call it, between steps.

    Each rank reads its tensors once and sends a few hundred bytes. If digests differ, a few ranks also send the digest of each
    tensor. Of three or more replicas the majority is taken as correct; of two replicas, both ranks are reported. Tensors in
    `optimizer.state[parameter]` are compared. Buffers are not compared, because some differ between ranks.

    Args:
        model: parallelized model.
        optimizer: optimizer of its parameters.

    Returns:
        None if all replicas are equal, or if there are no replicas. Otherwise a report, the same on all ranks, with one
        line for each deviating rank or set of ranks: "rank 2: model.norm.weight, also exp_avg; ranks 0, 1, 3 agree".
    """
    free_gathered_weights(model)
    optimizer.finish_offload()
    tables = _digest_parts(model, optimizer.state, runtime(model).mesh)
    hashes = {part: hashlib.blake2b(repr(table).encode(), digest_size=8) for part, table in tables.items()}
    hashes_of_ranks = all_gather_json({part: found.hexdigest() for part, found in hashes.items()})
    versions: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, hashes in enumerate(hashes_of_ranks):
        for part, table_hash in hashes.items():
            versions[part][table_hash].append(rank)
    differing = {part: list(ranks.values()) for part, ranks in versions.items() if len(ranks) > 1}
    lines: list[str] = []
    for part, holders in list(differing.items())[:MAX_REPORTED]:
        lines += _find_deviating(tables.get(part), sorted(holders, key=len, reverse=True)[:MAX_REPORTED])
    if len(differing) > MAX_REPORTED:
        lines.append(f"and {len(differing) - MAX_REPORTED} more parts of the model differ")
    return "\n".join(lines) or None


def _digest_parts(model: nn.Module, states: Any, mesh: DeviceMesh) -> dict[str, DigestTable]:
    """Digest tables of this rank by part of the model; ranks with the same key hold replicas of the same tensors."""
    coordinate = () if mesh.device_type == "cpu" else (mesh.get_local_rank("pp"), mesh.get_local_rank("tp"))
    digesters: dict[torch.device, Digester] = {}
    found: dict[str, list[tuple[str, str, Tensor]]] = defaultdict(list)
    for name, parameter, is_tied in _named_parameters(model):
        part = f"{'tied ' if is_tied else ''}{_layout(parameter)} {coordinate}"
        own = {kind: state for kind, state in states.get(parameter, {}).items() if isinstance(state, Tensor)}
        for kind, tensor in {"": parameter, **own}.items():
            local = to_local(tensor.detach())
            if local.device not in digesters:
                digesters[local.device] = Digester(local.device)
            found[part].append((name, kind, digesters[local.device](local)))
    values = fetch_digests([digest for rows in found.values() for _, _, digest in rows])
    tables: dict[str, DigestTable] = {}
    for part, rows in found.items():
        names = "\n".join(
            dict.fromkeys(name for name, _, _ in rows)
        ).encode()  # pipeline stages hold different parameters
        key = f"{part} {hashlib.blake2b(names, digest_size=8).hexdigest()}"
        tables[key] = [(name, kind, next(values)) for name, kind, _ in rows]
    return tables


def _named_parameters(model: Any) -> list[tuple[str, nn.Parameter, bool]]:
    """Name, parameter, and True if tied to a replica on another pipeline stage; tied replicas use the name of the embedding."""
    pipeline = runtime(model).pipeline
    if pipeline is None or not pipeline.shares_tied:
        return [(name, parameter, False) for name, parameter in model.named_parameters()]
    embedding = f"{pipeline.ends[0]}.weight"
    tied = [name == embedding or p is pipeline.tied_copy for name, p in model.named_parameters()]
    return [
        (embedding if is_tied else name, p, is_tied)
        for (name, p), is_tied in zip(model.named_parameters(), tied, strict=True)
    ]


def _layout(parameter: Tensor) -> str:
    """Key of the part of a parameter that this rank holds; ranks with the same key hold the same part."""
    if not isinstance(parameter, DTensor):
        return "full"
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    split = [None if p.is_replicate() else rank for p, rank in zip(parameter.placements, coordinate, strict=True)]
    return f"{mesh.mesh_dim_names} {parameter.placements} {split}"


def _find_deviating(table: DigestTable | None, holders: list[list[int]]) -> list[str]:
    """Report lines for the ranks whose replica of a part differs from the majority.

    Args:
        table: digest table of this rank, if it holds the part.
        holders: ranks of each version of the part; the first rank of each version broadcasts its table.
    """
    votes: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for ranks in holders:
        own = table if dist.get_rank() == ranks[0] else None
        for name, kind, digest in broadcast_json(own, ranks[0]):
            votes[name, kind][digest] += ranks
    all_ranks = sorted(rank for ranks in holders for rank in ranks)
    report: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (name, kind), versions in votes.items():
        largest = max(versions.values(), key=len)
        deviating = [rank for rank in all_ranks if rank not in largest]
        if deviating and 2 * len(largest) > len(all_ranks):
            for rank in deviating:
                report[f"rank {rank}", f"{_ranks(largest)} agree{'s' * (len(largest) == 1)}"][name].append(kind)
        elif deviating:
            report[_ranks(all_ranks), "they differ, and there is no majority"][name].append(kind)
    return [f"{ranks}: {_names(names)}; {verdict}" for (ranks, verdict), names in report.items()]


def _ranks(ranks: list[int]) -> str:
    shown = sorted(ranks)[:MAX_REPORTED]
    more = f" and {len(ranks) - MAX_REPORTED} more" if len(ranks) > MAX_REPORTED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, shown))}{more}"


def _names(kinds: dict[str, list[str]]) -> str:
    """Text of the parameters that differ, each with its optimizer states that differ ("" is the parameter itself)."""
    texts = []
    for name, differing in list(kinds.items())[:MAX_REPORTED]:
        states = ", ".join(kind for kind in differing if kind)
        texts.append((f"{name}, also {states}" if states else name) if "" in differing else f"{states} of {name}")
    more = f"; and {len(kinds) - MAX_REPORTED} more parameters" if len(kinds) > MAX_REPORTED else ""
    return "; ".join(texts) + more
