"""State of a recompute whose lane hands over: the other lane sees the model without it."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.lanes import Lanes
from weft.memory.recompute import _checkpointed
from weft.parallel.recompute_context import Recomputes, capture_context
from weft.parallel.sequence.dropout import DropoutContext


class Layer(nn.Module):
    """Layer that draws random numbers and uses a weight, on both sides of two hand-overs."""

    def __init__(self, lanes: Lanes, stats: Any, dropout: DropoutContext):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 8, dtype=torch.float64))
        self.lanes, self.stats, self.dropout = lanes, stats, dropout
        self.seen: list[tuple[bool, int | None]] = []
        """Whether router statistics are recorded, and the seed of layer-invariant dropout, in each part of each forward."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            self.seen.append((self.stats.recording, self.dropout.seed))
            x = (F.dropout(x, 0.5) * self.weight).sin()
            self.lanes.hand_over()
        return x


def train(jointly: bool) -> tuple[list[Any], list[Tensor], int]:
    """What the layer has seen; outputs, gradients and random numbers; and the number of hand-overs, of two micro-batches."""
    lanes, recomputes, stats = Lanes(), Recomputes(), SimpleNamespace(recording=True)
    lanes.registers.append(recomputes)
    dropout = DropoutContext(0, 1, True)
    layer: Any = Layer(lanes, stats, dropout)
    layer.forward = partial(_checkpointed, layer.forward, layer, partial(capture_context, stats, dropout, recomputes))
    torch.manual_seed(0)
    stored = layer.weight

    def forward(number: int) -> Tensor:
        """Forward with another weight than the stored one, and with a seed of its own."""
        layer._parameters["weight"], dropout.seed = stored * number, number
        out = layer(torch.full((8,), 0.1 * number, dtype=torch.float64))
        layer._parameters["weight"] = stored
        return out

    first = forward(1)
    if jointly:
        second = lanes.run(lambda: forward(2), first.sum().backward)
    else:
        first.sum().backward()
        second = forward(2)
    second.sum().backward()
    assert layer.weight is stored
    assert stats.recording
    return layer.seen, [first.detach(), second.detach(), stored.grad, torch.rand(4)], lanes.handovers


def test_the_other_lane_sees_no_recompute() -> None:
    """Random numbers, weights, seeds and statistics of both lanes are those of one after the other."""
    seen, expected, none = train(jointly=False)
    seen_jointly, found, handovers = train(jointly=True)
    assert (none, handovers) == (0, 5)  # the recompute ends with the last saved tensor
    assert sorted(seen) == sorted(seen_jointly)
    assert seen_jointly[3:9] == [(True, 2), (False, 1)] * 3
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
