"""Runs of users' scripts on the ranks of the pool: plain in one process, and under a plan as `weft run` does."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from tests.lab.pool import run_ranks
from weft.checkpoint.snapshot import wait_for_writers
from weft.integrations.script import run_script
from weft.plan import Plan

SCRIPTS = Path(__file__).parent / "scripts"


def variables_of(rank: int, ranks: int) -> dict[str, str]:
    """Environment of a rank that a launcher has started."""
    variables = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if ranks > 1:
        variables |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        variables |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return variables


def script_on_rank(rank: int, ranks: int, name: str, arguments: list[str], plan: Plan | None) -> None:
    variables = variables_of(rank, ranks)
    forget_trl()  # its trainers inherit from the Trainer of another test
    AcceleratorState._reset_state(True)  # another test in this process may have made the state, as lm-eval does
    try:
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(sys, "argv", [name, *arguments]),
            # By accelerate alone. Under a plan the ranks stay connected, as scripts save and evaluate after the end.
            mock.patch.object(dist, "destroy_process_group", side_effect=AssertionError if plan else None),
        ):
            if plan is None:
                runpy.run_path(str(SCRIPTS / name), run_name="__main__")
            else:
                run_script(SCRIPTS / name, arguments, plan)
                wait_for_writers()  # as a rank of weft run does
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        forget_trl()  # its trainers inherit from the Trainer of this plan


def forget_trl() -> None:
    """Let the next import make TRL's trainers anew."""
    for imported in [module for module in sys.modules if module.partition(".")[0] == "trl"]:
        del sys.modules[imported]


def plain(name: str, *arguments: Any, timeout: float = 120) -> None:
    """Run a script as `python script` does, in one process."""
    run_ranks(1, script_on_rank, name, list(map(str, arguments)), None, timeout=timeout)


def under(plan: Plan | None, ranks: int, name: str, *arguments: Any, timeout: float = 120) -> None:
    """Run a script under a plan, on ranks of the pool; None: as it is."""
    run_ranks(ranks, script_on_rank, name, list(map(str, arguments)), plan, timeout=timeout)
