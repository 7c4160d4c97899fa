"""Training session of one rank: process groups, model, optimizer, data, checkpoints and weight export."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.adapters.folder import save_adapters, start_adapters, start_reads_weights
from weft.adapters.model import build_model
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_any_anatomy
from weft.checkpoint.export_files import describe_task, set_end_of_text
from weft.checkpoint.huggingface import export_model
from weft.checkpoint.loading import materialize
from weft.checkpoint.manifest import Position
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import refused_weights, unusable_weight
from weft.checkpoint.snapshot import Snapshots
from weft.checkpoint.weight_files import file_of
from weft.comm.objects import all_gather_json, any_rank
from weft.data import AnyBatch, Prepared, Rows, RowSplit, TaskRows, batches, evaluation_batches, open_rows
from weft.device.detect import detect
from weft.device.device import Device
from weft.errors import ModelError
from weft.job import Job, Model, ResolvedJob, resolve_job
from weft.launch.rank_entry import connect
from weft.memory.storages import plain_parts
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import allocate, runtime
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh, data_rank
from weft.training.checkpoints import Checkpoints
from weft.training.functions import digest_functions, use_loss
from weft.training.optimizer import build_optimizer
from weft.training.same_inputs import compare_hosts, read_job_inputs


@dataclass(frozen=True)
class Session:
    """Training objects of one rank."""

    job: ResolvedJob
    prepared: Prepared
    device: Device
    torch_device: torch.device
    """Device of this rank."""
    rank: int
    mesh: DeviceMesh
    anatomy: Anatomy
    model: Any
    """Model of Transformers or Diffusers, parallelized."""
    optimizer: DistributedOptimizer
    train_rows: Rows | TaskRows
    held_out_rows: Rows | TaskRows
    checkpoints: Checkpoints | None
    """None without a run folder."""
    position: Position
    """Position where training starts."""


def open_session(
    job: Job,
    prepared: Prepared,
    run: Path | None = None,
    resume: Sequence[str] = (),
    store: dist.Store | None = None,
) -> Session:
    """Connect to the other ranks, parallelize the model, load its weights, and open the data.

    Args:
        run: run folder; None for a session without checkpoints.
        resume: sources in order of preference, "auto" or a checkpoint folder, to resume from under any plan. If there is no
            checkpoint, training starts from the first step.
        store: store in which the ranks have already met; None: see `weft.launch.rank_entry.connect`.

    Raises:
        CheckpointError: a named checkpoint does not verify, or belongs to another model.
        JobError: the data of the job differs from the data of the checkpoint, or the hosts have other inputs or versions.
    """
    device = detect()
    rank, world_size, local_rank = connect(device, store)
    compare_hosts(partial(read_job_inputs, job, prepared))
    torch_device = device.torch_device(local_rank)
    job = resolve_job(job, world_size, native_bf16=device.supports("bf16"))
    plan, rows = job.plan, RowSplit.of_job(job).rows_per_rank
    plan = plan.model_copy(update={"parallel": plan.parallel.model_copy(update={"rows_per_rank": rows})})
    mesh = build_mesh(plan, device.type, world_size)
    model = build_model(job, DTYPES[plan.precision.update])
    anatomy = read_any_anatomy(model, needs_roles=job.task.kind == "causal")
    parallelize(model, plan, mesh)
    job = job.model_copy(update={"plan": plan})
    use_loss(model, job)
    checkpoints = Checkpoints(job, run, prepared.identity, prepared.accepted) if run else None
    found = checkpoints.find(resume) if checkpoints else None
    has_adapters = runtime(model).saves_trained_only = job.adapter.kind != "none"
    if found and not has_adapters:
        allocate(model, torch_device)
    else:
        in_4_bits = plan.precision.frozen_weights == "nf4"
        start = partial(start_adapters, adapter=job.adapter, seed=job.model.init_seed, in_4_bits=in_4_bits)
        needs_weights = start_reads_weights(job.adapter)
        materialize(model, job.model, torch_device, start, job.task.kind, change_reads_weights=needs_weights)
        check_weights(model, str(job.model.path or "model.config"))
    if (teacher := runtime(model).teacher) is not None:
        materialize(teacher.model, Model(path=job.distillation.teacher), torch_device)
        check_weights(teacher.model, job.distillation.teacher)
    model.train()
    torch.manual_seed(job.train.seed + data_rank(mesh))  # dropout
    random.seed(job.train.seed + data_rank(mesh))  # the code of a model may use it; checkpoints include its state
    inner = build_optimizer(model, job.optimizer)
    optimizer = DistributedOptimizer(inner, model, device, keep_zeros=job.optimizer.keep_zeros)
    position = Position(step=0, next_batch=0, loss_scale=LossScale.from_plan(plan.precision.loss_scale))
    if checkpoints:
        identity, code = prepared.identity, digest_functions(job)
        snapshots = Snapshots(job, model, optimizer, device, torch_device, identity, checkpoints.run_id, code)
        checkpoints.attach(snapshots)
        if found:
            position = checkpoints.load(found)
            position = position.model_copy(update={"loss_scale": optimizer.loss_scale.resumed(position.loss_scale)})
            check_weights(model, str(found.folder))
    optimizer.loss_scale = position.loss_scale
    train_rows, held_out_rows = _open_rows(job, prepared, model.config)
    return Session(
        job=job,
        prepared=prepared,
        device=device,
        torch_device=torch_device,
        rank=rank,
        mesh=mesh,
        anatomy=anatomy,
        model=model,
        optimizer=optimizer,
        train_rows=train_rows,
        held_out_rows=held_out_rows,
        checkpoints=checkpoints,
        position=position,
    )


def _open_rows(job: Job, prepared: Prepared, config: Any) -> tuple[Rows | TaskRows, Rows | TaskRows]:
    """Rows to train on, and held-out rows."""
    if job.task.kind != "causal":
        return open_rows(job, prepared, config, held_out=False), open_rows(job, prepared, config, held_out=True)
    data = job.data
    open_split = partial(Rows, seq_len=data.seq_len, packing=data.packing)
    train = open_split(prepared.train, shuffle=data.shuffle, seed=job.train.seed)
    # The first rows of an evaluation are from all sets.
    return train, open_split(prepared.held_out, shuffle=len(data.sets) > 1, seed=0)


def row_split(session: Session, position: Position) -> RowSplit:
    """Split of the global batches from a position on: that of the plan, or with the rows that rebalance has chosen."""
    split, rows = RowSplit.of_job(session.job), position.rows_per_rank
    fits = len(rows) == split.data_ranks and sum(rows) == split.global_batch  # the number of ranks may have changed
    return replace(split, rows_per_rank=rows) if session.job.plan.parallel.rebalance == "auto" and fits else split


def train_batches(session: Session, position: Position) -> Iterator[list[AnyBatch]]:
    """Micro-batches of this rank for each remaining step, on its device."""
    train = session.job.train
    steps = batches(
        session.train_rows,
        steps=position.next_batch + train.steps - position.step,
        split=row_split(session, position),
        data_rank=data_rank(session.mesh),
        start_step=position.next_batch,
        pin=session.torch_device.type != "cpu",  # the host waits for a copy from other memory
    )
    for micro_batches in steps:
        yield [batch.to(session.torch_device) for batch in micro_batches]


def held_out_batches(session: Session) -> list[AnyBatch]:
    """Micro-batches of this rank for an evaluation, on its device; empty without held-out rows."""
    micro_batches = evaluation_batches(
        session.held_out_rows,
        micro_batch=session.job.train.micro_batch_size,
        data_rank=data_rank(session.mesh),
        data_ranks=session.job.plan.parallel.data_ranks,
        max_rows=session.job.train.evaluate_rows,
    )
    return [batch.to(session.torch_device) for batch in micro_batches]


def save_weights(session: Session, folder: Path) -> str:
    """Write the weights as a Hugging Face folder with tokenizer; of adapters, a folder of PEFT. Collective; rank 0 writes.

    Returns:
        Error message, for example of a full disk, the same on all ranks; "" if the folder was written.
    """
    job, model = session.job, session.model
    source = Path(job.model.path) if job.model.path else None
    tokenizer = Path(session.prepared.tokenizer) if session.prepared.tokenizer else None
    if job.adapter.kind != "none":
        return save_adapters(model, job, folder, tokenizer)
    with suppress(ModelError):  # a folder that is no longer there
        if hasattr(model.config, "use_cache"):  # it was switched off for training
            model.config.use_cache = read_config(job.model, job.task.kind, job.task.classes).use_cache
    if source is None and job.task.kind == "causal":  # a new model gets its end-of-text token from the tokenizer
        set_end_of_text(model, session.prepared.end_of_text)
    describe_task(model, job.model, session.prepared)
    return export_model(model, folder, tokenizer, DTYPES[job.plan.precision.update], source)


def check_weights(model: nn.Module, source: str) -> None:
    """Refuse weights that no step can use. Collective; all ranks raise the same error.

    Args:
        model: model with weights, parallelized or not.
        source: origin of the weights, for the message: a folder, or a key of the job.

    Raises:
        CheckpointError: a weight is NaN or infinite, or its square is infinite in float32; names the first such tensor in
            alphabetical order, its file and the number.
    """
    own: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        for part in plain_parts(parameter.detach()):
            if (unusable := unusable_weight(part)) is not None:
                own[name] = unusable
    if not any_rank(bool(own)):
        return
    found = [pair for pairs in all_gather_json(list(own.items())) for pair in pairs]
    bad: dict[str, float] = dict(sorted(found, key=lambda pair: not math.isfinite(pair[1])))
    if bad:
        raise refused_weights(bad, lambda name: str(file_of(name, Path(source)) or source))
