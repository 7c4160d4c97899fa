"""Settings of other libraries for a plan: for people who stay with another runtime.

    weft plan job.toml --device H100 --nnodes 2 --emit megatron

What a library cannot express is refused, not left out. Names are those of accelerate 1.15, torchtitan 0.3 and Megatron-LM
core 0.16.
"""

from collections.abc import Callable
from typing import Any

from weft.errors import PlanError
from weft.job import Job
from weft.plan import Plan

TITAN_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Name in torchtitan of each schedule that it has."""


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
    job = job.model_copy(update={"plan": job.plan.resolve(world_size).resolve_precision(native_bf16=True)})
    _refuse(job.plan, target)
    return TARGETS[target](job, world_size, nnodes, num_blocks)


def _refuse(plan: Plan, target: str) -> None:
    """Refuse what a library cannot express; names the first key of the plan."""
    p, m, precision = plan.parallel, plan.memory, plan.precision
    saves_no_memory = target == "torchtitan" or (
        target == "accelerate" and not p.zero
    )  # accelerate's are those of FSDP
    dtypes = ("fp32", "bf16")
    missing = {
        "parallel.cp_ulysses": p.cp_ulysses > 1,
        "parallel.zero": p.zero == 1 and target in ("accelerate", "torchtitan"),
        "parallel.ep": target == "accelerate" and p.ep > 1,
        "parallel.pp": target == "accelerate" and p.pp > 1,
        "pipeline.schedule": p.pp > 1
        and plan.pipeline.schedule not in (TITAN_SCHEDULES if target == "torchtitan" else ("1f1b", "interleaved")),
        "memory.recompute": m.recompute not in ((), ("block",)) or (saves_no_memory and bool(m.recompute)),
        "memory.recompute_interval": m.recompute_interval > 1,
        "memory.offload": bool(m.offload),
        "memory.optimizer_device": m.optimizer_device == "disk" or (m.optimizer_device != "device" and saves_no_memory),
        "precision.param_dtype": precision.param_dtype not in dtypes,
        "precision.backward": precision.backward != "forward",
        "precision.weights": precision.weights != "whole",
        "precision.optimizer_state_dtype": precision.optimizer_state_dtype != "update",
        "comm.compression": plan.comm.compression != "none",
    }
    for key, is_missing in missing.items():
        if is_missing:
            table, _, name = key.partition(".")
            raise PlanError(
                f"plan.{key} = {getattr(getattr(plan, table), name)!r} for {target}",
                where="weft plan --emit",
                rule=f"{target} has no setting for it that means the same",
                fix=f"plan without it, for example --set plan.{key}=..., or train with Weft: weft train, weft run",
            )


def _accelerate(job: Job, world_size: int, nnodes: int, num_blocks: int) -> str:
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


def _torchtitan(job: Job, world_size: int, nnodes: int, num_blocks: int) -> str:
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


def _megatron(job: Job, world_size: int, nnodes: int, num_blocks: int) -> str:
    """Arguments of Megatron-LM's training scripts, besides those of the model."""
    plan, p, train = job.plan, job.plan.parallel, job.train
    arguments: dict[str, Any] = {
        "tensor-model-parallel-size": p.tp,
        "pipeline-model-parallel-size": p.pp,
        "context-parallel-size": p.cp,
        "expert-model-parallel-size": p.ep,
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
        arguments["data-parallel-sharding-strategy"] = "optim_grads" if p.zero == 2 else "optim_grads_params"
    if p.zero and p.dp_replicate > 1:
        arguments["num-distributed-optimizer-instances"] = p.dp_replicate
    if plan.pipeline.stages_per_rank > 1:
        arguments["num-layers-per-virtual-pipeline-stage"] = num_blocks // (p.pp * plan.pipeline.stages_per_rank)
    if plan.memory.recompute:
        arguments |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    if plan.memory.optimizer_device == "host":
        flags.append("--optimizer-cpu-offload")
    return _arguments(arguments, flags)


def _arguments(values: dict[str, Any], flags: list[str]) -> str:
    """One argument a line, as a shell reads them."""
    return " \\\n".join([*(f"--{name} {value}" for name, value in values.items()), *flags]) + "\n"


TARGETS: dict[str, Callable[[Job, int, int, int], str]] = {
    "accelerate": _accelerate,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
}
"""Function that writes the settings of each library."""
