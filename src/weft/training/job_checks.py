"""Checks of a job before its ranks start: model, tokens, and the checkpoint that it resumes from."""

from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from weft.adapters.base import check_same_base
from weft.adapters.model import build_model
from weft.anatomy.classes import auto_class
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_any_anatomy
from weft.checkpoint.key import read_key
from weft.checkpoint.model_config import read_config
from weft.data import Prepared, RowSplit
from weft.data.labels import targets_of
from weft.data.noise import make_scheduler
from weft.data.record_batches import padding_of
from weft.data.row_split import proportional
from weft.data.tokenizer import check_same_tokens, has_tokenizer, load_tokenizer
from weft.device.device import Device
from weft.errors import CheckpointError, JobError, Refusal, UnreadableError, raise_if_refused
from weft.job import DISTILLATION, Job, ResolvedJob, Task, packs_base
from weft.parallel.choices import Choices, choose
from weft.parallel.experts.router_stats import CORRECTION, find_corrected, hides_logits
from weft.parallel.sequence.documents import reason_against_packing
from weft.parallel.sequence.rows import row_multiple
from weft.training.functions import digest_functions
from weft.training.record_checks import check_rows, reason_against_kind
from weft.training.remote_source import manifest_at, resume_candidates
from weft.training.resume_checks import check_same_batches, check_same_code, check_same_update
from weft.training.sdc_check import reason_against_sdc_checks
from weft.training.teacher import check_teacher


class CheckedModel(NamedTuple):
    """Model of a job, on the meta device, that supports its sequence length, packing and plan."""

    config: Any
    model: Any
    choices: Choices

    @property
    def anatomy(self) -> Anatomy:
        """Anatomy of the full model."""
        return self.choices.anatomy


def check_model(job: ResolvedJob, device: Device | None = None) -> CheckedModel:
    """Build the model on the meta device, and check that it supports sequence length, packing and plan of the job.

    Args:
        job: job.
        device: device that computes; None: operators are not chosen.

    Raises:
        ModelError: the model cannot be built, or its structure is not supported.
        JobError: the model has too few positions, or does not support packed documents.
    """
    raise_if_refused(_reason_against_task(job))
    config = read_config(job.model, job.task.kind, job.task.classes, in_4_bits=packs_base(job))
    model = build_model(job, torch.float32)
    anatomy = read_any_anatomy(model, needs_roles=job.task.kind == "causal")
    device_type = device.type if device else "cpu"
    choose_for = partial(choose, model, job.plan, device_type, device, anatomy=anatomy)
    if job.task.kind != "causal":
        raise_if_refused(_reason_against_other_model(job, model, config, anatomy.family) or reason_against_rows(job))
        return CheckedModel(config, model, choose_for(num_micro_batches=RowSplit.of_job(job).num_micro_batches))
    train = job.train
    refusal = _reason_against_length(job, anatomy.max_positions, anatomy.family, row_multiple(anatomy, job.plan))
    if job.data.packing and job.data.source != "tokens":
        refusal = refusal or reason_against_packing(model, anatomy, job.plan, job.data.seq_len)
    raise_if_refused(refusal or reason_against_rows(job))
    choices = choose_for(seq_len=job.data.seq_len, num_micro_batches=RowSplit.of_job(job).num_micro_batches)
    if train.router_bias_rate and not any(find_corrected(model, block) for block in anatomy.blocks):
        raise JobError(
            f"train.router_bias_rate = {train.router_bias_rate} for {anatomy.family}",
            where="train.router_bias_rate",
            rule=f"it moves the buffer {CORRECTION} of routers, which this model does not have",
            fix="leave train.router_bias_rate at 0; an auxiliary loss is set by model.config.output_router_logits",
        )
    if train.loss == DISTILLATION:
        check_teacher(job, model)
    if train.router_z_loss:
        raise_if_refused(_reason_against_z_loss(model, anatomy, train.router_z_loss))
    if job.guard.sdc_check_interval:
        raise_if_refused(reason_against_sdc_checks(job.plan))
    return CheckedModel(config, model, choices)


