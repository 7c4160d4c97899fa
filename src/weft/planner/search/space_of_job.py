"""Search space of a job: the dimensions of its model, and the axes over which it can be split."""

from collections.abc import Callable
from dataclasses import replace

import torch
import transformers

from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.device.detect import detect
from weft.errors import DeviceError, JobError, Refusal, WeftError
from weft.job import Job
from weft.parallel.choices import check_axes
from weft.plan import Parallel, Pipeline, Plan, ResolvedPlan, resolve_plan
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.shape import Shape, from_config
from weft.planner.dryrun.extrapolate import few_layers
from weft.planner.search.options import ExpertOptions
from weft.planner.search.space import MARGIN, Space
from weft.planner.search.strategy import matmul_dtype, stack_for


def reason_against_local_device(device_type: str, cluster: str) -> Refusal | None:
    """Reason against operator timing for devices of another type than this machine's."""
    here = detect().type
    if here != device_type:
        return Refusal(
            f"operators cannot be timed for {cluster}",
            where="weft plan --measure",
            rule=f"operators are timed on the local device, and the device type of this machine is {here}",
            fix="run the command on a machine with such a device, or omit --measure",
            error=DeviceError,
        )
    return None


def space_of(job: Job, cluster: ClusterSpec, margin: float = MARGIN) -> Space:
    """Search space of a job on a cluster.

    Raises:
        ModelError: the model's configuration cannot be read.
        JobError: the job trains adapters.
        PlanError: FP8 matmuls on a device without FP8.
    """
    if job.adapter.kind != "none":
        raise JobError(
            f"a search of plans for adapter.kind = {job.adapter.kind!r}",
            where="adapter.kind",
            rule="the formulas of the search count gradients and optimizer states of all weights, and a job with adapters has "
            "none of its frozen weights",
            fix="count the memory and traffic of one plan: weft dryrun JOB.toml --world-size N",
        )
    precision = job.plan.precision.resolve(cluster.device.native_bf16)
    dtype = matmul_dtype(precision, cluster.device)
    kind, shape = type_of(cluster), shape_of(job)
    stack = stack_for(precision, job.plan.compute, kind, expert_compression=job.plan.comm.expert_compression)
    if shape.expert_biases or not cluster.device.grouped_fp8:  # no grouped matmul in FP8 has biases
        stack = replace(stack, casts_experts=False)
    return Space(
        shape,
        job.data.seq_len,
        job.train.global_batch_size,
        cluster,
        stack,
        margin,
        dtype=dtype,
        unsplit=unsplit(job),
        expert_options=[
            ExpertOptions(joint, slots) for slots in (0, job.plan.parallel.expert_slots) for joint in (False, True)
        ],
    )


def unsplit(job: Job) -> dict[str, str]:
    """Axes over which the job's model cannot be parallelized, not even over two ranks, with the reason."""
    model = build_on_meta(read_config(few_layers(job.model)), torch.bfloat16)
    anatomy = read_anatomy(model)
    return refused_axes(job.plan, lambda plan: check_axes(model, anatomy, plan))


def refused_axes(base: Plan, check: Callable[[ResolvedPlan], object]) -> dict[str, str]:
    """Axes that a check refuses for two ranks, with the reason.

    Args:
        base: provides all settings but the parallel degrees.
        check: function of a plan that raises a WeftError.
    """
    refused = {}
    for axis in ("tp", "cp", "pp", "ep"):
        parallel = Parallel(zero=3).model_copy(update={axis: 2})
        plan = base.model_copy(update={"parallel": parallel, "pipeline": Pipeline()})
        try:
            check(resolve_plan(plan, 2, native_bf16=True))
        except WeftError as error:
            refused[axis] = error.what
    return refused


def shape_of(job: Job) -> Shape:
    """Dimensions of the job's model."""
    config: transformers.PretrainedConfig = read_config(job.model)
    return from_config(config.get_text_config().to_dict())


def type_of(cluster: ClusterSpec) -> str:
    """Torch device type of a cluster: "cpu", "npu" or "cuda"."""
    name = cluster.device.name
    return "cpu" if name == "CPU" else "npu" if name.startswith("Ascend") else "cuda"
