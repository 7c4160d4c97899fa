"""Buffers of FSDP2 whose parts are padded to 16 bytes before they are sent."""

from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.model_config import read_config
from weft.job import Model
from weft.parallel.data import aligned, fp8_gather
from weft.parallel.data.fsdp_timing import time_fsdp
from weft.plan import Parallel, Plan
from weft.topology.mesh import build_mesh


class Block(nn.Module):
    """Weights whose shards have 2 or 6 bytes more than a multiple of 16, in bf16 over 4 or 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.scale = nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)) * self.scale.sum()


def step(rank: int, ranks: int, in_parts_of_16_bytes: bool) -> tuple[list[Tensor], list[int]]:
    """Gradients of two steps, and bytes of the part of a rank in each message."""
    group = build_mesh(Plan(parallel=Parallel(dp_shard=ranks)), "cpu", ranks)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(16, 5))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for unit in (*model, model):
        fully_shard(unit, mesh=group["dp_shard"], mp_policy=policy)
    if in_parts_of_16_bytes:
        time_fsdp(model, {}, reduce_scatters=True)
    sizes: list[int] = []

    def counted(function: object) -> mock.Mock:
        def call(output: Tensor, own: Tensor, *rest: object, **options: object) -> object:
            sizes.append(min(output.nbytes, own.nbytes))
            return function(output, own, *rest, **options)  # type: ignore[operator]

        return mock.Mock(side_effect=call)

    with (
        mock.patch.object(aligned, "all_gather_single", counted(aligned.all_gather_single)),
        mock.patch.object(aligned, "reduce_scatter_single", counted(aligned.reduce_scatter_single)),
    ):
        for _ in range(2):
            model(torch.randn(4, 8) + rank).float().square().sum().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.grad is not None]
    return gradients, sizes


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_are_multiples_of_16_bytes_and_gradients_are_unchanged(ranks: int) -> None:
    padded, plain = (run_ranks(ranks, step, is_padded) for is_padded in (True, False))
    for (found, sizes), (expected, _) in zip(padded, plain, strict=True):
        assert len(found) == len(expected) == 6
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert len(sizes) == 2 * (2 + 2 + 2)  # two units, in forward and backward, and their gradients
        assert all(size % 16 == 0 for size in sizes)


def exchange(rank: int, ranks: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A gathered tensor, and the sum of the ranks' parts."""
    group = dist.group.WORLD
    assert group is not None
    gathered = torch.empty(ranks * length, dtype=dtype)
    aligned.gather_aligned(gathered, torch.arange(length).to(dtype) + 10 * rank, group=group)
    reduced = torch.empty(length, dtype=dtype)
    aligned.reduce_scatter_aligned(reduced, gathered * (rank + 1), dist.ReduceOp.SUM, group=group)
    return gathered, reduced


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [1, 7, 16, 33])
def test_collectives(length: int, dtype: torch.dtype) -> None:
    whole = torch.cat([torch.arange(length) + 10 * rank for rank in range(3)]).to(dtype)
    for rank, (gathered, reduced) in enumerate(run_ranks(3, exchange, length, dtype)):
        assert torch.equal(gathered, whole)
        assert torch.equal(reduced, whole.view(3, length)[rank] * 6)


def gather_fp8(rank: int, ranks: int) -> tuple[Tensor, list[int]]:
    """Gathered values of a unit, and bytes of the part of a rank."""
    own = torch.tensor([1.0, 2, 4, 8, 16, 0.1, 0.2, 0.3], dtype=torch.bfloat16) * (rank + 1)
    output = torch.empty(ranks * len(own), dtype=own.dtype)
    with mock.patch.object(fp8_gather, "all_gather_single", wraps=fp8_gather.all_gather_single) as sent:
        fp8_gather.Fp8AllGather([(5, True), (3, False)])(output, own, cast(dist.ProcessGroup, dist.group.WORLD))
    return output, [call.args[1].nbytes for call in sent.call_args_list]


def test_messages_in_fp8_are_multiples_of_16_bytes() -> None:
    """Five bytes and three numbers of two: 11 bytes."""
    for output, sizes in run_ranks(2, gather_fp8):
        own = torch.tensor([1.0, 2, 4, 8, 16, 0.1, 0.2, 0.3], dtype=torch.bfloat16)
        assert torch.equal(output, torch.cat([own, own * 2]))
        assert sizes == [16]


@pytest.mark.parametrize(
    ("table", "ranks", "extra"),
    [
        ({"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}, 64, 8),
        ({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}, 24, 12),
    ],
)
def test_parts_of_known_models_are_no_multiples_of_16_bytes(table: dict[str, Any], ranks: int, extra: int) -> None:
    """Blocks of Qwen3-8B and Llama-8B in bf16, of which FSDP2 shards each weight by rows."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 8}
    model = build_on_meta(read_config(Model(config=table | heads)), torch.bfloat16)
    shapes = [weight.shape for weight in model.model.layers[0].parameters()]
    assert sum(-(-shape[0] // ranks) * shape[1:].numel() * 2 for shape in shapes) % aligned.ALIGNMENT == extra
