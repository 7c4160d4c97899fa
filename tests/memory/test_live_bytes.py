"""Live storages are counted once, by kind, from allocation until they are freed."""

import torch
from torch import nn

from weft.memory.live_bytes import LiveBytes


def test_live_results_are_counted_once() -> None:
    x = torch.ones(100)
    with LiveBytes() as live:
        live.track("parameters", [x])
        y = x * 2
        z = y[:50].view(5, 10)  # the same storage
        assert live.current == {"parameters": 400, "activations": 400}
        del y
        assert live.total == 800
        del z
        assert live.current == {"parameters": 400, "activations": 0}
        assert live.peak == 800
        assert live.at_peak == {"parameters": 400, "activations": 400}


def test_backward_temporaries_count_for_the_peak() -> None:
    x = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        x.exp().exp().sum().backward()
        assert live.total == 400  # the gradient
        assert live.peak >= 3 * 400


def test_resized_storages_are_recounted() -> None:
    with LiveBytes() as live:
        x = torch.empty(10)
        x.resize_(1000)
        assert live.total == 4000


def test_gradients_are_counted_by_kind() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        live.track_training(model, optimizer)
        assert live.current == {"parameters": 256, "optimizer": 516}  # two moments, and the step count
        model(torch.ones(1, 8)).sum().backward()
        assert live.current["gradients"] == 256
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert live.current["gradients"] == 0
    model(torch.ones(1, 8)).sum().backward()
    assert live.current["gradients"] == 0  # not counted outside the context