def _reason_against_other_model(job: Job, model: Any, config: Any, family: str) -> Refusal | None:
    """Reason against a model of another task than causal language modelling, or against rows that it cannot read."""
    kind = job.task.kind
    refusal = reason_against_kind(kind, model)
    if kind in ("masked", "seq2seq", "classification"):  # whose texts are cut to seq_len tokens
        limit = getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", None))
        refusal = refusal or _reason_against_length(job, limit, family)
        if kind != "classification" or model.main_input_name == "input_ids":
            refusal = refusal or _reason_without_padding(job, config)
    if refusal or not getattr(config, "apply_spec_augment", False):
        return refusal
    return Refusal(
        "apply_spec_augment = true",
        where=f"model_type {config.model_type}",
        rule="SpecAugment draws from a global generator: ranks would hide different features, and a resume others",
        fix="set apply_spec_augment to false in the configuration of the model",
        error=JobError,
    )


def _reason_against_length(job: Job, limit: int | None, family: str, multiple: int = 1) -> Refusal | None:
    """Reason against rows with more tokens than the model has positions.

    Args:
        job: job.
        limit: positions of the model; None: any number.
        family: model_type, for the message.
        multiple: number that divides the length of a row.
    """
    if limit is not None and job.data.seq_len > limit:
        return Refusal(
            f"data.seq_len = {job.data.seq_len} is longer than the model's {limit} positions",
            where=f"model_type {family}",
            rule="data.seq_len must not exceed max_position_embeddings of the model's configuration",
            fix=f"set data.seq_len to {limit - limit % multiple or limit} or less",
            error=JobError,
        )
    return None


def _reason_without_padding(job: Job, config: Any) -> Refusal | None:
    """Reason against texts without a padding id.

    A decoder used as a classifier pools the last token that differs from the `pad_token_id` of its configuration.
    """
    text, folder = config.get_text_config(), job.model.path if job.data.tokenizer == "train" else job.data.tokenizer
    padding, own = getattr(text, "pad_token_id", None), 0  # a trained tokenizer has 0, which ends texts, and no padding
    if padding is not None and 0 <= padding < text.vocab_size:
        return None
    if folder and has_tokenizer(Path(folder)):
        tokenizer = load_tokenizer(Path(folder), needs_end=False)
        if job.task.kind != "classification" and 0 <= padding_of(config, tokenizer) < text.vocab_size:
            return None
        own = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    key = "model.config.pad_token_id" if job.model.path is None else f"pad_token_id in {job.model.path}/config.json"
    return Refusal(
        f"pad_token_id = {padding} of a model with {text.vocab_size} tokens",
        where=f"model_type {config.model_type}",
        rule="texts of a micro-batch are padded to the same length, by a token of the model",
        fix=f"set {key} to {own}",
        error=JobError,
    )


def _reason_against_task(job: ResolvedJob) -> Refusal | None:
    """Reason against keys that apply to causal language models, for other tasks.

    Args:
        job: job.
    """
    kind, plan, train = job.task.kind, job.plan, job.train
    if kind == "causal" and job.task == Task():
        return None
    if kind == "causal":
        return Refusal(
            "the table task has keys of other tasks, with task.kind = 'causal'",
            where="task",
            rule="causal language models have no keys of their own in it",
            fix="set task.kind, or remove the table",
            error=JobError,
        )
    if kind == "diffusion":
        make_scheduler(job.task)
    causal_only = {
        "plan.parallel.ep": plan.parallel.ep > 1,
        "plan.precision.backward": plan.precision.backward == "fp16",
        "adapter.kind": job.adapter.kind != "none",
        "task.classes": kind != "classification" and job.task.classes is not None,
        "task.source_lang": kind != "seq2seq" and job.task.source_lang is not None,
        "task.target_lang": kind != "seq2seq" and job.task.target_lang is not None,
        "task.max_new_tokens": kind not in ("seq2seq", "vlm") and job.task.max_new_tokens is not None,
        "task.noise": kind != "diffusion" and job.task.noise != "flow",
        "task.scheduler": kind != "diffusion" and bool(job.task.scheduler),
        "train.loss": train.loss != "cross_entropy",
        "train.router_bias_rate": train.router_bias_rate > 0,
        "train.router_z_loss": train.router_z_loss > 0,
        "eval.tasks": bool(job.eval.tasks),
        "data.source": kind == "masked" and job.data.source == "tokens",
        "data.format": kind == "masked" and job.data.format != "text",
    }
    for key, is_set in causal_only.items():
        if is_set:
            return Refusal(
                f"{key} = {attrgetter(key)(job)!r} with task.kind = {kind!r}",
                where=key,
                rule="this value applies to causal language models",
                fix=f"leave {key} out; plan.parallel.zero = 0 to 3, recompute and offload of blocks work for every task",
                error=JobError,
            )
    return None


