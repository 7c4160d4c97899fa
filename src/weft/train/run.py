"""A run from outside: check the job, prepare its data, start the ranks, and look at what they leave."""

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

from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.folders import clean, list_checkpoints
from weft.checkpoint.huggingface import build_on_meta
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
from weft.parallel.documents import check_packing
from weft.parallel.parallelize import check_axes
from weft.parallel.sdc_check import check_sdc_plan
from weft.parallel.sequence_sharding import row_multiple
from weft.plan import Plan
from weft.precision.dtypes import check_formats, explain_precision
from weft.topology.axis_links import explain_plan
from weft.topology.topology import Topology, of_hosts
from weft.train.checkpoints import check_same_batches, check_same_update, checkpoint_folder
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
WORD = "rendezvous"  # file in the run folder of several hosts, by which they know that it is one
SHARING_SECONDS = 10.0  # until what one host wrote is seen by another
NO_ENCRYPTION = {"cuda": "NCCL", "npu": "HCCL"}
BASELINE_ROWS = 40_000  # rows of the train split that the bigram counts look at, at most


def train(
    job: Job,
    *,
    ranks: int | None = None,
    resume: str | None = None,
    accept_changes: bool = False,
    max_restarts: int = 0,
    rendezvous: RendezvousConfig | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Train a job on the devices of this machine, or of several hosts together, and return its run folder.

    Everything that can be refused is refused before a rank starts.

    Args:
        job: what to train.
        ranks: how many processes on this host; by default one an accelerator, or two on CPU.
        resume: "auto" goes on in the run folder from its newest checkpoint that verifies, or begins where there is none; or
            the folder of a checkpoint. By default a run begins, and an earlier one in its folder is moved aside.
        accept_changes: a resumed run may have another optimizer, schedule or configuration than before, and other tokens.
        max_restarts: how often a failed job is started again, from its newest good checkpoint, without getting any further.
            A rank that fails twice in a row is left out, where fewer data ranks fit the plan; so is a host that is lost.
        rendezvous: where the hosts of the job meet, if there are several. All of them call this with the same job and the same
            run folder, on a file system that they share. Host 0 prepares it and decides; its `resume` and `max_restarts` count.
        say: receives lines of progress; the ranks print to the terminal themselves.

    Raises:
        WeftError: one of its subclasses, see `weft.errors`; `Stopped` after a signal, when the ranks have ended.
    """
    leads = rendezvous is None or rendezvous.host == 0
    check_writable(job, new=resume is None, leads=leads)
    device = detect()
    with early_forkserver(RANK_MODULE, device) as forkserver, HeldFolders(job) if leads else nullcontext() as folders:
        return _train(job, folders, device, forkserver, ranks, resume, accept_changes, max_restarts, rendezvous, say)


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
    say: Callable[[str], None],
) -> Path:
    """Train in folders that are held; None on another host than 0."""
    forward = explain_precision(job.plan.precision, device)
    job = job.model_copy(update={"plan": job.plan.resolve_precision(device.supports("bf16"))})
    check_formats(job.plan.precision, device)
    ranks = ranks or default_ranks(device)
    going_on = Resume(resume, accept_changes, max_restarts)
    if rendezvous is None:
        assert folders is not None
        return _train_here(job, folders, ranks, device, forkserver, forward, going_on, None, say)
    rendezvous = replace(rendezvous, encrypt=job.cluster.encrypt)
    coordinator = JobCoordinator.join(rendezvous, ranks, node_rejoin_seconds=job.guard.node_rejoin_seconds)
    failure: WeftError | None = None
    try:
        if folders:
            return _train_here(job, folders, ranks, device, forkserver, forward, going_on, coordinator, say)
        return _help(job, ranks, device, forkserver, coordinator, say)
    except WeftError as error:
        failure = error
        raise
    finally:
        coordinator.end(failure)


@dataclass(frozen=True)
class Resume:
    """What a run begins from, and how it goes on after a failure."""

    source: str | None
    """"auto", the folder of a checkpoint, or None."""
    accept_changes: bool
    max_restarts: int


def _train_here(
    job: Job,
    folders: HeldFolders,
    ranks: int,
    device: Device,
    forkserver: ForkServer | None,
    forward: str,
    going_on: Resume,
    coordinator: JobCoordinator | None,
    say: Callable[[str], None],
) -> Path:
    """Prepare a run, start its ranks on this host, and complete what they leave; on the only host, or on host 0."""
    resume = going_on.source
    all_ranks = coordinator.all_ranks() if coordinator else ranks
    plan = job.plan.resolve(all_ranks)
    resolved = job.model_copy(update={"plan": plan})
    config, anatomy = check_model(resolved)
    lines = explain_links(plan, coordinator.ranks_by_host() if coordinator else [ranks])
    prepared = prepare(job.data, model_folder=Path(job.model.path) if job.model.path else None, say=say)
    check_tokens(resolved, prepared, config)
    if resume and going_on.accept_changes:
        prepared = replace(prepared, accepted=earlier_tokens(job, resume))
    check_resume(job, prepared, resume, accept_changes=going_on.accept_changes)
    out = Path(job.out)
    if not resume:
        if aside := folders.move_aside():
            say(f"the earlier run in {out} is now {aside}; `weft clean {out}` removes runs moved aside")
        (out / RUN_ID).unlink(missing_ok=True)
    make_run_id(out)
    clean(checkpoint_folder(job))
    (out / "job.toml").write_text(resolved.to_toml(), encoding="utf-8")
    (out / "prepared.json").write_text(prepared.to_json(), encoding="utf-8")
    if coordinator:
        word = secrets.token_hex(8)
        (out / WORD).write_text(word, encoding="utf-8")
        coordinator.announce({"word": word, "resume": resume or ""})
    for line in [*startup_screen(resolved, prepared, device, all_ranks, anatomy, out, forward), *lines]:
        say(line)
    summary = out / SUMMARY
    before = summary.stat().st_mtime_ns if summary.exists() else None
    try:
        launch(
            _command(out, resume),
            ranks=ranks,
            log_dir=out / "logs",
            environment=_network(coordinator, device, say),
            limits=Timeouts(patience=job.guard.hang_timeout_seconds),
            max_restarts=going_on.max_restarts,
            again=_command(out, "auto", resume),
            resize=Resize(job, all_ranks, out / "job.toml"),
            coordinator=coordinator,
            forkserver=forkserver,
        )
    finally:
        if summary.exists() and summary.stat().st_mtime_ns != before:  # the ranks came to their end, or to a signal
            say("counting baselines on the same tokens, and writing a sample")
            try:
                _complete_summary(resolved, prepared, out, say)
            except KeyboardInterrupt:
                raise Stopped(signal.SIGINT) from None
    return out


def _help(
    job: Job,
    ranks: int,
    device: Device,
    forkserver: ForkServer | None,
    coordinator: JobCoordinator,
    say: Callable[[str], None],
) -> Path:
    """Start the ranks of another host than 0, when that has prepared the run."""
    out = Path(job.out)
    facts = coordinator.facts()
    _check_shared(out, facts["word"])
    join_folders(job, out)
    say(f"{coordinator.place} has {ranks} ranks of the job, output in {out}")
    launch(
        _command(out, facts["resume"]),
        ranks=ranks,
        log_dir=out / "logs",
        environment=_network(coordinator, device, say),
        limits=Timeouts(patience=job.guard.hang_timeout_seconds),
        again=_command(out, "auto", facts["resume"]),
        coordinator=coordinator,
        forkserver=forkserver,
    )
    return out


def _command(out: Path, *resume: str | None) -> list[str]:
    """Of a rank; checkpoints to go on from are tried in turn."""
    return [sys.executable, "-m", RANK_MODULE, str(out), *filter(None, resume)]


def explain_links(plan: Plan, ranks: Sequence[int]) -> list[str]:
    """Over which links the axes of a plan run, one line each, and warnings; nothing for one host of which nothing is declared.

    Args:
        plan: resolved.
        ranks: ranks of each host.

    Raises:
        TopologyError: the declared topology contradicts itself, or is of other hosts and ranks.
    """
    declared = plan.comm.topology
    if not declared and len(ranks) == 1:
        return []
    topology = Topology.load(declared) if declared else of_hosts(ranks)
    topology.check_fits(ranks, where=declared)
    return explain_plan(topology, plan)


def check_resume(job: Job, prepared: Prepared, resume: str | None, *, accept_changes: bool = False) -> None:
    """Refuse, before anything is touched, to go on from a checkpoint that is none, or had other batches or updates.

    Args:
        accept_changes: updates may be others; tokens may be those of `prepared.accepted`.

    Raises:
        CheckpointError: `resume` names a folder without a manifest that can be read, or checkpoint.key_file holds no key.
        JobError: its batches are others, or its updates.
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
    if resume == "auto" and not accept_changes and earlier.exists():  # copies of its state may be in memory
        before = Job.load(earlier)
        if before.checkpoint.memory_every:
            check_same_update(job, before.model_dump(mode="json"), before.train.steps, str(earlier))


def earlier_tokens(job: Job, resume: str) -> tuple[str, ...]:
    """`identity` of the tokens of every checkpoint that a run may go on from, on the disk or in memory."""
    found, key = set(), read_key(job.checkpoint.key_file)
    for folder in list_checkpoints(checkpoint_folder(job)) + [Path(resume)] * (resume != "auto"):
        with suppress(CheckpointError):  # ranks say why they pass over it
            found.add(read_manifest(folder, key).data)
    with suppress(OSError, ValueError, TypeError, KeyError):  # what checkpoints in memory were made with
        earlier = Prepared.from_json((Path(job.out) / "prepared.json").read_text(encoding="utf-8"))
        found |= {earlier.identity, *earlier.accepted}
    return tuple(sorted(found))


def _network(coordinator: JobCoordinator | None, device: Device, say: Callable[[str], None]) -> dict[str, str]:
    """Environment variables for the connections of ranks on several hosts; prints which of them are not encrypted."""
    if coordinator is None:
        return {}
    variables = coordinator.rank_network()
    unable = [NO_ENCRYPTION[device.type]] if device.type in NO_ENCRYPTION else []
    unable += [] if GLOO_TRANSPORT in variables else ["gloo of this PyTorch"]
    if coordinator.rendezvous.encrypt and unable:
        say(f"connections between ranks are not encrypted: no TLS in {' and '.join(unable)}; use WireGuard")
    return variables


def _check_shared(out: Path, word: str) -> None:
    """Refuse a run folder that is not that of host 0, in which it has left a word.

    Raises:
        JobError: the word is not there.
    """
    end = time.monotonic() + SHARING_SECONDS
    while not (out / WORD).exists() or (out / WORD).read_text(encoding="utf-8") != word:
        if time.monotonic() > end:
            raise JobError(
                f"{out.resolve()} is not the run folder of host 0",
                where="out",
                rule="all hosts of a job see one run folder, on a file system that they share",
                fix="set out to a folder of a shared file system, the same on every host",
            )
        time.sleep(0.1)


class Resize:
    """Decides with how many ranks a job that failed goes on: without one that fails again and again, and without lost hosts.

    Args:
        job: as the user wrote it.
        ranks: of the first attempt.
        path: of the job that ranks read, which is written anew.
    """

    def __init__(self, job: Job, ranks: int, path: Path):
        self.job, self.all_ranks, self.ranks, self.path = job, ranks, ranks, path
        self.blamed: int | None = None

    def __call__(self, failure: RankFailure, available: int) -> int:
        """The number of ranks of the next attempt; see `weft.launch.launcher.launch`.

        Raises:
            RankFailure: the failure, if the plan fits no number that is available.
        """
        again, self.blamed = failure.rank is not None and failure.rank == self.blamed, failure.rank
        found = fitting(self.job, available, self.all_ranks)
        if again and (fewer := fitting(self.job, self.ranks - 1, self.all_ranks)):
            found, self.blamed = fewer, None
        if found is None:
            raise failure
        self.ranks, job = found
        self.path.write_text(job.to_toml(), encoding="utf-8")
        return self.ranks


def fitting(job: Job, ranks: int, wanted: int) -> tuple[int, Job] | None:
    """The largest number of ranks up to `ranks` that the job's plan fits, and the job for it; the global batch stays.

    Args:
        job: as the user wrote it.
        wanted: ranks that it was started with; for fewer the number of data ranks may change.
    """
    for fewer in range(ranks, 0, -1):
        plan = job.plan if fewer == wanted else _any_data_ranks(job.plan)
        try:
            resolved = job.model_copy(update={"plan": plan.resolve(fewer)})
            check_model(resolved)
        except WeftError:
            continue
        return fewer, resolved
    return None


def _any_data_ranks(plan: Plan) -> Plan:
    """The plan with as many data ranks as fit."""
    parallel = plan.parallel.model_copy(update={"dp_shard": -1, "dp_replicate": 1})
    return plan.model_copy(update={"parallel": parallel})


def check_model(job: Job) -> tuple[PretrainedConfig, Anatomy]:
    """Build the model without memory and check that it can do what the job asks of it.

    Raises:
        ModelError: it cannot be built or read.
        JobError: its sequences are too short, or it cannot keep packed documents apart.
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
            rule="a row fits into max_position_embeddings of the model's configuration",
            fix=f"set data.seq_len to {limit - limit % multiple or limit} or less",
        )
    if job.data.packing and job.data.source != "tokens":
        check_packing(model, anatomy, job.plan, job.data.seq_len)
    train = job.train
    micro_batches = count_micro_batches(train.global_batch_size, train.micro_batch_size, job.plan.parallel.data_ranks)
    check_axes(model, anatomy, job.plan, job.data.seq_len, micro_batches)
    if job.guard.sdc_check_interval:
        check_sdc_plan(job.plan)
    return config, anatomy


def check_tokens(job: Job, prepared: Prepared, config: PretrainedConfig) -> None:
    """Check that the model has an embedding for every token.

    Raises:
        JobError: the tokenizer knows more tokens than the model.
    """
    entries = config.get_text_config().vocab_size
    if prepared.vocab_size > entries:
        raise JobError(
            f"the tokens need a vocabulary of {prepared.vocab_size}, the model has {entries}",
            where=f"tokenizer {prepared.tokenizer or job.data.path}",
            rule="every token has an entry in the model's embedding",
            fix=f"set model.config.vocab_size to {prepared.vocab_size} or more, or data.vocab_size to {entries} or less",
        )


def _complete_summary(job: Job, prepared: Prepared, out: Path, say: Callable[[str], None]) -> None:
    """Add to run.json what needs no ranks: baselines, a sample of text, the environment."""
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
    write_summary(out, summary, say, "baselines and sample")


def _baselines(job: Job, prepared: Prepared) -> dict[str, float] | None:
    """Held-out cross entropy of counting models on the same tokens; what a model must beat to have learnt context."""
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
    """Text the exported model writes after the beginning of a held-out row, loaded and run by plain Transformers."""
    spans = prepared.held_out or prepared.train
    row = Rows(spans, seq_len=prompt_tokens, packing=True, shuffle=False, seed=0)[0].tokens[:prompt_tokens]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    ids = row.to(torch.int64)[None]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or ids.shape[1] + new_tokens
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_length=min(limit, ids.shape[1] + new_tokens),
        do_sample=True,
        temperature=0.7,
        top_k=40,
    )
    return tokenizer.decode(written[0])
