"""Trainers of TRL for jobs: checks of their options, and the trainer of a rank."""

import dataclasses
import difflib
import importlib
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers

from weft.adapters.folder import check_folder
from weft.adapters.model import build_model, import_peft, peft_config
from weft.checkpoint.model_config import read_config
from weft.data.template_trial import refuse_endless
from weft.data.tokenizer import check_same_tokens, load_tokenizer
from weft.device.detect import detect
from weft.device.device import Device
from weft.errors import JobError, Refusal, raise_if_refused
from weft.integrations.auto_plan import AutoPlan
from weft.integrations.trainer import check_trainer, with_weft
from weft.job import Job, Model
from weft.own_code import import_extra, load_function
from weft.plan import Parallel, Plan, ResolvedPlan, resolve_plan
from weft.posttraining.inputs import check_inputs, check_reward
from weft.posttraining.job import TrainerJob
from weft.posttraining.kinds import KINDS, Kind, TrainerKind
from weft.posttraining.lengths import check_prompts, count_rows
from weft.posttraining.rows import check_rows, read_rows
from weft.training.task_evaluation import check_tasks

OWNED = {
    "output_dir": "out",
    "resume_from_checkpoint": "--resume",
    "bf16": "plan.precision.param_dtype",
    "fp16": "plan.precision.param_dtype",
    "deepspeed": "plan",
    "fsdp": "plan",
    "fsdp_config": "plan",
    "parallelism_config": "plan",
    "accelerator_config": "plan",
    "teacher_model_name_or_path": "trainer.teacher",
    "reward_model_path": "trainer.rewards",
}
"""Options of TRL that a job sets by another key."""
DEFAULTS = {"report_to": "none", "disable_tqdm": True}
EXPORT = "export"
"""Folder of the trained model, in the run folder."""


def import_trl() -> Any:
    """Module trl.

    Raises:
        JobError: it is not installed.
    """
    return import_extra("trl", "hf", "trainer.kind", "preference and reinforcement learning use the trainers of TRL")


def trainer_class(kind: Kind) -> Any:
    """Class of TRL's trainer.

    Raises:
        JobError: TRL is not installed, or this version has no such trainer.
    """
    return _class_of(KINDS[kind], "Trainer")


def config_class(kind: Kind) -> Any:
    """Class of TRL's configuration of a trainer.

    Raises:
        JobError: TRL is not installed, or this version has no such trainer.
    """
    return _class_of(KINDS[kind], "Config")


def _class_of(kind: TrainerKind, suffix: str) -> Any:
    version = import_trl().__version__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a module is experimental, which the startup screen says
            return getattr(importlib.import_module(kind.module), kind.name + suffix)
    except (ImportError, AttributeError):
        raise JobError(
            f"TRL {version} has no {kind.name}{suffix} in {kind.module}",
            where="trainer.kind",
            rule="jobs use the trainers of the installed TRL; those of trl.experimental come and go",
            fix="install a version of TRL with this trainer, such as 1.16, or choose another kind",
        ) from None


def check_job(job: TrainerJob, ranks: int, resume: str | None = None) -> str:
    """Check everything that can be checked before the ranks start.

    Args:
        ranks: number of ranks of all hosts.
        resume: source to resume from; None for a new run.

    Returns:
        Text about the rows.

    Raises:
        WeftError: an option does not exist or is set by another key, a function does not exist, the model
            folder is incomplete, a row or a task is invalid, or the trainer does not take the plan.
    """
    kind = KINDS[job.trainer.kind]
    chosen = job.plan or Plan(parallel=Parallel(zero=0))  # the planner chooses none that is refused
    plan = resolve_plan(chosen, ranks, native_bf16=detect().supports("bf16"))
    known = {field.name for field in dataclasses.fields(config_class(job.trainer.kind))}
    raise_if_refused(_reason_against_options(job, kind, known))
    _check_values(job, kind)
    noise = bool(job.trainer.options.get("neftune_noise_alpha"))
    sampling = str(job.trainer.options.get("train_sampling_strategy", ""))
    check_trainer(trainer_class(job.trainer.kind), plan, sampling, noise)
    if plan.parallel.pp > 1:
        raise JobError(
            f"trainer.kind = {job.trainer.kind} with plan.parallel.pp = {plan.parallel.pp}",
            where="plan.parallel.pp",
            rule="these trainers compute their losses from logits, which only the last stage of a pipeline has",
            fix="set plan.parallel.pp = 1",
        )
    check_inputs(job, resume)
    for reward in job.trainer.rewards:
        if isinstance(_reward(reward), str):
            _read_folder(reward, "trainer.rewards")
    config, tokenizer = _read_folder(job.model.path, "model.path")
    for key, path in (("trainer.reference", job.trainer.reference), ("trainer.teacher", job.trainer.teacher)):
        if path:
            _check_other_model(path, key, job, config)
    if "router_aux_loss_coef" in known:
        _check_router_loss(job, plan, config)
    check_tasks(job.eval, job.model.path)
    if job.adapter.kind != "none":  # a model without memory, whose layers are those of the targets
        adapted = Job(model=Model(path=job.model.path), adapter=job.adapter)
        build_model(adapted, torch.float32)
        check_folder(adapted)
    train, evaluation = read_rows(job.data, _seed(job), job.trainer.kind)
    has_template = bool(tokenizer.chat_template)
    if has_template:
        refuse_endless(tokenizer, job.model.path)
    options = {**default_options(job.trainer.kind), **kind.options, **job.trainer.options}
    if "num_generations" in options and job.plan:
        check_prompts(len(train), options, plan.parallel.data_ranks, job.data.path)
    parts = {"to train on": (train, job.data.path), "to evaluate on": (evaluation, job.data.eval_path or job.data.path)}
    texts = []
    for purpose, (rows, path) in parts.items():
        if rows is not None:
            check_rows(rows, job.trainer.kind, path, has_template=has_template)
            texts.append(f"{count_rows(rows, job.trainer.kind, tokenizer, options, path)} {purpose}")
    return ", ".join(texts)