def reason_against_rows(job: ResolvedJob) -> Refusal | None:
    """Reason against `rows_per_rank` and `rebalance` of a job.

    `rows_per_rank` has another sum than the global batch, or fewer rows for a rank than micro-batches; or `rebalance`, which
    changes the rows at checkpoints, has none.
    """
    saves = job.checkpoint.every or job.checkpoint.memory_every
    if job.plan.parallel.rebalance != "off" and not saves and not job.train.profile_only:
        return Refusal(
            f'plan.parallel.rebalance = "{job.plan.parallel.rebalance}" without checkpoints during the run',
            where="plan.parallel.rebalance, checkpoint.every",
            rule="rows change whenever a checkpoint is due, and the checkpoint has the new rows",
            fix='set checkpoint.every, such as 500, or plan.parallel.rebalance = "off"',
            error=JobError,
        )
    split, key = RowSplit.of_job(job), "plan.parallel.rows_per_rank"
    rows, total = split.rows_per_rank, split.global_batch
    if not rows:
        return None
    if sum(rows) != total:
        return Refusal(
            f"{key} has the sum {sum(rows)}, and train.global_batch_size is {total}",
            where=key,
            rule="the data ranks share all rows of a global batch",
            fix=f"set {key} = {list(proportional(total, rows))}, or train.global_batch_size = {sum(rows)}",
            error=JobError,
        )
    if min(rows) < split.num_micro_batches:
        return Refusal(
            f"data rank {rows.index(min(rows))} has {min(rows)} rows for {split.num_micro_batches} micro-batches",
            where=key,
            rule="all data ranks run the same number of micro-batches, each of at least one row: the largest number of rows "
            "divided by train.micro_batch_size",
            fix=f"set train.micro_batch_size to {-(-max(rows) // min(rows))} or more, or give the rank more rows",
            error=JobError,
        )
    return None


def _reason_against_z_loss(model: PreTrainedModel, anatomy: Anatomy, coefficient: float) -> Refusal | None:
    """Reason against a z-loss for a model without routers, or with a router whose logits cannot be seen."""
    hidden = hides_logits(model, anatomy)
    if hidden or not any(block.router for block in anatomy.blocks):
        return Refusal(
            f"train.router_z_loss = {coefficient} for {anatomy.family}"
            + (f": {hidden} does not return its logits" if hidden else ", which has no routers"),
            where="train.router_z_loss",
            rule="the z-loss is computed from router logits, [tokens, experts], the first output of each router module",
            fix="leave train.router_z_loss at 0",
            error=JobError,
        )
    return None


def check_tokens(job: ResolvedJob, prepared: Prepared, config: PretrainedConfig) -> None:
    """Check that the model has an embedding for every token, and has learned the ids of the tokenizer.

    Raises:
        JobError: the vocabulary of the tokenizer is larger than the embedding of the model.
        DataError: the tokenizer in the folder of the model gives other ids.
    """
    _check_classes(job, prepared, config)
    raise_if_refused(_reason_against_fields(job, prepared, config))
    check_rows(job, prepared)
    if not prepared.vocab_size:  # of records without text
        return
    entries = config.get_text_config().vocab_size
    if prepared.vocab_size > entries:
        fix = f"set model.config.vocab_size to {prepared.vocab_size} or more, or data.vocab_size to {entries} or less"
        if job.model.path is not None:
            fix = "set data.tokenizer to the tokenizer of the model; or add entries to the model once, with Transformers: "
            fix += f"model.resize_token_embeddings({prepared.vocab_size}) and model.save_pretrained(FOLDER)"
        raise JobError(
            f"the tokens need a vocabulary of {prepared.vocab_size}, the model has {entries}",
            where=f"tokenizer {prepared.tokenizer or job.data.path}",
            rule="every token must have an entry in the model's embedding",
            fix=fix,
        )
    folder = Path(job.model.path).expanduser().resolve() if job.model.path else None
    if prepared.tokenizer and folder and has_tokenizer(folder) and folder != Path(prepared.tokenizer).resolve():
        check_same_tokens(folder, Path(prepared.tokenizer), "model.path", may_add=True)


