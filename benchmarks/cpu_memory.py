"""Memory saved by each memory option, and its cost in time: Weft beside torch, Transformers and torchao.

    python benchmarks/cpu_memory.py [--repeats 7]

One rank, one Llama.

Activations, in float32 and bfloat16. Held: bytes saved for backward after forward (live storages without weights). Peak: the
maximum during forward and backward. Time: forward and backward over those of the plain model in the same repeat, median
(min-max). The gradients of every row are first compared with the plain model's, bit by bit.

Weights and optimizer states, bfloat16 with float32 master weights and AdamW: bytes between steps and at the peak of a step,
and the time of a step over that of whole weights with states in memory. The losses of every row are compared with those of
whole weights (to 5 % with quantized states, else to 0.1 %). torchao's rows need torchao and a C++ compiler. Memory-mapped
files are not counted, as they stay in memory only while the system has space.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peers.figures import spread
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.job import Model, Optimizer
from weft.launch.rank_entry import connect
from weft.memory.live_bytes import LiveBytes
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Memory, Parallel, Plan, Precision, resolve_plan
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
TOKENS = 512
TOLERANCE = 1e-3  # of a loss, relative
aten = torch.ops.aten
KEPT = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}


def weft(dtype: torch.dtype, **memory: Any) -> Any:
    name = "fp32" if dtype == torch.float32 else "bf16"
    precision = Precision(param_dtype=name, update=name, reduce_dtype=name)
    plan = resolve_plan(
        Plan(parallel=Parallel(zero=0), precision=precision, memory=Memory(**memory)),
        1,
        native_bf16=detect().supports("bf16"),
    )
    return parallelize(plain(dtype), plan, build_mesh(plan, "cpu", 1))


def plain(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    source = Model(config=MODEL)
    return build_plain(source, read_config(source), dtype)


def gradient_checkpointing(dtype: torch.dtype) -> Any:
    model = plain(dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def selective(dtype: torch.dtype) -> Any:
    """Torch's selective checkpointing of blocks: results of matmuls and of attention are saved."""
    model = plain(dtype)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in model.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return model


def saved_on_cpu(dtype: torch.dtype) -> Any:
    """Torch's save_on_cpu hooks; on a CPU they make a second copy in the same memory."""
    model = plain(dtype)
    for block in model.model.layers:
        block.forward = partial(_saved_on_cpu, block.forward)
    return model


