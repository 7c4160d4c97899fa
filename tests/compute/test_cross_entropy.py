"""Cross entropy from hidden states and the head, in chunks, against logits; its Triton kernels in the interpreter."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.compute.interpreter import assert_within, needs_triton, relative_error, run_interpreted
from tests.lab.pool import run_ranks
from weft.compute import cross_entropy as op
from weft.compute import cross_entropy_kernels as kernels
from weft.compute.cross_entropy import LogitTransform, Vocabulary, chunk_bounds, linear_cross_entropy_sum
from weft.parallel.loss.cross_entropy import own_vocabulary
from weft.parallel.weights import part_bounds

ROWS, TOKENS, WIDTH, VOCABULARY, IGNORED = 3, 70, 16, 101, -100
TRANSFORMS = [LogitTransform(), LogitTransform(0.5), LogitTransform(softcap=2.0), LogitTransform(3.0, 4.0)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, of which some do not count."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, TOKENS, generator=generator).to(dtype).transpose(1, 2)  # not contiguous
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
    targets[0, 3:40] = IGNORED
    return *(tensor.detach().requires_grad_() for tensor in (hidden, weight, bias)), targets


def by_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform
) -> Tensor:
    """The same from logits, in operations of torch alone."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op.CHUNKS, "cpu", op.ChunkLimits(4 * VOCABULARY * 37, 8))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_loss_and_gradients_equal_those_of_logits(
    dtype: torch.dtype, has_bias: bool, transform: LogitTransform
) -> None:
    hidden, weight, bias, targets = inputs(dtype)
    own = [hidden, weight, *([bias] if has_bias else [])]
    found = linear_cross_entropy_sum(
        hidden, weight, bias if has_bias else None, targets, IGNORED, transform, Vocabulary()
    )
    expected = by_logits(hidden, weight, bias if has_bias else None, targets, transform)
    assert len(chunk_bounds(ROWS * TOKENS, VOCABULARY, "cpu")) > 4
    assert found.dtype == expected.dtype
    assert relative_error(found.detach(), expected.detach()) < TOLERANCES[dtype] / 10
    gradients = (torch.autograd.grad(loss * 0.01, own) for loss in (found, expected))
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < TOLERANCES[dtype]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("trained", range(3))
def test_only_the_gradients_that_are_needed_are_computed(trained: int) -> None:
    *tensors, targets = inputs(torch.float64)
    own: list[Any] = [tensor if i == trained else tensor.detach() for i, tensor in enumerate(tensors)]
    found = linear_cross_entropy_sum(*own, targets, IGNORED, LogitTransform(), Vocabulary())
    (gradient,) = torch.autograd.grad(found, own[trained])
    (expected,) = torch.autograd.grad(by_logits(*own, targets, LogitTransform()), own[trained])
    assert relative_error(gradient, expected) < 1e-12


def test_without_targets_that_count_everything_is_zero() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    loss = linear_cross_entropy_sum(
        hidden, weight, bias, torch.full_like(targets, IGNORED), IGNORED, LogitTransform(), Vocabulary()
    )
    assert loss == 0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, (hidden, weight, bias)))


def test_infinite_logits_do_not_hide() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    with torch.no_grad():
        hidden[1, 0, 0] = float("inf")
    loss = linear_cross_entropy_sum(hidden, weight, bias, targets, IGNORED, LogitTransform(), Vocabulary())
    assert not torch.isfinite(loss)


def test_chunks_cover_all_tokens_within_their_limits() -> None:
    for tokens, vocabulary in ((0, 100), (1, 100), (1000, 50), (8192, 128256), (3000, 2**30)):
        bounds = chunk_bounds(tokens, vocabulary, "cpu")
        assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds)][: len(bounds)]
        assert (bounds[-1][1] if bounds else 0) == tokens
        assert all(4 * vocabulary * (end - begin) <= max(2**26, 4 * vocabulary) for begin, end in bounds)


def split_vocabulary(rank: int, world_size: int, transform: LogitTransform) -> tuple[Tensor, ...]:
    hidden, weight, bias, targets = inputs(torch.float64)
    start, length = part_bounds(VOCABULARY, world_size, rank)
    own = [tensor.detach()[start : start + length].requires_grad_() for tensor in (weight, bias)]
    vocabulary = own_vocabulary(dist.group.WORLD, VOCABULARY)  # type: ignore[arg-type]
    loss = linear_cross_entropy_sum(hidden, own[0], own[1], targets, IGNORED, transform, vocabulary)
    of_hidden, *of_own = torch.autograd.grad(loss, (hidden, *own))
    dist.all_reduce(of_hidden)
    return loss.detach(), of_hidden, *of_own


@pytest.mark.parametrize("transform", [TRANSFORMS[0], TRANSFORMS[-1]], ids=str)
def test_vocabulary_split_over_ranks(transform: LogitTransform) -> None:
    hidden, weight, bias, targets = inputs(torch.float64)
    expected = by_logits(hidden, weight, bias, targets, transform)
    of_hidden, of_weight, of_bias = torch.autograd.grad(expected, (hidden, weight, bias))
    ranks = run_ranks(3, split_vocabulary, transform)
    for loss, of_own_hidden, *_ in ranks:
        assert relative_error(loss, expected.detach()) < 1e-12
        assert relative_error(of_own_hidden, of_hidden) < 1e-12
    assert relative_error(torch.cat([found[2] for found in ranks]), of_weight) < 1e-12
    assert relative_error(torch.cat([found[3] for found in ranks]), of_bias) < 1e-12


def check_kernels() -> dict[str, float]:
    """Errors of the kernels relative to their tolerances; run in the interpreter."""
    kernels.BLOCK = 64
    torch.manual_seed(0)
    errors = {}
    for width in (101, 64, 300):
        for transform in TRANSFORMS:
            for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
                logits = (torch.randn(7, width + 5) * 3)[:, :width].to(dtype)
                targets = torch.randint(width, (7,))
                targets[1] = IGNORED
                exact = op.loss_and_gradient(logits.double(), targets, IGNORED, transform, Vocabulary(), True)
                own = torch.full((7, width + 5), float("nan"), dtype=dtype)[:, :width].copy_(logits)
                found = op.fused_loss_and_gradient(own, targets, IGNORED, transform, Vocabulary(), True)
                for name, a, b in zip(("loss", "gradient"), found, exact, strict=True):
                    limit = tolerance if name == "gradient" else 2e-6
                    errors[f"{name} {width} {transform} {dtype}"] = relative_error(a, b) / limit
                parts = []
                for start, end in ((0, width // 2), (width // 2, width)):  # statistics of parts of the vocabulary
                    parts.append(kernels.softmax_statistics(logits[:, start:end], targets, start, 1.0, 0.0))
                whole = kernels.softmax_statistics(logits, targets, 0, 1.0, 0.0)
                of_target = (parts[0][2] + parts[1][2])[targets != IGNORED]
                errors[f"target {width} {dtype}"] = relative_error(of_target, whole[2][targets != IGNORED]) / 1e-6
    return errors


@needs_triton
def test_kernels_in_the_interpreter() -> None:
    assert_within(run_interpreted(check_kernels))
