"""Dry runs that take no longer for a deep model than for a shallow one: of two with few layers, carried on.

All layers of a kind do the same. A model of few layers and one of a few more are run dry; what the second has more is added as
often as the whole model has it. Whether a model is made of equal layers, its parameters tell: they have to be on the same line.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.checkpoint.huggingface import build_on_meta
from weft.checkpoint.model_config import read_config
from weft.job import Job, Model
from weft.planner.dryrun.step_counts import extend, extrapolate
from weft.planner.dryrun.trace import Trace, trace_all
from weft.train.run import check_model

SHALLOW = 4  # layers: with fewer, what the ends of a model hold for a moment is more than what its layers do
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")


def cut_layers(config: dict[str, Any], depth: int) -> dict[str, Any]:
    """The configuration of a model that has only the first layers."""
    cut = {name: depth if name in DEPTHS else value for name, value in config.items()}
    return cut | {
        name: value[:depth] for name, value in config.items() if isinstance(value, list) and name.endswith("_types")
    }


def first_layers(config: dict[str, Any]) -> int:
    """Layers at the beginning that are of a kind of their own."""
    return int(config.get("first_k_dense_replace") or 0)


def trace_in_brief(job: Job, world_size: int, device_type: str, stage: int = 0) -> list[Trace]:
    """Dry runs of the first rank and, of a pipeline, of others: memory, messages and floating-point operations of a whole step.

    Without a pipeline of few layers, where the model is made of equal ones; with one of few micro-batches.

    Args:
        job, world_size, device_type: as of `weft.planner.dryrun.trace.trace`.
        stage: of a pipeline, to be looked at beside the first and the last.

    Raises:
        PlanError: the plan does not fit the model or the number of ranks.
        ModelError: the model cannot be built or read.
    """
    plan = job.plan.resolve(world_size)
    check_model(job.model_copy(update={"plan": plan}))
    if plan.parallel.pp > 1:
        stages = sorted({0, stage, plan.parallel.pp - 1})
        ranks = [stage * world_size // plan.parallel.pp for stage in stages]
        return trace_all([(job, world_size, rank, device_type) for rank in ranks], in_brief=True)
    config = read_config(job.model).to_dict()
    depth, depths = _depth(config), two_depths(config, plan.memory.recompute_interval)
    if depths is None:
        return trace_all([(job, world_size, 0, device_type)])
    shallow, deep = trace_all([(with_layers(job, config, few), world_size, 0, device_type) for few in depths])
    times = (depth - depths[1]) // (depths[1] - depths[0])

    whole = replace(
        deep,
        parameters=extend(shallow.parameters, deep.parameters, times),
        count=extrapolate(shallow.count, deep.count, times),
        elsewhere={name: extend(shallow.elsewhere[name], size, times) for name, size in deep.elsewhere.items()},
        moved=extend(shallow.moved, deep.moved, times),
        seconds=shallow.seconds + deep.seconds,
    )
    return [whole]


def with_layers(job: Job, config: dict[str, Any], depth: int) -> Job:
    """The job with a model that has only the first layers."""
    model = job.model.model_copy(update={"path": None, "config": cut_layers(config, depth)})
    return job.model_copy(update={"model": model})


def two_depths(config: dict[str, Any], every: int = 1) -> tuple[int, int] | None:
    """Layers of the two models that are run in place of the whole one; None where it is not much deeper, or layers differ.

    Args:
        config: of the whole model.
        every: one in so many layers is computed again.
    """
    depth, step = _depth(config), math.lcm(_period(config), every)
    shallow = first_layers(config) + SHALLOW
    shallow += (depth - shallow) % step
    if depth <= 2 * (shallow + step):
        return None
    sizes = [_parameters(cut_layers(config, few)) for few in (shallow, shallow + step, depth)]
    times = (depth - shallow) // step
    return (shallow, shallow + step) if sizes[2] - sizes[0] == times * (sizes[1] - sizes[0]) else None


def _depth(config: dict[str, Any]) -> int:
    return next((int(config[name]) for name in DEPTHS if config.get(name)), 0)


def _period(config: dict[str, Any]) -> int:
    """Layers after which the kinds of layers come again; at least two, of which the second may use what the first has left."""
    kinds = [value[first_layers(config) :] for name, value in config.items() if name.endswith("_types") and value]
    rows = list(zip(*kinds, strict=False))
    return next(step for step in range(2, len(rows) + 3) if rows[step:] == rows[: max(0, len(rows) - step)])


def _parameters(config: dict[str, Any]) -> int:
    model: nn.Module = build_on_meta(read_config(Model(config=config)), torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters())
