"""Ranks on the stand-in NPU, `python -m tests.lab.npu_rank LAYOUT...`; rank 0 prints their results as JSON.

They are forks of one process, which has their imports and has computed nothing. Variables of the environment besides RANK are
those of torchrun, or of Weft's launcher.
"""

import json
import os
import sys
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.lab import npu
from tests.lab.families import family
from tests.lab.npu_attention import NpuAttention
from tests.lab.parity import SETTINGS, STEPS, packed_batches, plan_for, reference, share
from tests.lab.plans import resolved
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.collectives import all_reduce
from weft.device.detect import detect
from weft.job import Model
from weft.launch.rank_entry import connect
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.gradients import clip_grad_norm_
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import set_dropout_seed
from weft.topology.mesh import AXES, build_mesh, data_rank
from weft.training.optimizer import build_optimizer, learning_rate
from weft.training.step import evaluate, train_step


def reduce_float64(mesh: DeviceMesh, rank: int, device: torch.device) -> list[Any]:
    """Sums and maxima over the ranks of float64 values that float32 cannot hold; a scalar as well, and a gradient norm."""
    values = torch.tensor([1.0 + 2.0**-40 * (rank + 1), -(2.0**60) - 1024 * rank, 3.0 * rank], dtype=torch.float64)
    found = [all_reduce(values.to(device, copy=True), mesh, AXES, op).tolist() for op in ("sum", "max")]
    weight = nn.Parameter(torch.ones(3, device=device))
    weight.grad = torch.full_like(weight, 2.0 + rank)
    return [*found, all_reduce(values[0].to(device, copy=True), mesh, AXES).item(), clip_grad_norm_(weight, 1.0).item()]


def train(name: str, device: torch.device, world_size: int, head_dim: int = 8, **parallel: int) -> list[list[float]]:
    """Losses, gradient norms and held-out loss on npu ranks, and those of the untouched model on the CPU.

    The attention operator of torch_npu takes heads of multiples of 16 elements; smaller heads are computed by matmuls.
    """
    source = Model(config={**family(name), "head_dim": head_dim})
    batches = packed_batches(read_config(source).vocab_size)
    plan = resolved(plan_for("fp32", **parallel), world_size)
    mesh = build_mesh(plan, device.type, world_size)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh)
    materialize(model, source, device)
    optimizer = DistributedOptimizer(build_optimizer(model.train(), SETTINGS), model, detect())
    shares = [
        [part.to(device) for part in share(batch, data_rank(mesh), plan.parallel.data_ranks, 2)] for batch in batches
    ]
    results = []
    for step, micro_batches in enumerate(shares, 1):
        for group in optimizer.inner.param_groups:
            group["lr"] = learning_rate(step, STEPS, SETTINGS)
        set_dropout_seed(model, 0, step)
        results.append(train_step(model, optimizer, micro_batches, SETTINGS.clip_norm))
    found = [*(result.loss for result in results), *(result.grad_norm for result in results)]
    return [[*found, evaluate(model, shares[0])], untouched(name, head_dim) if dist.get_rank() == 0 else []]


@cache
def untouched(name: str, head_dim: int) -> list[float]:
    """Losses, gradient norms and held-out loss of the untouched model on the CPU."""
    source = Model(config={**family(name), "head_dim": head_dim})
    expected = reference(source, "fp32", packed_batches(read_config(source).vocab_size), 4)
    return [*expected.losses, *expected.norms, expected.held_out]


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("llama", {"head_dim": 16, "zero": 0}),
    "ZeRO 3": ("llama", {"zero": 3}),
    "tensor parallel": ("qwen3_moe", {"zero": 3, "tp": 2, "sp": True}),
    "expert parallel": ("qwen3_moe", {"zero": 3, "ep": 2}),
    "context parallel": ("llama", {"head_dim": 16, "zero": 3, "cp": 2}),
    "pipeline": ("llama", {"zero": 1, "pp": 2}),
}
"""Family and settings of each layout."""


def main(attention: NpuAttention, layouts: list[str]) -> None:
    """Connect, compute collectives, and train under some layouts."""
    device = detect()
    rank, world_size, local_rank = connect(device)
    torch_device = device.torch_device(local_rank)
    mesh = build_mesh(resolved(plan_for("fp32", zero=0), world_size), device.type, world_size)
    alone = torch.ones(2, device=torch_device)
    dist.all_reduce(alone, group=mesh.get_group("tp"))
    results: dict[str, Any] = {
        "device": [device.type, device.backend, device.count],
        "axis of one rank": alone.tolist(),
        "float64 on the device": reduce_float64(mesh, rank, torch_device),
        "float64 on the host": reduce_float64(mesh, rank, torch.device("cpu")),
    }
    for name in layouts:
        model, settings = LAYOUTS[name]
        results[name] = train(model, torch_device, world_size, **settings)
        results[f"{name}: calls"] = attention.take_calls()
    if rank == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    forks = []
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        if not (fork := os.fork()):
            os.environ["RANK"] = str(rank)
            forks = []
            break
        forks.append(fork)
    else:
        os.environ["RANK"] = "0"
    libraries = npu.install()
    sys.modules["torch_npu"] = operators = NpuAttention(npu.on_cpu, npu.on_npu)
    main(operators, sys.argv[1:])
    sys.exit(max((os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks), default=0))
