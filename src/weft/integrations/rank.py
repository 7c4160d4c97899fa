"""Entry point of each rank of `weft run`: python -m weft.integrations.rank PLAN.json SCRIPT [ARGUMENTS]."""

import sys
from pathlib import Path

import torch.distributed as dist

from weft.checkpoint.snapshot import wait_for_writers
from weft.integrations.script import run_script
from weft.launch.heartbeat import Heartbeat
from weft.launch.rank_entry import rank_main
from weft.plan import Plan
from weft.training.prepare import init


def main() -> None:
    """Join the ranks, and run the script."""
    plan = Plan.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    heartbeat = Heartbeat.open()
    heartbeat.phase("script")
    init()
    try:
        run_script(Path(sys.argv[2]), sys.argv[3:], plan)
    except SystemExit as end:
        if not end.code:
            wait_for_writers()
        raise
    wait_for_writers()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
