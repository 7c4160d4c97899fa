"""Predicted and measured steps of random plans of small models, on this machine.

    python benchmarks/planner_here.py                 # 30 plans at 1 to 4 ranks, an hour on two cores
    python benchmarks/planner_here.py --plans 8 --seed 1

A plan is a model (Llama or Qwen3-MoE of random sizes) with random rows, degrees, ZeRO stage, schedule, dtypes and recompute,
among the combinations that Weft accepts. This machine is calibrated once for each number of ranks, as by `weft calibrate`. The
operators of a plan are timed, the plan is trained, and its operators are timed again, because the speed of this machine
drifts; the prediction is the mean of both (the first timing alone is scored too). The measured time is the median of the steps
without the first two (in brackets the quickest and slowest step). Memory and bytes: measured over predicted, minus one; for
bytes the largest error of all axes.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from published.validate import spearman
from rich.console import Console
from rich.table import Column, Table

from weft.device.detect import detect
from weft.errors import WeftError
from weft.job import Job
from weft.observe.prediction import WARM_UP, compare
from weft.observe.record import read_run
from weft.plan import resolve_plan
from weft.planner.calibrate.calibrate import calibrate, formula
from weft.planner.costmodel.cluster_file import ClusterFile
from weft.planner.costmodel.layout import layout_of
from weft.planner.costmodel.operator_timing import time_step
from weft.planner.costmodel.step_time import StepTime
from weft.planner.dryrun.trace import Trace, trace_stages
from weft.planner.search.space import Choice
from weft.planner.search.space_of_job import space_of
from weft.planner.search.strategy import predict
from weft.planner.train import train

STEPS = 24  # a CPU compiles kernels for each number of rows per expert, of which the first ten steps have many new ones
COLUMNS = ("by formula, s", "by operators, s", "measured, s", "memory", "sent")


def random_job(chance: random.Random, ranks: int) -> dict[str, Any]:
    """Random job; Weft may refuse it."""
    heads = chance.choice([4, 8])
    config: dict[str, Any] = {
        "model_type": chance.choice(["llama", "llama", "qwen3_moe"]),
        "vocab_size": 2048,
        "hidden_size": heads * chance.choice([32, 48, 64]),
        "num_hidden_layers": chance.choice([2, 4, 6]),
        "num_attention_heads": heads,
        "num_key_value_heads": chance.choice([2, 4]),
        "max_position_embeddings": 1024,
    }
    config["head_dim"] = config["hidden_size"] // heads
    config["intermediate_size"] = chance.choice([2, 3, 4]) * config["hidden_size"]
    if config["model_type"] == "qwen3_moe":
        config |= {"num_experts": chance.choice([4, 8]), "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    remaining, degrees = ranks, {}
    for axis in chance.sample(["tp", "pp", "cp"], 3):
        degrees[axis] = chance.choice([size for size in range(1, remaining + 1) if remaining % size == 0])
        remaining //= degrees[axis]
    parallel = degrees | {"dp_shard": remaining, "zero": chance.choice([0, 1, 2, 3])}
    if config["model_type"] == "qwen3_moe":
        parallel["ep"] = chance.choice([1, ranks // degrees["pp"]])
    micro_batch = chance.choice([1, 2, 4])
    plan: dict[str, Any] = {
        "parallel": parallel,
        "precision": {"param_dtype": chance.choice(["fp32", "fp32", "bf16"])},
        "memory": {"recompute": chance.choice([[], [], ["activation", "norm"], ["block"]])},
        "pipeline": {"schedule": chance.choice(["1f1b", "gpipe", "zb-h1"])},
    }
    return {
        "model": {"config": config},
        # One document per row: a dry run assumes that packed rows have several documents, and a mask.
        "data": {"source": "python", "vocab_size": 2048, "seq_len": chance.choice([128, 256, 512]), "packing": False},
        "optimizer": {
            "lr": 1e-5
        },  # at a higher learning rate routers send all tokens to two experts within eight steps
        "train": {
            "steps": STEPS,
            "micro_batch_size": micro_batch,
            "global_batch_size": remaining * micro_batch * chance.choice([2, 4]),
            "evaluate_every": 0,
            "evaluate_rows": 4,
        },
        "plan": plan,
    }


def jobs(seed: int, count: int, folder: Path) -> Iterator[tuple[int, Job, list[Trace]]]:
    """Number of ranks, job, and dry runs of the first rank of each stage, for accepted random jobs."""
    chance, found = random.Random(seed), 0
    while found < count:
        ranks = 1 + found % 4
        try:
            job = Job.parse(random_job(chance, ranks) | {"out": str(folder / f"run-{found}")})
            traces = trace_stages(job, ranks)
        except WeftError:
            continue
        found += 1
        yield ranks, job, traces


def with_prediction(job: Job, traces: list[Trace], time: StepTime, machine: ClusterFile) -> Job:
    """Job with a prediction, which its run compares with the measurement."""
    space = space_of(job, machine.cluster())
    layout = layout_of(traces[0].plan, job.data.seq_len, job.train.global_batch_size, job.train.micro_batch_size)
    prediction = predict(space, Choice(layout, time, space.memory(layout)), traces, machine.operators_scalar)
    return job.model_copy(update={"plan": job.plan.model_copy(update={"prediction": prediction})})


def in_short(job: Job, ranks: int) -> str:
    """Model and plan as one line of text."""
    plan, config = resolve_plan(job.plan, ranks, native_bf16=detect().supports("bf16")), job.model.config or {}
    p = plan.parallel
    sizes = (
        f"{config['model_type']} {config['hidden_size']} x {config['num_hidden_layers']}, rows of {job.data.seq_len}"
    )
    degrees = [f"{name} {size}" for name in ("tp", "cp", "pp", "ep") if (size := getattr(p, name)) > 1]
    degrees.append(f"dp {p.data_ranks} zero {p.zero}")
    more = [plan.pipeline.schedule] if p.pp > 1 else []
    more += [f"recompute {' '.join(plan.memory.recompute)}"] if plan.memory.recompute else []
    batch = f"{job.train.micro_batch_size} of {job.train.global_batch_size}"
    return ", ".join([sizes, batch, plan.precision.param_dtype, *degrees, *more])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    machines = {}
    for ranks in range(1, min(4, chosen.plans) + 1):
        machines[ranks], missed = calibrate(ranks)
        print(f"{ranks} ranks, matmul error {missed:.0%}:\n{machines[ranks].to_toml()}", flush=True)
    table = Table("ranks", "plan", *(Column(name, justify="right") for name in COLUMNS))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        for ranks, job, traces in jobs(chosen.seed, chosen.plans, Path(name)):
            outcome, cells = score(ranks, job, traces, machines[ranks])
            outcomes.append(outcome)
            table.add_row(str(ranks), in_short(job, ranks), *cells)
            print(ranks, in_short(job, ranks), *cells, flush=True)
    console = Console(width=190)
    console.print(table)
    measured = [outcome.measured for outcome in outcomes]
    for name in ("by_operators", "before", "by_formula"):
        predicted = [getattr(outcome, name) for outcome in outcomes]
        errors = [value / base - 1 for value, base in zip(predicted, measured, strict=True)]
        console.print(
            f"{name}: mean error {statistics.mean(map(abs, errors)):.1%}, bias {statistics.mean(errors):+.1%}, "
            f"correlation of ranks {spearman(predicted, measured):.3f}"
        )
    worst = sorted((abs(outcome.memory) for outcome in outcomes), reverse=True)
    console.print(f"memory: {sum(off <= 0.05 for off in worst)} of {len(worst)} within 5 %, {worst[0]:.1%} at most")


class Outcome(NamedTuple):
    """Predicted and measured seconds of a step, and the error of memory."""

    by_operators: float
    before: float
    """Prediction from the operators timed before the run alone."""
    by_formula: float
    measured: float
    memory: float


def score(ranks: int, job: Job, traces: list[Trace], machine: ClusterFile) -> tuple[Outcome, tuple[str, ...]]:
    """Predict, train and compare one job; return the outcome and its table cells."""
    cluster, scalar = machine.cluster(), machine.operators_scalar
    by_formula = formula(job, ranks, cluster).seconds * machine.scalar
    time = time_step(job, traces, cluster)
    out = train(with_prediction(job, traces, time, machine), ranks=ranks, log=lambda line: None)
    before, after = time.seconds * scalar, time_step(job, traces, cluster).seconds * scalar
    run = read_run(out)
    steps = [row.step_seconds for row in run.rows[WARM_UP:]]
    lines = {line.name: line for line in compare(run)}
    sent = max((abs(line.off) for line in lines.values() if line.kind == "bytes"), default=0.0)
    outcome = Outcome((before + after) / 2, before, by_formula, lines["step"].measured, lines["memory"].off)
    cells = (
        f"{by_formula:.2f}",
        f"{outcome.by_operators:.2f} ({before:.2f}, {after:.2f})",
        f"{outcome.measured:.2f} ({min(steps):.2f}-{max(steps):.2f})",
        f"{outcome.memory:+.1%}",
        f"{sent:.1%}",
    )
    return outcome, cells


if __name__ == "__main__":
    main()
