"""What each rank of `weft train` runs: python -m weft.train.rank RUN_FOLDER."""

import logging
import signal
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from weft.cluster.launch import rank_main
from weft.data import Prepared
from weft.job import Job
from weft.train.loop import open_session, train


def main() -> None:
    """Open the run folder the launcher made, train, and leave."""
    # FSDP2 of torch 2.13 calls collectives by the names it deprecates itself.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    out = Path(sys.argv[1])
    prepared = Prepared.from_json((out / "prepared.json").read_text(encoding="utf-8"))
    session = open_session(Job.load(out / "job.toml"), prepared)
    stopped_by = train(session, out)
    dist.destroy_process_group()
    if stopped_by:
        signal.signal(stopped_by, signal.SIG_DFL)
        sys.exit(0)


if __name__ == "__main__":
    rank_main(main)
