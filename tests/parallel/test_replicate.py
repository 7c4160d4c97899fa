"""Gradient buckets on their own: unused parameters, several backwards, and buckets that stay."""

import torch
from torch import nn

from tests.lab.pool import run_ranks
from weft.parallel.replicate import GradientReducer, Unit


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.second(x) if both else x).sum()


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank: int, world_size: int, rank_that_skips: int) -> dict[str, torch.Tensor]:
    """Gradients after two steps, the second of two micro-batches; one rank never uses the second block."""
    model = TwoBlocks()
    reducer = GradientReducer([Unit(name, torch.distributed.group.WORLD) for name in ("second", "first", "")])
    model.register_forward_pre_hook(reducer.prepare)
    both = rank != rank_that_skips
    model(inputs(rank, 0), both).backward()
    places = [p.grad.data_ptr() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    for micro_batch in (1, 2):
        reducer.last_micro_batch = micro_batch == 2
        model(inputs(rank, micro_batch), both).backward()
    assert [p.grad.data_ptr() for p in model.parameters()] == places
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_averages_with_a_parameter_that_one_rank_does_not_use() -> None:
    for rank_that_skips in (-1, 0, 1):
        plain = TwoBlocks()
        for rank in (0, 1):
            for micro_batch in (1, 2):
                (plain(inputs(rank, micro_batch), rank != rank_that_skips) / 2).backward()
        for gradients in run_ranks(2, train, rank_that_skips):
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, msg=f"{name}, {rank_that_skips} skips")
