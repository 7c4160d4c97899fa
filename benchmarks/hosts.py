"""Cost of slow links between hosts, and speed of plans that send fewer bytes or overlap messages with computation.

    python benchmarks/hosts.py [--rate 100] [--repeats 3] [--steps 2] [--hosts 2] [--ranks 2]
    python benchmarks/hosts.py --loss-steps 60 --rows flat "pp between hosts"    # final losses of some rows instead of speed
    python benchmarks/hosts.py --scaling [--rate 100]    # 1 to 8 hosts of one rank
    python benchmarks/hosts.py --models experts --ranks 1 --rate 400    # messages of experts in turn, and joint

Hosts are network namespaces on this machine whose links have the rate of --rate Mbit/s in each direction (needs root and
iproute2). Their ranks share its cores, so computation takes longer with more ranks. Two models of about 10 million
parameters, dense and Mixture-of-Experts, train on the source code of Python's standard library, byte by byte. Each row is
another plan of the same training. The table has

- tokens per second over those of the first row, side by side in each repeat: median (min-max);
- bytes that leave host 0 in a step, by the counters of its interface without headers, and by the recorder.

With --loss-steps, losses are those of a training of that many steps, on the same rows for all plans, without a limit on the
links; 1-bit Adam freezes after a fifth of them. When speed is measured, 1-bit Adam is timed after the freeze.

With --scaling each rank has two rows of the dense model for any number of ranks. All ranks share the cores of this machine, so
the upper bound for N hosts is the speed of N untouched models that run at the same time without messages between them. That
is the first column; the other columns are fractions of it.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers.figures import spread
from rich.console import Console
from rich.table import Table
from tests.lab.hosts import INTERFACE, hosts, payload_sent
from torch import Tensor
from transformers import AutoModelForCausalLM

from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.collectives import all_gather_rows
from weft.comm.recorder import Recorder
from weft.comm.stopwatch import CollectiveClock
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.job import Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Plan, resolve_plan
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

CODECS = ("bf16", "int8", "2:4", "1-bit")
System = tuple[dict[str, Any], dict[str, Any]]
"""Tables parallel and comm of a plan."""
Step = Callable[[Tensor], float]
"""Training step on rows of tokens; returns the loss."""


def between(codec: str) -> dict[str, Any]:
    """Compression of messages between hosts."""
    return {"compression": codec, "compress_scope": "inter_node"}


TOKENS, ROWS = 256, 8
"""Tokens per row, and rows per step."""
ROWS_EACH = 2
"""Rows per rank with --scaling."""
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
MODELS["experts"] = {
    "model_type": "qwen3_moe",
    **SHAPE,
    "head_dim": 64,
    "intermediate_size": 768,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
FLAT, NO_PREFETCH = {"hierarchy": "flat", "prefetch": 0}, {"prefetch": 0}
SYSTEMS: dict[str, dict[str, System]] = {
    "dense": {
        "zero 0, flat": ({"zero": 0}, FLAT),
        "zero 0, hierarchical": ({"zero": 0}, {}),
        **{f"zero 0, hierarchical, {codec} between": ({"zero": 0}, between(codec)) for codec in CODECS},
        "zero 3, flat": ({"zero": 3}, FLAT),
        "zero 3, hierarchical": ({"zero": 3}, NO_PREFETCH),
        "zero 3, hierarchical, prefetch": ({"zero": 3}, {}),
        "zero 3, hierarchical, prefetch, int8 between": ({"zero": 3}, between("int8")),
        **{
            f"zero 0, tp on each host, {codec} between": ({"zero": 0, "tp": 2}, between(codec))
            for codec in ("int8", "1-bit")
        },
        "zero 0, pp between hosts": ({"zero": 0, "pp": 2}, {}),
    },
    "moe": {
        "experts on all hosts, flat": ({"zero": 0, "ep": -1}, FLAT),
        "experts on all hosts, hierarchical": ({"zero": 0, "ep": -1}, {}),
        **{f"hierarchical, {codec} between": ({"zero": 0, "ep": -1}, between(codec)) for codec in CODECS},
        "experts on each host, hierarchical, int8 between": ({"zero": 0, "ep": 2}, between("int8")),
        "experts on each host, pp between hosts": ({"zero": 0, "ep": 2, "pp": 2}, {}),
    },
    "experts": {
        f"zero {zero}, {name}": ({"zero": zero, "ep": -1}, {**FLAT, "expert_overlap": value})
        for zero in (0, 2)
        for name, value in (("in turn", "off"), ("joint", "joint"))
    },
}
"""Systems by model; those of "experts" run micro-batches of one row."""

ALONE = "no messages"
SCALED: dict[str, System] = {
    "plain": ({"zero": 0}, FLAT),
    **{f"{codec} between": ({"zero": 0}, between(codec)) for codec in ("int8", "1-bit")},
}
"""Plans measured by --scaling, beside untouched models."""


def rows_of(model: str, ranks: int, scaling: bool = False) -> int:
    """Rows of a step."""
    return ROWS_EACH * ranks if scaling else 4 * ranks if model == "experts" else ROWS


def text() -> Tensor:
    """Bytes of Python's standard library, int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def select(systems: dict[str, System], endings: list[str]) -> dict[str, System]:
    """Systems whose names have one of these endings; all systems if there are no endings."""
    return {name: system for name, system in systems.items() if not endings or name.endswith(tuple(endings))}


