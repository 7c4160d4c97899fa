"""Statistics of tokens over a split vocabulary: values and gradients are those of the full logits."""

import pytest
import torch
import torch.distributed as dist

from tests.lab.pool import run_ranks
from weft.parallel.loss.token_statistics import token_statistics

VOCABULARY = 11


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [2, 5, 11], with equal largest logits in some rows, and targets."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 5, VOCABULARY, dtype=torch.float64, generator=generator)
    logits[0, 1, [2, 9]] = 20.0
    logits[1, 2, [7, 8]] = 20.0
    targets = torch.randint(VOCABULARY, (2, 5), generator=generator)
    targets[0, 1], targets[1, 2], targets[1, 3] = 2, 8, logits[1, 3].argmax()
    return logits, targets


def _compare(rank: int, ranks: int) -> None:
    logits, targets = example()
    full = logits.clone().requires_grad_()
    every = full.log_softmax(-1)
    log_probs = every.gather(-1, targets[..., None])[..., 0]
    entropy = -(every.exp() * every).sum(-1)
    expected = {
        "log_probs": log_probs,
        "entropy": entropy,
        "log_sum_squares": every.exp().square().sum(-1).log(),
        "mean_logits": logits.mean(-1),
        "is_top1": (logits.argmax(-1) == targets).double(),
    }
    (log_probs.sin() + entropy.square()).sum().backward()

    sizes = [VOCABULARY // ranks + (index < VOCABULARY % ranks) for index in range(ranks)]
    part = logits.split(sizes, -1)[rank].clone().requires_grad_()
    found = token_statistics(part, targets, dist.group.WORLD, VOCABULARY)
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name), value, msg=name)
    (found.log_probs.sin() + found.entropy.square()).sum().backward()
    assert full.grad is not None
    torch.testing.assert_close(part.grad, full.grad.split(sizes, -1)[rank])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_split_vocabulary_equals_the_full_one(ranks: int) -> None:
    run_ranks(ranks, _compare)


def test_logits_in_bf16_are_reduced_in_float32() -> None:
    logits, targets = example()
    found = token_statistics(logits.bfloat16(), targets)
    assert found.log_probs.dtype == torch.float32
    expected = logits.bfloat16().float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(found.log_probs, expected)
