"""Kernels of packed sequences against the definition, on CPU, with the shapes of CUDA, and on a stand-in for an NPU."""

import sys
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.lab.npu_attention import NpuAttention
from weft.compute import varlen_attention
from weft.compute.attention import CPU, PLAIN, merge_attention
from weft.compute.sequences import Sequences, TokenDropout, VarlenKernel
from weft.compute.varlen_attention import FLASH, FUSION, choose_kernel
from weft.compute.varlen_blocks import CPU_BLOCKS, PLAIN_BLOCKS, blocks_kernel

SCALE = 0.3
SMALL = blocks_kernel("small blocks", PLAIN, strip=2, largest=12)
KERNELS = {
    "cpu": CPU_BLOCKS,
    "cpu in strips": blocks_kernel("strips", CPU, strip=2),
    "plain": PLAIN_BLOCKS,
    "small blocks": SMALL,
    "npu": FUSION,
}
CASES = {  # numbers of queries, of keys, left, right
    "causal": ((3, 3, 1, 9, 4), (3, 3, 1, 9, 4), -1, 0),
    "full": ((3, 1, 4, 4), (5, 2, 1, 1), -1, -1),
    "causal window": ((3, 12, 12, 1), (3, 12, 12, 1), 3, 0),
    "window of another chunk": ((5, 5, 2), (6, 6, 3), 2, -1),
}


def sequences_of(case: str) -> Sequences:
    queries, keys, left, right = CASES[case]
    borders = [(0, *accumulate(lengths)) for lengths in (queries, keys)]
    on_device = (torch.tensor(own, dtype=torch.int32) for own in borders)
    return Sequences(borders[0], borders[1], left, right, *on_device, max(queries), max(keys))


def tensors(sequences: Sequences, heads: int, kv_heads: int, size: int, value_size: int) -> list[Tensor]:
    """Gradient, q, k and v in float64; keys and values are views of one tensor, as in a ring."""
    generator = torch.Generator().manual_seed(4)
    queries, keys = sequences.queries[-1], sequences.keys[-1]
    shapes = [(queries, heads, value_size), (queries, heads, size), (keys, kv_heads, size + value_size)]
    grad, q, kv = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [grad, q, *kv.split([size, value_size], -1)]


def definition(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, softcap: float | None) -> tuple[Tensor, Tensor]:
    """out and lse by a mask over all tokens."""
    visible = torch.zeros(len(q), len(k), dtype=torch.bool)
    for (start, stop), (first, last) in zip(pairwise(sequences.queries), pairwise(sequences.keys), strict=True):
        distance = torch.arange(first, last) - first - (torch.arange(start, stop)[:, None] - stop + last - first)
        seen = distance <= sequences.right if sequences.right >= 0 else torch.ones_like(distance, dtype=torch.bool)
        visible[start:stop, first:last] = seen & (distance >= -sequences.left) if sequences.left >= 0 else seen
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def run(kernel: VarlenKernel, inputs: list[Tensor], sequences: Sequences, *options: Any) -> list[Tensor]:
    """out, lse and gradients by a kernel, which gets out and lse of a softmax with one more key for every query."""
    grad, q, k, v = inputs
    out, lse = kernel.forward(q, k, v, sequences, SCALE, *options)
    assert (out.dtype, lse.shape) == (q.dtype, (q.shape[1], len(q)))
    merged, merged_lse = out.clone(), lse.clone()
    merge_attention(merged.transpose(0, 1), merged_lse, torch.zeros(()), torch.zeros_like(lse))
    return [out, lse, *kernel.backward(grad, q, k, v, merged, merged_lse, sequences, SCALE, *options)]


def expected(inputs: list[Tensor], sequences: Sequences, softcap: float | None) -> list[Tensor]:
    grad, *leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = definition(*leaves, sequences, softcap)
    share = torch.sigmoid(lse)  # of these keys, beside a key with score 0 and value 0
    gradients = torch.autograd.grad(out * share.T[..., None], leaves, grad)
    return [out.detach(), lse.detach(), *gradients]


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> NpuAttention:
    module = NpuAttention()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


