"""Ranks that run a script; with `launch_script`, as forks of a process that has imported torch and weft.

An interpreter for each rank of each launch would need more than a second of CPU time for these imports.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed  # noqa: F401

import weft.backends.hierarchical
import weft.device.detect  # noqa: F401
from weft.launch.forkserver import ForkServer
from weft.launch.launcher import launch

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Run the script that the first argument names."""
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def script(folder: Path, code: str) -> list[str]:
    """Command that runs this code, with the rank in the variable `rank`."""
    path = folder / "rank.py"
    path.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{code}")
    return [sys.executable, str(path)]


def script_server() -> ForkServer:
    """Fork server for `launch_script`."""
    paths = os.pathsep.join(
        (str(ROOT / "src"), str(ROOT))
    )  # the code of this checkout, wherever Weft is installed from
    return ForkServer(__name__, {**os.environ, "PYTHONPATH": paths})


def launch_script(server: ForkServer, folder: Path, code: str, *arguments: str, **options: Any) -> None:
    """Launch ranks that run this code, with the rank in the variable `rank`."""
    executable, path = script(folder, code)
    launch([executable, "-m", __name__, path, *arguments], forkserver=server, **options)
