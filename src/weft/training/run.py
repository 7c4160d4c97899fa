"""Launch of a run: check the job, prepare its data, start the ranks, and complete the summary after they end."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weft.adapters.base import pin_base
from weft.adapters.folder import check_folder
from weft.checkpoint.model_config import explain_ties
from weft.data import Prepared, prepare
from weft.device.detect import detect_for_launcher
from weft.device.device import Device
from weft.errors import Stopped, printable
from weft.evaluation.harness import HARNESS_ENVIRONMENT
from weft.files import replace_file
from weft.job import Job, ResolvedJob, resolve_job, with_plan
from weft.launch.coordinator import MAX_RESTARTS, JobCoordinator
from weft.launch.follow import closing, follow_host_0
from weft.launch.forkserver import ForkServer
from weft.launch.interrupts import keep_interrupts
from weft.launch.launcher import default_ranks, early_forkserver, launch, raise_on_signal, thread_variables
from weft.launch.rendezvous import RendezvousConfig
from weft.launch.rounds import resume_sources, round_of, write_round
from weft.launch.tls import GLOO_TRANSPORT
from weft.launch.watchdog import Timeouts
from weft.memory.offload import explain_host_memory
from weft.parallel.sequence.varlen import check_flex
from weft.plan import ResolvedPlan
from weft.precision.dtypes import check_dtypes, check_row_format, explain_precision
from weft.topology.axis_links import explain_plan
from weft.topology.topology import Topology, from_host_sizes
from weft.training.checkpoints import checkpoint_folder
from weft.training.claim import claim_run
from weft.training.functions import check_functions
from weft.training.inputs import check_inputs
from weft.training.job_checks import check_model, check_resume, check_tokens, earlier_tokens
from weft.training.profiler import check_profiled_ranks
from weft.training.resize import Resize
from weft.training.run_folder import (
    RUN_ID,
    SUMMARY,
    HeldFolders,
    check_checkpoint_folder,
    check_writable,
    join_folders,
    make_run_id,
    read_run_id,
)
from weft.training.run_summary import complete_summary
from weft.training.shared_folders import share_with_launchers, shared_folders, write_nonce
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

RANK_MODULE = "weft.training.rank"
SOURCES = "sources"  # key of the published settings
NO_ENCRYPTION = {"cuda": "NCCL", "npu": "HCCL"}


def train(
    job: Job,
    *,
    ranks: int | None = None,
    resume: str | None = None,
    accept_changes: bool = False,
    max_restarts: int = 0,
    rendezvous: RendezvousConfig | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Train a job on the devices of this machine, or of several hosts together.

    Invalid input is refused before a rank starts.

    Args:
        job: job to train.
        ranks: number of ranks on this host; default: one per accelerator, or two on CPU.
        resume: checkpoint folder to resume from, or "auto" for the newest valid checkpoint in the run folder, or for the first
            step if there is none. Default: start a new run, and move an earlier run in its folder aside.
        accept_changes: allow a resumed run to change optimizer, schedule, configuration or tokens.
        max_restarts: maximum consecutive restarts without progress; a failed job restarts from its newest valid checkpoint. A
            rank that fails twice in a row, or a lost host, is excluded if the plan fits fewer data ranks.
        rendezvous: rendezvous of several hosts; None for one host. All hosts call this function with the same job and the same
            run folder, on a shared file system. Host 0 leads: only its `resume` and `max_restarts` apply.
        log: function that prints a progress line; the ranks print to the terminal themselves.

    Returns:
        Run folder.

    Raises:
        WeftError: a subclass, see `weft.errors`; `Stopped` after a signal, when the ranks have ended.
    """
    sources = resume_sources(round_of(os.environ), Path(job.out), resume)
    check_writable(job, new=not sources, alone=rendezvous is None)
    device = detect_for_launcher()
    with early_forkserver(RANK_MODULE, device) as forkserver, ExitStack() as stack:
        recovery = RecoveryOptions(tuple(sources), accept_changes, max_restarts)
        if rendezvous is None:
            folders = stack.enter_context(HeldFolders(job))
            job, forward = check_device(job, device)
            ranks = ranks or default_ranks(device)
            return _lead_run(job, folders, ranks, device, forkserver, forward, recovery, None, log)
        rendezvous = replace(rendezvous, encrypt=job.cluster.encrypt)
        seconds = job.guard.node_rejoin_seconds
        if rendezvous.host == 0:
            folders, state = stack.enter_context(claim_run(job, rendezvous, recovery.resume))
            job, forward = check_device(job, device)
            ranks = ranks or default_ranks(device)
            joined = JobCoordinator.join(rendezvous, ranks, node_rejoin_seconds=seconds, state=state)
            coordinator = stack.enter_context(closing(joined))
            return _lead_run(job, folders, ranks, device, forkserver, forward, recovery, coordinator, log)
        job, _ = check_device(job, device)
        here = ranks or default_ranks(device)
        join = partial(_join_run, job, here, device, forkserver, log)
        stack.enter_context(raise_on_signal())  # also while it waits for a new host 0
        return follow_host_0(rendezvous, here, join, log, node_rejoin_seconds=seconds)