def _saved_on_cpu(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return forward(*args, **kwargs)


def recompute(*roles: str, **memory: Any) -> Callable[[torch.dtype], Any]:
    return partial(weft, recompute=roles, **memory)


SYSTEMS: dict[str, Callable[[torch.dtype], Any]] = {
    "plain": plain,
    "Weft, activation": recompute("activation"),
    "Weft, norm": recompute("norm"),
    "Weft, activation and norm": recompute("activation", "norm"),
    "Weft, attention, activation and norm": recompute("attention", "activation", "norm"),
    "Weft, mlp": recompute("mlp"),
    "Weft, block": recompute("block"),
    "Weft, every second block": recompute("block", recompute_interval=2),
    "Weft, attention offloaded to disk": partial(weft, offload=("attention",), offload_to="disk"),
    "Weft, attention offloaded to disk, mlp recomputed": recompute("mlp", offload=("attention",), offload_to="disk"),
    "Weft, block offloaded to disk": partial(weft, offload=("block",), offload_to="disk"),
    "torch, selective checkpointing": selective,
    "torch, save_on_cpu": saved_on_cpu,
    "Transformers, gradient checkpointing": gradient_checkpointing,
}


def backward(model: Any, tokens: Tensor) -> None:
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()


def count(model: Any, tokens: Tensor) -> tuple[int, int, list[Tensor]]:
    """Bytes held after forward, bytes at the peak, and gradients."""
    model.zero_grad(set_to_none=False)
    with LiveBytes() as live:
        live.track("parameters", [*model.parameters(), *model.buffers()])
        live.track("gradients", (parameter.grad for parameter in model.parameters()))
        before = live.total
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        held = live.total - before
        loss.backward()
        peak = live.peak - before
    return held, peak, [parameter.grad.clone() for parameter in model.parameters()]


def measure(dtype: torch.dtype, repeats: int) -> tuple[Table, list[str]]:
    tokens = torch.randint(0, MODEL["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    models = {name: build(dtype).train() for name, build in SYSTEMS.items()}
    for model in models.values():  # allocates the gradients, which are then reused
        backward(model, tokens)
    counted = {name: count(model, tokens) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            begin = time.perf_counter()
            backward(model, tokens)
            seconds[name].append(time.perf_counter() - begin)
    held, peak, gradients = counted["plain"]
    table = Table(
        title=f"{dtype}: {TOKENS} tokens; plain holds {held / 2**20:.1f} MiB, peak {peak / 2**20:.1f} MiB, "
        f"{statistics.median(seconds['plain']):.2f} s"
    )
    for column in ("", "held", "peak", "time"):
        table.add_column(column, justify="left" if not column else "right")
    problems = []
    for name, (own_held, own_peak, own_gradients) in counted.items():
        if not all(map(torch.equal, own_gradients, gradients)):
            problems.append(f"{dtype}: gradients of {name} differ")
        ratios = [value / base for value, base in zip(seconds[name], seconds["plain"], strict=True)]
        table.add_row(name, f"{own_held / held:.1%}", f"{own_peak / peak:.1%}", spread(ratios, ".2f"))
    return table, problems


# Weights and states


class Training:
    """Training by Weft."""

    def __init__(
        self,
        zero: int = 0,
        weights: str = "whole",
        states: str = "update",
        optimizer_device: str = "device",
        build: Callable[..., torch.optim.Optimizer] | None = None,
    ):
        self.tolerance = 0.05 if build or states != "update" else TOLERANCE
        precision = Precision(weights=weights, optimizer_state_dtype=states)  # type: ignore[arg-type]
        memory = Memory(optimizer_device=optimizer_device)  # type: ignore[arg-type]
        self.plan = resolve_plan(
            Plan(parallel=Parallel(zero=zero), precision=precision, memory=memory),
            1,
            native_bf16=detect().supports("bf16"),
        )  # type: ignore[arg-type]
        self.mesh = build_mesh(self.plan, "cpu", 1)
        self.model: Any = parallelize(plain(torch.float32), self.plan, self.mesh).train()
        inner = build_optimizer(self.model, Optimizer())
        inner = build(inner.param_groups, **inner.defaults) if build else inner
        self.optimizer = DistributedOptimizer(inner, self.model, detect())

    def track(self, live: LiveBytes) -> None:
        self.optimizer.track(live)

    def step(self, tokens: Tensor) -> float:
        positions = torch.arange(TOKENS).expand_as(tokens)
        targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)
        batches = [MicroBatch(tokens, positions, targets)]
        return train_step(self.model, self.optimizer, batches, clip_norm=0.0).loss


class Offloaded:
    """Training by torch's FSDP2 with CPU offload of shards, gradients and states; on a CPU that is the same memory."""

    def __init__(self) -> None:
        self.tolerance = TOLERANCE
        self.model: Any = plain(torch.float32).train()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        settings: dict[str, Any] = {"mp_policy": policy, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
        for block in self.model.model.layers:
            fully_shard(block, **settings)
        fully_shard(self.model, **settings)
        self.optimizer = build_optimizer(self.model, Optimizer())

    def track(self, live: LiveBytes) -> None:
        live.track_training(self.model, self.optimizer)

    def step(self, tokens: Tensor) -> float:
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


UPDATES: dict[str, Callable[[], Any]] = {
    "Weft, whole weights": Training,
    "Weft, split weights": partial(Training, weights="split"),
    "Weft, split weights, ties to even": partial(Training, weights="split_even"),
    "Weft, states on disk": partial(Training, optimizer_device="disk"),
    "Weft, split weights, states on disk": partial(Training, weights="split", optimizer_device="disk"),
    "Weft, states in bfloat16": partial(Training, states="bf16"),
    "Weft, states of 8 bits": partial(Training, states="int8"),
    "Weft, states of 4 bits": partial(Training, states="int4"),
    "Weft, split weights, states of 8 bits": partial(Training, weights="split", states="int8"),
    "Weft, zero 3": partial(Training, zero=3),
    "torch, FSDP2 with CPUOffloadPolicy": Offloaded,
}


def torchao_optimizers() -> dict[str, Callable[[], Any]]:
    """Training with torchao's AdamW of 8 and of 4 bits; empty if torchao is not installed."""
    try:
        from torchao.optim import AdamW4bit, AdamW8bit
    except ImportError:
        return {}

    def build(kind: Any) -> Callable[..., Any]:
        return lambda groups, lr, betas, eps, weight_decay, **_: kind(
            [{key: group[key] for key in ("params", "weight_decay")} for group in groups],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )

    return {f"torchao, {kind.__name__}": partial(Training, build=build(kind)) for kind in (AdamW8bit, AdamW4bit)}


def measure_updates(repeats: int) -> tuple[Table, list[str]]:
    tokens = torch.randint(0, MODEL["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    systems = {name: build() for name, build in (UPDATES | torchao_optimizers()).items()}
    losses = {name: [system.step(tokens) for _ in range(3)] for name, system in systems.items()}
    counted: dict[str, tuple[int, int]] = {}
    for name, system in systems.items():
        # LiveBytes cannot see inside compiled code: torchao's update is counted uncompiled.
        with torch.compiler.set_stance("force_eager"), LiveBytes() as live:
            system.track(live)
            state = live.total
            system.step(tokens)
        counted[name] = state, live.peak
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, system in systems.items():
            begin = time.perf_counter()
            system.step(tokens)
            seconds[name].append(time.perf_counter() - begin)
    first = next(iter(UPDATES))
    parameters = sum(parameter.numel() for parameter in systems[first].model.parameters())
    table = Table(
        title=f"{parameters / 1e6:.1f} million parameters, {TOKENS} tokens; the first row takes "
        f"{statistics.median(seconds[first]):.2f} s a step"
    )
    for column in ("", "bytes a parameter between steps", "at the peak", "time of a step"):
        table.add_column(column, justify="left" if not column else "right")
    problems = []
    for name, (state, peak) in counted.items():
        difference = max(abs(value - base) / base for value, base in zip(losses[name], losses[first], strict=True))
        if difference > systems[name].tolerance:
            problems.append(f"losses of {name} differ by {difference:.1e}")
        ratios = [value / base for value, base in zip(seconds[name], seconds[first], strict=True)]
        table.add_row(name, f"{state / parameters:.2f}", f"{peak / parameters:.2f}", spread(ratios, ".2f"))
    return table, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    chosen = parser.parse_args()
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE"}
    torch.set_num_threads(2)
    connect(detect())
    problems = []
    for dtype in (torch.float32, torch.bfloat16):
        table, found = measure(dtype, chosen.repeats)
        Console(width=120).print(table)
        problems += found
    table, found = measure_updates(chosen.repeats)
    Console(width=120).print(table)
    problems += found
    sys.exit("; ".join(problems) or None)


if __name__ == "__main__":
    main()
