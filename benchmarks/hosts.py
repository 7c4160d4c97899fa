"""What slow links between hosts cost, and what each way to speak over them less, or behind computation, gets back.

    python benchmarks/hosts.py [--rate 100] [--repeats 3] [--steps 2] [--loss-steps 40] [--hosts 2] [--ranks 2]

Hosts are network namespaces on this machine whose links have the rate of --rate Mbit/s in each direction (root is needed, and
iproute2); their ranks share its cores, so that computation takes the longer the more there are. Two models of about 10 million
parameters, dense and Mixture-of-Experts, on the source code of Python's standard library, byte by byte. Each row is another
plan of the same training. Tokens a second over those of the first row of its table, side by side in each repeat: median
(min-max). Bytes that leave host 0 in a step: by the counters of its interface, headers taken off, and by the recorder.
The loss is that after --loss-steps more steps of all plans on the same rows, whatever the link.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers.figures import spread
from rich.console import Console
from rich.table import Table
from tests.lab.hosts import INTERFACE, hosts
from torch import Tensor

from weft.checkpoint.huggingface import build_on_meta, materialize, read_config
from weft.cluster.mesh import build_mesh, data_rank
from weft.comm.collectives import Recorder, all_gather_rows
from weft.comm.stopwatch import Stopwatch
from weft.data import MicroBatch
from weft.job import Model, Optimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Plan
from weft.precision.scaling import LossScale
from weft.train.optimizer import build_optimizer
from weft.train.step import train_step

TOKENS, ROWS = 256, 8
"""Of a row, and rows of a step."""
HEADER = 66  # bytes of Ethernet, IP and TCP with time stamps around each packet
SHAPE: dict[str, Any] = {"vocab_size": 256, "hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", **SHAPE, "intermediate_size": 1024, "num_hidden_layers": 6},
    "moe": {
        "model_type": "deepseek_v3",
        **SHAPE,
        "intermediate_size": 768,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 192,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
    },
}
FLAT, NOTHING = {"hierarchy": "flat", "prefetch": 0}, {"prefetch": 0}
SYSTEMS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "dense": {
        "zero 0, flat": ({"zero": 0}, FLAT),
        "zero 0, two levels": ({"zero": 0}, {}),
        "zero 3, flat": ({"zero": 3}, FLAT),
        "zero 3, two levels": ({"zero": 3}, NOTHING),
        "zero 3, two levels, gathered ahead": ({"zero": 3}, {}),
    },
    "moe": {
        "experts on all hosts, flat": ({"zero": 0, "ep": -1}, FLAT),
        "experts on all hosts, two levels": ({"zero": 0, "ep": -1}, {}),
    },
}


def text() -> Tensor:
    """Bytes of Python's standard library, int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def build(model: str, parallel: dict[str, Any], comm: dict[str, Any]) -> Any:
    """A training: a function that takes a step on rows of tokens, and gives its loss."""
    ranks = dist.get_world_size()
    degrees = {key: ranks if value == -1 else value for key, value in parallel.items()}
    tables = {"parallel": degrees, "precision": {"forward": "fp32"}, "comm": comm}
    plan = Plan.model_validate(tables).resolve(ranks)
    mesh, source = build_mesh(plan, "cpu", ranks), Model(config=MODELS[model])
    split = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh).train()
    materialize(split, source, torch.device("cpu"))
    optimizer = build_optimizer(split, Optimizer(lr=1e-3))
    positions = torch.arange(TOKENS).expand(ROWS // ranks, -1)

    def step(rows: Tensor) -> float:
        mine = rows.chunk(plan.parallel.data_ranks)[data_rank(mesh)]
        batch = MicroBatch(mine[:, :-1].contiguous(), positions, mine[:, 1:].contiguous())
        return train_step(split, optimizer, [batch], plan, mesh, LossScale(), 1.0).loss

    return step


def sent() -> tuple[int, int]:
    """Bytes and packets that have left this host."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split() for line in lines if line.strip().startswith(INTERFACE))
    return int(fields[9]), int(fields[10])


def rank_main(chosen: argparse.Namespace, out: Path) -> None:
    """One rank: times every training in turn, and leaves on rank 0 what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens, generator = text(), torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for model in chosen.models:
        steps = {name: build(model, *system) for name, system in SYSTEMS[model].items()}
        batches = [
            torch.stack(
                [tokens[i : i + TOKENS + 1] for i in torch.randint(len(tokens) - TOKENS, (ROWS,), generator=generator)]
            )
            for _ in range(max(chosen.loss_steps, 2))
        ]
        rows: dict[str, Any] = {name: {"seconds": [], "exposed": [], "hidden": []} for name in steps}
        for name, step in steps.items():
            with Recorder() as recorder:
                step(batches[0])
            own = sum(message.bytes for message in recorder.messages if message.link == "between")
            dist.barrier()
            before = sent()
            step(batches[1])
            dist.barrier()
            bytes_, packets = (after - ago for after, ago in zip(sent(), before, strict=True))
            recorded = all_gather_rows(torch.tensor([own]), dist.get_world_size())[: chosen.ranks].sum().item()
            rows[name] |= {"wire": bytes_ - HEADER * packets, "recorded": recorded, "messages": len(recorder.messages)}
        for _ in range(chosen.repeats):
            for name, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                with Stopwatch() as watch:
                    for number in range(chosen.steps):
                        step(batches[number])
                dist.barrier()
                rows[name]["seconds"].append((time.perf_counter() - begin) / chosen.steps)
                for kind in ("exposed", "hidden"):
                    rows[name][kind].append(sum(getattr(watch, kind).values()) / chosen.steps)
        for name, step in steps.items():
            losses = [step(batch) for batch in batches[: chosen.loss_steps]]
            rows[name]["loss"] = statistics.fmean(losses[-5:]) if losses else None
        found[model] = rows
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))


