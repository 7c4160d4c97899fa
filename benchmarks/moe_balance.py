"""Load of expert-parallel ranks with and without replicas of hot experts and relocation, and what even load is worth.

    python benchmarks/moe_balance.py            # about five minutes
    python benchmarks/moe_balance.py --quick

Plans: routings of Zipf popularity (1,024 tokens a rank, random order, sources that differ a little), and those of a small
Qwen3-MoE while it learns Python source code without an auxiliary loss. Load: rows of the fullest rank / mean, the median and
99th percentile of micro-batches; seconds are those of one thread.

Relocation: homes are planned from 20 micro-batches of a popularity that lasts, and tried on 20 later ones.

Steps: two ranks train one layer of experts on rows that choose by popularity; one rank has the popular experts. Systems take
turns: the router's own choice, relocated experts, replicas, both, and a router forced to choose evenly, which is the limit.
Core seconds are those of the busier rank, without its waits; on a busy machine they say more than seconds.
"""

import os
import sys
import sysconfig
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from peers.figures import spread
from rich.console import Console
from rich.table import Table
from tests.lab.experts import balance_experts, split_experts
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from weft.backends.hierarchical import register_backend
from weft.device.detect import detect
from weft.parallel.experts.balance import plan_replicas, rows_to_receive, rows_to_send, shares
from weft.parallel.experts.dispatch import Channel
from weft.parallel.experts.homes import ExpertHomes, plan_homes

GROUPS = ((8, 64, 8), (8, 128, 8), (16, 128, 8), (64, 256, 8))
"""Ranks, experts, and experts of a token."""
SYSTEMS = ("the router's choice", "relocated", "replicas", "relocated, replicas", "forced even")


def zipf(ranks: int, experts: int, top_k: int, alpha: float, tokens: int, seed: int, lasting: int | None = None) -> Any:
    """Copies of each rank's tokens for each expert, [ranks, experts]; `lasting`: seed of a popularity that lasts."""
    generator = np.random.default_rng(seed)
    order = generator if lasting is None else np.random.default_rng(lasting)
    popularity = order.permutation(np.arange(1, experts + 1) ** -alpha)
    counts = np.zeros((ranks, experts), np.int64)
    for rank in range(ranks):
        scores = np.log(popularity * np.exp(generator.normal(0, 0.3, experts)))
        chosen = np.argpartition(-(scores + generator.gumbel(size=(tokens, experts))), top_k, 1)[:, :top_k]
        counts[rank] = np.bincount(chosen.ravel(), minlength=experts)
    return counts