def build(model: str, parallel: dict[str, Any], comm: dict[str, Any], freeze_steps: int) -> Step:
    """Training step of a plan; rows are divided equally among data ranks."""
    ranks = dist.get_world_size()
    degrees = {key: ranks if value == -1 else value for key, value in parallel.items()}
    tables = {"parallel": degrees, "precision": {"param_dtype": "fp32"}, "comm": comm}
    plan = resolve_plan(Plan.model_validate(tables), ranks, native_bf16=detect().supports("bf16"))
    mesh, source = build_mesh(plan, "cpu", ranks), Model(config=MODELS[model])
    split = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh).train()
    materialize(split, source, torch.device("cpu"))
    one_bit = plan.comm.compression == "1-bit"
    settings = {"name": "onebit-adam", "freeze_steps": freeze_steps} if one_bit else {}
    optimizer = DistributedOptimizer(build_optimizer(split, Optimizer(lr=1e-3, **settings)), split, detect())

    def step(rows: Tensor) -> float:
        mine = rows.chunk(plan.parallel.data_ranks)[data_rank(mesh)]
        batches = [
            MicroBatch(part[:, :-1].contiguous(), torch.arange(TOKENS).expand(len(part), -1), part[:, 1:].contiguous())
            for part in mine.split(1 if plan.parallel.pp > 1 or "expert_overlap" in comm else len(mine))
        ]
        return train_step(split, optimizer, batches, 1.0).loss

    return step


