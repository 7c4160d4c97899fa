"""Entry point of each rank of a job with a trainer: python -m weft.posttraining.rank RUN_FOLDER [SOURCE...]."""

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import datasets
import torch.distributed as dist
import transformers

from weft.checkpoint.snapshot import wait_for_writers
from weft.checkpoint.together import ask_rank_0, new_folder
from weft.device.detect import detect
from weft.integrations.generator import ProcessGenerator
from weft.integrations.optimizer import refuse_untrained
from weft.integrations.trainer_checkpoints import newest_complete
from weft.job import Job
from weft.launch.heartbeat import Heartbeat
from weft.launch.rank_entry import connect, rank_main
from weft.own_code import load_module
from weft.posttraining.export import keep_files
from weft.posttraining.inputs import find_rows
from weft.posttraining.job import TrainerJob
from weft.posttraining.resume import check_resume, job_facts
from weft.posttraining.tasks import TaskCallback
from weft.posttraining.trainers import EXPORT, generator_device, make_trainer
from weft.training.metrics import MetricsWriter
from weft.training.run_folder import join_folders
from weft.training.same_inputs import compare_hosts, read_code, read_files
from weft.training.session import check_weights


def main() -> None:
    """Train in the run folder that the launcher has prepared, evaluate, and save the model."""
    train_rank(Path(sys.argv[1]), sys.argv[2:])


def train_rank(out: Path, resume: Sequence[str], store: dist.Store | None = None) -> int:
    """Train in a prepared run folder, on this rank. Collective.

    Args:
        out: run folder.
        resume: sources to resume from, in order of preference: "auto" or a checkpoint folder.
        store: store in which ranks of another launcher have met; None: see `weft.launch.rank_entry.connect`.

    Returns:
        0: a signal ends a trainer of TRL at once.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # of TRL's calls of Transformers, and of FSDP2's of torch
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    heartbeat = Heartbeat.open()
    heartbeat.phase("script")
    device = detect()
    if device.type == "cpu":  # accelerate would train on one process
        os.environ["ACCELERATE_USE_CPU"] = "true"
    connect(device, store)
    job = TrainerJob.load(out / "job.toml")
    join_folders(Job(out=job.out), out)  # the locks are held until this process ends
    compare_hosts(partial(_read_inputs, job))
    train(job, resume, heartbeat)
    wait_for_writers()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _read_inputs(job: TrainerJob) -> dict[str, str]:
    """Values of this host that must be the same on all hosts."""
    functions = [name for name in job.trainer.rewards if ":" in name]
    for name in functions:
        load_module(name.partition(":")[0], f"trainer.rewards = {name}")
    found = read_code() | read_files(job.model.path, "model.path")
    named = [("trainer.rewards", name) for name in set(job.trainer.rewards).difference(functions)]
    named += [("trainer.reference", job.trainer.reference), ("trainer.teacher", job.trainer.teacher)]
    for key, path in [*named, ("adapter.path", job.adapter.path or "")]:
        found |= read_files(path, key) if path else {}
    for key, rows in (("data.path", job.data.path), ("data.eval_path", job.data.eval_path)):
        for file in find_rows(rows, key) if rows else ():
            found |= read_files(file, key, ends=("",))
    return found


def find_checkpoint(out: Path, resume: Sequence[str]) -> str:
    """Checkpoint of the first source that has one, "auto" being the newest complete one of the run; "" without one."""
    return next(filter(None, (newest_complete(out) if source == "auto" else source for source in resume)), "")


def train(job: TrainerJob, resume: Sequence[str], heartbeat: Heartbeat) -> None:
    """Train, evaluate, and save the model and the logs, on this rank. Collective.

    Args:
        job: job.
        resume: as in `train_rank`. Without a checkpoint, training starts at the first step.
        heartbeat: heartbeat of this rank.

    Raises:
        JobError: TRL refuses an option, or a checkpoint has other inputs or settings that cannot change.
        NumericError: the updates of all steps were skipped.
    """
    out = Path(job.out)
    checkpoint = ask_rank_0(partial(find_checkpoint, out, resume)) or None
    facts = ask_rank_0(partial(job_facts, job))
    for line in ask_rank_0(partial(check_resume, facts, checkpoint)) if checkpoint else ():
        if dist.get_rank() == 0:
            print(line, flush=True)
    trainer = make_trainer(job)
    trainer.accelerator.training_state.facts = facts
    check_weights(trainer.model, job.model.path)
    with ExitStack() as stack:
        if job.trainer.generator == "process":
            device = generator_device(detect(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            generator = ProcessGenerator(job.model.path, job.adapter, device, out / "logs" / "generator.log")
            trainer.generator = stack.enter_context(closing(generator))
        tasks = TaskCallback(trainer, job, stack.enter_context(MetricsWriter(out)), heartbeat)
        if job.eval.tasks:
            trainer.add_callback(tasks)
        trainer.train(resume_from_checkpoint=checkpoint)
        refuse_untrained(trainer.accelerator._optimizers, f"trainer.kind = {job.trainer.kind}")
        if job.eval.tasks:
            tasks.evaluate(trainer.state.global_step)
        if trainer.eval_dataset is not None:
            trainer.evaluate()
    with new_folder(out / EXPORT) as part:
        trainer.save_model(str(part))
        if trainer.is_world_process_zero():
            keep_files(part, Path(job.model.path))
    trainer.save_state()


if __name__ == "__main__":
    rank_main(main)
