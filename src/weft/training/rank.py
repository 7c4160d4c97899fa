"""Entry point of each rank of `weft train`: python -m weft.training.rank RUN_FOLDER [auto] [CHECKPOINT]."""

import sys
import time
import tomllib
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
import transformers

from weft.checkpoint.together import ask_rank_0
from weft.comm.objects import run_together
from weft.data import Prepared, prepare
from weft.device.detect import detect
from weft.job import Job
from weft.launch.heartbeat import Heartbeat
from weft.launch.rank_entry import connect, rank_main
from weft.training.functions import Callback
from weft.training.loop import train
from weft.training.run_folder import join_folders
from weft.training.same_inputs import first_ranks, token_files
from weft.training.session import open_session


def main() -> None:
    """Train in the run folder that the launcher has prepared."""
    train_rank(Path(sys.argv[1]), sys.argv[2:])


def train_rank(
    out: Path, resume: Sequence[str], store: dist.Store | None = None, followers: Sequence[Callback] = ()
) -> int:
    """Train in a prepared run folder, on this rank. Collective.

    Args:
        out: run folder.
        resume: sources to resume from, in order of preference: "auto" or a checkpoint folder.
        store: store in which ranks of another launcher have met; None: see `weft.launch.rank_entry.connect`.
        followers: further callbacks of this rank, see `weft.training.loop.train`.

    Returns:
        Number of the signal that ended training; 0 without one.
    """
    began = time.time()
    # FSDP2 of torch 2.13 calls collectives by names that torch itself deprecates.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")  # of Transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    heartbeat = Heartbeat.open()
    connect(detect(), store)
    texts = ask_rank_0(lambda: [(out / name).read_text(encoding="utf-8") for name in ("job.toml", "prepared.json")])
    job, prepared = Job.parse(tomllib.loads(texts[0])), Prepared.from_json(texts[1])
    locks = join_folders(job, out)
    if job.checkpoint.per_host:
        heartbeat.phase("preparing data")
        is_first = dist.get_rank() in first_ranks()
        run_together(partial(_prepare_here, job, prepared) if is_first else lambda: None)
    session = open_session(job, prepared, out, resume, store)
    stopped = train(session, out, heartbeat, began, followers)
    dist.destroy_process_group()
    for lock in locks:  # a process of another launcher may live on
        lock.release()
    return stopped


def _prepare_here(job: Job, prepared: Prepared) -> None:
    """Make the tokens of host 0 on this host, if it does not have them: a host with its own disk has its own cache."""
    if not all(Path(path).exists() for path in token_files(prepared)):
        prepare(job.data, model_folder=Path(job.model.path) if job.model.path else None, log=print, task=job.task)


if __name__ == "__main__":
    rank_main(main)
