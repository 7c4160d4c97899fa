"""GPT models of the real megatron-core on CPU, in processes of their own: save, load and compute logits.

    python tests/lab/megatron_core.py CONFIG.json TASK...

Each TASK is a JSON object with a "world" [tp, pp, ep], and a "load" and a "save" folder and a "logits" file where wanted.
megatron-core expects CUDA. `run_on_cpu` replaces the calls to it, in these processes alone.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

IDS = torch.arange(32).view(2, 16) * 3 % 113
"""Token ids of the logits, [rows, tokens]."""


class _Stream:
    """Stream or event without a device."""

    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = record_event = synchronize = record = wait = wait_stream


class _CudaToCpu(TorchFunctionMode):
    """Creates on the CPU every tensor that is asked for on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")) or isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def run_on_cpu() -> None:
    """Replace the calls to CUDA that megatron-core makes without asking whether there is a device."""
    import megatron.core.tensor_parallel.random as tracked
    import megatron.core.transformer.moe.moe_utils as moe

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = cuda.set_device = lambda *args: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **options: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    cuda._lazy_call = lambda function, **options: None
    cuda.default_generators = (torch.default_generator,)
    torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]
    tracked._get_cuda_rng_state = cuda.get_rng_state
    tracked._set_cuda_rng_state = cuda.set_rng_state
    for name in ("te_general_gemm", "fused_topk_with_score_function"):  # 0.16.1 names them without Transformer Engine
        setattr(moe, name, getattr(moe, name, None))
    _CudaToCpu().__enter__()


def build(config: dict[str, Any], world: Sequence[int]) -> Any:
    """GPTModel of a Hugging Face configuration; the vocabulary is padded to a multiple of 128, as Megatron-LM does."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, pp, ep = world
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    experts = config.get("num_experts") or config.get("num_local_experts")
    family = config["model_type"]
    settings: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family.startswith("qwen3"),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "pipeline_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        **dict.fromkeys(("bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm"), False),
        **dict.fromkeys(("apply_rope_fusion", "gradient_accumulation_fusion", "bias_dropout_fusion"), False),
    }
    if experts:
        settings |= {
            "num_moe_experts": experts,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"]),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    spec = get_gpt_layer_local_spec(experts, qk_layernorm=settings["qk_layernorm"], normalization="RMSNorm")
    if experts:  # the name that the norm has with Transformer Engine, without which 0.16.1 trains no experts
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return GPTModel(
        TransformerConfig(**settings),
        spec,
        vocab_size=-(-config["vocab_size"] // 128) * 128,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        position_embedding_type="rope",
        rotary_base=int(config["rope_theta"]),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
    ).eval()


@torch.no_grad()
def perform(config: dict[str, Any], task: dict[str, Any]) -> None:
    """Build a model; load or initialize its weights; compute logits and save."""
    from megatron.core import dist_checkpointing

    model = build(config, task["world"])
    metadata = task.get("metadata")
    if "load" in task:
        expected = {"model": model.sharded_state_dict(metadata=metadata)}
        state = dist_checkpointing.load(expected, task["load"], strict="raise_unexpected")
        model.load_state_dict(state["model"], strict=True)
    else:  # norms are initialized to one and biases to zero: add to all, so that none can be mistaken for another
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    if "logits" in task:
        positions = torch.arange(IDS.shape[1]).expand_as(IDS)
        mask = torch.ones(1, 1, IDS.shape[1], IDS.shape[1], dtype=torch.bool).triu(1)
        logits = model(IDS, positions, mask)[..., : config["vocab_size"]]
        save_file({"logits": logits.contiguous()}, task["logits"])
    if "save" in task:
        Path(task["save"]).mkdir(exist_ok=True)
        dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata)}, task["save"])


def run_rank(rank: int, config: dict[str, Any], task: dict[str, Any], world_size: int, store: str) -> None:
    """One rank of a task."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    run_on_cpu()
    perform(config, task)
    dist.barrier()
    dist.destroy_process_group()


def main(config_file: str, *tasks: str) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it compiles small functions, which takes longer than they do
    config = json.loads(Path(config_file).read_text())
    for text in tasks:
        task = json.loads(text)
        world_size = task["world"][0] * task["world"][1] * task["world"][2]
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            run = functools.partial(torch.multiprocessing.spawn, run_rank)
            run((config, task, world_size, store), nprocs=world_size, daemon=False)  # megatron-core starts a process


if __name__ == "__main__":
    main(*sys.argv[1:])
