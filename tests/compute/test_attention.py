"""Attention primitives against the definition: outputs, log-sum-exp and gradients, and merged blocks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.compute.attention import CPU, PLAIN, Primitive, merge_attention
from weft.compute.dropout import dropout_mask

IMPLEMENTATIONS = {"plain": PLAIN, "cpu": CPU}
SCALE = 0.3
# heads of queries, of keys, queries, keys, head dim, value dim
SHAPES = [(4, 4, 9, 9, 8, 8), (4, 2, 7, 13, 8, 8), (4, 1, 6, 6, 5, 3), (6, 2, 5, 5, 4, 8), (2, 2, 1, 1, 3, 3)]


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the output gradient, in the memory layout of real models."""
    hq, hkv, sq, sk, d, dv = shape
    generator = torch.Generator().manual_seed(1)
    sizes = [(2, sq, hq, d), (2, sk, hkv, d), (2, sk, hkv, dv), (2, sq, hq, dv)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for size in sizes]


def a_bias(heads: int, queries: int, keys: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Bias with a document border, a hidden key, and a query that sees no key."""
    bias = torch.randn(1, heads, queries, keys, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bias[:, :, 0, keys // 2 :] = -math.inf
    bias[..., -1] = -math.inf
    bias[:, :, queries // 2] = -math.inf
    return bias.to(dtype)


def definition(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    visible = scores.isfinite()
    weights = torch.where(visible, scores, 0).exp() * visible
    out = weights @ v.repeat_interleave(groups, 1) / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return out, weights.sum(-1).log()


def compare(implementation: Primitive, inputs: list[Tensor], bias: Tensor | None, causal: bool, **extra: Any) -> None:
    q, k, v, grad = inputs
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = definition(*leaves, None if bias is None else bias.double(), causal, extra.get("softcap"))
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    out, lse = implementation.forward(q, k, v, bias, causal, SCALE, **extra)
    found = implementation.backward(grad, q, k, v, out, lse, bias, causal, SCALE, **extra)
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[q.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=min(tolerance, 1e-3))
    for x, reference in zip((out, *found), (expected, *gradients), strict=True):
        torch.testing.assert_close(x.double(), reference.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["full", "causal", "bias", "bias of heads", "causal and bias"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_primitives_match_the_definition(name: str, form: str, shape: tuple[int, ...]) -> None:
    hq, _, sq, sk, _, _ = shape
    bias = a_bias(hq if form == "bias of heads" else 1, sq, sk) if "bias" in form else None
    compare(IMPLEMENTATIONS[name], tensors(shape), bias, "causal" in form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_half_precision_dtypes_match_the_definition(name: str, dtype: torch.dtype) -> None:
    inputs = tensors((4, 2, 40, 40, 8, 8), dtype)
    compare(IMPLEMENTATIONS[name], inputs, a_bias(1, 40, 40, dtype), False)
    compare(IMPLEMENTATIONS[name], inputs, None, True)


@pytest.mark.must("lengths of the flash operator of a CPU")
def test_few_lengths_serve_documents_of_16_bits() -> None:
    """Documents of any length, in forward and backward: oneDNN compiles kernels for each length that it gets."""
    seen = set[int]()

    class Lengths(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "flash_attention" in func.__name__:
                seen.update(x.shape[2] for x in args[:4] if isinstance(x, Tensor) and x.ndim == 4)
            return func(*args, **kwargs or {})

    for queries, keys in ((1, 1), (31, 31), (33, 33), (70, 90), (513, 513)):
        with Lengths():
            compare(CPU, tensors((4, 2, queries, keys, 16, 12), torch.bfloat16), None, True)
    assert seen == {32, 64, 96, 544}
    seen.clear()
    with Lengths():
        compare(CPU, tensors((4, 2, 70, 50, 16, 12), torch.bfloat16), None, False)
        compare(CPU, tensors((4, 2, 33, 33, 16, 12), torch.float32), None, True)
    assert seen == {70, 50, 33}  # zeros would be seen, or save nothing


def test_hidden_tiles_before_the_first_visible_key() -> None:
    """Hides full tiles of the flash operator, which processes hundreds of keys at a time."""
    bias = torch.zeros(1, 1, 3, 1300, dtype=torch.float64)
    bias[..., 1, :1100] = -math.inf
    compare(CPU, tensors((2, 1, 3, 1300, 4, 4)), bias, False)


def test_softcap_matches_the_definition() -> None:
    compare(PLAIN, tensors((4, 2, 7, 7, 8, 8)), None, True, softcap=0.5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_merged_blocks_match_full_attention(name: str) -> None:
    """Blocks merge to the out and lse of all keys, and gradients of blocks with merged out and lse add up."""
    forward, backward = IMPLEMENTATIONS[name]
    q, k, v, grad = tensors((4, 2, 6, 12, 8, 4))
    bias = a_bias(1, 6, 12)
    out, lse = forward(q, k, v, bias, False, SCALE)
    parts = [slice(0, 4), slice(4, 5), slice(5, 12)]
    merged, merged_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for part in parts:
        merge_attention(
            merged, merged_lse, *forward(q, k[:, :, part], v[:, :, part], bias[..., part].contiguous(), False, SCALE)
        )
    torch.testing.assert_close((merged, merged_lse), (out, lse), rtol=1e-12, atol=1e-12)
    pieces = [
        backward(grad, q, k[:, :, p], v[:, :, p], merged, merged_lse, bias[..., p].contiguous(), False, SCALE)
        for p in parts
    ]
    dqs, dks, dvs = zip(*pieces, strict=True)
    full = backward(grad, q, k, v, out, lse, bias, False, SCALE)
    found = torch.stack(dqs).sum(0), torch.cat(dks, 2), torch.cat(dvs, 2)
    torch.testing.assert_close(found, full, rtol=1e-12, atol=1e-12)


def test_dropout_has_the_gradient_of_its_mask() -> None:
    q, k, v, grad = tensors((4, 2, 6, 6, 8, 8))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keep = dropout_mask(3, *[torch.arange(size) for size in (2, 4, 6, 6)], rate=0.4).double()
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * SCALE
    expected = (torch.softmax(scores, -1) * keep) @ leaves[2].repeat_interleave(2, 1)
    gradients = torch.autograd.grad(expected, leaves, grad)
    out, lse = PLAIN.forward(q, k, v, None, False, SCALE, keep=keep)
    found = PLAIN.backward(grad, q, k, v, out, lse, None, False, SCALE, keep=keep)
    torch.testing.assert_close((out, *found), (expected.detach(), *gradients), rtol=1e-12, atol=1e-12)


def test_dropout_mask_depends_on_position_only() -> None:
    """The share of dropped elements is right along every dim, and an element depends only on its position."""
    indices = [torch.arange(size) for size in (4, 8, 64, 64)]
    keep = dropout_mask(5, *indices, rate=0.25)
    assert set(keep.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    for dim in range(4):
        shares = (keep == 0).double().mean([d for d in range(4) if d != dim])
        deviation = math.sqrt(0.25 * 0.75 * len(shares) / keep.numel())
        assert (shares - 0.25).abs().max() < 4.5 * deviation
    part = dropout_mask(5, indices[0][1:3], indices[1][4:], indices[2][7:9], indices[3][::5], rate=0.25)
    assert torch.equal(part, keep[1:3, 4:, 7:9, ::5])
    other = dropout_mask(6, *indices, rate=0.25)
    assert abs(((keep == 0) & (other == 0)).double().mean().item() - 0.25**2) < 0.01
