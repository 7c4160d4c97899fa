"""Pruning of routed experts: those that the fewest calibration tokens choose go, as many from each group of a router."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.anatomy.roles import Block
from weft.anatomy.transformers import experts_per_token
from weft.compress.ranks import Ranks
from weft.compress.smaller import changed, check_shapes, kept_count, key_of, shapes_of
from weft.compress.source import Source
from weft.errors import ModelError
from weft.memory.storages import saved_buffers
from weft.parallel.experts.router_stats import chosen_experts, count_indices

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class _Plan(NamedTuple):
    """Number of experts that are left in each layer, and where they are."""

    experts: int
    """Experts of a layer before the pruning."""
    left: int
    groups: int
    """Groups of which a router chooses some, with equally many experts."""
    config: Any
    """Smaller configuration."""
    sizes: dict[str, int]
    """Weights and saved buffers that have something of each expert, with the dimension of the experts."""


def drop_experts(
    model: Source, fraction: float, rows: Sequence[Tensor], ranks: Ranks, log: Callable[[str], None]
) -> tuple[dict[str, Tensor], Any]:
    """Remove the experts that the fewest tokens choose. Collective. Returns the weights and configuration that are left."""
    experts = {name: block for block in model.anatomy.blocks for name in block.experts}
    plan = _plan(model, fraction, experts)
    whole = model.load_whole()
    weights = {name: model.read(name) for name in model.names}
    for name, load in _count_tokens(whole, plan.experts, experts, rows, ranks).items():
        of_group = load.view(plan.groups, -1)
        first = torch.arange(0, plan.experts, plan.experts // plan.groups)[:, None]
        kept = (of_group.topk(plan.left // plan.groups).indices + first).flatten().sort().values
        share = load[kept].sum().item() / max(1, load.sum().item())
        log(f"{name}: the experts that are left had {share:.1%} of the tokens")
        for weight, dim in plan.sizes.items():
            if weight.startswith(f"{experts[name].name}."):
                weights[weight] = weights[weight].index_select(dim, kept)
    return weights, plan.config


def _plan(model: Source, fraction: float, experts: dict[str, Block]) -> _Plan:
    """Decide how many experts are left.

    Raises:
        ModelError: so few are not possible, or not in this family.
    """
    config = model.config.get_text_config()
    count, groups = _count_experts(model, experts), int(getattr(config, "n_group", None) or 1)
    left = kept_count(count, fraction, "experts", groups)
    least = experts_per_token(config) or 1
    among = left if groups == 1 else left // groups * int(getattr(config, "topk_group", None) or groups)
    if among < least or (groups > 1 and left // groups < 2):
        raise ModelError(
            f"{left} of {count} experts{f' in {groups} groups' if groups > 1 else ''}, and each token chooses {least}",
            where="recipe",
            rule="the groups that a router chooses have as many experts as a token, and at least two each",
            fix="choose a smaller fraction",
        )
    smaller = changed(model.config, {key_of(model.config, EXPERT_KEYS, count, "experts"): left})
    shapes, expected = model.shapes, shapes_of(smaller)
    sizes = {
        name: dim
        for name in shapes.keys() & expected.keys()
        for dim, (before, after) in enumerate(zip(shapes[name], expected[name], strict=False))
        if (before, after) == (count, left)
    }
    for name, dim in sizes.items():
        shapes[name] = torch.Size((*shapes[name][:dim], left, *shapes[name][dim + 1 :]))
    check_shapes(smaller, set(shapes), shapes, expected)
    of_experts = tuple(f"{block.name}." for block in experts.values())
    for name, buffer in saved_buffers(model.model).items():
        if name in shapes and name.startswith(of_experts) and not buffer.is_floating_point():
            raise ModelError(
                f"{name} has indices of experts",
                where=f"model_type {model.anatomy.family}",
                rule="a router chooses experts for each token; a table that names them does not fit fewer ones",
                fix="prune a model of another family",
            )
    return _Plan(count, left, groups, smaller, sizes)


def _count_tokens(
    whole: nn.Module, count: int, experts: Iterable[str], rows: Sequence[Tensor], ranks: Ranks
) -> dict[str, Tensor]:
    """Number of tokens that choose each expert [count], by layer. Collective."""
    loads = {name: torch.zeros(count, dtype=torch.int64) for name in experts}

    def count_load(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                chosen = chosen_experts(args, kwargs)
            except StopIteration:
                raise ModelError(
                    f"{name} is not told which experts the tokens choose",
                    where="recipe",
                    rule="experts of families that compute only with those that are chosen are pruned",
                    fix="prune a model of another family",
                ) from None
            loads[name] += count_indices(chosen, count)

        return hook

    handles = [
        whole.get_submodule(name).register_forward_pre_hook(count_load(name), with_kwargs=True) for name in loads
    ]
    with torch.no_grad():
        for batch in ranks.batches(rows):
            whole(input_ids=batch, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    for load in loads.values():
        ranks.sum(load)
    return loads


def _count_experts(model: Source, experts: Iterable[str]) -> int:
    """Number of routed experts of a layer.

    Raises:
        ModelError: no weight has one for each expert.
    """
    for name in experts:
        for parameter in model.model.get_submodule(name).parameters():
            if parameter.ndim == 3:
                return int(parameter.shape[0])
    raise ModelError(
        f"{model.anatomy.family} has no weights of all experts",
        where="recipe",
        rule="experts are pruned where a weight [experts, out, in] has them all, and a router chooses some for each token",
        fix="prune a model of another family",
    )
