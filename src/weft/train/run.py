"""Launch of a run: check the job, prepare its data, start the ranks, and complete the summary after they end."""

import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from weft.anatomy.build import build_on_meta
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.model_config import read_config
from weft.data import Prepared, Rows, count_micro_batches, prepare, scored_pairs, unigram_and_bigram
from weft.device.device import Device, detect
from weft.errors import CheckpointError, JobError, RankFailure, Stopped, WeftError
from weft.job import Job
from weft.launch.coordinator import JobCoordinator
from weft.launch.forkserver import ForkServer
from weft.launch.launcher import default_ranks, early_forkserver, launch
from weft.launch.rendezvous import RendezvousConfig
from weft.launch.tls import GLOO_TRANSPORT
from weft.launch.watchdog import Timeouts
from weft.parallel.documents import check_packed_documents
from weft.parallel.parallelize import check_axes
from weft.parallel.sdc_check import check_sdc_plan
from weft.parallel.sequence_sharding import row_multiple
from weft.plan import Plan
from weft.precision.dtypes import check_dtypes, explain_precision
from weft.topology.axis_links import explain_plan
from weft.topology.topology import Topology, from_host_sizes
from weft.train.checkpoints import check_same_batches, check_same_update, checkpoint_folder
from weft.train.functions import check_functions
from weft.train.run_folder import (
    RUN_ID,
    SUMMARY,
    HeldFolders,
    check_writable,
    join_folders,
    make_run_id,
    read_table,
    write_summary,
)
from weft.train.startup import startup_screen

RANK_MODULE = "weft.train.rank"
NONCE_FILE = "rendezvous"  # file in the run folder with which other hosts check that they see the run folder of host 0
SHARING_SECONDS = 10.0  # delay allowed until a file of host 0 is visible on other hosts
NO_ENCRYPTION = {"cuda": "NCCL", "npu": "HCCL"}
BASELINE_ROWS = 40_000  # maximum rows of the training split for bigram counts


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
    leads = rendezvous is None or rendezvous.host == 0
    check_writable(job, new=resume is None, leads=leads)
    device = detect()
    with early_forkserver(RANK_MODULE, device) as forkserver, HeldFolders(job) if leads else nullcontext() as folders:
        return _train(job, folders, device, forkserver, ranks, resume, accept_changes, max_restarts, rendezvous, log)


def _train(
    job: Job,
    folders: HeldFolders | None,
    device: Device,
    forkserver: ForkServer | None,
    ranks: int | None,
    resume: str | None,
    accept_changes: bool,
    max_restarts: int,
    rendezvous: RendezvousConfig | None,
    log: Callable[[str], None],
) -> Path:
    """Train in locked folders; `folders` is None on hosts other than 0."""
    check_functions(job)
    forward = explain_precision(job.plan.precision, device)
    job = job.model_copy(update={"plan": job.plan.resolve_precision(device.supports("bf16"))})
    check_dtypes(job.plan.precision, device)
    ranks = ranks or default_ranks(device)
    recovery = RecoveryOptions(resume, accept_changes, max_restarts)
    if rendezvous is None:
        assert folders is not None
        return _lead_run(job, folders, ranks, device, forkserver, forward, recovery, None, log)
    rendezvous = replace(rendezvous, encrypt=job.cluster.encrypt)
    coordinator = JobCoordinator.join(rendezvous, ranks, node_rejoin_seconds=job.guard.node_rejoin_seconds)
    failure: WeftError | None = None
    try:
        if folders:
            return _lead_run(job, folders, ranks, device, forkserver, forward, recovery, coordinator, log)
        return _join_run(job, ranks, device, forkserver, coordinator, log)
    except WeftError as error:
        failure = error
        raise
    finally:
        coordinator.close(failure)


