"""Builders of the compared systems on data-parallel ranks: each builds the model in the system's idiom, and returns its step.

A step gets the rows of all ranks, int64 [global_batch, seq_len], and computes this rank's share. It updates the weights once,
and returns a loss to log: the mean over the tokens of this rank, or of all ranks. The default process group must exist. Each
system is imported where it is used, because all of them are optional.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers.workload import SETTINGS, Workload
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import weft
from weft.anatomy.build import build_on_meta
from weft.checkpoint.model_config import read_config
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.plan import Plan, resolve_plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import IGNORED, train_step

Step = Callable[[Tensor], float]


def own_rows(rows: Tensor) -> Tensor:
    """Rows of this rank, if every rank is a data rank."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def build_weft(workload: Workload, zero: int, dtype: str) -> Step:
    """Training step of Weft on the untouched model, by ZeRO stage and dtype."""
    return build_weft_plan(workload, {"parallel": {"zero": zero}, "precision": {"param_dtype": dtype}})


def build_weft_plan(workload: Workload, tables: dict[str, Any], micro_batches: int = 1) -> Step:
    """Training step of Weft on the untouched model, under any plan."""
    return weft_step(*build_weft_model(workload, tables), micro_batches)


def build_weft_model(workload: Workload, tables: dict[str, Any]) -> tuple[PreTrainedModel, Plan, DeviceMesh]:
    """Parallelized model, resolved plan and mesh, for a plan given as its tables."""
    ranks = dist.get_world_size()
    plan = resolve_plan(Plan.model_validate(tables), ranks, native_bf16=detect().supports("bf16"))
    source = Model(config=workload.config, init_seed=0)
    device = detect()
    device.use(0)  # as `weft.launch.rank_entry.connect` does in every rank
    mesh = weft.build_mesh(plan, device.type, ranks)
    model = weft.parallelize(build_on_meta(read_config(source), DTYPES[plan.precision.update]), plan, mesh)
    weft.materialize(model, source, torch.device("cpu"))
    return model.train(), plan, mesh


def weft_step(model: PreTrainedModel, plan: Plan, mesh: DeviceMesh, micro_batches: int) -> Step:
    """Training step of Weft, with a number of micro-batches per rank."""
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())

    def step(rows: Tensor) -> float:
        own = rows.chunk(plan.parallel.data_ranks)[data_rank(mesh)].contiguous()
        positions = torch.arange(own.shape[1]).expand_as(own)
        targets = F.pad(own[:, 1:], (0, 1), value=IGNORED)  # as Transformers shifts labels
        parts = (tensor.chunk(micro_batches) for tensor in (own, positions, targets))
        batches = [MicroBatch(*tensors) for tensors in zip(*parts, strict=True)]
        return train_step(model, optimizer, batches, SETTINGS.clip_norm).loss

    return step


def build_torch(workload: Workload, zero: int, dtype: str) -> Step:
    """Hand-written torch loop: DistributedDataParallel with autocast for ZeRO 0, fully_shard on each block for 2 and 3."""
    model: nn.Module = workload.untouched_model().train()
    cast: AbstractContextManager[object] = nullcontext()
    if zero == 0:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if dtype == "bf16":
            cast = torch.autocast("cpu", torch.bfloat16)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
        for module in (*model.get_submodule("model.layers").children(), model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    optimizer = build_optimizer(model, SETTINGS)

    def step(rows: Tensor) -> float:
        own = own_rows(rows)
        with cast:
            loss = model(input_ids=own, labels=own, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def build_accelerate(workload: Workload, zero: int, dtype: str) -> Step:
    """Accelerate: DistributedDataParallel for ZeRO 0, its FSDP2 plugin for 2 and 3."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if dtype == "bf16" else "no")
    if zero > 0:
        # Accelerate 1.15 reads the plugin on accelerators only; on CPU it would go on with DistributedDataParallel.
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=zero == 3,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        if dtype == "bf16":
            plugin.set_mixed_precision("bf16")
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    model = workload.untouched_model().train()
    model, optimizer = accelerator.prepare(model, build_optimizer(model, SETTINGS))

    def step(rows: Tensor) -> float:
        own = own_rows(rows)
        loss = model(input_ids=own, labels=own, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def build_deepspeed(workload: Workload, zero: int, dtype: str) -> Step:
    """DeepSpeed's engine with a client optimizer; in bf16 it keeps fp32 master weights and reduces gradients in bf16."""
    import deepspeed

    model = workload.untouched_model().train()
    config = {
        "train_micro_batch_size_per_gpu": workload.global_batch // dist.get_world_size(),
        "gradient_clipping": SETTINGS.clip_norm,
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(model, SETTINGS), config=config)

    def step(rows: Tensor) -> float:
        own = own_rows(rows)
        loss = engine(input_ids=own, labels=own, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


BUILDERS: dict[str, Callable[[Workload, int, str], Step]] = {
    "weft": build_weft,
    "torch": build_torch,
    "accelerate": build_accelerate,
    "deepspeed": build_deepspeed,
}


def installed(system: str) -> bool:
    """True if the package of a system can be imported."""
    return find_spec(system) is not None
