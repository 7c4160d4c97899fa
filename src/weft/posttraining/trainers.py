"""Trainers of TRL for jobs: checks of their options, and the trainer of a rank."""

import dataclasses
import difflib
from pathlib import Path
from typing import Any

import torch
import transformers

from weft.adapters.model import build_model, peft_config
from weft.checkpoint.model_config import read_config
from weft.data.template_trial import refuse_endless
from weft.data.tokenizer import load_tokenizer
from weft.device.detect import detect
from weft.device.device import Device
from weft.errors import JobError
from weft.integrations.auto_plan import AutoPlan
from weft.integrations.trainer import check_trainer, with_weft
from weft.job import Job, Model
from weft.own_code import import_extra, load_function
from weft.plan import Parallel, Plan
from weft.posttraining.inputs import check_inputs, check_reward
from weft.posttraining.job import Kind, TrainerJob
from weft.posttraining.rows import check_rows, read_rows
from weft.training.task_evaluation import check_tasks

CLASSES: dict[Kind, str] = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
"""Beginning of the names of the trainer's class and of its configuration in TRL."""
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


def check_job(job: TrainerJob, ranks: int, resume: str | None = None) -> str:
    """Check everything that can be checked before the ranks start.

    Args:
        job: job.
        ranks: number of ranks of all hosts.
        resume: source to resume from; None for a new run.

    Returns:
        Text about the rows.

    Raises:
        WeftError: an option does not exist or is set by another key, a function does not exist, the model
            folder is incomplete, a row or a task is invalid, or the trainer does not take the plan.
    """
    trl = import_trl()
    plan = (job.plan or Plan(parallel=Parallel(zero=0))).resolve(ranks)  # the planner chooses none that is refused
    known = {field.name for field in dataclasses.fields(getattr(trl, f"{CLASSES[job.trainer.kind]}Config"))}
    for name, value in job.trainer.options.items():
        if name in OWNED and not (job.plan is None and name in ("bf16", "fp16")):
            raise JobError(
                f"trainer.options.{name} = {value}",
                where="trainer.options",
                rule=f"this is set by {OWNED[name]}",
                fix=f"remove the option, and set {OWNED[name]}",
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise JobError(
                f"unknown option trainer.options.{name}",
                where="trainer.options",
                rule=f"options are the settings of TRL's {CLASSES[job.trainer.kind]}Config",
                fix=f"did you mean {near[0]}?" if near else "see the documentation of TRL",
            )
    noise = bool(job.trainer.options.get("neftune_noise_alpha"))
    sampling = str(job.trainer.options.get("train_sampling_strategy", ""))
    check_trainer(getattr(trl, f"{CLASSES[job.trainer.kind]}Trainer"), plan, sampling, noise)
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
    if "router_aux_loss_coef" in known:
        _check_router_loss(job, plan, config)
    check_tasks(job.eval, job.model.path)
    if job.adapter.kind != "none":  # a model without memory, whose layers are those of the targets
        build_model(Job(model=Model(path=job.model.path), adapter=job.adapter), torch.float32)
    train, evaluation = read_rows(job.data, _seed(job))
    has_template = bool(tokenizer.chat_template)
    if has_template:
        refuse_endless(tokenizer, job.model.path)
    check_rows(train, job.trainer.kind, job.data.path, has_template=has_template)
    if evaluation is None:
        return f"{len(train)} rows to train on"
    check_rows(evaluation, job.trainer.kind, job.data.eval_path or job.data.path, has_template=has_template)
    return f"{len(train)} rows to train on, {len(evaluation)} to evaluate on"


def _read_folder(path: str, key: str) -> tuple[Any, Any]:
    """Configuration of the decoder, and tokenizer, of a model folder.

    Raises:
        ModelError, DataError: Transformers cannot read them.
    """
    return read_config(Model(path=path)).get_text_config(), load_tokenizer(Path(path), key)


def _check_router_loss(job: TrainerJob, plan: Plan, config: Any) -> None:
    """Refuse the auxiliary loss of routers, which TRL adds to its own, where the tokens of a row are split over ranks.

    Args:
        job: job whose trainer has the option `router_aux_loss_coef`.
        plan: resolved.
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
    trl, name, device = import_trl(), CLASSES[job.trainer.kind], detect()
    native_bf16 = device.supports("bf16")
    train, evaluation = read_rows(job.data, _seed(job))
    own = {"eval_on_start": evaluation is not None, "bf16": job.plan is None and native_bf16}
    options = DEFAULTS | own | job.trainer.options
    try:
        arguments = getattr(trl, f"{name}Config")(output_dir=job.out, use_cpu=device.type == "cpu", **options)
    except (TypeError, ValueError) as error:
        raise JobError(
            f"TRL refuses the options: {str(error).strip()}",
            where="trainer.options",
            rule=f"options are the settings of TRL's {name}Config",
            fix="change the option; see the documentation of TRL",
        ) from None
    transformers.set_seed(arguments.seed)  # a new head or adapter is the same on all ranks
    adapters = None
    if job.adapter.kind != "none":
        adapters = peft_config(job.adapter)
        if job.trainer.kind == "reward":
            adapters.task_type = "SEQ_CLS"
    rewards = [_reward(reward) for reward in job.trainer.rewards]
    plan = job.plan.resolve_precision(native_bf16) if job.plan else AutoPlan(Path(job.out))
    return with_weft(getattr(trl, f"{name}Trainer"), plan)(
        model=job.model.path,
        args=arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        peft_config=adapters,
        **({"reward_funcs": rewards} if rewards else {}),
    )


def _seed(job: TrainerJob) -> int:
    return int(job.trainer.options.get("seed", 42))


def _reward(name: str) -> Any:
    """Reward of trainer.rewards: a function, or the path of a reward model, which TRL loads."""
    check_reward(name)
    return name if Path(name).is_dir() else load_function(name, "trainer.rewards")