def _reason_against_options(job: TrainerJob, kind: TrainerKind, known: Collection[str]) -> Refusal | None:
    """Reason against options that another key sets, or that are not among the known ones."""
    for name, value in job.trainer.options.items():
        if name in OWNED and not (job.plan is None and name in ("bf16", "fp16")):
            return Refusal(
                f"trainer.options.{name} = {value}",
                where="trainer.options",
                rule=f"this is set by {OWNED[name]}",
                fix=f"remove the option, and set {OWNED[name]}",
                error=JobError,
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            return Refusal(
                f"unknown option trainer.options.{name}",
                where="trainer.options",
                rule=f"options are the settings of TRL's {kind.name}Config",
                fix=f"did you mean {near[0]}?" if near else "see the documentation of TRL",
                error=JobError,
            )
    return None


def default_options(kind: Kind) -> dict[str, Any]:
    """Defaults of the options of a trainer.

    Raises:
        JobError: TRL is not installed, or this version has no such trainer.
    """
    fields = dataclasses.fields(config_class(kind))
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _check_other_model(path: str, key: str, job: TrainerJob, config: Any) -> None:
    """Refuse a reference or a teacher that reads other tokens than the model.

    Args:
        path: folder of the reference or the teacher.
        key: its key.
        config: configuration of the decoder of the model.

    Raises:
        JobError: a teacher with another size of its vocabulary.
        DataError: another tokenizer.
        ModelError: the folder cannot be read.
    """
    other, _ = _read_folder(path, key)
    check_same_tokens(Path(path), Path(job.model.path), key)
    if key == "trainer.teacher" and other.vocab_size != config.vocab_size:
        raise JobError(
            f"{path} has {other.vocab_size} tokens, and the model has {config.vocab_size}",
            where=key,
            rule="TRL compares the probabilities of all tokens of one vocabulary",
            fix='choose a teacher with the same vocab_size; train.loss = "weft:distillation" takes padded vocabularies',
        )


def _check_values(job: TrainerJob, kind: TrainerKind) -> None:
    """Refuse options that contradict the kind of the trainer, or by which nothing is learned.

    Raises:
        JobError: names the option.
    """
    options = job.trainer.options
    if "loss_type" in options and "loss_type" in kind.options:
        raise JobError(
            f"trainer.options.loss_type = {options['loss_type']} with trainer.kind = {job.trainer.kind}",
            where="trainer.options.loss_type",
            rule=f"the loss of this kind is {kind.options['loss_type']}",
            fix="remove the option, or choose another trainer.kind",
        )
    for name in kind.positive:
        values = options.get(name, 1.0)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, int | float) and not value > 0:
                raise JobError(
                    f"trainer.options.{name} = {value} with trainer.kind = {job.trainer.kind}",
                    where=f"trainer.options.{name}",
                    rule=f"{name} is above 0: TRL divides by it, or the loss has no gradient",
                    fix=f"set a {name} above 0, or remove the option",
                )


def _read_folder(path: str, key: str) -> tuple[Any, Any]:
    """Configuration of the decoder, and tokenizer, of a model folder.

    Raises:
        ModelError, DataError: Transformers cannot read them.
    """
    return read_config(Model(path=path)).get_text_config(), load_tokenizer(Path(path), key)


