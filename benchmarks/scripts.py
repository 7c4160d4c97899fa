"""Speed of unmodified scripts on two CPU ranks: plain under torchrun (DDP, FSDP2), and under `weft run`.

    python benchmarks/scripts.py            # about 15 minutes on two free cores
    python benchmarks/scripts.py --quick
    python benchmarks/scripts.py --kinds vlm,dit      # an encoder of images beside a language model; diffusion

The scripts are one of TRL (sft, lora) and a loop of accelerate (vlm, dit).

accelerate's FSDP2 is set by `peers/fsdp_script.py`, because accelerate reads its settings on accelerators only. It gathers
weights again in backward (zero 3), or keeps them after forward (zero 2). Systems take turns; each turn is a whole
command, whose first steps do not count. Peak memory is the largest resident size of rank 0, libraries included. The limit is
two processes that train side by side without communication, each on its own copy of the model.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weft.device.cpu import Cpu

PEERS = Path(__file__).parent / "peers"
SCRIPTS = dict.fromkeys(("sft", "lora"), "sft_script.py") | dict.fromkeys(("vlm", "dit"), "kinds_script.py")
"""Script by kind."""
BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "2"]
LIMIT = "no communication"
SYSTEMS = {
    "DDP": "",
    LIMIT: "",
    "weft zero 0": "zero = 0",
    "FSDP2, zero 2": "",
    "weft zero 2": "zero = 2",
    "FSDP2, zero 3": "",
    "weft zero 3": "zero = 3",
}
"""Plan by system; "": without Weft."""


def run(name: str, kind: str, steps: int, folder: Path) -> dict[str, float | list[float]] | None:
    """Run the script once; None if the system cannot run it."""
    plan = SYSTEMS[name]
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    (folder / "plan.toml").write_text(f"[parallel]\n{plan}\n")
    script = PEERS / SCRIPTS[kind]
    command = [*TORCHRUN, str(script)]
    if name.startswith("FSDP2"):
        command = [*TORCHRUN, str(PEERS / "fsdp_script.py"), name[-1], str(script)]
    if plan:
        command = [str(BIN / "weft"), "run", "--plan", str(folder / "plan.toml"), "--nproc-per-node", "2", str(script)]
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"}
    copies = 1
    if name == LIMIT:
        command, copies = [sys.executable, str(script)], 2
    arguments = [*command, str(result), str(steps), kind]
    processes = [
        subprocess.Popen(
            arguments,
            env={**os.environ, **own},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(copies)
    ]
    errors = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes) or not result.exists():
        print(f"{name}: {errors[0].strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(result.read_text())


def beside(results: list, others: list | None) -> str:
    """Median and range of the ratio of tokens per second within each turn; "" beside nothing or itself."""
    if others is None or None in others or others is results:
        return ""
    ratios = sorted(a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(results, others, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def main(
    quick: Annotated[bool, typer.Option(help="One repeat of few steps.")] = False,
    kinds: Annotated[str, typer.Option(help=f"Kinds of models, of {', '.join(SCRIPTS)}.")] = "sft,lora",
) -> None:
    """Run all systems in turns, and print tokens per second, ratios and peak memory."""
    repeats, steps = (1, 4) if quick else (3, 12)
    columns = ("script", "system", "tokens/s", "beside DDP", "beside FSDP2", "peak MiB", "loss")
    table = Table(*columns, title=f"{Cpu().name}, two ranks, fp32")
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds.split(","):
            found: dict[str, list] = {name: [] for name in SYSTEMS}
            for _ in range(repeats):
                for name in SYSTEMS:
                    found[name].append(run(name, kind, steps, Path(folder)))
            for name, results in found.items():
                if None in results:
                    table.add_row(kind, name, "does not run")
                    continue
                speeds = sorted(result["tokens_per_second"] for result in results)
                peak = statistics.median(result["peak_mib"] for result in results)
                table.add_row(
                    kind,
                    name,
                    f"{statistics.median(speeds):.0f} ({speeds[0]:.0f}-{speeds[-1]:.0f})",
                    beside(results, found["DDP"]),
                    beside(results, found.get(f"FSDP2, {name.removeprefix('weft ')}")),
                    f"{peak:.0f}",
                    f"{results[0]['losses'][-1]:.5f}",
                )
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
