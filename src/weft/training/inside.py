"""Training on ranks that another launcher has started: torchrun, srun, mpirun, Ray Train or Kubernetes.

Each rank runs `weft train` itself. Rank 0 checks the job and prepares the run as Weft's launcher does, while the other ranks
wait for its decision in the store where all ranks meet. Then each rank trains as a rank of Weft's launcher.
"""

import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.backends.hierarchical import host_id
from weft.device.detect import detect
from weft.device.device import Device
from weft.errors import JobError, RankFailure, RendezvousError, Stopped, WeftError
from weft.evaluation.harness import HARNESS_ENVIRONMENT
from weft.launch.attempt import FailureRecord
from weft.launch.environment import HANG_TIMEOUT_VARIABLE, RAY, StartedRank
from weft.launch.launcher import thread_variables
from weft.launch.node_member import NodeMember
from weft.launch.rank_entry import ignore_signals
from weft.launch.rounds import LaunchRound, join_rounds, resume_sources, write_round
from weft.launch.watchdog import REFUSED, Timeouts
from weft.own_code import package_version
from weft.training.run_folder import HeldFolders, check_writable
from weft.training.shared_folders import check_shared, shared_folders, write_nonce
from weft.training.work import Work

MEETING_SECONDS = 300.0  # until all ranks have started
READING_SECONDS = 10.0  # for the other ranks to read why rank 0 ends, if rank 0 serves the store
POLL_SECONDS = 0.1
ROUND, FOLDERS, DECISION, FINISHED, ENDED = (
    f"weft {name}" for name in ("round", "folders", "decision", "finished", "ended")
)
"""Keys in the store."""


@dataclass(frozen=True)
class GatheredRanks:
    """Ranks that have met on rank 0."""

    store: dist.Store
    """Store of this round of ranks alone."""
    by_host: list[int]
    """Number of ranks of each host."""
    launch_round: LaunchRound

    def share(self, folders: Mapping[str, str]) -> None:
        """Wait until all ranks have found the folders of rank 0, which it has created.

        Args:
            folders: folders, with the key of each.

        Raises:
            JobError: a rank has another folder.
        """
        if not folders or len(self.by_host) == 1:
            return
        self.store.set(FOLDERS, json.dumps({"folders": dict(folders), "nonce": write_nonce(folders)}))
        keys = [f"folders of {rank}" for rank in range(1, sum(self.by_host))]
        while not self.store.check(keys):  # a rank that has ended meanwhile ends the job
            time.sleep(POLL_SECONDS)
        for failure in (json.loads(self.store.get(key)) for key in keys):
            if failure:
                raise JobError(**{name: failure[name] for name in ("what", "where", "rule", "fix")})


def inside(
    load: Callable[[], Work],
    train: Callable[[Path, list[str], dist.Store], int],
    started: StartedRank,
    member: NodeMember,
    *,
    resume: str | None,
) -> WeftError | None:
    """Prepare a run on rank 0, and train on all ranks. Collective over the ranks of the launcher.

    Args:
        load: makes the job of a door; called on rank 0 alone.
        train: called on all ranks with the run folder, the sources to resume from in order of preference, and a store;
            returns the number of the signal that ended training, or 0.
        started: this rank.
        member: connection to the watchdog of this host.
        resume: checkpoint folder, "auto", or None for a new run.

    Returns:
        The error of input that rank 0 refused before training, on all ranks; None if they have trained.

    Raises:
        WeftError: another error of rank 0 before training, on all ranks; or of `train`.
        Stopped: a signal ended training in order.
    """
    os.environ.update(HARNESS_ENVIRONMENT)
    device = detect()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = thread_variables(device, started.local_world_size or 1)
        torch.set_num_threads(int(threads.get("OMP_NUM_THREADS", "1")))
    store = meet(started)
    with ExitStack() as held:  # the locks of the folders are held until training has ended, as by a launcher
        work = None
        try:
            if started.rank:
                store = join_rank_0(store, started)
                decision = wait_for_rank_0(store, started)
            else:
                name = secrets.token_hex(8)
                store.set(ROUND, name)
                store, of_all_rounds = dist.PrefixStore(name, store), store
                with decides_for_all(store, started.world_size, held):
                    ranks = gather_ranks(of_all_rounds, name, started)
                    work = load()
                    decision = _prepare(work, ranks, started, device, resume, held)
                    store.set(DECISION, json.dumps(decision))
        except WeftError as error:
            if error.exit_code != REFUSED:
                raise
            return error
        out, timeouts = Path(decision["out"]), Timeouts(**decision["timeouts"])
        member.configure(Path(decision["logs"]), timeouts)
        os.environ[HANG_TIMEOUT_VARIABLE] = str(timeouts.hang)
        stopped = train(out, decision["resume"], store)
        if work:
            work.finish(True)
    if stopped:
        end_together(store, started)
        raise Stopped(stopped)
    return None


