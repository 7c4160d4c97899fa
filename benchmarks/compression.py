"""Effect of compressed gradients on the held-out loss: the same training with each codec.

    python benchmarks/compression.py                     # 3 seeds of 2,000 steps, two ranks: an hour or two on two cores
    python benchmarks/compression.py --seeds 1 --only none 2:4
    python benchmarks/compression.py --bandwidth         # speed of encode and decode only

The recipe of `weft train` (a Qwen3-MoE on the source code of Python's standard library), smaller: 64 wide, two blocks, four
experts, rows of 64 tokens, eight rows a step. Each seed is another order of the same rows. Printed are the held-out loss and
its distance from that without compression, in percent: mean, and range over seeds. The second row is the first with
micro-batches of two rows, which differ from it only in rounding; at the recipe's own learning rate, 3e-3, such runs end up to
a percent apart. 1-bit Adam freezes its second moment after a fifth of the steps. It is another optimizer, so the cost of its
signs is its distance from 1-bit Adam without compression.
"""

import argparse
import os
import socket
import statistics
import time
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from weft.comm.compression.codec import decode, encode
from weft.comm.compression.codecs import CODECS
from weft.data import Prepared, prepare
from weft.job import Job, read_toml
from weft.training.optimizer import learning_rate, set_learning_rate
from weft.training.session import held_out_batches, open_session, train_batches
from weft.training.step import evaluate, train_step

RANKS = 2
AGAIN = "none, sums in another order"
SMALLER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "moe_intermediate_size": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    AGAIN: {},
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "int8": {"compression": "int8"},
    "2:4": {"compression": "2:4"},
    "2:4 without error feedback": {"compression": "2:4", "error_feedback": False},
    "1-bit Adam, nothing compressed": {
        "compression": "1-bit",
        "compress_scope": "inter_node",
    },  # ranks of one host send uncompressed gradients
    "1-bit": {"compression": "1-bit"},
    "1-bit without error feedback": {"compression": "1-bit", "error_feedback": False},
}


def job_for(name: str, steps: int, seed: int, zero: int, lr: float) -> Job:
    """Job of a case: a smaller recipe with the compression of the case."""
    job = read_toml(Path(str(files("weft.recipes") / "first.toml")))
    job["model"]["config"] |= SMALLER
    job["data"] |= {"seq_len": 64}
    job["optimizer"] |= {"lr": lr, "schedule": "cosine"}
    job["train"] |= {"steps": steps, "seed": seed, "global_batch_size": 8, "evaluate_rows": 512}
    job["train"]["micro_batch_size"] = 2 if name == AGAIN else 4
    job["plan"] = {"parallel": {"zero": zero}, "precision": {"param_dtype": "fp32"}, "comm": CASES[name]}
    if name.startswith("1-bit"):
        job["optimizer"] |= {"name": "onebit-adam", "freeze_steps": steps // 5}
    return Job.parse(job)


def train(job: Job, prepared: Prepared) -> tuple[float, list[float]]:
    """Train on this rank; return the held-out loss and the gradient norm of every step."""
    session = open_session(job, prepared)
    settings, norms = session.job.optimizer, []
    for step, micro_batches in enumerate(train_batches(session, session.position), 1):
        set_learning_rate(session.optimizer.inner, learning_rate(step, job.train.steps, settings))
        result = train_step(session.model, session.optimizer, micro_batches, settings.clip_norm)
        assert result.problem is None, result.problem
        norms.append(result.grad_norm)
    loss = evaluate(session.model, held_out_batches(session))
    dist.destroy_process_group()
    return loss, norms


def run_rank(rank: int, port: int, job: Job, prepared: Prepared, results: Any) -> None:
    """Join the process group as one rank, train, and put the result of rank 0 into `results`."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    found = train(job, prepared)
    if rank == 0:
        results.put(found)


def run(job: Job, prepared: Prepared) -> tuple[float, list[float]]:
    """Train a job on forked ranks."""
    context = get_context("fork")
    results = context.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=run_rank, args=(rank, port, job, prepared, results)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found = results.get()
    for process in ranks:
        process.join()
    return found


def bandwidth(num_elements: int = 2**24, repeats: int = 5) -> Table:
    """Table of GB/s of float32 elements, encoded and decoded by one core."""
    table = Table(title=f"{num_elements * 4 // 2**20} MiB of float32, one core, median of {repeats}")
    for column in ("", "bits an element", "encode, GB/s", "decode, GB/s"):
        table.add_column(column, justify="left" if not column else "right")
    torch.set_num_threads(1)
    gradient = torch.randn(1, num_elements)
    for name, codec in CODECS.items():
        seconds: dict[str, list[float]] = {"encode": [], "decode": []}
        for _ in range(repeats):
            begin = time.perf_counter()
            messages = encode(codec, gradient)
            encoded = time.perf_counter()
            decode(codec, messages, num_elements)
            seconds["encode"].append(encoded - begin)
            seconds["decode"].append(time.perf_counter() - encoded)
        rates = (f"{gradient.nbytes / statistics.median(times) / 1e9:.2f}" for times in seconds.values())
        table.add_row(name, f"{8 * codec.bytes_per_element:.3f}", *rates)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--bandwidth", action="store_true")
    chosen = parser.parse_args()
    console = Console(width=120)
    if chosen.bandwidth:
        console.print(bandwidth())
        return
    disable_progress_bar()
    torch.set_num_threads(1)  # before any fork
    prepared = prepare(job_for("none", chosen.steps, 0, chosen.zero, chosen.lr).data, model_folder=None, log=print)
    table = Table(title=f"{chosen.steps} steps, {chosen.seeds} seeds, {RANKS} ranks, zero = {chosen.zero}")
    for column in ("", "held-out loss", "from none, %"):
        table.add_column(column, justify="left" if not column else "right")
    reference: list[float] = []
    for name in chosen.only:
        losses = []
        for seed in range(chosen.seeds):
            begin = time.perf_counter()
            loss, norms = run(job_for(name, chosen.steps, seed, chosen.zero, chosen.lr), prepared)
            losses.append(loss)
            parts = [norms[len(norms) * part // 10 : len(norms) * (part + 1) // 10] for part in range(10)]
            shown = " ".join(f"{statistics.mean(part):.2f}" for part in parts if part)
            print(f"{name}, seed {seed}: {loss:.5f} in {time.perf_counter() - begin:.0f} s; norms {shown}", flush=True)
        reference = reference or losses
        differences = [100 * (loss / base - 1) for loss, base in zip(losses, reference, strict=True)]
        spread = f"{statistics.mean(differences):+.2f} ({min(differences):+.2f} to {max(differences):+.2f})"
        table.add_row(name, f"{statistics.mean(losses):.4f}", spread)
    console.print(table)


if __name__ == "__main__":
    main()
