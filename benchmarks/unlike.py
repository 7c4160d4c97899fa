"""Speed of equal and unequal shares on two hosts, of which one is throttled, beside the sum of the speeds of both.

    python benchmarks/unlike.py [--shares 1 0.333] [--repeats 5] [--steps 1] [--rows 64] [--rate 1000]
    python benchmarks/unlike.py --shares 0.3 0.1    # while other work uses the machine
    python benchmarks/unlike.py --quick             # a smoke run

Two hosts are network namespaces on this machine (needs root and iproute2), with one rank each, pinned to its own core. The
hosts may use `--shares` of their cores: by a quota of cgroups if they are writable, else by stopping and continuing a rank in a
duty cycle. The dense model of `hosts.py` trains in float32 on random tokens, with the same rows in every plan. Rows are

- each host alone: the untouched model on the same rows, on both hosts at the same time without messages. The sum of both
  speeds is the upper bound of any plan; their ratio is what the shares of the other rows are made of;
- equal rows, and equal stages;
- rows in proportion to speed, and stages in proportion to speed, with ZeRO 0 or a pipeline.

The table has tokens per second over those of equal rows, and over the sum of both speeds, side by side in each repeat: median
(min-max). The losses of all plans must agree to 1e-4.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers.figures import ratios, spread
from rich.console import Console
from rich.table import Table
from tests.lab.hosts import hosts
from torch import Tensor
from transformers import AutoModelForCausalLM

from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.data import MicroBatch, RowSplit
from weft.data.row_split import proportional
from weft.device.cpu import Cpu
from weft.device.detect import detect
from weft.job import Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Plan, resolve_plan
from weft.planner.costmodel.unlike import divide_blocks
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

TOKENS, BLOCKS = 256, 8
MICRO_BATCH, PIPELINE_ROWS = 8, 2
"""Largest rows per micro-batch; and with a pipeline."""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 1024,
    "num_hidden_layers": BLOCKS,
}
CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD, LEAST_QUOTA, WEIGHT = 10_000, 1_000, 200_000
"""Microseconds of a period, the least quota of the kernel, and the weight with which the quota is kept beside other work."""
ALONE, EQUAL = "each host alone", "equal rows, zero 0"
Step = Callable[[Tensor], float]


def build(table: dict[str, Any], micro_batch: int) -> Step:
    """Training step of a plan on the rows of a global batch; returns the loss."""
    plan = resolve_plan(
        Plan.model_validate({"precision": {"param_dtype": "fp32"}, **table}),
        dist.get_world_size(),
        native_bf16=detect().supports("bf16"),
    )
    mesh, source = build_mesh(plan, "cpu", dist.get_world_size()), Model(config=CONFIG)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh).train()
    materialize(model, source, torch.device("cpu"))
    optimizer = DistributedOptimizer(build_optimizer(model, Optimizer(lr=1e-3)), model, detect())
    positions = torch.arange(TOKENS)

    def step(rows: Tensor) -> float:
        p = plan.parallel
        split = RowSplit(len(rows), micro_batch, p.data_ranks, p.rows_per_rank)
        parts = [rows[own.start : own.stop] for own, _ in split.micro_batches(data_rank(mesh))]
        batches = [
            MicroBatch(part[:, :-1].contiguous(), positions.expand(len(part), -1), part[:, 1:].contiguous())
            for part in parts
        ]
        return train_step(model, optimizer, batches, 1.0).loss

    return step


def build_alone() -> Step:
    """Training step of the untouched model on this rank alone, in micro-batches."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(read_config(Model(config=CONFIG)), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(rows: Tensor) -> float:
        losses = []
        for part in rows.split(MICRO_BATCH):
            logits = model(input_ids=part[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss * len(part) / len(rows)).backward()
            losses.append(loss.item() * len(part) / len(rows))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses)

    return step


def seconds_of(step: Step, batches: list[Tensor]) -> float:
    """Seconds of a step on this rank, in the mean over batches."""
    began = time.perf_counter()
    for batch in batches:
        step(batch)
    return (time.perf_counter() - began) / len(batches)