def meet(started: StartedRank) -> dist.Store:
    """Store in which all ranks of the launcher meet; rank 0 serves it, or the agent of torchrun, whose store outlives ranks.

    Raises:
        RendezvousError: rank 0 cannot listen, or this rank cannot reach it.
    """
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=MEETING_SECONDS))))
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {started.rank} cannot meet the other ranks: {str(error).splitlines()[0]}",
            where=f"MASTER_ADDR={os.environ.get('MASTER_ADDR', '')} MASTER_PORT={os.environ.get('MASTER_PORT', '')}",
            rule="the ranks meet at a free port of the host of rank 0 that all hosts reach",
            fix="set MASTER_ADDR and MASTER_PORT, the same for all ranks of the job",
        ) from None
    return store


def join_rank_0(store: dist.Store, started: StartedRank) -> dist.Store:
    """Announce this rank to rank 0 until rank 0 of the same round has seen it; return the store of the round.

    The store may still have the announcements and decisions of earlier rounds, also where the launcher counts no restart.
    """
    token, seen = secrets.token_hex(8), ""
    with _of_rank_0():
        while not store.check([token]):
            if store.check([ROUND]) and (name := store.get(ROUND).decode()) != seen:
                seen = name
                store.set(f"rank {started.rank}", json.dumps(_announcement(started) | {"round": name, "token": token}))
            time.sleep(POLL_SECONDS)
        return dist.PrefixStore(store.get(token).decode(), store)


def gather_ranks(store: dist.Store, name: str, started: StartedRank) -> GatheredRanks:
    """Wait until all ranks have started, and compare them; on rank 0.

    Args:
        store: store of `meet`.
        name: name of this round.
        started: this rank.

    Raises:
        RendezvousError: a rank is missing.
        JobError: the ranks differ in command or version, or those of a host are not numbered in sequence.
    """
    deadline = time.monotonic() + MEETING_SECONDS
    found = {0: _announcement(started)}
    while missing := [rank for rank in range(started.world_size) if rank not in found]:
        for rank in missing:
            if store.check([f"rank {rank}"]) and (entry := json.loads(store.get(f"rank {rank}")))["round"] == name:
                found[rank] = entry
                store.set(entry["token"], name)
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"{len(missing)} of {started.world_size} ranks have not started: rank {', '.join(map(str, missing[:8]))}",
                where=started.launcher,
                rule=f"all ranks start within {MEETING_SECONDS:g} s",
                fix="see the output of these ranks, and of the launcher",
            )
        time.sleep(POLL_SECONDS)
    ranks = [found[rank] for rank in range(started.world_size)]
    for key in ("version", "command"):
        if other := next((rank for rank, entry in enumerate(ranks) if entry[key] != ranks[0][key]), None):
            raise JobError(
                f"rank {other} has the {key} {ranks[other][key]}, and rank 0 {ranks[0][key]}",
                where=started.launcher,
                rule="all ranks of a job run the same command with the same code",
                fix="start all ranks by one command of the launcher, with the same installation on every host",
            )
    groups = [(host, len(list(group))) for host, group in groupby(entry["host"] for entry in ranks)]
    if len(groups) > len(dict(groups)):
        raise JobError(
            f"the hosts of ranks 0, 1, 2 ... are {', '.join(entry['host'].split()[0] for entry in ranks[:8])} ...",
            where=started.launcher,
            rule="the ranks of a host are numbered in sequence, so that axes with much traffic stay on one host",
            fix="srun --distribution=block, or mpirun --map-by slot",
        )
    rounds = [LaunchRound(tuple(entry["own"]), tuple(entry["earlier"])) for entry in ranks]
    return GatheredRanks(dist.PrefixStore(name, store), [count for _, count in groups], join_rounds(rounds))