def rank_main(chosen: argparse.Namespace, measure: str, out: Path) -> None:
    """Run steps of every plan in turn on one rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens, generator = text(), torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for model in chosen.models:
        rows = rows_of(model, dist.get_world_size(), measure == "scaling")
        starts = torch.randint(
            len(tokens) - TOKENS, (max(chosen.loss_steps, chosen.steps, 2), rows), generator=generator
        )
        batches = [torch.stack([tokens[i : i + TOKENS + 1] for i in row]) for row in starts]
        systems = SCALED if measure == "scaling" else select(SYSTEMS[model], chosen.rows)
        if measure == "loss":
            found[model] = {name: final_loss(model, system, batches) for name, system in systems.items()}
        else:
            steps = {name: build(model, *system, freeze_steps=1) for name, system in systems.items()}
            if measure == "scaling":
                steps = {ALONE: build_alone()} | steps
            found[model] = speed(steps, chosen, batches)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))


def build_alone() -> Step:
    """Training step of the untouched dense model on this rank alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(read_config(Model(config=MODELS["dense"])), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> float:
        mine = batch[dist.get_rank() * ROWS_EACH :][:ROWS_EACH]
        loss = model(mine[:, :-1], labels=mine[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def final_loss(model: str, system: System, batches: list[Tensor]) -> float:
    """Mean loss of the last five steps."""
    step = build(model, *system, freeze_steps=max(len(batches) // 5, 1))
    return statistics.fmean([step(batch) for batch in batches][-5:])


def speed(steps: dict[str, Step], chosen: argparse.Namespace, batches: list[Tensor]) -> dict[str, Any]:
    """Seconds, bytes and messages of a step of every plan."""
    rows: dict[str, Any] = {name: {"seconds": [], "exposed": [], "hidden": []} for name in steps}
    for name, step in steps.items():
        step(batches[0])
        dist.barrier()
        before = payload_sent()
        with Recorder() as recorder:
            step(batches[1])
            dist.barrier()
        sent = payload_sent() - before
        own_bytes = sum(message.bytes for message in recorder.messages if message.link == "between")
        recorded = all_gather_rows(torch.tensor([own_bytes]), dist.get_world_size())[: chosen.ranks].sum().item()
        rows[name] |= {"wire": sent, "recorded": recorded, "messages": len(recorder.messages)}
    for _ in range(chosen.repeats):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            with CollectiveClock() as watch:
                for index in range(chosen.steps):
                    step(batches[index])
            dist.barrier()
            rows[name]["seconds"].append((time.perf_counter() - begin) / chosen.steps)
            for kind in ("exposed", "hidden"):
                rows[name][kind].append(sum(getattr(watch, kind).values()) / chosen.steps)
    return rows


def run_ranks(chosen: argparse.Namespace, measure: str, rate: int | None) -> dict[str, Any]:
    """Start all ranks on emulated hosts, and return their results for each model."""
    with tempfile.TemporaryDirectory() as folder, hosts(chosen.hosts, rate) as emulated:
        out, world = Path(folder) / "found.json", chosen.hosts * chosen.ranks
        processes: list[subprocess.Popen[Any]] = []
        for rank in range(world):
            environment = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": emulated[0].address, "MASTER_PORT": 29400}
            environment |= {
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": 1,
                "WEFT_MEASURE": measure,
                "WEFT_OUT": out,
            }
            variables = os.environ | {key: str(value) for key, value in environment.items()}
            processes.append(emulated[rank // chosen.ranks].start([sys.executable, *sys.argv], env=variables))
        if sum([abs(process.wait()) for process in processes]):
            sys.exit("a rank failed")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def show(model: str, rows: dict[str, Any], chosen: argparse.Namespace) -> None:
    first = next(iter(rows.values()))
    tokens = rows_of(model, chosen.hosts * chosen.ranks) * TOKENS / statistics.median(first["seconds"])
    table = Table(
        title=f"{model}, {chosen.hosts} hosts x {chosen.ranks} ranks, {chosen.rate} Mbit/s; first row: {tokens:,.0f} tokens/s"
    )
    columns = ("", "tokens/s", "exposed", "hidden", "MB a step", "recorded", "messages")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        ratios = [base / value for value, base in zip(row["seconds"], first["seconds"], strict=True)]
        seconds = [f"{statistics.median(row[kind]):.2f} s" for kind in ("exposed", "hidden")]
        recorded = f"{row['recorded'] / 1e6:.2f}" if row["recorded"] else ""
        table.add_row(
            name,
            spread(ratios, ".2f"),
            *seconds,
            f"{row['wire'] / 1e6:.2f}",
            recorded,
            str(row["messages"]),
        )
    Console(width=140).print(table)


def show_scaling(found: dict[int, dict[str, Any]], rate: int) -> None:
    """Print tokens per second of all hosts, as a fraction of their speed without messages."""
    table = Table(title=f"dense, one rank a host, {rate} Mbit/s, {ROWS_EACH * TOKENS} tokens a rank and step")
    names = list(next(iter(found.values())))
    for column in ("hosts", f"{ALONE}, tokens/s", *names[1:], "best over plain"):
        table.add_column(column, justify="right")
    for num_hosts, rows in found.items():
        alone = rows[ALONE]["seconds"]
        tokens = num_hosts * ROWS_EACH * TOKENS / statistics.median(alone)
        shares = {
            name: [100 * base / value for value, base in zip(row["seconds"], alone, strict=True)]
            for name, row in rows.items()
        }
        best = min(names[1:], key=lambda name: statistics.median(rows[name]["seconds"]))
        over = [plain / value for plain, value in zip(rows["plain"]["seconds"], rows[best]["seconds"], strict=True)]
        columns = [f"{spread(shares[name], '.0f')} %" for name in names[1:]]
        table.add_row(str(num_hosts), f"{tokens:,.0f}", *columns, spread(over, ".2f"))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rate", 100), ("repeats", 3), ("steps", 2), ("loss-steps", 0), ("hosts", 2), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--rows", nargs="+", default=[], help="endings of the names of the rows to run")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    chosen = parser.parse_args()
    if chosen.scaling:
        chosen.models, chosen.ranks = ["dense"], 1
    if "WEFT_OUT" in os.environ:
        return rank_main(chosen, os.environ["WEFT_MEASURE"], Path(os.environ["WEFT_OUT"]))
    if chosen.scaling:
        found = {}
        for chosen.hosts in (1, 2, 4, 8):
            found[chosen.hosts] = run_ranks(chosen, "scaling", chosen.rate * 10**6)["dense"]
        return show_scaling(found, chosen.rate)
    if chosen.loss_steps:
        return Console(width=140).print(run_ranks(chosen, "loss", None))
    for model, rows in run_ranks(chosen, "speed", chosen.rate * 10**6).items():
        show(model, rows, chosen)


if __name__ == "__main__":
    main()
