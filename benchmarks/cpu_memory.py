"""What each way to hold fewer activations saves, and what it costs: Weft beside torch's own answers.

    python benchmarks/cpu_memory.py [--repeats 7]

One rank, one Llama, float32 and bfloat16. Held is what forward leaves for backward (live storages, weights apart); peak the
most that is there at once in forward and backward; time that of forward and backward over that of the plain model, in the same
repeat: median (min-max). Gradients of every row are compared with the plain model's first, bit by bit.
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
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.checkpoint.huggingface import build_plain, read_config
from weft.cluster.device import detect
from weft.cluster.launch import connect
from weft.cluster.mesh import build_mesh
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.plan import Memory, Parallel, Plan, Precision
from weft.planner.live_bytes import LiveBytes

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
aten = torch.ops.aten
KEPT = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}


def weft(dtype: torch.dtype, *roles: str, every: int = 1) -> Any:
    format = "fp32" if dtype == torch.float32 else "bf16"
    precision = Precision(forward=format, update=format, reduce=format)
    memory = Memory(recompute=roles, recompute_every=every)
    plan = Plan(parallel=Parallel(zero=0), precision=precision, memory=memory).resolve(1)
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
    """Torch's selective checkpointing of whole blocks: results of matrices and of attention are kept."""
    model = plain(dtype)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in model.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return model


SYSTEMS: dict[str, Callable[[torch.dtype], Any]] = {
    "plain": plain,
    "Weft, activation": lambda dtype: weft(dtype, "activation"),
    "Weft, norm": lambda dtype: weft(dtype, "norm"),
    "Weft, activation and norm": lambda dtype: weft(dtype, "activation", "norm"),
    "Weft, attention, activation and norm": lambda dtype: weft(dtype, "attention", "activation", "norm"),
    "Weft, mlp": lambda dtype: weft(dtype, "mlp"),
    "Weft, block": lambda dtype: weft(dtype, "block"),
    "Weft, every second block": lambda dtype: weft(dtype, "block", every=2),
    "torch, selective checkpointing": selective,
    "Transformers, gradient checkpointing": gradient_checkpointing,
}


def backward(model: Any, tokens: Tensor) -> None:
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()


def count(model: Any, tokens: Tensor) -> tuple[int, int, list[Tensor]]:
    """Bytes held after forward, at the peak, and gradients."""
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
    for model in models.values():  # gradients stay where they are made
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
    for name, (own_held, own_peak, own) in counted.items():
        if not all(map(torch.equal, own, gradients)):
            problems.append(f"{dtype}: gradients of {name} differ")
        ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds["plain"], strict=True)]
        table.add_row(name, f"{own_held / held:.1%}", f"{own_peak / peak:.1%}", spread(ratios, ".2f"))
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
    sys.exit("; ".join(problems) or None)


if __name__ == "__main__":
    main()