def natural(steps: int) -> list[Any]:
    """Copies of eight ranks for 64 experts, of each layer and step of a small model that learns source code."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 64}
    config = AutoConfig.for_model("qwen3_moe", **sizes, num_experts_per_tok=8, norm_topk_prob=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    chosen: list[Any] = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda module, args: chosen.append(args[1].detach()))
    files = [file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    files = [text for text in files if len(text) > 20000]
    generator, optimizer, found = np.random.default_rng(0), torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for _ in range(steps):
        rows = []
        for _ in range(16):
            text = files[generator.integers(len(files))]
            start = generator.integers(len(text) - 65)
            rows.append(torch.frombuffer(bytearray(text[start : start + 64]), dtype=torch.uint8).long())
        ids = torch.stack(rows)
        chosen.clear()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for index in chosen:
            found.append(np.stack([np.bincount(part.ravel(), minlength=64) for part in index.view(8, -1).numpy()]))
    return found[len(found) // 2 :]


def load_of(counts: Any, slots: int) -> tuple[float, int, float]:
    """Rows of the fullest rank / mean with replicas, their number, and seconds for the plan and the routes of a rank."""
    ranks, experts = counts.shape
    load = counts.sum(0)
    begin = time.thread_time()
    replicas = plan_replicas(load, ranks, slots) if slots else []
    shared = shares(counts, replicas)
    rows_to_send(counts, shared, 0)
    rows_to_receive(counts, shared, 0)
    seconds = time.thread_time() - begin
    held = load.reshape(ranks, -1).sum(1)
    for replica in replicas:
        held[replica.rank] += replica.copies
        held[replica.expert // (experts // ranks)] -= replica.copies
    return held.max() * ranks / load.sum(), len(replicas), seconds


def plans(repeats: int, steps: int) -> Table:
    """Table of loads by routing."""
    table = Table(
        "routing", "ranks", "experts", "alone", "1 slot", "2 slots", "3 slots", "replicas", "ms", title="load"
    )
    cases = [
        (
            f"Zipf {alpha:g}",
            [zipf(ranks, experts, top_k, alpha, 1024 if ranks < 64 else 256, seed) for seed in range(repeats)],
        )
        for ranks, experts, top_k in GROUPS
        for alpha in (1.0, 1.5)
    ]
    for name, all_counts in [*cases, ("trained, no auxiliary loss", natural(steps))]:
        found = {slots: [load_of(counts, slots) for counts in all_counts] for slots in range(4)}
        cells = [[one[0] for one in results] for results in found.values()]
        table.add_row(
            name,
            *map(str, all_counts[0].shape),
            *(f"{median(cell):.3f} / {np.percentile(cell, 99):.3f}" for cell in cells),
            f"{median(one[1] for one in found[2]):.0f}",
            f"{1e3 * median(one[2] for one in found[2]):.2f}",
        )
    return table


def relocations(repeats: int) -> Table:
    """Table of loads of a lasting popularity, without and with relocation."""
    table = Table(
        "routing", "ranks", "experts", "alone", "relocated", "moved", "2 slots", "replicas", "both", "replicas"
    )
    for ranks, experts, top_k in GROUPS:
        for alpha in (1.0, 1.5):
            cells: list[list[float]] = [[] for _ in range(7)]
            for lasting in range(repeats):
                shape = ranks, experts, top_k, alpha, 256
                past, later = ([zipf(*shape, seed, lasting) for seed in seeds] for seeds in (range(20), range(20, 40)))
                homes = plan_homes(sum(past).sum(0), np.arange(experts), ranks)
                cells[2].append((homes != np.arange(experts)).sum())
                for counts in later:
                    for column, slots, order in ((0, 0, np.arange(experts)), (1, 0, homes)):
                        cells[column].append(load_of(counts[:, order], slots)[0])
                    for column, order in ((3, np.arange(experts)), (5, homes)):
                        load, replicas, _ = load_of(counts[:, order], 2)
                        cells[column].append(load)
                        cells[column + 1].append(replicas)
            texts = [f"{median(c):.3f} / {np.percentile(c, 99):.3f}" for c in cells]
            texts[2], texts[4], texts[6] = (f"{median(cells[column]):.0f}" for column in (2, 4, 6))
            table.add_row(f"Zipf {alpha:g}", str(ranks), str(experts), *texts)
    return table


def train(rank: int, ranks: int, tokens: int, repeats: int, alpha: float, port: int) -> None:
    """Seconds of a forward and backward of one layer of experts, by system, on the slower rank."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    group: Any = dist.new_group(backend=register_backend())
    config = AutoConfig.for_model("mixtral", hidden_size=512, intermediate_size=1024, num_local_experts=8)
    config._experts_implementation = "grouped_mm"
    generator = torch.Generator().manual_seed(rank)
    popularity = torch.arange(1, 9).double() ** -alpha
    index = torch.multinomial(popularity.expand(tokens, -1), 2, generator=generator)
    load = torch.bincount(index.flatten(), minlength=8)
    dist.all_reduce(load, group=group)
    homes = ExpertHomes(8)
    homes.set(plan_homes(load.numpy(), np.arange(8), ranks).tolist(), torch.device("cpu"))
    layers = []
    for name in SYSTEMS:
        experts: Any = MixtralExperts(config)
        for key, parameter in list(experts.named_parameters()):
            setattr(experts, key, torch.nn.Parameter(0.02 * torch.randn_like(parameter.chunk(ranks)[rank])))
        moved = homes if "relocated" in name else None
        if "replicas" in name:
            balance_experts(experts, Channel(group), 2, homes=moved)
        else:
            split_experts(experts, (Channel(group),), homes=moved)
        layers.append(experts)
    even = (torch.arange(2 * tokens) % 8).view(tokens, 2)
    hidden, weights = torch.randn(tokens, 512, generator=generator, requires_grad=True), torch.full((tokens, 2), 0.5)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    for _ in range(repeats + 2):
        for name, experts in zip(SYSTEMS, layers, strict=True):
            dist.barrier(group)
            begin, core = time.perf_counter(), time.process_time()
            experts(hidden, even if name == "forced even" else index, weights).sum().backward()
            taken = torch.tensor([time.perf_counter() - begin, time.process_time() - core], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX, group)
            seconds[name].append(tuple(taken.tolist()))
    if rank == 0:
        title = f"one layer of experts, two ranks, Zipf {alpha:g}"
        table = Table("system", "load", "ms", "forced even / system", "the same in core seconds", title=title)
        limits = seconds["forced even"][2:]
        for name, times in seconds.items():
            held = load[homes.expert_of if "relocated" in name else slice(None)].view(2, -1).sum(1)
            is_even = "replicas" in name or name == "forced even"
            ratio = 1.0 if is_even else 2 * held.max().item() / held.sum().item()
            pairs = list(zip(limits, times[2:], strict=True))
            of_limit = [spread([limit[kind] / own[kind] for limit, own in pairs], ".2f") for kind in (0, 1)]
            table.add_row(name, f"{ratio:.2f}", spread([1e3 * t for t, _ in times[2:]], ".0f"), *of_limit)
        Console(width=120).print(table)
    dist.destroy_process_group()


def main(quick: Annotated[bool, typer.Option(help="Few routings and repeats.")] = False) -> None:
    """Print the loads of all routings, then the seconds of real steps."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent.parent))
    print(f"{detect().name}; the load is the median / the 99th percentile of the fullest rank's rows over the mean")
    Console(width=140).print(plans(5 if quick else 100, 5 if quick else 200))
    Console(width=140).print(relocations(1 if quick else 10))
    for alpha in (1.0, 1.5):
        spawn(train, (2, 256 if quick else 4096, 2 if quick else 9, alpha, 29500 + os.getpid() % 1000), nprocs=2)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