@pytest.mark.parametrize(
    ("name", "case"),
    [pair for pair in product(KERNELS, CASES) if pair != ("npu", "window of another chunk")],  # which is not chosen
)
def test_kernels_match_the_definition(name: str, case: str, npu: NpuAttention) -> None:
    sequences = sequences_of(case)
    inputs = tensors(sequences, 4, 2, 16, 16)
    for x, reference in zip(run(KERNELS[name], inputs, sequences), expected(inputs, sequences, None), strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [PLAIN_BLOCKS, SMALL], ids=["plain", "small blocks"])
def test_softcap_matches_the_definition(kernel: VarlenKernel, case: str) -> None:
    sequences = sequences_of(case)
    inputs = tensors(sequences, 4, 1, 5, 3)
    for x, reference in zip(run(kernel, inputs, sequences, 0.7), expected(inputs, sequences, 0.7), strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-10, atol=1e-10)


def test_dropout_does_not_depend_on_the_blocks() -> None:
    sequences = sequences_of("causal window")
    inputs, tokens = tensors(sequences, 4, 2, 8, 8), torch.arange(sequences.queries[-1])
    dropout = TokenDropout(0.4, 3, torch.arange(4), tokens // 12, tokens % 12, tokens % 12)
    found = [run(kernel, inputs, sequences, None, dropout) for kernel in (PLAIN_BLOCKS, SMALL)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found[0][0], run(SMALL, inputs, sequences)[0])


@pytest.mark.parametrize("value_dim", [32, 16])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_of_cuda_has_the_shapes_of_the_attention(case: str, value_dim: int) -> None:
    """The operators of torch accept the arguments, and shapes and dtypes of the results are those of the interface."""
    with FakeTensorMode():
        sequences = sequences_of(case)
        queries, keys = sequences.queries[-1], sequences.keys[-1]
        shapes = (queries, 4, value_dim), (queries, 4, 32), (keys, 2, 32), (keys, 2, value_dim)
        grad, q, k, v = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        out, lse = FLASH.forward(q, k, v, sequences, SCALE)
        assert (out.shape, out.dtype) == ((len(q), 4, value_dim), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((4, len(q)), torch.float32)
        gradients = FLASH.backward(grad, q, k, v, out, lse, sequences, SCALE)
        assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


def test_an_npu_computes_many_sequences_in_several_calls(npu: NpuAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "FUSION_SEQUENCES", 2)
    sequences = sequences_of("causal")
    inputs = tensors(sequences, 4, 2, 16, 16)
    for x, reference in zip(run(FUSION, inputs, sequences), expected(inputs, sequences, None), strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-10, atol=1e-10)
    assert npu.calls == 3 * ["forward"] + 3 * ["backward"]


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("arguments", "options", "kernel", "reason"),
    [
        (("cuda", BF16, 128, 128), {}, FLASH, ""),
        (("cuda", torch.float16, 192, 128), {"window": 64, "ring": 4}, FLASH, ""),
        (("cuda", FP32, 128, 128), {}, PLAIN_BLOCKS, "flash does not take float32"),
        (("cuda", BF16, 512, 512), {}, PLAIN_BLOCKS, "512"),
        (("cuda", BF16, 128, 128), {"softcap": 30.0}, PLAIN_BLOCKS, "softcap"),
        (("cuda", BF16, 128, 128), {"dropout": 0.1}, PLAIN_BLOCKS, "dropout"),
        (("npu", FP32, 128, 128), {}, FUSION, ""),
        (("npu", BF16, 128, 128), {"window": 64}, FUSION, ""),
        (("npu", BF16, 128, 128), {"window": 64, "ring": 2}, PLAIN_BLOCKS, "windows over a ring"),
        (("npu", torch.float64, 128, 128), {}, PLAIN_BLOCKS, "float64"),
        (("npu", BF16, 192, 128), {}, PLAIN_BLOCKS, "192"),
        (("cpu", FP32, 5, 3), {"window": 4}, CPU_BLOCKS, ""),
        (("xpu", BF16, 128, 128), {}, PLAIN_BLOCKS, "xpu"),
    ],
)
def test_choice(arguments: Any, options: Any, kernel: VarlenKernel, reason: str) -> None:
    found, why = choose_kernel(*arguments, **options)
    assert found is kernel
    assert bool(why) is bool(reason)
    assert reason in why