def wait_for_rank_0(store: dist.Store, started: StartedRank) -> dict[str, Any]:
    """Wait until rank 0 has prepared the run; return its decision, on the other ranks.

    Args:
        store: store of this round.
        started: this rank.

    Raises:
        WeftError: what rank 0 has refused, with its exit code.
    """
    has_compared = False
    with _of_rank_0():
        while not store.check([DECISION]):  # for as long as the preparation of data takes
            if not has_compared and store.check([FOLDERS]):
                has_compared = True
                store.set(f"folders of {started.rank}", json.dumps(_compare_folders(json.loads(store.get(FOLDERS)))))
            time.sleep(POLL_SECONDS)
        decision = json.loads(store.get(DECISION))
        store.add("readers", 1)
    if "failure" in decision:
        raise FailureRecord(**decision["failure"]).to_error()
    return decision


def _compare_folders(message: dict[str, Any]) -> dict[str, Any] | None:
    """Compare the folders of rank 0 with those of this host; the refusal, or None."""
    try:
        check_shared(message["folders"], message["nonce"])
    except JobError as error:
        return asdict(FailureRecord.from_error(error))
    return None


@contextmanager
def _of_rank_0() -> Iterator[None]:
    """Explain the loss of the store."""
    try:
        yield
    except RuntimeError as error:
        raise RankFailure(f"the store of rank 0 is lost: {error}", fix="see the output of rank 0") from None


@contextmanager
def decides_for_all(store: dist.Store, world_size: int, held: ExitStack) -> Iterator[None]:
    """Pass an error of rank 0 on to the other ranks, which wait for its decision.

    The locks are released first: when another rank ends, the launcher may end this one at once.
    """
    try:
        yield
    except Exception as error:
        held.close()
        lost = RankFailure(
            f"rank 0 failed before training: {type(error).__name__}: {error}", fix="see the output of rank 0"
        )
        record = FailureRecord.from_error(error if isinstance(error, WeftError) else lost)
        store.set(DECISION, json.dumps({"failure": asdict(record)}))
        deadline = time.monotonic() + READING_SECONDS
        while store.add("readers", 0) < world_size - 1 and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        raise


def end_together(store: dist.Store, started: StartedRank) -> None:
    """Wait until rank 0 has written the summary after a signal: launchers end all ranks when one exits with its code."""
    if started.rank:
        with suppress(RuntimeError):  # rank 0, which may serve the store, has ended
            while not store.check([FINISHED]):
                time.sleep(POLL_SECONDS)
            ignore_signals()
            store.add(ENDED, 1)
        return
    ignore_signals()
    store.set(FINISHED, "")
    deadline = time.monotonic() + READING_SECONDS
    while store.add(ENDED, 0) < started.world_size - 1 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _announcement(started: StartedRank) -> dict[str, Any]:
    """Facts about this rank for rank 0."""
    command = shlex.join(sys.argv[1:])
    if started.launcher == RAY:  # its own numbers of the worker; the job is part of the command for all workers
        command = ""
    facts = {"host": " ".join(host_id()), "version": package_version(), "command": command}
    return facts | asdict(started.launch_round)


def _prepare(
    work: Work, ranks: GatheredRanks, started: StartedRank, device: Device, resume: str | None, held: ExitStack
) -> dict[str, Any]:
    """Prepare a run on rank 0, and return its decision for all ranks. The locks are held until `held` ends."""
    out = Path(work.job.out)
    sources = resume_sources(ranks.launch_round, out, resume)
    check_writable(work.job, new=not sources)
    work.check(device)
    folders = held.enter_context(HeldFolders(work.job))
    ranks.share(shared_folders(work.job))
    work.prepare(folders, ranks.by_host, device, next(iter(sources), None))
    write_round(out, ranks.launch_round)
    logs = out / "logs" / f"attempt-{started.attempt}" if started.attempt else out / "logs"
    return {"out": str(out), "logs": str(logs), "resume": sources, "timeouts": asdict(work.timeouts)}
