"""Training steps on one accelerator: Weft under a plan, and plain Transformers; weights are random and made on the device."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.models.llama import modeling_llama

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
    varlen: bool = False,
    compiled: bool = False,
    fsdp: Literal["", "eager", "blocks"] = "",
) -> System:
    """Training step of plain Transformers, and the model: SDPA, the model's own loss, fused AdamW, clipping.

    Args:
        varlen: variable-length flash attention for packed rows, which are then one row, as of a collator that flattens.
        compiled: compile the whole model.
        fsdp: FSDP2 in bf16 with float32 reduction, with blocks that are compiled or not, as torchtitan does.
    """
    model = build_full(config, weights, device, "varlen" if varlen else "sdpa")
    model.train()
    if compiled:
        model.compile()
    if fsdp:
        shard = partial(
            fully_shard,
            mesh=init_device_mesh(device.type, (1,)),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
        for name, block in model.model.layers.named_children():
            block = torch.compile(block) if fsdp == "blocks" else block
            model.model.layers.register_module(name, block)
            shard(block)
        shard(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True
    )

    def step(batches: Sequence[MicroBatch]) -> float:
        total = torch.zeros((), device=device)
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = model(**_inputs(batch, varlen), use_cache=False).loss
            (loss / len(batches)).backward()
            total += loss.detach() / len(batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return System(step, model, optimizer)


def _inputs(batch: MicroBatch, varlen: bool) -> dict[str, Any]:
    """Arguments of a causal model of Transformers; with `varlen`, packed rows as one row of many documents."""
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "shift_labels": batch.targets}
    positions = batch.host_positions().flatten()
    starts = (positions == 0).nonzero().flatten()
    if varlen and len(starts) > batch.rows:
        inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
        borders = torch.cat([starts, starts.new_tensor([len(positions)])]).to(torch.int32)
        lengths = borders.to(batch.input_ids.device, non_blocking=True)
        longest = int(borders.diff().max())
        inputs |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": longest, "max_length_k": longest}
    return {**inputs, "labels": inputs["input_ids"]}


def varlen_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention function of Transformers: variable-length flash attention of torch for packed rows, SDPA for others.

    It takes the arguments that Transformers passes to the package flash-attn, whose kernel torch has too. On a CPU, which has
    no such kernel, each document is computed by SDPA.
    """
    borders, longest = options.pop("cu_seq_lens_q", None), options.pop("max_length_q", None)
    if borders is None:
        return sdpa_attention_forward(module, query, key, value, None, **options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, head_dim]
    if query.device.type == "cpu":
        parts = zip(*(x.split(borders.diff().tolist()) for x in (q, k, v)), strict=True)
        out = torch.cat([_causal(*part) for part in parts])
    else:
        grouped = (
            {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
        )  # needed from torch 2.12
        both = (borders, borders, longest, longest)
        out = varlen_attn(q, k, v, *both, scale=options["scaling"], window_size=(-1, 0), **grouped)
    return out[None], None


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


AttentionInterface.register("varlen", varlen_attention)
AttentionMaskInterface.register("varlen", flash_attention_mask)


@contextmanager
def liger_patches() -> Iterator[None]:
    """Llama of Transformers as Liger Kernel patches it: models that are built inside have its kernels."""
    before, forward = dict(vars(modeling_llama)), modeling_llama.LlamaForCausalLM.forward
    importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    try:
        yield
    finally:
        vars(modeling_llama).update(before)
        modeling_llama.LlamaForCausalLM.forward = forward


def build_full(config: dict[str, Any], dtype: torch.dtype, device: torch.device, attention: str = "sdpa") -> Any:
    """Unmodified model with random weights, made on the device."""
    torch.manual_seed(0)
    source = read_config(Model(config=config))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(source, dtype=dtype, attn_implementation=attention)