def _reason_against_fields(job: Job, prepared: Prepared, config: Any) -> Refusal | None:
    """Reason against records without the field that the model reads: text, images or audio."""
    kind = job.task.kind
    if kind not in ("seq2seq", "classification"):
        return None
    model = auto_class(kind, config)._model_mapping[type(config)]
    text = "source" if kind == "seq2seq" else "text"
    wanted = {"input_ids": text, "pixel_values": "image"}.get(model.main_input_name, "audio")
    if wanted not in prepared.fields:
        return Refusal(
            f"the records have the fields {', '.join(prepared.fields)}, and {config.model_type} reads {wanted}",
            where="data.path" if job.data.path else "data.source",
            rule="the records have the field that the model reads: text, images or audio",
            fix=f"name another model, or records with {wanted}",
            error=JobError,
        )
    return None


def _check_classes(job: Job, prepared: Prepared, config: Any) -> None:
    """Check that the labels are those of a model: of a classifier, or an embedding for every class of diffusion."""
    labels = prepared.labels
    if labels is None:
        return
    if job.task.kind != "diffusion":
        targets_of(labels, job.model, config)
        return
    known = config.get("num_embeds_ada_norm")
    if labels.is_list or not labels.is_whole or labels.low < 0 or (known is not None and labels.classes > known):
        raise JobError(
            f"labels from {labels.low:g} to {labels.high:g}, {labels.classes} classes; the model has {known}",
            where="model.config.num_embeds_ada_norm",
            rule="every record has one class, an integer from 0 on or a name, and every class has an embedding",
            fix=f"set model.config.num_embeds_ada_norm = {labels.classes}, or correct the labels",
        )


def check_resume(job: Job, prepared: Prepared, resume: str | None, *, accept_changes: bool = False) -> None:
    """Refuse to resume from an unreadable checkpoint, or with other batches or optimizer settings. Changes no files.

    Args:
        job: job that resumes.
        prepared: prepared tokens of the job.
        resume: "auto", a checkpoint folder, a URL, or None.
        accept_changes: allow other optimizer settings, and the tokens in `prepared.accepted`.

    Raises:
        CheckpointError: the folder named by `resume` has no readable manifest, or checkpoint.key_file holds no key.
        UnreadableError: a manifest cannot be read at the moment.
        JobError: batches or optimizer settings differ.
    """
    key = read_key(job.checkpoint.key_file)
    if resume is None:
        return
    for found in resume_candidates(job, resume):
        try:
            manifest = manifest_at(found, key)
        except UnreadableError:
            raise
        except CheckpointError:
            if resume != "auto":
                raise
            continue
        check_same_base(job, manifest, found)
        check_same_batches(job, (prepared.identity, *prepared.accepted), manifest, found)
        if not accept_changes:
            check_same_update(job, manifest.job, manifest.position.step, found)
            check_same_code(digest_functions(job), manifest, found)
        return
    earlier = Path(job.out) / "job.toml"
    if resume == "auto" and not accept_changes and earlier.exists():  # an in-memory checkpoint may exist
        before = Job.load(earlier)
        if before.checkpoint.memory_every:
            check_same_update(job, before.model_dump(mode="json"), before.train.steps, str(earlier))


def earlier_tokens(job: Job, resume: str) -> tuple[str, ...]:
    """`identity` of the tokens of all checkpoints that a run may resume from, on disk, in a store or in memory."""
    identities, key = set(), read_key(job.checkpoint.key_file)
    for found in dict.fromkeys([*resume_candidates(job, "auto"), *resume_candidates(job, resume)]):
        with suppress(CheckpointError):  # the ranks report why they skip a checkpoint
            identities.add(manifest_at(found, key).data)
    with suppress(OSError, ValueError, TypeError, KeyError):  # tokens of in-memory checkpoints
        earlier = Prepared.from_json((Path(job.out) / "prepared.json").read_text(encoding="utf-8"))
        identities |= {earlier.identity, *earlier.accepted}
    return tuple(sorted(identities))
