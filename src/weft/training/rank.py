"""Entry point of each rank of `weft train`: python -m weft.training.rank RUN_FOLDER [auto] [CHECKPOINT]."""

import sys
import time
import warnings
from pathlib import Path

import torch.distributed as dist
import transformers

from weft.data import Prepared
from weft.job import Job
from weft.launch.heartbeat import Heartbeat
from weft.launch.rank_entry import rank_main
from weft.training.loop import train
from weft.training.run_folder import join_folders
from weft.training.session import open_session


def main() -> None:
    """Train in the run folder that the launcher has prepared."""
    began = time.time()
    # FSDP2 of torch 2.13 calls collectives by names that torch itself deprecates.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    out = Path(sys.argv[1])
    prepared = Prepared.from_json((out / "prepared.json").read_text(encoding="utf-8"))
    heartbeat = Heartbeat.open()
    job = Job.load(out / "job.toml")
    join_folders(job, out)  # the locks are held until this process ends
    session = open_session(job, prepared, out, sys.argv[2:])
    train(session, out, heartbeat, began)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
