"""Jobs of `weft train`: check the job, prepare its data, and complete the summary after its ranks have ended."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.adapters.base import pin_base
from weft.adapters.folder import check_folder
from weft.checkpoint.model_config import explain_ties
from weft.data import Prepared, prepare
from weft.device.device import Device
from weft.errors import printable
from weft.files import replace_file
from weft.job import Job, ResolvedJob, resolve_job, with_plan
from weft.launch.interrupts import keep_interrupts
from weft.launch.watchdog import Timeouts
from weft.memory.offload import explain_host_memory
from weft.parallel.sequence.varlen import check_attention
from weft.plan import ResolvedPlan
from weft.precision.dtypes import check_dtypes, check_row_format, explain_precision
from weft.topology.axis_links import explain_plan
from weft.topology.topology import Topology, from_host_sizes
from weft.training.checkpoints import checkpoint_folder
from weft.training.functions import check_functions
from weft.training.inputs import check_inputs
from weft.training.job_checks import check_model, check_resume, check_tokens, earlier_tokens
from weft.training.profiler import check_profiled_ranks
from weft.training.remote_source import open_remote
from weft.training.resize import Resize
from weft.training.run_folder import (
    RUN_ID,
    SUMMARY,
    HeldFolders,
    check_checkpoint_folder,
    make_run_id,
    read_run_id,
)
from weft.training.run_summary import complete_summary
from weft.training.startup import (
    describe_operators,
    explain_capacity,
    explain_joint_experts,
    explain_relocation,
    explain_rows,
    startup_screen,
)
from weft.training.task_evaluation import check_tasks
from weft.versions import explain_versions

ChooseZero = Callable[[Job, Sequence[int], Device], tuple[Job, str]]
"""Function of a job, the number of ranks of each host and the device: the job with a ZeRO stage, and the reason for it."""


class TrainWork:
    """Job of `weft train`, for `launch_work` and `inside`: see `weft.training.work.Work`.

    Args:
        job: job to train.
        accept_changes: allow a resumed run to change optimizer, schedule, configuration or tokens.
        log: function that prints a line.
        end: called when the summary is complete.
        choose_zero: gives a job its ZeRO stage, and says why: `weft.planner.zero_stage.choose_zero`.
    """

    module, forks, replaces_hosts = "weft.training.rank", True, True
    prepared: tuple[ResolvedJob, Prepared]
    """Job and data of the ranks, after `prepare`."""

    def __init__(
        self,
        job: Job,
        *,
        accept_changes: bool = False,
        log: Callable[[str], None] = partial(print, flush=True),  # noqa: B008
        end: Callable[[Job], None] = lambda job: None,
        choose_zero: ChooseZero,
    ):
        self.job, self.accept_changes, self.log, self.end = job, accept_changes, log, end
        self.choose_zero = choose_zero
        self.timeouts = Timeouts(hang=job.guard.hang_timeout_seconds)
        self.forward = ""
        """Forward dtype and the reason for it."""
        self.summary_before: int | None = None

    def check(self, device: Device) -> None:
        """Refuse functions and dtypes that cannot be used on a device, and give the job its dtypes."""
        check_functions(self.job)
        self.forward = explain_precision(self.job.plan.precision, device)
        plan = self.job.plan.with_dtypes(device.supports("bf16"))
        self.job = self.job.model_copy(update={"plan": plan})
        check_dtypes(plan.precision, device)
        check_row_format(plan.comm, device)
        check_attention(plan, device)

    def prepare(self, folders: HeldFolders, ranks_by_host: Sequence[int], device: Device, resume: str | None) -> Resize:
        """Write `job.toml` and `prepared.json` for the ranks. Restarts exclude failing ranks, see `Resize`."""
        job, all_ranks, out, log = self.job, sum(ranks_by_host), Path(self.job.out), self.log
        with keep_interrupts():
            check_inputs(job, resume)
            remote = open_remote(job, resume, read_run_id(out))
            job, why_zero = self.choose_zero(job, ranks_by_host, device)
            resolved = resolve_job(job, all_ranks, native_bf16=device.supports("bf16"))
            plan = resolved.plan
            check_profiled_ranks(job.train, all_ranks)
            config, model, choices = check_model(resolved, device)
            anatomy, operators = choices.anatomy, describe_operators(model, choices, device.type)
            job = pin_base(job)
            check_folder(job)
            resolved = with_plan(job, plan)
            libraries = ["torch", "transformers"] + ["peft"] * (job.adapter.kind != "none")
            libraries += ["diffusers"] * (job.task.kind == "diffusion")
            lines = [*explain_versions(libraries), operators, *explain_links(plan, ranks_by_host)]
            lines += explain_joint_experts(resolved, device.type, len(ranks_by_host)) + explain_capacity(plan)
            lines += explain_host_memory(plan.memory, device.type) + explain_relocation(plan)
            lines += explain_rows(resolved) + explain_ties(job.model, config)
            lines += [f"{'zero':<12}{why_zero}"] if why_zero else []
            lines += [f"{'copies':<12}of each checkpoint go to {remote.url}, in the background"] if remote else []
            model_folder = Path(job.model.path) if job.model.path else None
            prepared = prepare(job.data, model_folder=model_folder, log=log, task=job.task)
            check_tokens(resolved, prepared, config)
            check_tasks(job.eval, prepared.tokenizer)
            if resume and self.accept_changes:
                prepared = replace(prepared, accepted=earlier_tokens(job, resume))
            if resume == "auto":
                check_checkpoint_folder(checkpoint_folder(job), read_run_id(out))
            check_resume(job, prepared, resume, accept_changes=self.accept_changes)
        if not resume:
            if aside := folders.move_aside():
                log(f"the earlier run in {out} is now {aside}; `weft clean {out}` removes runs moved aside")
            (out / RUN_ID).unlink(missing_ok=True)
        run_id = make_run_id(out, job.checkpoint.folder)
        if remote:
            remote.claim(run_id)
        replace_file(out / "job.toml", resolved.to_toml())
        replace_file(out / "prepared.json", prepared.to_json())
        for line in [*startup_screen(resolved, prepared, device, all_ranks, anatomy, out, self.forward), *lines]:
            log(printable(line))
        self.prepared, self.summary_before = (resolved, prepared), _changed(out / SUMMARY)
        return Resize(job, all_ranks, out / "job.toml")

    def finish(self, succeeded: bool) -> None:
        """Complete the summary, if the ranks ended training: at the last step or after a signal."""
        summary = Path(self.job.out) / SUMMARY
        if _changed(summary) not in (None, self.summary_before):
            causal = self.job.task.kind == "causal"
            self.log(
                "counting baselines on the same tokens, and generating a sample"
                if causal
                else "trying the export on held-out records"
            )
            complete_summary(*self.prepared, summary.parent, self.log)
        self.end(self.prepared[0])


def _changed(path: Path) -> int | None:
    """Time of the last change of a file, in ns; None without it."""
    return path.stat().st_mtime_ns if path.exists() else None


def explain_links(plan: ResolvedPlan, ranks: Sequence[int]) -> list[str]:
    """Lines about the links that each mesh axis of a plan uses, and warnings; empty for one host without a declared topology.

    Args:
        plan: plan.
        ranks: number of ranks of each host.

    Raises:
        TopologyError: the declared topology contradicts itself, or describes other hosts and ranks.
    """
    declared = plan.comm.topology
    if not declared and len(ranks) == 1:
        return []
    topology = Topology.load(declared) if declared else from_host_sizes(ranks)
    topology.check_fits(ranks, where=declared)
    return explain_plan(topology, plan)
