"""Teacher of a distillation: a second model on the ranks of the student, split like it, with a separate ZeRO stage."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.data.tokenizer import check_same_tokens, has_tokenizer
from weft.errors import JobError
from weft.job import Distillation, Job, Model, ResolvedJob
from weft.parallel.choices import check_axes
from weft.parallel.loss.distillation import Teacher, keep_hidden
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Parallel, Pipeline, Plan, Precision, ResolvedPlan, resolve_plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh, mesh_shape

SAME_AXES = ("dp_replicate", "dp_shard", "tp", "sp", "cp", "cp_ulysses", "pp")
"""Axes of the student's plan that the teacher's has too, so that a rank has the same tokens and vocabulary of both."""


def teacher_plan(plan: ResolvedPlan, settings: Distillation, *, has_experts: bool) -> ResolvedPlan:
    """Plan of the teacher.

    Args:
        plan: plan of the student.
        settings: table of the job.
        has_experts: True if the teacher has experts, which are then divided like the student's.
    """
    axes = {name: getattr(plan.parallel, name) for name in SAME_AXES}
    if has_experts:
        axes |= {"ep": plan.parallel.ep, "etp": plan.parallel.etp}
    dtype: Any = plan.precision.param_dtype if settings.param_dtype == "student" else settings.param_dtype
    # Nothing updates the weights: they are stored in the dtype of forward. Plans refuse updates in fp16, and
    # fp16 without a loss scale.
    wide: Any = "fp32" if dtype == "fp16" else dtype
    scale: Any = 1.0 if dtype == "fp16" else "none"
    precision = Precision(param_dtype=dtype, update=wide, reduce_dtype=wide, loss_scale=scale)
    teacher = Plan(
        parallel=Parallel(zero=3 if settings.shard_teacher else 0, **axes),
        precision=precision,
        pipeline=Pipeline(schedule=plan.pipeline.schedule, virtual_stages=plan.pipeline.virtual_stages),
    )
    return resolve_plan(teacher, plan.parallel.world_size, native_bf16=False)


def check_teacher(job: ResolvedJob, student: Any) -> None:
    """Check that the teacher of a job exists, has the vocabulary of the student, and supports its axes.

    Args:
        student: full model on any device.

    Raises:
        JobError: another size of the vocabulary, or another number of channels where hidden states are compared.
        DataError: the teacher has another tokenizer.
        CheckpointError: the folder has no configuration.
        PlanError: the teacher does not support an axis of the plan.
        ModelError: the teacher cannot be built.
    """
    config, folder = read_config(Model(path=job.distillation.teacher)), Path(job.distillation.teacher)
    size, vocabulary = (each.get_text_config().vocab_size for each in (config, student.config))
    tokens = None
    if has_tokenizer(folder) and job.data.source != "tokens":
        tokens = check_same_tokens(folder, _tokenizer_folder(job), "distillation.teacher")
    if size != vocabulary and (tokens is None or tokens > min(size, vocabulary)):
        raise JobError(
            f"{job.distillation.teacher} has {size} tokens, and the model has {vocabulary}",
            where="distillation.teacher",
            rule="the student learns the probability of each token of one vocabulary; sizes may differ by padding, if both "
            "have the same tokenizer",
            fix="choose a teacher with the tokenizer of the model in its folder, and the same vocab_size",
        )
    model = build_on_meta(config, torch.float32)
    anatomy = read_anatomy(model)
    if job.distillation.hidden_states:
        widths = [each.get_output_embeddings().weight.shape[1] for each in (model, student)]
        if widths[0] != widths[1]:
            raise JobError(
                f"{job.distillation.teacher} has hidden states of {widths[0]} channels, and the model of {widths[1]}",
                where="distillation.hidden_states",
                rule="hidden states are compared channel by channel",
                fix="set distillation.hidden_states = 0, or choose a teacher with as many channels",
            )
    plan = teacher_plan(job.plan, job.distillation, has_experts=anatomy.has_experts)
    check_axes(model, anatomy, plan, job.data.seq_len)


def _tokenizer_folder(job: Job) -> Path:
    """Folder of the tokenizer of a run with a teacher that has one.

    Raises:
        JobError: the tokenizer of the run is trained on its text.
    """
    trained = job.data.tokenizer == "train"
    folder = Path(job.model.path or "" if trained else job.data.tokenizer).expanduser()
    if trained and not has_tokenizer(folder):
        raise JobError(
            f'data.tokenizer = "train" with the tokenizer of {job.distillation.teacher}',
            where="data.tokenizer",
            rule="model and teacher read the same ids, and a tokenizer that is trained on the text has others",
            fix=f'set data.tokenizer = "{job.distillation.teacher}"',
        )
    return folder


def build_teacher(job: ResolvedJob, student: nn.Module, mesh: DeviceMesh) -> Teacher:
    """Build the teacher of a job on the meta device, and parallelize it. Collective.

    Args:
        student: parallelized model that learns.
    """
    settings = job.distillation
    plan = teacher_plan(job.plan, settings, has_experts=False)
    dtype = plan.precision.param_dtype
    model = build_on_meta(read_config(Model(path=settings.teacher)), DTYPES[dtype])
    plan = teacher_plan(job.plan, settings, has_experts=read_anatomy(model).has_experts)
    model.requires_grad_(False)
    if mesh_shape(plan) != tuple(mesh.shape):  # with zero = 0, ranks that would share a model hold copies
        mesh = build_mesh(plan, mesh.device_type, mesh.size())
    parallelize(model, plan, mesh)
    model.eval()
    sizes = (runtime(student).anatomy.vocab_size, runtime(model).anatomy.vocab_size)
    heads: list[nn.Module] = [each.get_submodule(runtime(each).anatomy.head) for each in (student, model)]
    if settings.hidden_states and all(any(True for _ in head.parameters()) for head in heads):  # not on another stage
        # Their hooks run after those of parallelism, so that the inputs have the tokens of the logits.
        for each, head in zip((student, model), heads, strict=True):
            keep_hidden(head, runtime(each).forward_slot)
    tables = None if sizes[0] == sizes[1] else sizes
    return Teacher(model, settings.temperature, settings.weight, settings.hidden_states, tables)
