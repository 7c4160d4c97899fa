"""Structured pruning: fewer blocks, experts, heads or feed-forward units, in a plain smaller configuration.

`drop_blocks.py`, `drop_experts.py`, and `plan_widths.py` with `widths.py` say which ones go.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from weft.checkpoint.export_files import write_config
from weft.checkpoint.huggingface import save_folder
from weft.compress.drop_blocks import drop_blocks
from weft.compress.drop_experts import drop_experts
from weft.compress.folder import WeightWriter
from weft.compress.plan_widths import plan_widths
from weft.compress.ranks import Ranks
from weft.compress.recipe import Recipe
from weft.compress.source import Source
from weft.compress.widths import write_narrower
from weft.errors import ModelError


def prune(
    source: Path,
    out: Path,
    recipe: Recipe,
    rows: Sequence[Tensor],
    log: Callable[[str], None],
    ranks: Ranks = Ranks(),  # noqa: B008 - it is frozen
) -> None:
    """Write a pruned copy of a model. Collective; rank 0 writes.

    Args:
        source: Hugging Face folder of a causal language model, with weights that are not quantized.
        out: folder to write.
        recipe: drop_blocks, prune and prune_parts decide what goes.
        rows: token ids of each calibration row, int64.
        log: called with a line of progress.
        ranks: ranks that share the work; all have the same arguments.

    Raises:
        CheckpointError: weights are missing or damaged.
        DataError: too few calibration rows.
        ModelError: the family has no such parts, or its smaller configuration does not have the weights that are left.
    """
    with Source(source) as model:
        if recipe.drop_blocks:
            drop_blocks(model, recipe.drop_blocks, rows, ranks, log)
        if recipe.prune and "experts" in (parts := _parts(model, recipe)):
            weights, config = drop_experts(model, recipe.prune, rows, ranks, log)
            config.dtype = model.dtype  # a model on the meta device has another
            if ranks.leads:
                save_folder(config, weights, None, out, None, source=source)
            return
        widths = plan_widths(model, recipe.prune, parts, log, optional=not recipe.prune_parts) if recipe.prune else None
        if ranks.leads:
            out.mkdir()
        writer = WeightWriter(out, discards=not ranks.leads)
        write_narrower(model, widths, rows, ranks, writer, log)
        writer.finish()
        if ranks.leads:
            write_config(model.config if widths is None else widths.config, out, source)


def _parts(model: Source, recipe: Recipe) -> tuple[str, ...]:
    """Parts of blocks to prune."""
    has_experts = model.anatomy.has_experts
    parts: tuple[str, ...] = recipe.prune_parts or (("experts",) if has_experts else ("heads", "units"))
    if has_experts != (parts == ("experts",)):
        raise ModelError(
            f"prune_parts = {list(parts)} for {model.anatomy.family}, which has {'' if has_experts else 'no '}experts",
            where="recipe",
            rule="experts are pruned alone; heads and feed-forward units of models without experts",
            fix='set prune_parts = ["experts"]' if has_experts else 'set prune_parts = ["heads", "units"]',
        )
    return parts
