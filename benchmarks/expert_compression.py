"""Effect of rows of experts in 8 bits on the held-out loss: the same training with each value of plan.comm.expert_compression.

    python benchmarks/expert_compression.py              # 3 seeds of 300 steps, two ranks: ten minutes on two free cores
    python benchmarks/expert_compression.py --quick
    python benchmarks/expert_compression.py --bandwidth  # speed of encode and decode only

The recipe of `weft train` (a Qwen3-MoE with eight experts on the source code of Python's standard library), 128 wide, with its
experts split over two ranks, in float32, so that all that differs is the rounding. Each seed is another order of the same rows.
The second row is the first with micro-batches of half the rows, which differ from it only in the order of sums.
"""

import statistics
import time
from typing import Annotated, Any

import torch
import typer
from compression import job_for, run
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from weft.comm.compression.rows import DTYPES as ROW_FORMATS
from weft.comm.compression.rows import decode_rows, encode_rows
from weft.data import prepare
from weft.job import Job

MODEL = {"hidden_size": 128, "intermediate_size": 256, "num_experts": 8, "moe_intermediate_size": 128, "head_dim": 64}
CASES = {"none": ("none", 4), "none, sums in another order": ("none", 2), "int8": ("int8", 4), "fp8": ("fp8", 4)}
"""Value of the key, and rows of a micro-batch."""


def job_of(case: str, steps: int, seed: int) -> Job:
    """Job of a case."""
    kind, micro_batch = CASES[case]
    tables: dict[str, Any] = job_for("none", steps, seed, 2, 1e-3).model_dump(exclude_none=True)
    tables["model"]["config"] |= MODEL
    tables["data"]["seq_len"] = 64
    tables["train"]["micro_batch_size"] = micro_batch
    tables["plan"]["parallel"]["ep"] = 2
    tables["plan"]["comm"]["expert_compression"] = kind
    return Job.parse(tables)


def bandwidth(dtype: torch.dtype, repeats: int = 9) -> Table:
    """Table of GB/s of rows, encoded and decoded by one core, and the bandwidth of a link below which both take less time than
    the bytes that they save."""
    rows = torch.randn(2048, 2048).to(dtype)
    found = torch.empty_like(rows)
    table = Table(title=f"{rows.nbytes // 2**20} MiB of {dtype}, one core, median of {repeats}")
    for column in ("", "encode, GB/s", "decode, GB/s", "pays below, GB/s"):
        table.add_column(column, justify="left" if not column else "right")
    for kind in ROW_FORMATS:
        seconds: dict[str, list[float]] = {"encode": [], "decode": []}
        for _ in range(repeats):
            begin = time.thread_time()
            messages = encode_rows(rows, kind)
            encoded = time.thread_time()
            decode_rows(messages, found, kind)
            seconds["encode"].append(encoded - begin)
            seconds["decode"].append(time.thread_time() - encoded)
        medians = [statistics.median(times) for times in seconds.values()]
        rates = [f"{rows.nbytes / value / 1e9:.2f}" for value in medians]
        table.add_row(kind, *rates, f"{(rows.nbytes - messages.nbytes) / sum(medians) / 1e9:.2f}")
    return table


def main(
    quick: Annotated[bool, typer.Option("--quick", help="One seed of few steps.")] = False,
    only_bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Speed of encode and decode only.")] = False,
) -> None:
    disable_progress_bar()
    torch.set_num_threads(1)  # before any fork
    if only_bandwidth:
        for dtype in (torch.float32, torch.bfloat16):
            Console(width=120).print(bandwidth(dtype))
        return
    steps, seeds = (20, 1) if quick else (300, 3)
    prepared = prepare(job_of("none", steps, 0).data, model_folder=None, log=print)
    table = Table(title=f"{steps} steps, {seeds} seeds, two ranks")
    for column in ("expert_compression", "held-out loss", "from none, %"):
        table.add_column(column, justify="left" if column == "expert_compression" else "right")
    reference: list[float] = []
    for case in CASES:
        losses = []
        for seed in range(seeds):
            begin = time.perf_counter()
            losses.append(run(job_of(case, steps, seed), prepared)[0])
            print(f"{case}, seed {seed}: {losses[-1]:.5f} in {time.perf_counter() - begin:.0f} s", flush=True)
        reference = reference or losses
        differences = [100 * (loss / base - 1) for loss, base in zip(losses, reference, strict=True)]
        spread = f"{statistics.mean(differences):+.3f} ({min(differences):+.3f} to {max(differences):+.3f})"
        table.add_row(case, f"{statistics.mean(losses):.4f}", spread)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
