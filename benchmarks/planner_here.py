"""What the planner predicts for random plans of small models, beside what `weft train` then measures here.

    python benchmarks/planner_here.py                 # 30 plans at 1 to 4 ranks, half an hour on two cores
    python benchmarks/planner_here.py --plans 8 --seed 1

A plan is a model (Llama or Qwen3-MoE of random sizes), rows, degrees, ZeRO stage, schedule, formats and recompute at random,
as far as Weft takes them. This machine is calibrated once for each number of ranks, as `weft calibrate` does. The
operators of a plan are timed, and then it is trained; the median of its steps counts, the first two left out.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weft.errors import WeftError
from weft.job import Job
from weft.observe.prediction import compare
from weft.observe.record import read_run
from weft.plan import Prediction
from weft.planner.calibrate import calibrate, formula
from weft.planner.measured import time_step
from weft.planner.step_time import StepTime
from weft.planner.trace import Trace, trace
from weft.train.run import train

STEPS = 8


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
            stages = job.plan.resolve(ranks).parallel.pp
            traces = trace(job, ranks, [stage * ranks // stages for stage in range(stages)])
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
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for ranks, job, traces in jobs(chosen.seed, chosen.plans, Path(name)):
            time = time_step(job, traces, machines[ranks].cluster())
            scalar = machines[ranks].operators_scalar
            out = train(with_prediction(job, traces, time, scalar), ranks=ranks, say=lambda line: None)
            lines = compare(read_run(out))
            rows.append((ranks, job, time, lines))
            step = lines[0]
            others = {line.name: round(100 * line.off, 1) for line in lines[1:] if abs(line.off) > 0.001}
            print(f"{ranks}: {in_short(job, ranks)}: {step.predicted:.3f} s, {step.measured:.3f} s", others, flush=True)
            alone = formula(job, ranks, machines[ranks].cluster()).seconds * machines[ranks].scalar
            print(
                "  ",
                f"by formula {alone:.3f}",
                {key: round(value, 3) for key, value in vars(time).items() if value},
                flush=True,
            )


if __name__ == "__main__":
    main()
