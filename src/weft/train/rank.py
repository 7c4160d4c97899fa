"""What each rank of `weft train` runs: python -m weft.train.rank RUN_FOLDER [auto] [CHECKPOINT]."""

import sys
import warnings
from pathlib import Path

import torch.distributed as dist
import transformers

from weft.data import Prepared
from weft.job import Job
from weft.launch.heartbeat import Heartbeat
from weft.launch.launcher import rank_main
from weft.train.loop import train
from weft.train.run_folder import join_folders
from weft.train.session import open_session


def main() -> None:
    """Open the run folder the launcher made, train, and leave."""
    # FSDP2 of torch 2.13 calls collectives by the names it deprecates itself.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    out = Path(sys.argv[1])
    prepared = Prepared.from_json((out / "prepared.json").read_text(encoding="utf-8"))
    pulse = Heartbeat.open()
    job = Job.load(out / "job.toml")
    join_folders(job, out)  # until this process ends
    session = open_session(job, prepared, out, sys.argv[2:])
    train(session, out, pulse)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