def _check_router_loss(job: TrainerJob, plan: ResolvedPlan, config: Any) -> None:
    """Refuse the auxiliary loss of routers, which TRL adds to its own, where the tokens of a row are split over ranks.

    Args:
        job: job whose trainer has the option `router_aux_loss_coef`.
        config: configuration of the decoder of the model.

    Raises:
        JobError: the coefficient is not 0.
    """
    coefficient = job.trainer.options.get("router_aux_loss_coef")
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    axis = next((axis for axis in ("tp", "cp") if getattr(plan.parallel, axis) > 1), "")
    if axis and coefficient and hasattr(config, "output_router_logits"):
        raise JobError(
            f"router_aux_loss_coef = {coefficient} with plan.parallel.{axis} = {getattr(plan.parallel, axis)}",
            where=f"plan.parallel.{axis}",
            rule="the auxiliary loss of the routers needs all tokens of a row on each rank",
            fix=f"set trainer.options.router_aux_loss_coef = 0, or plan.parallel.{axis} = 1",
        )


def generator_device(device: Device, ranks: int) -> torch.device:
    """Device of the process that generates completions: the CPU, or the first accelerator without a rank.

    Args:
        device: device of this host.
        ranks: ranks on this host.

    Raises:
        JobError: each accelerator has a rank.
    """
    if device.type != "cpu" and ranks >= device.count:
        raise JobError(
            f'trainer.generator = "process" with {ranks} ranks on {device.count} {device.type} devices',
            where="trainer.generator",
            rule="the process that generates completions needs a device without a rank",
            fix=f'set --nproc-per-node {max(device.count - 1, 1)}, or trainer.generator = "copy"',
        )
    return device.torch_device(0 if device.type == "cpu" else ranks)


def make_trainer(job: TrainerJob) -> Any:
    """Make the trainer of a job on this rank, under the plan of the job. Collective.

    Raises:
        JobError: TRL refuses an option.
    """
    kind, device = KINDS[job.trainer.kind], detect()
    native_bf16 = device.supports("bf16")
    train, evaluation = read_rows(job.data, _seed(job), job.trainer.kind)
    own = {"eval_on_start": evaluation is not None, "bf16": job.plan is None and native_bf16, **kind.options}
    if kind.template == "option" and job.data.chat_template_args:
        own["chat_template_kwargs"] = job.data.chat_template_args
    options = DEFAULTS | own | job.trainer.options
    try:
        arguments = config_class(job.trainer.kind)(output_dir=job.out, use_cpu=device.type == "cpu", **options)
    except (TypeError, ValueError) as error:
        raise JobError(
            f"TRL refuses the options: {str(error).strip()}",
            where="trainer.options",
            rule=f"options are the settings of TRL's {kind.name}Config",
            fix="change the option; see the documentation of TRL",
        ) from None
    transformers.set_seed(arguments.seed)  # a new head or adapter is the same on all ranks
    adapters, model = None, job.model.path
    if job.adapter.path:
        plain = load_plain(job, job.model.path)
        model = import_peft().PeftModel.from_pretrained(plain, job.adapter.path, is_trainable=True, torch_device="cpu")
    elif job.adapter.kind != "none":
        adapters = peft_config(job.adapter)
        if job.trainer.kind == "reward":
            adapters.task_type = "SEQ_CLS"
    more: dict[str, Any] = {}
    if job.trainer.rewards:
        more["reward_funcs"] = [_reward(reward) for reward in job.trainer.rewards]
    if job.trainer.reference:
        more["ref_model"] = load_plain(job, job.trainer.reference)
    if job.trainer.teacher:
        more["teacher_model"] = job.trainer.teacher
    if kind.module != "trl":  # some of them load none by themselves
        more["processing_class"] = load_tokenizer(Path(job.model.path), "model.path")
    plan = job.plan.with_dtypes(native_bf16) if job.plan else AutoPlan(Path(job.out))
    return with_weft(trainer_class(job.trainer.kind), plan)(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        peft_config=adapters,
        **more,
    )


def load_plain(job: TrainerJob, path: str | Path) -> Any:
    """Plain model of a folder in float32; for a reward model, a classifier with one output."""
    is_reward = job.trainer.kind == "reward"
    loader: Any = transformers.AutoModelForSequenceClassification if is_reward else transformers.AutoModelForCausalLM
    more = {"num_labels": 1} if is_reward else {}
    return loader.from_pretrained(path, dtype=torch.float32, local_files_only=True, **more)


def _seed(job: TrainerJob) -> int:
    return int(job.trainer.options.get("seed", 42))


def _reward(name: str) -> Any:
    """Reward of trainer.rewards: a function, or the path of a reward model, which TRL loads."""
    check_reward(name)
    return name if Path(name).is_dir() else load_function(name, "trainer.rewards")
