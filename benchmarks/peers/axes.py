"""Tensor, sequence and expert parallelism of torch and Transformers; steps are as in `peers.systems`."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers.systems import Step
from peers.workload import SETTINGS, Workload
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

from weft.training.optimizer import build_optimizer


def build_torch_plain(workload: Workload) -> Step:
    """Hand-written torch loop on one rank."""
    model = workload.untouched_model().train()
    optimizer = build_optimizer(model, SETTINGS)

    def step(rows: Tensor) -> float:
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def build_torch_tensor_parallel(workload: Workload, sequence_parallel: bool) -> Step:
    """Llama under `parallelize_module` and `loss_parallel`, as in PyTorch's tutorial on tensor parallelism.

    Attention works on the local tensors of this rank's heads.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = workload.untouched_model().train()
    hidden = Shard(1) if sequence_parallel else Replicate()
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    layouts: Any = {"hidden_states": hidden}, {"hidden_states": Replicate()}
    block_plan: dict[str, Any] = {
        **{name: ColwiseParallel() for name in names},
        "self_attn": PrepareModuleInput(input_kwarg_layouts=layouts[0], desired_input_kwarg_layouts=layouts[1]),
        "self_attn.o_proj": RowwiseParallel(output_layouts=hidden),
        "mlp": PrepareModuleInput(input_layouts=hidden, desired_input_layouts=Replicate()),
        "mlp.down_proj": RowwiseParallel(output_layouts=hidden),
    }
    ends_plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "lm_head": ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        block_plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        ends_plan |= {"model.norm": SequenceParallel()}
    parallelize_module(model, mesh, ends_plan)
    for block in model.model.layers:
        parallelize_module(block, mesh, block_plan)
    optimizer = build_optimizer(model, SETTINGS)

    def step(rows: Tensor) -> float:
        positions = torch.arange(rows.shape[1]).expand_as(
            rows
        )  # by default Transformers numbers only this rank's tokens
        targets = F.pad(rows[:, 1:], (0, 1), value=-100)
        logits = model(input_ids=rows, position_ids=positions, use_cache=False).logits
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        clip_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return full_value(loss).item()

    return step


def build_transformers(workload: Workload, folder: str, degrees: dict[str, int]) -> Step:
    """Transformers' own parallel runtime, with its own plans for this family.

    Args:
        workload: workload whose model is in the folder.
        folder: model folder, written by `save_pretrained`.
        degrees: tp_size, fsdp_size and ep_size of its DistributedConfig.
    """
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**degrees)  # type: ignore[arg-type]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).train()
    data_ranks, data_rank = config.fsdp_size or 1, dist.get_rank() // (config.tp_size or 1)
    optimizer = build_optimizer(model, SETTINGS)

    def step(rows: Tensor) -> float:
        share = rows.chunk(data_ranks)[data_rank].contiguous()
        loss = model(input_ids=share, labels=share, use_cache=False).loss
        loss.backward()
        clip_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return full_value(loss).item()

    return step


def full_value(tensor: Tensor) -> Tensor:
    """Full tensor of a DTensor; a plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """`clip_grad_norm_` for a mix of plain tensors and DTensors of several meshes, which torch's refuses."""
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        by_mesh[getattr(gradient, "device_mesh", None)].append(gradient)
    norms = [full_value(nn.utils.get_total_norm(gradients)) for gradients in by_mesh.values()]
    factor = min(1.0, SETTINGS.clip_norm / (torch.stack(norms).norm().item() + 1e-6))
    for gradients in by_mesh.values():
        torch._foreach_mul_(gradients, factor)
