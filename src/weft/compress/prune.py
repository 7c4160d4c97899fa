"""Structured pruning: fewer blocks, heads, feed-forward units or experts, in a plain smaller configuration.

Blocks: those whose output is closest to their input go (ShortGPT: Men et al., 2024). Experts: those that the fewest tokens
choose. Heads and units: see `widths.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import experts_per_token
from weft.checkpoint.huggingface import save_folder
from weft.compress.blocks import BATCH_ROWS, calibrate_blocks
from weft.compress.folder import WeightWriter
from weft.compress.ranks import Ranks
from weft.compress.recipe import Recipe
from weft.compress.smaller import changed, kept_count, key_of, not_streamed
from weft.compress.source import Source
from weft.compress.widths import prune_widths
from weft.errors import ModelError
from weft.parallel.moe_aux_loss import chosen_experts, count_indices

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def prune(
    source: Path,
    out: Path,
    recipe: Recipe,
    rows: Tensor,
    log: Callable[[str], None],
    ranks: Ranks = Ranks(),  # noqa: B008 - it is frozen
) -> None:
    """Write a pruned copy of a model. Collective; rank 0 writes.

    Args:
        source: Hugging Face folder of a causal language model, with weights that are not quantized.
        out: folder to write.
        recipe: drop_blocks, prune and prune_parts decide what goes.
        rows: token ids of calibration rows [rows, tokens], int64.
        log: called with a line of progress.
        ranks: ranks that share the work; all have the same arguments.

    Raises:
        CheckpointError: weights are missing or damaged.
        DataError: too few calibration rows.
        ModelError: the family has no such parts, or its smaller configuration does not have the weights that are left.
    """
    with Source(source) as model:
        if recipe.drop_blocks:
            _drop_blocks(model, recipe.drop_blocks, rows, ranks, log)
        parts = _parts(model, recipe) if recipe.prune else ()
        if "experts" in parts:
            weights, config = _drop_experts(model, recipe.prune, rows, ranks, log)
            _check_shapes(config, weights)
            if ranks.leads:
                if model.anatomy.tied:
                    weights[f"{model.anatomy.head}.weight"] = weights[f"{model.anatomy.embedding}.weight"]
                save_folder(config, weights, source, out, next(iter(weights.values())).dtype)
            return
        if ranks.leads:
            out.mkdir()
        writer = WeightWriter(out, discards=not ranks.leads)
        shapes, config = prune_widths(model, recipe.prune, parts, rows, ranks, writer, log)
        _check_shapes(config, shapes)
        writer.finish()
        if ranks.leads:
            config.save_pretrained(out)


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


def _drop_blocks(model: Source, fraction: float, rows: Tensor, ranks: Ranks, log: Callable[[str], None]) -> None:
    """Remove the blocks that change their inputs least."""
    names = [block.name for block in model.anatomy.blocks]
    left = kept_count(len(names), fraction, "blocks")
    if not model.is_streamed:
        raise not_streamed(model, "blocks are dropped", "prune a model of another family, or only its experts")
    changes: list[float] = []

    def watch(inputs: list[Tensor], outputs: list[Tensor]) -> None:
        pairs = zip(inputs, outputs, strict=True)
        alike = [torch.cosine_similarity(before.float(), after.float(), dim=-1) for before, after in pairs]
        of_tokens = torch.cat([each.flatten() for each in alike])
        total, count = ranks.sum(torch.tensor([of_tokens.sum().item(), len(of_tokens)], dtype=torch.float64)).tolist()
        changes.append(1 - total / count)

    batches = ranks.share(rows).split(BATCH_ROWS)
    calibrate_blocks(model.model, model.anatomy, model.load, batches, watch=watch)
    by_change = sorted(range(len(names)), key=changes.__getitem__)
    kept = sorted(by_change[len(names) - left :])
    dropped = [names[index] for index in sorted(by_change[: len(names) - left])]
    log("blocks that change their inputs least: " + ", ".join(dropped))
    renamed = {f"{names[old]}.": f"{names[new]}." for new, old in enumerate(kept)}
    old_names = {}
    for name in model.names:
        prefix = next((f"{block}." for block in names if name.startswith(f"{block}.")), "")
        if not prefix:
            old_names[name] = name
        elif prefix in renamed:
            old_names[renamed[prefix] + name.removeprefix(prefix)] = name
    model.rename(_without_blocks(model.config, kept), old_names)


def _without_blocks(config: Any, kept: list[int]) -> Any:
    """Configuration with some of the blocks: lists with an element for each block are shortened."""
    table, count = config.to_dict(), config.num_hidden_layers
    key = key_of(config, ("num_hidden_layers",), count, "blocks")
    lists = {
        name: [value[index] for index in kept]
        for name, value in table.items()
        if isinstance(value, list) and len(value) == count
    }
    return changed(config, {key: len(kept), **lists})


def _drop_experts(
    model: Source, fraction: float, rows: Tensor, ranks: Ranks, log: Callable[[str], None]
) -> tuple[dict[str, Tensor], Any]:
    """Remove the experts that the fewest tokens choose. Returns all weights that are left, and the configuration."""
    whole, anatomy = model.load_whole(), model.anatomy
    config = model.config.get_text_config()
    experts = {name: block for block in anatomy.blocks for name in block.experts}
    count = next(int(p.shape[0]) for name in experts for p in whole.get_submodule(name).parameters() if p.ndim == 3)
    left = kept_count(count, fraction, "experts")
    key = key_of(model.config, EXPERT_KEYS, count, "experts")
    least = experts_per_token(config) or 1
    if left < least or int(getattr(config, "n_group", None) or 1) > 1:
        raise ModelError(
            f"{left} of {count} experts"
            + (f", and each token chooses {least}" if left < least else " in groups that a router chooses"),
            where="recipe",
            rule="a router has as many experts as a token chooses, in one group",
            fix="choose a smaller fraction" if left < least else "prune a model of another family",
        )
    loads = {name: torch.zeros(count, dtype=torch.int64) for name in experts}

    def count_load(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            loads[name] += count_indices(chosen_experts(args, kwargs), count)

        return hook

    handles = [
        whole.get_submodule(name).register_forward_pre_hook(count_load(name), with_kwargs=True) for name in experts
    ]
    with torch.no_grad():
        for batch in ranks.share(rows).split(BATCH_ROWS):
            whole(input_ids=batch, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    for load in loads.values():
        ranks.sum(load)
    weights = {name: model.read(name) for name in model.names}
    for name, block in experts.items():
        kept = loads[name].topk(left).indices.sort().values
        share = loads[name][kept].sum().item() / max(1, loads[name].sum().item())
        log(f"{name}: the experts that are left had {share:.1%} of the tokens")
        inside = tuple(f"{part}." for part in (name, *block.router))
        for weight in weights:
            if weight.startswith(inside) and weights[weight].shape[:1] == (count,):
                weights[weight] = weights[weight].index_select(0, kept)
    return weights, changed(model.config, {key: left})


def _check_shapes(config: Any, weights: dict[str, Tensor]) -> None:
    """Check that the model of a configuration has weights of these shapes.

    Raises:
        ModelError: names the first weight that has another shape.
    """
    model = build_on_meta(config, torch.float32)
    for name, parameter in model.named_parameters():
        found = tuple(weights[name].shape) if name in weights else None
        if found != tuple(parameter.shape):
            raise ModelError(
                f"{name} would have the shape {found}, and a model of the smaller configuration has {tuple(parameter.shape)}",
                where=f"model_type {config.model_type}",
                rule="the sizes of all weights follow from the configuration",
                fix="leave heads or units out of prune_parts",
            )