@dataclass(frozen=True)
class RecoveryOptions:
    """Source to resume from, and restarts after a failure."""

    resume: str | None
    """"auto", a checkpoint folder, or None for a new run."""
    accept_changes: bool
    max_restarts: int


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
    resume = recovery.resume
    all_ranks = coordinator.world_size() if coordinator else ranks
    plan = job.plan.resolve(all_ranks)
    resolved = job.model_copy(update={"plan": plan})
    config, anatomy = check_model(resolved)
    lines = explain_links(plan, coordinator.ranks_by_host() if coordinator else [ranks])
    prepared = prepare(job.data, model_folder=Path(job.model.path) if job.model.path else None, log=log)
    check_tokens(resolved, prepared, config)
    if resume and recovery.accept_changes:
        prepared = replace(prepared, accepted=earlier_tokens(job, resume))
    check_resume(job, prepared, resume, accept_changes=recovery.accept_changes)
    out = Path(job.out)
    if not resume:
        if aside := folders.move_aside():
            log(f"the earlier run in {out} is now {aside}; `weft clean {out}` removes runs moved aside")
        (out / RUN_ID).unlink(missing_ok=True)
    make_run_id(out)
    (out / "job.toml").write_text(resolved.to_toml(), encoding="utf-8")
    (out / "prepared.json").write_text(prepared.to_json(), encoding="utf-8")
    if coordinator:
        nonce = secrets.token_hex(8)
        (out / NONCE_FILE).write_text(nonce, encoding="utf-8")
        coordinator.publish_config({"nonce": nonce, "resume": resume or ""})
    for line in [*startup_screen(resolved, prepared, device, all_ranks, anatomy, out, forward), *lines]:
        log(line)
    summary = out / SUMMARY
    before = summary.stat().st_mtime_ns if summary.exists() else None
    try:
        launch(
            _command(out, resume),
            ranks=ranks,
            log_dir=out / "logs",
            environment=_network(coordinator, device, log),
            timeouts=Timeouts(hang=job.guard.hang_timeout_seconds),
            max_restarts=recovery.max_restarts,
            restart_argv=_command(out, "auto", resume),
            resize=Resize(job, all_ranks, out / "job.toml"),
            coordinator=coordinator,
            forkserver=forkserver,
        )
    finally:
        if (
            summary.exists() and summary.stat().st_mtime_ns != before
        ):  # the ranks ended training, at the last step or after a signal
            log("counting baselines on the same tokens, and generating a sample")
            try:
                _complete_summary(resolved, prepared, out, log)
            except KeyboardInterrupt:
                raise Stopped(signal.SIGINT) from None
    return out


def _join_run(
    job: Job,
    ranks: int,
    device: Device,
    forkserver: ForkServer | None,
    coordinator: JobCoordinator,
    log: Callable[[str], None],
) -> Path:
    """Start the ranks of this host after host 0 has prepared the run; on hosts other than 0."""
    out = Path(job.out)
    config = coordinator.wait_for_config()
    _check_shared(out, config["nonce"])
    join_folders(job, out)
    log(f"{coordinator.host_label} has {ranks} ranks of the job, output in {out}")
    launch(
        _command(out, config["resume"]),
        ranks=ranks,
        log_dir=out / "logs",
        environment=_network(coordinator, device, log),
        timeouts=Timeouts(hang=job.guard.hang_timeout_seconds),
        restart_argv=_command(out, "auto", config["resume"]),
        coordinator=coordinator,
        forkserver=forkserver,
    )
    return out


def _command(out: Path, *resume: str | None) -> list[str]:
    """Command line of a rank, with the sources to resume from in order of preference."""
    return [sys.executable, "-m", RANK_MODULE, str(out), *filter(None, resume)]


