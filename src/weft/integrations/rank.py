"""Entry point of each rank of `weft run`: python -m weft.integrations.rank PLAN.json SCRIPT [ARGUMENTS].

With auto:FOLDER instead of PLAN.json, the planner chooses the plan, and writes it to this folder.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from weft.checkpoint.snapshot import wait_for_writers
from weft.device.detect import detect
from weft.integrations.auto_plan import AUTO, AutoPlan
from weft.integrations.script import run_script
from weft.launch.heartbeat import Heartbeat
from weft.launch.rank_entry import rank_main
from weft.plan import Plan
from weft.training.prepare import init


def main() -> None:
    """Join the ranks, and run the script."""
    name, is_auto = sys.argv[1], sys.argv[1].startswith(f"{AUTO}:")
    plan = (
        AutoPlan(Path(name.partition(":")[2])) if is_auto else Plan.model_validate_json(Path(name).read_text("utf-8"))
    )
    run_rank(plan, Path(sys.argv[2]), sys.argv[3:])


def run_rank(plan: Plan | AutoPlan, script: Path, arguments: Sequence[str]) -> None:
    """Join the ranks, and run a script under a plan.

    Args:
        plan: plan, or `AutoPlan`, which chooses it.
        script: Python script.
        arguments: arguments of the script.
    """
    heartbeat = Heartbeat.open()
    heartbeat.phase("script")
    if detect().type == "cpu":  # Trainer and accelerate would train on one process
        os.environ["ACCELERATE_USE_CPU"] = "true"
    init()
    try:
        run_script(script, arguments, plan)
    except SystemExit as end:
        if not end.code:
            wait_for_writers()
        raise
    wait_for_writers()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
