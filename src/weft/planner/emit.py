"""Settings of other libraries for a plan: for people who stay with another runtime.

    weft plan job.toml --device H100 --nnodes 2 --emit megatron

What a library cannot express is refused, not left out. Names are those of accelerate 1.15, torchtitan 0.3, Megatron-LM core
0.16 and NeMo AutoModel 0.7.
"""

import json
from collections.abc import Callable
from typing import Any

from weft.errors import PlanError
from weft.job import Job, ResolvedJob, resolve_job
from weft.plan import ResolvedPlan
from weft.plan.resolve import with_zero

TITAN_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Name in torchtitan, and in NeMo AutoModel, of each schedule that they have: those of torch."""


def emit(job: Job, target: str, world_size: int, nnodes: int, num_blocks: int) -> str:
    """Text of the settings of another library for the plan of a job.

    Args:
        job: job with its plan, for `world_size` ranks.
        target: key of `TARGETS`.
        world_size: number of ranks.
        nnodes: number of hosts.
        num_blocks: number of blocks of the model.

    Raises:
        PlanError: the library has no setting for a part of the plan.
    """
    if job.plan.parallel.zero == "auto":  # every library shards weights; not each has replicas beside other axes
        job = job.model_copy(update={"plan": with_zero(job.plan, 3)})
    resolved = resolve_job(job, world_size, native_bf16=True)
    _refuse(resolved.plan, target)
    if target == "automodel":
        plan, p = resolved.plan, resolved.plan.parallel  # NeMo AutoModel refuses these pipelines when it starts
        if p.pp > 1 and resolved.train.global_batch_size // (p.data_ranks * resolved.train.micro_batch_size) < p.pp:
            raise _no_setting(plan, "parallel.pp", "automodel", f"{p.pp} stages need as many micro-batches")
        stages = p.pp * plan.pipeline.stages_per_rank
        if p.pp > 1 and -(-num_blocks // -(-num_blocks // stages)) != stages:
            rule = f"it gives each stage the same number of blocks, and {num_blocks} blocks do not make {stages} such stages"
            raise _no_setting(plan, "pipeline.virtual_stages", "automodel", rule)
    return TARGETS[target](resolved, world_size, nnodes, num_blocks)


def _refuse(plan: ResolvedPlan, target: str) -> None:
    """Refuse what a library cannot express; names the first key of the plan."""
    p, m, precision = plan.parallel, plan.memory, plan.precision
    axes = p.tp * p.cp * p.ep * p.pp
    torch_schedules = target in ("torchtitan", "automodel")
    recomputes = target != "torchtitan" and (target != "accelerate" or bool(p.zero))  # accelerate: a key of FSDP
    offloads = target != "torchtitan" and bool(p.zero)  # keys of FSDP; Megatron-LM: of its distributed optimizer
    dtypes = ("fp32", "bf16")
    missing = {
        "parallel.cp_ulysses": p.cp_ulysses > 1,
        "parallel.zero": (p.zero == 1 and target in ("accelerate", "torchtitan", "automodel"))
        or (p.zero == 0 and target == "automodel" and axes > 1),  # its DDP splits nothing else
        "parallel.dp_replicate": target == "automodel" and p.zero > 0 and p.dp_replicate > 1 and p.dp_shard == 1,
        "parallel.ep": target == "accelerate" and p.ep > 1,
        "parallel.etp": target != "megatron" and p.etp > 1,
        "parallel.pp": target == "accelerate" and p.pp > 1,
        "pipeline.schedule": p.pp > 1
        and plan.pipeline.schedule not in (TITAN_SCHEDULES if torch_schedules else ("1f1b", "interleaved")),
        "parallel.rows_per_rank": bool(p.rows_per_rank),
        "pipeline.stage_blocks": p.pp > 1 and bool(plan.pipeline.stage_blocks),
        "memory.recompute": m.recompute not in ((), ("block",)) or (bool(m.recompute) and not recomputes),
        "memory.recompute_interval": m.recompute_interval > 1,
        "memory.offload": bool(m.offload),
        "memory.parameters_device": m.parameters_device != "device",
        "memory.optimizer_device": m.optimizer_device not in (("device", "host") if offloads else ("device",)),
        "precision.param_dtype": precision.param_dtype not in dtypes,
        "precision.backward": precision.backward != "forward",
        "precision.weights": precision.weights != "whole",
        "precision.optimizer_state_dtype": precision.optimizer_state_dtype != "update",
        "comm.compression": plan.comm.compression != "none",
    }
    for key, is_missing in missing.items():
        if is_missing:
            raise _no_setting(plan, key, target)


def _no_setting(plan: ResolvedPlan, key: str, target: str, rule: str = "") -> PlanError:
    table, _, name = key.partition(".")
    return PlanError(
        f"plan.{key} = {getattr(getattr(plan, table), name)!r} for {target}",
        where="weft plan --emit",
        rule=rule or f"{target} has no setting for it that means the same",
        fix=f"plan without it, for example --set plan.{key}=..., or train with Weft: weft train, weft run",
    )


def _accelerate(job: ResolvedJob, world_size: int, nnodes: int, num_blocks: int) -> str:
    """Configuration file of `accelerate launch --config_file`."""
    plan, p = job.plan, job.plan.parallel
    lines: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if p.zero else "MULTI_GPU",
        "mixed_precision": "bf16" if plan.precision.param_dtype == "bf16" else "no",
        "num_machines": nnodes,
        "num_processes": world_size,
    }
    text = "".join(f"{key}: {value}\n" for key, value in lines.items())
    if p.zero:
        fsdp = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": str(p.zero == 3).lower(),
            "fsdp_offload_params": str(plan.memory.optimizer_device == "host").lower(),
            "fsdp_activation_checkpointing": str(bool(plan.memory.recompute)).lower(),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        text += "fsdp_config:\n" + "".join(f"  {key}: {value}\n" for key, value in fsdp.items())
    if p.tp * p.cp * p.dp_replicate > 1:
        replicas, shards = (p.dp_replicate, p.dp_shard) if p.zero else (p.data_ranks, 1)
        sizes = {"dp_replicate": replicas, "dp_shard": shards, "tp": p.tp, "cp": p.cp}
        text += "parallelism_config:\n" + "".join(
            f"  parallelism_config_{axis}_size: {size}\n" for axis, size in sizes.items()
        )
    return text


def _torchtitan(job: ResolvedJob, world_size: int, nnodes: int, num_blocks: int) -> str:
    """Arguments of torchtitan, after --module and --config of the model."""
    plan, p, train = job.plan, job.plan.parallel, job.train
    rows = train.micro_batch_size if p.pp == 1 else train.global_batch_size // p.data_ranks
    sharded = p.dp_shard if p.zero else 1
    arguments: dict[str, Any] = {
        "parallelism.data_parallel_replicate_degree": p.dp_replicate if p.zero else p.data_ranks,
        "parallelism.data_parallel_shard_degree": sharded,
        "parallelism.fsdp_reshard_after_forward": "always" if p.zero == 3 else "never",
        "parallelism.tensor_parallel_degree": p.tp,
        "parallelism.context_parallel_degree": p.cp,
        "parallelism.expert_parallel_degree": p.ep,
        "parallelism.pipeline_parallel_degree": p.pp,
        "training.local_batch_size": rows,
        "training.global_batch_size": train.global_batch_size,
        "training.seq_len": job.data.seq_len,
        "training.mixed_precision_param": "bfloat16" if plan.precision.param_dtype == "bf16" else "float32",
    }
    if p.pp > 1:
        stages = p.pp * plan.pipeline.stages_per_rank
        arguments |= {
            "parallelism.pipeline_parallel_schedule": TITAN_SCHEDULES[plan.pipeline.schedule],
            "parallelism.pipeline_parallel_microbatch_size": train.micro_batch_size,
            "parallelism.pipeline_parallel_layers_per_stage": -(-(num_blocks + 2) // stages),  # it counts both ends
        }
    flags = ["--parallelism.enable_sequence_parallel" if p.sp else "--parallelism.no-enable_sequence_parallel"]
    return _arguments(arguments, flags)


def _megatron(job: ResolvedJob, world_size: int, nnodes: int, num_blocks: int) -> str:
    """Arguments of Megatron-LM's training scripts, besides those of the model."""
    plan, p, train = job.plan, job.plan.parallel, job.train
    arguments: dict[str, Any] = {
        "tensor-model-parallel-size": p.tp,
        "pipeline-model-parallel-size": p.pp,
        "context-parallel-size": p.cp,
        "expert-model-parallel-size": p.ep,
        **({"expert-tensor-parallel-size": p.etp} if p.ep > 1 else {}),  # its default is tp
        "micro-batch-size": train.micro_batch_size,
        "global-batch-size": train.global_batch_size,
        "seq-length": job.data.seq_len,
    }
    flags = ["--sequence-parallel"] if p.sp and p.tp > 1 else []
    flags += ["--bf16"] if plan.precision.param_dtype == "bf16" else []
    if p.zero == 1:
        flags.append("--use-distributed-optimizer")
    elif p.zero > 1:
        flags += ["--use-distributed-optimizer", "--use-megatron-fsdp"]
        arguments["ckpt-format"] = "fsdp_dtensor"  # the only one that its FSDP accepts
        arguments["data-parallel-sharding-strategy"] = "optim_grads" if p.zero == 2 else "optim_grads_params"
    if p.zero and p.dp_replicate > 1:
        arguments["num-distributed-optimizer-instances"] = p.dp_replicate
    if plan.pipeline.stages_per_rank > 1:
        arguments["num-layers-per-virtual-pipeline-stage"] = num_blocks // (p.pp * plan.pipeline.stages_per_rank)
    if plan.memory.recompute:
        arguments |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    if plan.memory.optimizer_device == "host":
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]  # one needs the other
    return _arguments(arguments, flags)


