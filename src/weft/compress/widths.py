"""Pruning of heads and feed-forward units: channels between two layers, which both become narrower.

Those go whose removal changes the output of the layer that reads them least, if the weights of the others make up for it
(Optimal Brain Surgeon: Hassibi and Stork, 1993; for structures Kurtic et al., ZipLM, 2023); they then do make up for it.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.anatomy.build import build_on_meta
from weft.anatomy.roles import Block
from weft.compress.blocks import Hessians, calibrate_blocks, check_tokens
from weft.compress.folder import WeightWriter
from weft.compress.gptq import damped
from weft.compress.plan_widths import Widths
from weft.compress.ranks import Ranks
from weft.compress.source import Source
from weft.compress.width_slices import Slice, Width, members, part_of, slices_of


def write_narrower(
    model: Source,
    widths: Widths | None,
    rows: Sequence[Tensor],
    ranks: Ranks,
    writer: WeightWriter,
    log: Callable[[str], None],
) -> None:
    """Write all weights, those of pruned parts narrower. Collective; rank 0 writes.

    Args:
        widths: from `plan_widths`; None: nothing becomes narrower.
        rows: token ids of each calibration row, int64.
        ranks: ranks that share the work; all have the same arguments.
        writer: writer of the new folder.
        log: called with a line of progress.

    Raises:
        DataError: too few calibration rows.
    """
    written, stored = set[str](), frozenset(model.names)
    narrower = None if widths is None else build_on_meta(copy.deepcopy(widths.config), torch.float32)

    def write(name: str, tensor: Tensor) -> None:
        written.add(name)
        writer.write(model.as_stored(name, tensor.contiguous(), narrower if name in model.shapes else None))

    def change(prefix: str, module: nn.Module, hessians: Hessians) -> None:
        block = next(block for block in model.anatomy.blocks if block.name == prefix)
        slices: dict[str, Slice] = {}
        for part, width in widths.parts.items() if widths else ():
            slices |= _prune_part(model.config, block, module, part, width, hessians)
        for name, weight in module.state_dict().items():
            full = f"{prefix}.{name}"
            sliced = slices.get(full)
            if full in stored:  # only the layer that reads a part was refitted
                before = model.read(full)
                weight = before if sliced is None or sliced.dim == 0 else weight.to(before.dtype)
            write(full, weight if sliced is None else weight.index_select(sliced.dim, sliced.kept))
        log(f"{prefix}: pruned")

    if widths is not None:
        blocks = [(block, model.model.get_submodule(block.name)) for block in model.anatomy.blocks]
        readers = [part_of(model.config, block, module, part)[2] for part in widths.parts for block, module in blocks]
        check_tokens(sum(map(len, rows)), [reader.in_features for reader in readers])
        batches = ranks.batches(rows)
        calibrate_blocks(model.model, model.anatomy, model.load, batches, change, ranks=ranks)
    for name in model.names:
        if name not in written:
            write(name, model.read(name))


def _prune_part(
    config: Any, block: Block, module: nn.Module, part: str, width: Width, hessians: Hessians
) -> dict[str, Slice]:
    """Choose what a part of a block keeps, and let the layer that reads it make up for the rest, in place.

    Args:
        config: configuration before pruning.
        block: names of the block's parts.
        part: heads or units.
        width: what is kept.
        hessians: of its matrices.

    Returns:
        Kept part of each weight that becomes narrower, by full name.
    """
    _, name, reader = part_of(config, block, module, part)
    weight, hessian = reader.weight.float(), hessians[f"{name}.weight", 0]
    chosen = choose(weight, hessian, width.groups, width.kept)
    columns = members(chosen, reader.in_features // width.groups)
    reader.weight.data = refit(weight, hessian, columns).to(reader.weight.dtype)
    return slices_of(config, block, module, part, width, chosen)


def choose(weight: Tensor, hessian: Tensor, groups: int, kept: int) -> Tensor:
    """Groups of columns to keep: those whose removal would change the outputs most, even if the others made up for it.

    Args:
        weight: [out, in], float32.
        hessian: [in, in], sum of x xT over the inputs.
        groups: number of groups of columns.
        kept: number of groups to keep.

    Returns:
        [kept], in ascending order.
    """
    size = weight.shape[1] // groups
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped(hessian)))
    blocks = torch.stack([inverse[i : i + size, i : i + size] for i in range(0, weight.shape[1], size)])
    columns = weight.T.unflatten(0, (groups, size))  # [groups, size, out]
    costs = (columns * torch.linalg.solve(blocks, columns)).sum((1, 2))
    return costs.topk(kept).indices.sort().values


def refit(weight: Tensor, hessian: Tensor, index: Tensor) -> Tensor:
    """Weights with the least squared error of the outputs that use only some of the inputs.

    Args:
        weight: [out, in], float32; not changed.
        hessian: [in, in], sum of x xT over the inputs.
        index: columns that are used; all others are zero in the result.
    """
    removed = torch.ones(weight.shape[1], dtype=torch.bool).index_fill(0, index, False).nonzero().flatten()
    whole = damped(hessian)
    missing = weight[:, removed] @ whole[removed][:, index]
    correction = torch.cholesky_solve(missing.T, torch.linalg.cholesky(whole[index][:, index])).T
    result = torch.zeros_like(weight)
    result[:, index] = weight[:, index] + correction
    return result
