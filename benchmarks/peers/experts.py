"""One layer of experts on two ranks by other systems: Transformers, and the dispatchers of torchtitan and Megatron-Core.

A builder gets the same weights of all experts as the others, and returns the layer of this rank. The default process group
must exist. The dispatchers are called around the same matmuls, `grouped_experts`, because the experts of these systems do not
compute in float32 on a CPU. Each system is imported where it is used, because all of them are optional.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Forward of tokens [T, H], expert indices [T, K] and router weights [T, K]."""


class Shape(NamedTuple):
    """Sizes of a layer of experts."""

    experts: int
    top_k: int
    hidden: int
    width: int


class Weights(NamedTuple):
    """Weights of all experts, as stored by Transformers."""

    gate_up_proj: Tensor
    """[experts, 2 width, hidden]."""
    down_proj: Tensor
    """[experts, hidden, width]."""


class Layer(NamedTuple):
    """Layer of experts on this rank."""

    parameters: list[Any]
    """Weights of the experts of this rank, in the order of `Weights`."""
    forward: Forward
    data_ranks: int = 1
    """Ranks over whose tokens the gradients of the parameters are means; 1 for sums."""
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of forward and backward."""

    def gradients(self) -> list[Tensor]:
        """Gradients of the experts of this rank, sums over the tokens of all ranks."""
        own = [parameter.grad for parameter in self.parameters]
        return [
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient) * self.data_ranks for gradient in own
        ]


Builder = Callable[[Shape, Weights], Layer]


def draw_weights(shape: Shape) -> Weights:
    """Weights of all experts, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((shape.experts, 2 * shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width))
    return Weights(*(0.02 * torch.randn(size, generator=generator) for size in sizes))


def build_module(shape: Shape, weights: Weights) -> Any:
    """Experts module of Transformers with the given weights, of all experts or of those of a rank."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config)
    for name, value in weights._asdict().items():
        setattr(experts, name, nn.Parameter(value.clone()))
    return experts


def build_one_process(shape: Shape, weights: Weights) -> Layer:
    """Transformers' experts in one process, which has all experts and the tokens of all ranks."""
    experts = build_module(shape, weights)
    return Layer(list(experts.parameters()), experts)


def build_transformers(shape: Shape, weights: Weights) -> Layer:
    """Transformers' own expert parallelism: `DistributedConfig` with the plan of the family."""
    from transformers.distributed import DistributedConfig

    ranks = dist.get_world_size()
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        moe_intermediate_size=shape.width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for name, value in weights._asdict().items():
            experts.get_parameter(name).copy_(value)
    with TemporaryDirectory() as own_folder:
        folder = [own_folder]
        dist.broadcast_object_list(folder)  # rank 0 alone saves
        model.save_pretrained(folder[0])
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(
            folder[0],
            distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ranks),
            dtype=torch.float32,
            experts_implementation="grouped_mm",
        )
        dist.barrier()
    experts = model.train().model.layers[0].mlp.experts
    return Layer([experts.gate_up_proj, experts.down_proj], experts, data_ranks=ranks)


def build_torchtitan(shape: Shape, weights: Weights) -> Layer:
    """torchtitan's `AllToAllTokenDispatcher`, around grouped matmuls in float32: its own experts convert to bf16."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    # With its default, "spmd_types", gloo refuses the all-to-all of rows: "alltoall: invalid tensor size at index 1".
    set_spmd_backend("partial_dtensor")
    config = AllToAllTokenDispatcher.Config(num_experts=shape.experts, top_k=shape.top_k)
    dispatcher = AllToAllTokenDispatcher(config)
    dispatcher.wire_meshes(ep_mesh=mesh)
    own = own_parameters(weights)

    def forward(hidden: Tensor, index: Tensor, router_weights: Tensor) -> Tensor:
        # As its `MoE` and `RoutedExperts` do.
        chosen = torch.zeros(len(hidden), shape.experts, dtype=torch.bool).scatter_(-1, index, True)
        rows, counts, metadata = dispatcher.dispatch(hidden, router_weights, index, chosen.sum(0))
        return dispatcher.combine(grouped_experts(rows, counts, *own), metadata, hidden)

    return Layer(own, forward)


def build_megatron(shape: Shape, weights: Weights) -> Layer:
    """Megatron-Core's `MoEAlltoAllTokenDispatcher`, around grouped matmuls in float32: `TEGroupedMLP` needs CUDA."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    ranks, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=2,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.top_k,
        moe_ffn_hidden_size=shape.width,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=ranks,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    per_rank = shape.experts // ranks
    local = list(range(rank * per_rank, (rank + 1) * per_rank))
    with cuda_calls_on_cpu():
        groups = ProcessGroupCollection.use_mpu_process_groups()
        dispatcher = MoEAlltoAllTokenDispatcher(per_rank, local, config, groups)
    own = own_parameters(weights)

    def forward(hidden: Tensor, index: Tensor, router_weights: Tensor) -> Tensor:
        # Its router returns a mask and weights of all experts, [T, experts].
        chosen = torch.zeros(len(hidden), shape.experts, dtype=torch.bool).scatter_(-1, index, True)
        dense = torch.zeros(len(hidden), shape.experts).scatter(-1, index, router_weights)
        rows, weights_of_rows = dispatcher.dispatch_preprocess(hidden, chosen, dense)
        # On CUDA it copies the splits to numpy arrays itself; gloo refuses tensors as splits.
        dispatcher.input_splits, dispatcher.output_splits = (
            splits.tolist() for splits in (dispatcher.input_splits, dispatcher.output_splits)
        )
        rows, weights_of_rows = dispatcher.token_dispatch(rows, weights_of_rows)
        rows, counts, weights_of_rows = dispatcher.dispatch_postprocess(rows, weights_of_rows)
        outputs = grouped_experts(rows, counts, *own, weights_of_rows)
        outputs = dispatcher.token_combine(dispatcher.combine_preprocess(outputs))
        return dispatcher.combine_postprocess(outputs)

    return Layer(own, forward, context=cuda_calls_on_cpu)


def own_parameters(weights: Weights) -> list[nn.Parameter]:
    """Weights of the experts of this rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return [nn.Parameter(value.chunk(ranks)[rank].clone()) for value in weights]


def grouped_experts(
    rows: Tensor, counts: Tensor, gate_up_proj: Tensor, down_proj: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Gated experts on rows that are sorted by expert.

    Args:
        rows: [R, hidden].
        counts: [experts of this rank] int64, rows of each.
        gate_up_proj, down_proj: see `Weights`.
        weights: [R] router weights, which Megatron-Core applies before the second matmul; None for ones.

    Returns:
        [R, hidden].
    """
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(rows, gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
    inner = F.silu(gate) * up
    inner = inner if weights is None else inner * weights[:, None]
    return F.grouped_mm(inner, down_proj.transpose(1, 2), offs=ends)


class _Stream:
    """CUDA stream or event without a device."""

    def wait_stream(self, stream: object) -> None:
        """There is nothing to wait for."""

    def record_event(self) -> "_Stream":
        """An event that has happened."""
        return self

    def synchronize(self) -> None:
        """There is nothing to wait for."""


@contextmanager
def cuda_calls_on_cpu() -> Iterator[None]:
    """Replace the calls to CUDA that Megatron-Core makes without asking whether there is a device."""
    stream = _Stream()
    with patch.multiple(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda _: nullcontext(),
    ):
        yield
