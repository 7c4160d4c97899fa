"""Jobs with a trainer of TRL: check the job, prepare its run folder, and print what training has changed."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weft.device.device import Device
from weft.evaluation.results import HISTORY
from weft.files import replace_file
from weft.integrations.trainer_checkpoints import newest_complete
from weft.job import Job
from weft.launch.interrupts import keep_interrupts
from weft.launch.watchdog import Timeouts
from weft.memory.offload import explain_host_memory
from weft.plan import refuse_run_keys, resolve_plan
from weft.posttraining.job import TrainerJob
from weft.posttraining.kinds import KINDS
from weft.posttraining.report import TIMES, read_history, write_report
from weft.posttraining.resume import check_resume, job_facts
from weft.posttraining.trainers import EXPORT, check_job, generator_device
from weft.precision.dtypes import explain_precision
from weft.training.metrics import read_task_evaluations
from weft.training.run_folder import HeldFolders, make_run_id
from weft.training.startup import describe_device

HANG_SECONDS = 1800.0  # TRL gives no sign of life while it generates


class TrainerWork:
    """Job of a trainer of TRL, for `launch_work` and `inside`: see `weft.training.work.Work`.

    Its run folder gets `trainer_state.json` with all logs, `checkpoint-N`, and the model in `export`.

    Args:
        job: job to train.
        log: function that prints a line.
    """

    module, forks, replaces_hosts = "weft.posttraining.rank", False, False
    timeouts = Timeouts(other=HANG_SECONDS, hang=HANG_SECONDS)

    def __init__(self, job: TrainerJob, *, log: Callable[[str], None] = partial(print, flush=True)):  # noqa: B008
        self.trainer_job, self.job, self.log = job, Job(out=job.out), log

    def check(self, device: Device) -> None:
        """Nothing: `prepare` checks the job, which needs its rows and its model."""

    def prepare(self, folders: HeldFolders, ranks_by_host: Sequence[int], device: Device, resume: str | None) -> None:
        """Write `job.toml` for the ranks."""
        job, all_ranks, out, log = self.trainer_job, sum(ranks_by_host), Path(self.job.out), self.log
        with keep_interrupts():
            rows = check_job(job, all_ranks, resume)
            if job.trainer.generator == "process":
                generator_device(device, ranks_by_host[0])
            if folder := newest_complete(out) if resume == "auto" else resume:
                check_resume(job_facts(job), folder)  # the ranks print what it returns
        if resume is None and (aside := folders.move_aside()):
            log(f"the earlier run in {out} is now {aside}; `weft clean {out}` removes runs moved aside")
        make_run_id(out)
        replace_file(out / "job.toml", job.to_toml())
        if plan := job.plan:
            refuse_run_keys(plan, "trainer of TRL")
            plan = resolve_plan(plan, all_ranks, native_bf16=device.supports("bf16"))
        log(f"device      {describe_device(device, all_ranks, plan)}")
        if plan:
            log(f"precision   {explain_precision(plan.precision, device)}")
        log(f"model       {job.model.path}, adapter {job.adapter.kind}")
        log(f"data        {rows}")
        experimental = ", which may change it in any version" * (KINDS[job.trainer.kind].module != "trl")
        log(f"trainer     {job.trainer.kind} of TRL {version('trl')}{experimental}")
        for line in explain_host_memory(plan.memory, device.type) if plan else ():
            log(line)

    def finish(self, succeeded: bool) -> None:
        """Print what training has changed, and write the report."""
        if not succeeded:
            return
        out = Path(self.job.out)
        for line in changes(out):
            self.log(line)
        try:
            self.log(f"report      {write_report(out)}")
        except OSError as error:  # the model is saved, and a report can be written later
            self.log(f"report      not written: {error}; write it later with `weft report {out}`")


def changes(out: Path) -> list[str]:
    """Lines about a finished run: the first and the last evaluation of metrics and of tasks, and the folder of the model."""
    history: list[dict[str, Any]] = read_history(out)
    evaluations = [row for row in history if "eval_loss" in row or "eval_reward" in row]
    lines = []
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        names = [name for name in last if name.startswith("eval_") and not name.endswith(TIMES) and name in first]
        lines.append(f"evaluation  after step {first['step']} -> after step {last['step']}")
        lines += _changes([(name.removeprefix("eval_"), first[name], last[name]) for name in names])
    tasks = read_task_evaluations(out / HISTORY) if (out / HISTORY).is_file() else []
    if len(tasks) == 1:
        lines.append(f"tasks       after step {tasks[0].step}: {tasks[0].text()}")
    elif tasks:
        before, after = tasks[0].values(), tasks[-1].values()
        lines.append(f"tasks       after step {tasks[0].step} -> after step {tasks[-1].step}")
        lines += _changes([(name, before[name], value) for name, value in after.items() if name in before])
    return [*lines, f"model       {out / EXPORT}"]


def _changes(values: list[tuple[str, float, float]]) -> list[str]:
    """Lines of values by name, (name, first value, last value)."""
    width = max((len(name) for name, _, _ in values), default=0) + 2
    return [f"  {name:<{width}}{first:.4g} -> {last:.4g}" for name, first, last in values]
