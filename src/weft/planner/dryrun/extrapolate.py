"""Dry runs of deep models, extrapolated from two dry runs with few layers.

All layers of one type do the same work. A model of few layers and one with a few more are dry-run, and their difference is
added as often as the full model has these layers. The layers count as equal if the number of parameters is linear in the
depth.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.anatomy.build import build_on_meta
from weft.checkpoint.model_config import read_config
from weft.job import Job, Model, packs_base, resolve_job
from weft.planner.dryrun.step_counts import extrapolate, extrapolate_value
from weft.planner.dryrun.trace import Trace, native_bf16, trace_all
from weft.training.job_checks import check_model

SHALLOW = 4  # minimum layers; with fewer, the short-lived tensors of embedding and head dominate those of the layers
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")


def cut_layers(config: dict[str, Any], depth: int) -> dict[str, Any]:
    """Configuration of the model with only its first `depth` layers."""
    cut = {name: depth if name in DEPTHS else value for name, value in config.items()}
    return cut | {
        name: value[:depth] for name, value in config.items() if isinstance(value, list) and name.endswith("_types")
    }


def first_layers(config: dict[str, Any]) -> int:
    """Number of leading layers of another type (dense layers of an MoE model)."""
    return int(config.get("first_k_dense_replace") or 0)


def trace_in_brief(job: Job, world_size: int, device_type: str, stage: int = 0) -> list[Trace]:
    """Extrapolated dry runs: memory, communication and FLOPs of a full step on the first rank, with pp on three ranks.

    Without pp, few layers are run if the model has equal layers. With pp, few micro-batches are run.

    Args:
        job, world_size, device_type: as for `weft.planner.dryrun.trace.trace`.
        stage: with pp, a stage to run in addition to the first and the last one.

    Raises:
        PlanError: the plan does not fit the model or the number of ranks.
        ModelError: the model cannot be built or read.
    """
    resolved = resolve_job(job, world_size, native_bf16=native_bf16(device_type))
    plan = resolved.plan
    check_model(resolved)
    if plan.parallel.pp > 1:
        stages = sorted({0, stage, plan.parallel.pp - 1})
        ranks = [stage * world_size // plan.parallel.pp for stage in stages]
        return trace_all([(job, world_size, rank, device_type) for rank in ranks], in_brief=True)
    read = read_config(job.model, job.task.kind, job.task.classes, in_4_bits=packs_base(job))
    config = read if isinstance(read, dict) else read.to_dict()
    depth, depths = _depth(config), two_depths(config, plan.memory.recompute_interval, job.task.kind)
    if depths is None:
        return trace_all([(job, world_size, 0, device_type)])
    shallow, deep = trace_all([(with_layers(job, config, few), world_size, 0, device_type) for few in depths])
    times = (depth - depths[1]) // (depths[1] - depths[0])

    full = replace(
        deep,
        parameters=extrapolate_value(shallow.parameters, deep.parameters, times),
        count=extrapolate(shallow.count, deep.count, times),
        offloaded={
            name: extrapolate_value(shallow.offloaded[name], size, times) for name, size in deep.offloaded.items()
        },
        offload_traffic=extrapolate_value(shallow.offload_traffic, deep.offload_traffic, times),
        seconds=shallow.seconds + deep.seconds,
    )
    return [full]


def few_layers(model: Model) -> Model:
    """Model with few of its layers, for checks that all layers pass alike; the same model if its layers differ."""
    config = read_config(model).to_dict()
    depths = two_depths(config)
    return model if depths is None else model.model_copy(update={"path": None, "config": cut_layers(config, depths[0])})


def with_layers(job: Job, config: dict[str, Any], depth: int) -> Job:
    """Job with only the first `depth` layers of the model."""
    model = job.model.model_copy(update={"path": None, "config": cut_layers(config, depth)})
    return job.model_copy(update={"model": model})


def two_depths(config: dict[str, Any], recompute_interval: int = 1, kind: str = "causal") -> tuple[int, int] | None:
    """Depths of the two models that replace the full one; None if it is not much deeper or its layers differ.

    Args:
        config: configuration of the full model.
        recompute_interval: recompute interval: every n-th layer is recomputed.
        kind: `task.kind` of the job.
    """
    depth, step = _depth(config), math.lcm(_period(config), recompute_interval)
    shallow = first_layers(config) + SHALLOW
    shallow += (depth - shallow) % step
    if depth <= 2 * (shallow + step):
        return None
    sizes = [_parameters(cut_layers(config, few), kind) for few in (shallow, shallow + step, depth)]
    times = (depth - shallow) // step
    return (shallow, shallow + step) if sizes[2] - sizes[0] == times * (sizes[1] - sizes[0]) else None


def _depth(config: dict[str, Any]) -> int:
    return next((int(config[name]) for name in DEPTHS if config.get(name)), 0)


def _period(config: dict[str, Any]) -> int:
    """Period of the layer types, at least 2 layers: every second layer may reuse memory that the previous one has freed."""
    kinds = [value[first_layers(config) :] for name, value in config.items() if name.endswith("_types") and value]
    rows = list(zip(*kinds, strict=False))
    return next(step for step in range(2, len(rows) + 3) if rows[step:] == rows[: max(0, len(rows) - step)])


def _parameters(config: dict[str, Any], kind: str) -> int:
    model: nn.Module = build_on_meta(read_config(Model(config=config), kind), torch.bfloat16, kind)
    return sum(parameter.numel() for parameter in model.parameters())