def check_device(job: Job, device: Device) -> tuple[Job, str]:
    """Refuse functions and dtypes that cannot be used on a device.

    Returns:
        job: the job with its dtypes.
        forward: forward dtype and the reason for it.

    Raises:
        WeftError: a subclass, see `weft.errors`.
    """
    check_functions(job)
    forward = explain_precision(job.plan.precision, device)
    job = job.model_copy(update={"plan": job.plan.with_dtypes(device.supports("bf16"))})
    check_dtypes(job.plan.precision, device)
    check_row_format(job.plan.comm, device)
    check_flex(job.plan, device)
    return job, forward


@dataclass(frozen=True)
class RecoveryOptions:
    """Sources to resume from, and restarts after a failure."""

    sources: tuple[str, ...]
    """"auto" or checkpoint folders, in order of preference; empty for a new run."""
    accept_changes: bool
    max_restarts: int

    @property
    def resume(self) -> str | None:
        """Source to resume from first."""
        return next(iter(self.sources), None)


@dataclass(frozen=True)
class PreparedRun:
    """Run whose ranks can start: its folder holds `job.toml` and `prepared.json`."""

    job: ResolvedJob
    requested: Job
    """Job with the plan that was asked for, from which a plan for other ranks can be made."""
    prepared: Prepared
    out: Path
    summary_before: int | None
    """Time of the last change of an earlier summary, in ns; None without one."""

    def complete(self, log: Callable[[str], None]) -> None:
        """Complete the summary, if the ranks ended training: at the last step or after a signal."""
        summary = self.out / SUMMARY
        if summary.exists() and summary.stat().st_mtime_ns != self.summary_before:
            causal = self.job.task.kind == "causal"
            log(
                "counting baselines on the same tokens, and generating a sample"
                if causal
                else "trying the export on held-out records"
            )
            complete_summary(self.job, self.prepared, self.out, log)


def prepare_run(
    job: Job,
    folders: HeldFolders,
    ranks_by_host: Sequence[int],
    device: Device,
    forward: str,
    resume: str | None,
    accept_changes: bool,
    log: Callable[[str], None],
) -> PreparedRun:
    """Check a job, prepare its data and its run folder, and print the startup screen.

    Args:
        job: job with its dtypes.
        folders: locked folders of the run.
        ranks_by_host: number of ranks of each host.
        device: device of this host.
        forward: forward dtype and the reason for it.
        resume: checkpoint folder, "auto", or None for a new run, which moves an earlier run in its folder aside.
        accept_changes: allow a resumed run to change optimizer, schedule, configuration or tokens.
        log: function that prints a line.

    Raises:
        WeftError: a subclass, see `weft.errors`.
    """
    all_ranks = sum(ranks_by_host)
    with keep_interrupts():
        check_inputs(job, resume)
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
        model_folder = Path(job.model.path) if job.model.path else None
        prepared = prepare(job.data, model_folder=model_folder, log=log, task=job.task)
        check_tokens(resolved, prepared, config)
        check_tasks(job.eval, prepared.tokenizer)
        if resume and accept_changes:
            prepared = replace(prepared, accepted=earlier_tokens(job, resume))
        if resume == "auto":
            check_checkpoint_folder(checkpoint_folder(job), read_run_id(Path(job.out)))
        check_resume(job, prepared, resume, accept_changes=accept_changes)
    out = Path(job.out)
    if not resume:
        if aside := folders.move_aside():
            log(f"the earlier run in {out} is now {aside}; `weft clean {out}` removes runs moved aside")
        (out / RUN_ID).unlink(missing_ok=True)
    make_run_id(out, job.checkpoint.folder)
    replace_file(out / "job.toml", resolved.to_toml())
    replace_file(out / "prepared.json", prepared.to_json())
    for line in [*startup_screen(resolved, prepared, device, all_ranks, anatomy, out, forward), *lines]:
        log(printable(line))
    summary = out / SUMMARY
    return PreparedRun(resolved, job, prepared, out, summary.stat().st_mtime_ns if summary.exists() else None)


