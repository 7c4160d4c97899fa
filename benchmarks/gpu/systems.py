"""Training steps on one accelerator: Weft under a plan, and plain Transformers; weights are random and made on the device."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import scatter_weights
from weft.checkpoint.model_config import read_config
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.job import Job, Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import allocate
from weft.plan import Plan, resolve_plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

SETTINGS = Optimizer(lr=1e-4, eps=1e-6)


class System(NamedTuple):
    """A model in training."""

    step: Callable[[Sequence[MicroBatch]], float]
    """One optimizer step; returns the loss."""
    model: Any
    optimizer: Any


LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
BLOCKS_OF_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
}
"""Four blocks with the widths of Llama-3-8B."""
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
}
"""Four blocks with the widths of Qwen3-30B-A3B."""
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 32}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY = {
    "llama": {"model_type": "llama", **_SMALL, **_HEADS},
    "qwen3_moe": {"model_type": "qwen3_moe", **_SMALL, **_HEADS, "num_experts": 8, "moe_intermediate_size": 64},
}


def job_of(config: dict[str, Any], plan: Plan, num_rows: int, seq_len: int) -> Job:
    """Job of one micro-batch a step, for dry runs."""
    return Job.parse(
        {
            "model": {"config": config},
            "data": {"source": "python", "vocab_size": 2048, "seq_len": seq_len},
            "train": {"global_batch_size": num_rows, "micro_batch_size": num_rows},
            "optimizer": SETTINGS.model_dump(exclude_defaults=True),
        }
    ).model_copy(update={"plan": plan})


def random_batch(vocab: int, rows: int, seq_len: int, device: torch.device, seed: int, document: int = 0) -> MicroBatch:
    """Random rows; `document` > 0: packed documents of about this length, with one length for each document."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows, seq_len + 1), generator=generator)
    positions, targets = torch.arange(seq_len).repeat(rows, 1), tokens[:, 1:].clone()
    for row in range(rows if document else 0):
        begin = 0
        while begin < seq_len:
            length = int(torch.randint(document // 2, document * 3 // 2 + 1, (), generator=generator))
            end = min(begin + length, seq_len)
            positions[row, begin:end] = torch.arange(end - begin)
            targets[row, end - 1] = -100
            begin = end
    return MicroBatch(tokens[:, :-1].contiguous(), positions, targets).to(device)


def weft_trainer(config: dict[str, Any], plan: Plan, device: torch.device, on_host: bool = False) -> System:
    """Training step of Weft on one rank, and the model; `on_host`: the same weights on every device."""
    source = read_config(Model(config=config))
    plan = resolve_plan(plan, 1, native_bf16=detect().supports("bf16"))
    model = build_on_meta(source, DTYPES[plan.precision.update])
    parallelize(model, plan, build_mesh(plan, device.type, 1))
    allocate(model, device)
    plain = build_full(config, torch.float32, torch.device("cpu") if on_host else device)
    scatter_weights(model, {**dict(plain.named_buffers()), **plain.state_dict()})
    del plain
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    return System(lambda batches: train_step(model, optimizer, batches, SETTINGS.clip_norm).loss, model, optimizer)


def plain_trainer(
    config: dict[str, Any],
    weights: torch.dtype,
    autocast: bool,
    device: torch.device,
    liger: bool = False,
    compiled: bool = False,
) -> System:
    """Training step of plain Transformers, and the model: SDPA, the model's own loss, fused AdamW, clipping.

    Args:
        liger: patch Transformers for the rest of the process.
        compiled: compile the whole model.
    """
    if liger:
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    model = build_full(config, weights, device)
    model.train()
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True
    )

    def step(batches: Sequence[MicroBatch]) -> float:
        total = torch.zeros((), device=device)
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = model(
                    input_ids=batch.input_ids,
                    position_ids=batch.position_ids,
                    labels=batch.input_ids,
                    shift_labels=batch.targets,
                    use_cache=False,
                ).loss
            (loss / len(batches)).backward()
            total += loss.detach() / len(batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return System(step, model, optimizer)


def build_full(config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Unmodified model with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(read_config(Model(config=config)), dtype=dtype)
