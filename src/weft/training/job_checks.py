"""Checks of a job before its ranks start: model, tokens, and the checkpoint that it resumes from."""

from contextlib import suppress
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from weft.adapters.base import check_same_base
from weft.adapters.model import build_model, check_plan
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.model_config import read_config
from weft.data import Prepared, RowSplit
from weft.data.row_split import proportional
from weft.errors import CheckpointError, JobError
from weft.job import Job
from weft.parallel.documents import check_packed_documents
from weft.parallel.moe_aux_loss import CORRECTION, find_corrected, hides_logits
from weft.parallel.parallelize import check_axes
from weft.parallel.sdc_check import check_sdc_plan
from weft.parallel.sequence_sharding import row_multiple
from weft.training.checkpoints import check_same_batches, check_same_update, checkpoint_folder


def check_model(job: Job) -> tuple[PretrainedConfig, Anatomy]:
    """Build the model on the meta device, and check that it supports sequence length, packing and plan of the job.

    Raises:
        ModelError: the model cannot be built, or its structure is not supported.
        JobError: the model has too few positions, or does not support packed documents.
    """
    config = read_config(job.model)
    check_plan(job)
    model = build_model(job, torch.float32)
    anatomy = read_anatomy(model)
    limit = anatomy.max_positions
    multiple = row_multiple(anatomy, job.plan)
    if limit is not None and job.data.seq_len > limit:
        raise JobError(
            f"data.seq_len = {job.data.seq_len} is longer than the model's {limit} positions",
            where=f"model_type {anatomy.family}",
            rule="data.seq_len must not exceed max_position_embeddings of the model's configuration",
            fix=f"set data.seq_len to {limit - limit % multiple or limit} or less",
        )
    if job.data.packing and job.data.source != "tokens":
        check_packed_documents(model, anatomy, job.plan, job.data.seq_len)
    train = job.train
    check_rows_per_rank(job)
    check_axes(model, anatomy, job.plan, job.data.seq_len, RowSplit.of_job(job).num_micro_batches)
    if train.router_bias_rate and not any(find_corrected(model, block) for block in anatomy.blocks):
        raise JobError(
            f"train.router_bias_rate = {train.router_bias_rate} for {anatomy.family}",
            where="train.router_bias_rate",
            rule=f"it moves the buffer {CORRECTION} of routers, which this model does not have",
            fix="leave train.router_bias_rate at 0; an auxiliary loss is set by model.config.output_router_logits",
        )
    if train.router_z_loss:
        _check_z_loss(model, anatomy, train.router_z_loss)
    if job.guard.sdc_check_interval:
        check_sdc_plan(job.plan)
    return config, anatomy


def check_rows_per_rank(job: Job) -> None:
    """Check that `rows_per_rank` covers the global batch, and that no rank has fewer rows than micro-batches.

    Args:
        job: job with a resolved plan.

    Raises:
        JobError: another sum than the global batch, or a rank without a row for each micro-batch.
    """
    split, key = RowSplit.of_job(job), "plan.parallel.rows_per_rank"
    rows, total = split.rows_per_rank, split.global_batch
    if not rows:
        return
    if sum(rows) != total:
        raise JobError(
            f"{key} has the sum {sum(rows)}, and train.global_batch_size is {total}",
            where=key,
            rule="the data ranks share all rows of a global batch",
            fix=f"set {key} = {list(proportional(total, rows))}, or train.global_batch_size = {sum(rows)}",
        )
    if min(rows) < split.num_micro_batches:
        raise JobError(
            f"data rank {rows.index(min(rows))} has {min(rows)} rows for {split.num_micro_batches} micro-batches",
            where=key,
            rule="all data ranks run the same number of micro-batches, each of at least one row: the largest number of rows "
            "divided by train.micro_batch_size",
            fix=f"set train.micro_batch_size to {-(-max(rows) // min(rows))} or more, or give the rank more rows",
        )


def _check_z_loss(model: PreTrainedModel, anatomy: Anatomy, coefficient: float) -> None:
    """Refuse a z-loss for a model without routers, or with a router whose logits cannot be seen."""
    hidden = hides_logits(model, anatomy)
    if hidden or not any(block.router for block in anatomy.blocks):
        raise JobError(
            f"train.router_z_loss = {coefficient} for {anatomy.family}"
            + (f": {hidden} does not return its logits" if hidden else ", which has no routers"),
            where="train.router_z_loss",
            rule="the z-loss is computed from router logits, [tokens, experts], the first output of each router module",
            fix="leave train.router_z_loss at 0",
        )


def check_tokens(job: Job, prepared: Prepared, config: PretrainedConfig) -> None:
    """Check that the model has an embedding for every token.

    Raises:
        JobError: the vocabulary of the tokenizer is larger than the embedding of the model.
    """
    entries = config.get_text_config().vocab_size
    if prepared.vocab_size > entries:
        raise JobError(
            f"the tokens need a vocabulary of {prepared.vocab_size}, the model has {entries}",
            where=f"tokenizer {prepared.tokenizer or job.data.path}",
            rule="every token must have an entry in the model's embedding",
            fix=f"set model.config.vocab_size to {prepared.vocab_size} or more, or data.vocab_size to {entries} or less",
        )


def check_resume(job: Job, prepared: Prepared, resume: str | None, *, accept_changes: bool = False) -> None:
    """Refuse to resume from an unreadable checkpoint, or with other batches or optimizer settings. Changes no files.

    Args:
        job: job that resumes.
        prepared: prepared tokens of the job.
        resume: "auto", a checkpoint folder, or None.
        accept_changes: allow other optimizer settings, and the tokens in `prepared.accepted`.

    Raises:
        CheckpointError: the folder named by `resume` has no readable manifest, or checkpoint.key_file holds no key.
        JobError: batches or optimizer settings differ.
    """
    key = read_key(job.checkpoint.key_file)
    if resume is None:
        return
    for folder in list_checkpoints(checkpoint_folder(job)) if resume == "auto" else [Path(resume)]:
        try:
            manifest = read_manifest(folder, key)
        except CheckpointError:
            if resume != "auto":
                raise
            continue
        check_same_base(job, manifest, folder)
        check_same_batches(job, (prepared.identity, *prepared.accepted), manifest, folder)
        if not accept_changes:
            check_same_update(job, manifest.job, manifest.position.step, str(folder))
        return
    earlier = Path(job.out) / "job.toml"
    if resume == "auto" and not accept_changes and earlier.exists():  # an in-memory checkpoint may exist
        before = Job.load(earlier)
        if before.checkpoint.memory_every:
            check_same_update(job, before.model_dump(mode="json"), before.train.steps, str(earlier))


def earlier_tokens(job: Job, resume: str) -> tuple[str, ...]:
    """`identity` of the tokens of all checkpoints that a run may resume from, on disk or in memory."""
    identities, key = set(), read_key(job.checkpoint.key_file)
    for folder in list_checkpoints(checkpoint_folder(job)) + [Path(resume)] * (resume != "auto"):
        with suppress(CheckpointError):  # the ranks report why they skip a checkpoint
            identities.add(read_manifest(folder, key).data)
    with suppress(OSError, ValueError, TypeError, KeyError):  # tokens of in-memory checkpoints
        earlier = Prepared.from_json((Path(job.out) / "prepared.json").read_text(encoding="utf-8"))
        identities |= {earlier.identity, *earlier.accepted}
    return tuple(sorted(identities))