def _lead_run(
    job: Job,
    folders: HeldFolders,
    ranks: int,
    device: Device,
    forkserver: ForkServer | None,
    forward: str,
    recovery: RecoveryOptions,
    coordinator: JobCoordinator | None,
    log: Callable[[str], None],
) -> Path:
    """Prepare a run, start the ranks of this host, and complete the summary; on host 0 or the only host."""
    resume, ranks_by_host, nonce = recovery.resume, [ranks], ""
    if coordinator:
        ranks_by_host = coordinator.ranks_by_host()
        nonce = share_with_launchers(coordinator, shared_folders(job))
    if coordinator and (state := coordinator.lost_host_0()):
        resume, ranks_by_host = "auto", state.state.ranks
    run = prepare_run(job, folders, ranks_by_host, device, forward, resume, recovery.accept_changes, log)
    out = run.out
    write_round(out, round_of(os.environ))
    if coordinator:
        write_nonce(shared_folders(job), nonce)  # an earlier run, now aside, has the first one
        coordinator.publish_config({SOURCES: "\n".join(recovery.sources), MAX_RESTARTS: str(recovery.max_restarts)})
    try:
        launch(
            _command(out, *recovery.sources),
            ranks=ranks,
            log_dir=out / "logs",
            environment=HARNESS_ENVIRONMENT | thread_variables(device, ranks) | _network(coordinator, device, log),
            timeouts=Timeouts(hang=job.guard.hang_timeout_seconds),
            max_restarts=recovery.max_restarts,
            restart_argv=_command(out, "auto", *recovery.sources),
            resize=Resize(run.requested, sum(ranks_by_host), out / "job.toml"),
            coordinator=coordinator,
            forkserver=forkserver,
        )
    finally:
        try:
            if coordinator is None or coordinator.leads():
                run.complete(log)
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT) from None
    return out


def _join_run(
    job: Job,
    ranks: int,
    device: Device,
    forkserver: ForkServer | None,
    log: Callable[[str], None],
    coordinator: JobCoordinator,
) -> Path:
    """Start the ranks of this host after host 0 has prepared the run; on hosts other than 0."""
    out = Path(job.out)
    share_with_launchers(coordinator, shared_folders(job))
    sources = coordinator.wait_for_config(SOURCES)[SOURCES].splitlines()
    join_folders(job, out)
    log(f"{coordinator.host_label} has {ranks} ranks of the job, output in {out}")
    launch(
        _command(out, *sources),
        ranks=ranks,
        log_dir=out / "logs",
        environment=HARNESS_ENVIRONMENT | thread_variables(device, ranks) | _network(coordinator, device, log),
        timeouts=Timeouts(hang=job.guard.hang_timeout_seconds),
        restart_argv=_command(out, "auto", *sources),
        coordinator=coordinator,
        forkserver=forkserver,
    )
    return out


def _command(out: Path, *sources: str) -> list[str]:
    """Command line of a rank, with the sources to resume from in order of preference."""
    return [sys.executable, "-m", RANK_MODULE, str(out), *sources]


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


def _network(coordinator: JobCoordinator | None, device: Device, log: Callable[[str], None]) -> dict[str, str]:
    """Environment variables for connections between ranks of several hosts; logs connections that are not encrypted."""
    if coordinator is None:
        return {}
    variables = coordinator.network_environment()
    unencrypted = [NO_ENCRYPTION[device.type]] if device.type in NO_ENCRYPTION else []
    unencrypted += [] if GLOO_TRANSPORT in variables else ["gloo of this PyTorch"]
    if coordinator.rendezvous.encrypt and unencrypted:
        log(f"connections between ranks are not encrypted: no TLS in {' and '.join(unencrypted)}; use WireGuard")
    return variables