def run_ranks(chosen: argparse.Namespace, rate: int | None) -> dict[str, Any]:
    """All ranks on hosts of their own."""
    with tempfile.TemporaryDirectory() as folder, hosts(chosen.hosts, rate) as made:
        out, world = Path(folder) / "found.json", chosen.hosts * chosen.ranks
        processes: list[subprocess.Popen[Any]] = []
        for rank in range(world):
            environment = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": made[0].address, "MASTER_PORT": 29400}
            environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": 1, "WEFT_OUT": out}
            own = os.environ | {key: str(value) for key, value in environment.items()}
            processes.append(made[rank // chosen.ranks].start([sys.executable, *sys.argv], env=own))
        if sum([abs(process.wait()) for process in processes]):
            sys.exit("a rank failed")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def show(model: str, rows: dict[str, Any], chosen: argparse.Namespace) -> None:
    first = next(iter(rows.values()))
    tokens = ROWS * TOKENS / statistics.median(first["seconds"])
    table = Table(
        title=f"{model}, {chosen.hosts} hosts x {chosen.ranks} ranks, {chosen.rate} Mbit/s; the first: {tokens:,.0f} tokens/s"
    )
    columns = ("", "tokens/s", "exposed", "hidden", "MB a step", "recorded", "messages", "loss")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        ratios = [theirs / mine for mine, theirs in zip(row["seconds"], first["seconds"], strict=True)]
        seconds = [f"{statistics.median(row[kind]):.2f} s" for kind in ("exposed", "hidden")]
        recorded = f"{row['recorded'] / 1e6:.2f}" if row["recorded"] else ""
        loss = "" if row["loss"] is None else f"{row['loss']:.3f}"
        table.add_row(
            name, spread(ratios, ".2f"), *seconds, f"{row['wire'] / 1e6:.2f}", recorded, str(row["messages"]), loss
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rate", 100), ("repeats", 3), ("steps", 2), ("loss-steps", 40), ("hosts", 2), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    chosen = parser.parse_args()
    if "WEFT_OUT" in os.environ:
        return rank_main(chosen, Path(os.environ["WEFT_OUT"]))
    for model, rows in run_ranks(chosen, chosen.rate * 10**6).items():
        show(model, rows, chosen)


if __name__ == "__main__":
    main()