def over_ranks(value: float) -> list[float]:
    """A number of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def rank_main(chosen: argparse.Namespace, out: Path) -> None:
    """Run steps of every plan in turn on one rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(256, (chosen.rows, TOKENS + 1), generator=generator) for _ in range(max(3, chosen.steps))]
    alone = build_alone()
    (out.parent / f"ready-{dist.get_rank()}").touch()
    while not (out.parent / "throttled").exists():
        time.sleep(0.05)
    # A quarter of the rows: enough to know the speed, and the slow host is not waited for.
    few = [batch[: max(MICRO_BATCH, chosen.rows // 4)] for batch in batches]
    seconds_of(alone, few[:1])
    speeds = [len(few[0]) / seconds for seconds in over_ranks(seconds_of(alone, few[:2]))]
    rows = proportional(chosen.rows, speeds)
    blocks = divide_blocks(BLOCKS, [1 / speed for speed in speeds], 0.0)
    slow_first = divide_blocks(BLOCKS, [1.0, 1.0], 0.0)
    plans: dict[str, tuple[dict[str, Any], int]] = {
        EQUAL: ({"parallel": {"zero": 0}}, MICRO_BATCH),
        f"rows {list(rows)}, zero 0": ({"parallel": {"zero": 0, "rows_per_rank": rows}}, MICRO_BATCH),
        f"rows {list(rows)}, zero 3": ({"parallel": {"zero": 3, "rows_per_rank": rows}}, MICRO_BATCH),
        f"equal stages {list(slow_first)}": (
            {"parallel": {"zero": 0, "pp": 2}, "pipeline": {"stage_blocks": slow_first, "schedule": "zb-h1"}},
            PIPELINE_ROWS,
        ),
        f"stages {list(blocks)}": (
            {"parallel": {"zero": 0, "pp": 2}, "pipeline": {"stage_blocks": blocks, "schedule": "zb-h1"}},
            PIPELINE_ROWS,
        ),
    }
    steps = {name: build(*plan) for name, plan in plans.items()}
    losses = {name: [step(batch) for batch in batches[:2]] for name, step in steps.items()}
    found: dict[str, Any] = {"losses": losses, "speeds": [], "tokens": {name: [] for name in steps}}
    for _ in range(chosen.repeats):
        dist.barrier()
        # The fast host repeats its step while the slow one computes, so that neither has the machine to itself.
        found["speeds"].append([len(few[0]) * TOKENS / s for s in over_ranks(seconds_of(alone, few[: chosen.steps]))])
        for name, step in steps.items():
            dist.barrier()
            seconds = max(over_ranks(seconds_of(step, batches[: chosen.steps])))
            found["tokens"][name].append(chosen.rows * TOKENS / seconds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))


@contextmanager
def throttled(pid: int, share: float) -> Iterator[str]:
    """Limit a process to a share of its core; yields the means, in words."""
    if share == 1:
        yield ""
        return
    group = CGROUP / f"weft-unlike-{pid}"
    try:
        group.mkdir()
        period = max(PERIOD, math.ceil(LEAST_QUOTA / share))
        (group / "cpu.cfs_period_us").write_text(str(period))
        (group / "cpu.cfs_quota_us").write_text(str(int(period * share)))
        (group / "cpu.shares").write_text(str(WEIGHT))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        ended = threading.Event()
        worker = threading.Thread(target=_duty_cycle, args=(pid, share, ended))
        worker.start()
        try:
            yield "stopped in a duty cycle"
        finally:
            ended.set()
            worker.join()
        return
    try:
        yield "quota of a cgroup"
    finally:
        for _ in range(100):  # until the process is gone
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def _duty_cycle(pid: int, share: float, ended: threading.Event) -> None:
    period = 2 * PERIOD * 1e-6
    with suppress(ProcessLookupError):
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(period * (1 - share))
            os.kill(pid, signal.SIGCONT)
            time.sleep(period * share)


def measure(chosen: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Start one rank on each host; return the results of rank 0, and how the second host is throttled."""
    with tempfile.TemporaryDirectory(prefix="weft-unlike-") as name, hosts(2, chosen.rate * 10**6) as machines:
        out, cores = Path(name) / "found.json", sorted(os.sched_getaffinity(0))
        settings = [f"--{key}={getattr(chosen, key)}" for key in ("repeats", "steps", "rows")]
        for rank, host in enumerate(machines):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": machines[0].address,
                "MASTER_PORT": "29400",
                "GLOO_SOCKET_IFNAME": host.interface,
                "OMP_NUM_THREADS": "1",
            }
            argv = ["taskset", "-c", str(cores[rank % len(cores)]), sys.executable, __file__, *settings]
            host.start([*argv, "--out", str(out)], env=environment)
        processes = [host.processes[0] for host in machines]
        while not all((out.parent / f"ready-{rank}").exists() for rank in range(2)):
            if any(process.poll() is not None for process in processes):
                sys.exit("a rank failed")
            time.sleep(0.05)
        with ExitStack() as stack:
            means = [
                stack.enter_context(throttled(process.pid, share))
                for process, share in zip(processes, chosen.shares, strict=True)
            ]
            (out.parent / "throttled").touch()
            codes = [process.wait() for process in processes]
            if any(codes):
                sys.exit("a rank failed")
        return json.loads(out.read_text()), means[-1]


def table_of(found: dict[str, Any], chosen: argparse.Namespace, means: str) -> Table:
    """Table of ratios; checks that the losses of all plans agree."""
    equal = found["tokens"][EQUAL]
    for name, losses in found["losses"].items():
        for loss, expected in zip(losses, found["losses"][EQUAL], strict=True):
            if abs(loss - expected) > 1e-4:
                raise SystemExit(f"{name}: loss {loss}, and {expected} with equal rows")
    both = [sum(speeds) for speeds in found["speeds"]]
    ratio = statistics.median(speeds[0] / speeds[1] for speeds in found["speeds"])
    title = (
        f"{Cpu().name}: {Cpu().instruction_set}; the hosts have {chosen.shares[0]:.0%} and {chosen.shares[1]:.0%} of their "
        f"cores ({means}), host 0 is {ratio:.2f} x as fast; {chosen.rows} rows of {TOKENS} tokens a step"
    )
    table = Table("plan", "tokens/s", "over equal rows", "over the sum of both speeds", "loss of step 2", title=title)
    table.add_row(ALONE, " + ".join(f"{statistics.median(s):.0f}" for s in zip(*found["speeds"], strict=True)))
    for name, tokens in found["tokens"].items():
        table.add_row(
            name.replace("[", "\\["),
            f"{statistics.median(tokens):.0f}",
            spread(ratios(tokens, equal), ".2f"),
            spread(ratios(tokens, both), ".1%"),
            f"{found['losses'][name][1]:.6f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shares", type=float, nargs=2, default=[1.0, 1 / 3], help="shares of their cores for the hosts"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps of each plan in a repeat")
    parser.add_argument("--rows", type=int, default=64, help="rows of a global batch")
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s of the link between the hosts")
    parser.add_argument("--quick", action="store_true", help="a smoke run: one repeat of 8 rows")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.repeats, chosen.rows = 1, 8
    if chosen.out:
        return rank_main(chosen, chosen.out)
    found, means = measure(chosen)
    console = Console(soft_wrap=True)
    console.width = max(console.width, 140)
    console.print(table_of(found, chosen, means))


if __name__ == "__main__":
    main()