def _automodel(job: ResolvedJob, world_size: int, nnodes: int, num_blocks: int) -> str:
    """Sections of the recipe of NeMo AutoModel, in YAML, besides those of model, data and optimizer."""
    plan, p, train = job.plan, job.plan.parallel, job.train
    dtypes = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    rows = train.micro_batch_size if p.pp == 1 else train.global_batch_size // p.data_ranks
    param_dtype = dtypes[plan.precision.param_dtype]
    scheduler = {"global_batch_size": train.global_batch_size, "local_batch_size": rows}
    distributed: dict[str, Any] = {"strategy": "fsdp2" if p.zero else "ddp"}
    distributed["activation_checkpointing"] = bool(plan.memory.recompute)
    nested: dict[str, dict[str, Any]] = {}
    if p.zero:
        sizes = {"dp_size": p.data_ranks, "dp_replicate_size": p.dp_replicate}
        sizes |= {"tp_size": p.tp, "cp_size": p.cp, "ep_size": p.ep, "pp_size": p.pp}
        distributed |= {**sizes, "sequence_parallel": p.sp and p.tp > 1, "reshard_after_forward": p.zero == 3}
        nested["mp_policy"] = {"param_dtype": param_dtype, "reduce_dtype": dtypes[plan.precision.reduce_dtype]}
    elif param_dtype != dtypes[plan.precision.update]:
        distributed["autocast_dtype"] = param_dtype
    if plan.memory.optimizer_device == "host":
        nested["offload_policy"] = {"pin_memory": True}
    if p.pp > 1:
        nested["pipeline"] = {
            "pp_schedule": TITAN_SCHEDULES[plan.pipeline.schedule],
            "pp_microbatch_size": train.micro_batch_size,
            "layers_per_stage": -(-num_blocks // (p.pp * plan.pipeline.stages_per_rank)),
            "pp_seq_len": job.data.seq_len,
        }
    text = f"# rows of {job.data.seq_len} tokens; model.torch_dtype: {dtypes[plan.precision.update]}\n"
    text += "step_scheduler:\n" + _yaml(scheduler, "  ") + "distributed:\n" + _yaml(distributed, "  ")
    return text + "".join(f"  {name}:\n" + _yaml(values, "    ") for name, values in nested.items())


def _yaml(values: dict[str, Any], indent: str) -> str:
    """Lines of a mapping."""
    return "".join(f"{indent}{key}: {json.dumps(value)}\n" for key, value in values.items())


def _arguments(values: dict[str, Any], flags: list[str]) -> str:
    """One argument a line, as a shell reads them."""
    return " \\\n".join([*(f"--{name} {value}" for name, value in values.items()), *flags]) + "\n"


TARGETS: dict[str, Callable[[ResolvedJob, int, int, int], str]] = {
    "accelerate": _accelerate,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "automodel": _automodel,
}
"""Function that writes the settings of each library."""
