"""What the planner predicts for random plans of small models, beside what `weft train` then measures here.

    python benchmarks/planner_here.py                 # 30 plans at 1 to 4 ranks, half an hour on two cores
    python benchmarks/planner_here.py --plans 8 --seed 1

A plan is a model (Llama or Qwen3-MoE of random sizes), rows, degrees, ZeRO stage, schedule, formats and recompute at random,
as far as Weft takes them. This machine is calibrated once for each number of ranks, as `weft calibrate` does. The
operators of a plan are timed, and then it is trained; the median of its steps counts, the first two left out (and the
quickest and slowest of them, in brackets). Memory and bytes: measured over predicted, less one; the largest of all axes.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from weft.errors import WeftError
from weft.job import Job
from weft.observe.prediction import WARM_UP, compare
from weft.observe.record import read_run
from weft.plan import Prediction
from weft.planner.calibrate import calibrate, formula
from weft.planner.measured import time_step
from weft.planner.step_time import StepTime
from weft.planner.trace import Trace, trace_stages
from weft.planner.validate import spearman
from weft.train.run import train

STEPS = 8
COLUMNS = ("by formula, s", "by operators, s", "measured, s", "memory", "sent")


def random_job(chance: random.Random, ranks: int) -> dict[str, Any]:
    """A job that may be one that Weft refuses."""
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
    left, degrees = ranks, {}
    for axis in chance.sample(["tp", "pp", "cp"], 3):
        degrees[axis] = chance.choice([size for size in range(1, left + 1) if left % size == 0])
        left //= degrees[axis]
    parallel = degrees | {"dp_shard": left, "zero": chance.choice([0, 1, 2, 3])}
    if config["model_type"] == "qwen3_moe":
        parallel["ep"] = chance.choice([1, ranks // degrees["pp"]])
    micro_batch = chance.choice([1, 2, 4])
    plan: dict[str, Any] = {
        "parallel": parallel,
        "precision": {"forward": chance.choice(["fp32", "fp32", "bf16"])},
        "memory": {"recompute": chance.choice([[], [], ["activation", "norm"], ["block"]])},
        "pipeline": {"schedule": chance.choice(["1f1b", "gpipe", "zb-h1"])},
    }
    return {
        "model": {"config": config},
        "data": {"source": "python", "vocab_size": 2048, "seq_len": chance.choice([128, 256, 512])},
        "optimizer": {"lr": 1e-3},
        "train": {
            "steps": STEPS,
            "micro_batch": micro_batch,
            "global_batch": left * micro_batch * chance.choice([2, 4]),
            "evaluate_every": 0,
            "evaluate_rows": 4,
        },
        "plan": plan,
    }


def jobs(seed: int, count: int, folder: Path) -> Iterator[tuple[int, Job, list[Trace]]]:
    """Ranks, job and the dry runs of one rank of each stage, the first of the ranks that are alike."""
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


def with_prediction(job: Job, traces: list[Trace], time: StepTime, scalar: float) -> Job:
    """The job, whose run puts what it measures beside the prediction."""
    sent: dict[str, int] = {}
    for message in traces[0].count.messages:
        sent[message.axis] = sent.get(message.axis, 0) + message.bytes
    seconds = time.seconds * scalar
    prediction = Prediction(
        cluster="this machine",
        micro_batch=job.train.micro_batch,
        step_seconds=seconds,
        terms=vars(time),
        tokens_per_second=job.train.global_batch * job.data.seq_len / seconds,
        memory_bytes=max(found.count.peak for found in traces),
        memory=dict(traces[0].count.peak_bytes),
        sent_bytes=sent,
    )
    return job.model_copy(update={"plan": job.plan.model_copy(update={"prediction": prediction})})


def in_short(job: Job, ranks: int) -> str:
    """Model and plan in a line."""
    plan, config = job.plan.resolve(ranks), job.model.config or {}
    p = plan.parallel
    sizes = (
        f"{config['model_type']} {config['hidden_size']} x {config['num_hidden_layers']}, rows of {job.data.seq_len}"
    )
    degrees = [f"{name} {size}" for name in ("tp", "cp", "pp", "ep") if (size := getattr(p, name)) > 1]
    degrees.append(f"dp {p.data_ranks} zero {p.zero}")
    more = [plan.pipeline.schedule] if p.pp > 1 else []
    more += [f"recompute {' '.join(plan.memory.recompute)}"] if plan.memory.recompute else []
    batch = f"{job.train.micro_batch} of {job.train.global_batch}"
    return ", ".join([sizes, batch, plan.precision.forward, *degrees, *more])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    machines = {}
    for ranks in range(1, min(4, chosen.plans) + 1):
        machines[ranks], missed = calibrate(ranks)
        print(f"{ranks} ranks, products within {missed:.0%}:\n{machines[ranks].to_toml()}", flush=True)
    table = Table("ranks", "plan", *(Column(name, justify="right") for name in COLUMNS))
    outcomes: list[tuple[float, float, float, float]] = []  # by operators, by formula, measured, memory off
    with tempfile.TemporaryDirectory() as name:
        for ranks, job, traces in jobs(chosen.seed, chosen.plans, Path(name)):
            machine = machines[ranks]
            time = time_step(job, traces, machine.cluster())
            alone = formula(job, ranks, machine.cluster()).seconds * machine.scalar
            out = train(
                with_prediction(job, traces, time, machine.operators_scalar), ranks=ranks, say=lambda line: None
            )
            run = read_run(out)
            steps = [row.step_seconds for row in run.rows[WARM_UP:]]
            lines = {line.name: line for line in compare(run)}
            step, memory = lines["step"], lines["memory"]
            sent = max((abs(line.off) for line in lines.values() if line.kind == "bytes"), default=0.0)
            outcomes.append((step.predicted, alone, step.measured, memory.off))
            cells = (
                f"{alone:.2f}",
                f"{step.predicted:.2f}",
                f"{step.measured:.2f} ({min(steps):.2f}-{max(steps):.2f})",
            )
            cells += (f"{memory.off:+.1%}", f"{sent:.1%}")
            table.add_row(str(ranks), in_short(job, ranks), *cells)
            print(ranks, in_short(job, ranks), *cells, flush=True)
    console = Console(width=190)
    console.print(table)
    measured = [outcome[2] for outcome in outcomes]
    for name, place in (("operators", 0), ("formula", 1)):
        predicted = [outcome[place] for outcome in outcomes]
        off = statistics.mean(abs(mine / theirs - 1) for mine, theirs in zip(predicted, measured, strict=True))
        console.print(f"by {name}: {off:.1%} off in the mean, correlation of ranks {spearman(predicted, measured):.3f}")
    worst = sorted((abs(outcome[3]) for outcome in outcomes), reverse=True)
    console.print(f"memory: {sum(off <= 0.05 for off in worst)} of {len(worst)} within 5 %, {worst[0]:.1%} at most")


if __name__ == "__main__":
    main()