def explain_links(plan: Plan, ranks: Sequence[int]) -> list[str]:
    """Lines about the links that each mesh axis of a plan uses, and warnings; empty for one host without a declared topology.

    Args:
        plan: resolved plan.
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


def _check_shared(out: Path, nonce: str) -> None:
    """Refuse a run folder that is not the run folder of host 0.

    Args:
        out: run folder on this host.
        nonce: content of `NONCE_FILE`, written by host 0.

    Raises:
        JobError: the file is missing or has other content.
    """
    deadline = time.monotonic() + SHARING_SECONDS
    while not (out / NONCE_FILE).exists() or (out / NONCE_FILE).read_text(encoding="utf-8") != nonce:
        if time.monotonic() > deadline:
            raise JobError(
                f"{out.resolve()} is not the run folder of host 0",
                where="out",
                rule="all hosts of a job use the same run folder, on a shared file system",
                fix="set out to a folder on a shared file system, the same on every host",
            )
        time.sleep(0.1)


class Resize:
    """World size of a restarted job: excludes a rank that fails twice in a row, and lost hosts.

    Args:
        job: job as written by the user.
        ranks: world size of the first attempt.
        path: file of the resolved job for the ranks, which is rewritten.
    """

    def __init__(self, job: Job, ranks: int, path: Path):
        self.job, self.initial_ranks, self.ranks, self.path = job, ranks, ranks, path
        self.last_failed: int | None = None

    def __call__(self, failure: RankFailure, available: int) -> int:
        """World size of the next attempt; see `weft.launch.launcher.launch`.

        Args:
            failure: failure of the last attempt.
            available: number of available ranks.

        Raises:
            RankFailure: `failure`, if the plan fits no available world size.
        """
        repeated, self.last_failed = failure.rank is not None and failure.rank == self.last_failed, failure.rank
        resized = fit_plan(self.job, available, self.initial_ranks)
        if repeated and (fewer := fit_plan(self.job, self.ranks - 1, self.initial_ranks)):
            resized, self.last_failed = fewer, None
        if resized is None:
            raise failure
        self.ranks, job = resized
        self.path.write_text(job.to_toml(), encoding="utf-8")
        return self.ranks


def fit_plan(job: Job, ranks: int, initial_ranks: int) -> tuple[int, Job] | None:
    """Largest world size up to `ranks` that the plan of a job fits, and the resolved job; None if no size fits.

    The global batch size does not change.

    Args:
        job: job as written by the user.
        ranks: maximum world size.
        initial_ranks: world size of the first attempt; for other world sizes the number of data ranks may change.
    """
    for world_size in range(ranks, 0, -1):
        plan = job.plan if world_size == initial_ranks else _with_flexible_data_ranks(job.plan)
        try:
            resolved = job.model_copy(update={"plan": plan.resolve(world_size)})
            check_model(resolved)
        except WeftError:
            continue
        return world_size, resolved
    return None


def _with_flexible_data_ranks(plan: Plan) -> Plan:
    """Copy of a plan whose number of data ranks follows from the world size."""
    parallel = plan.parallel.model_copy(update={"dp_shard": -1, "dp_replicate": 1})
    return plan.model_copy(update={"parallel": parallel})


def check_model(job: Job) -> tuple[PretrainedConfig, Anatomy]:
    """Build the model on the meta device, and check that it supports sequence length, packing and plan of the job.

    Raises:
        ModelError: the model cannot be built, or its structure is not supported.
        JobError: the model has too few positions, or does not support packed documents.
    """
    config = read_config(job.model)
    model = build_on_meta(config, torch.float32)
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
    micro_batches = count_micro_batches(train.global_batch_size, train.micro_batch_size, job.plan.parallel.data_ranks)
    check_axes(model, anatomy, job.plan, job.data.seq_len, micro_batches)
    if job.guard.sdc_check_interval:
        check_sdc_plan(job.plan)
    return config, anatomy


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


def _complete_summary(job: Job, prepared: Prepared, out: Path, log: Callable[[str], None]) -> None:
    """Add baselines, a generated sample and the software environment to run.json."""
    libraries = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    environment = {
        "weft": version("weft-train"),
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }
    summary = read_table(out / SUMMARY) | {
        "baselines": _baselines(job, prepared),
        "sample": sample(out / "export", prepared) if prepared.tokenizer else None,
        "environment": environment,
    }
    write_summary(out, summary, log, "baselines and sample")


def _baselines(job: Job, prepared: Prepared) -> dict[str, float] | None:
    """Held-out cross entropy of unigram and bigram models on the same tokens, in nats; None without held-out tokens."""
    if not prepared.held_out:
        return None
    data = job.data
    train, held_out = (
        Rows(spans, seq_len=data.seq_len, packing=data.packing, shuffle=False, seed=0)
        for spans in (prepared.train, prepared.held_out)
    )
    unigram, bigram = unigram_and_bigram(
        scored_pairs(train, BASELINE_ROWS), scored_pairs(held_out), prepared.vocab_size
    )
    return {"unigram": unigram, "bigram": bigram}


def sample(folder: Path, prepared: Prepared, *, prompt_tokens: int = 24, new_tokens: int = 96) -> str:
    """Text that the exported model generates from the start of a held-out row, using plain Transformers."""
    spans = prepared.held_out or prepared.train
    row = Rows(spans, seq_len=prompt_tokens, packing=True, shuffle=False, seed=0)[0].tokens[:prompt_tokens]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    ids = row.to(torch.int64)[None]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or ids.shape[1] + new_tokens
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_length=min(limit, ids.shape[1] + new_tokens),
        do_sample=True,
        temperature=0.7,
        top_k=40,
    )
    return tokenizer.decode(generated[0])
