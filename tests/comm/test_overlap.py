"""Products in chunks beside their communication: the same numbers as the plain form, and on an emulated wire the time of the
longer of the two in place of their sum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.lab.pool import run_ranks
from tests.lab.wire import Wire, new_wire, virtual_seconds
from weft.cluster.shared_memory import register_backend
from weft.comm import collectives
from weft.comm.chunks import Costs, Line, Receive, Send, cut_rows, fewest_chunks
from weft.comm.collectives import Recorder
from weft.comm.overlap import (
    Overlap,
    can_overlap,
    multiply_copied,
    multiply_gathered,
    multiply_reduced,
    multiply_scattered,
)
from weft.errors import PlanError
from weft.precision.backward import HELD, Carried, carry_gradient

FORMS = ("gathered", "copied", "scattered", "reduced")
FORMATS = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """One product on all ranks of a group."""

    form: str
    chunks: int | str
    fan: int = 1
    dim: int = 1
    dtype: torch.dtype = torch.float32
    bias: bool = False
    whole: bool = True
    """Small whole numbers, whose sums are exact in every format and order: any row in another place changes bits."""
    batch: int = 2
    tokens: int = 12
    """Along `dim`, of all ranks."""
    again: bool = False
    """Computed once more in backward."""
    transposed: bool = False
    """The weight is a view of its transpose."""


def tensors(case: Case, rank: int, ranks: int) -> tuple[Tensor, list[Tensor], list[Tensor | None], list[Tensor]]:
    """Input, matrices, biases and output gradients of one rank; the gradients are permuted in memory."""
    generator = torch.Generator().manual_seed(10 * ranks)

    def draw(*shape: int) -> Tensor:
        """Other numbers on each rank."""
        for number in range(ranks):
            if case.whole:
                drawn = torch.randint(-2, 3, shape, generator=generator).to(case.dtype)
            else:
                drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
            found = drawn if number == rank or number == 0 else found
        return found

    part = case.tokens // ranks
    shape = [case.batch, case.tokens]
    if case.form == "gathered":
        shape = [case.batch, part] if case.dim == 1 else [part, case.batch]
    elif case.dim == 0:
        shape = shape[::-1]
    x = draw(*shape, 6)
    if case.form == "copied":
        dist.broadcast(x, 0)
    out_shape = [case.batch, case.tokens] if case.dim == 1 else [case.tokens, case.batch]
    if case.form == "scattered":
        out_shape[case.dim] //= ranks
    matrices = [draw(5 + number, 6) for number in range(case.fan)]
    if case.transposed:
        matrices = [matrix.T.contiguous() for matrix in matrices]
    biases = [draw(5 + number) if case.bias else None for number in range(case.fan)]
    gradients = [draw(5 + number, *out_shape[::-1]).permute(2, 1, 0) for number in range(case.fan)]
    if case.form == "reduced":
        for number, gradient in enumerate(gradients):
            same = gradient.contiguous()
            dist.broadcast(same, 0)
            gradients[number] = same.transpose(0, 1).contiguous().transpose(0, 1)
    return x, matrices, biases, gradients


def plain(case: Case, x: Tensor, matrices: Any, biases: Any, group: dist.ProcessGroup) -> list[Tensor]:
    """The form by single collectives."""
    if case.form in ("gathered", "copied"):
        x = collectives.gather(x, group, case.dim) if case.form == "gathered" else collectives.copy(group, x)[0]
        return [F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
    out = F.linear(x, matrices[0], biases[0])
    return [
        collectives.reduce_scatter(out, group, case.dim) if case.form == "scattered" else collectives.reduce(out, group)
    ]


def in_chunks(case: Case, x: Tensor, matrices: Any, biases: Any, overlap: Overlap) -> list[Tensor]:
    if case.form == "gathered":
        return list(multiply_gathered(x, matrices, biases, overlap, case.dim))
    if case.form == "copied":
        return list(multiply_copied(x, matrices, biases, overlap))
    if case.form == "scattered":
        return [multiply_scattered(x, matrices[0], biases[0], overlap, case.dim)]
    return [multiply_reduced(x, matrices[0], biases[0], overlap)]


def run(case: Case, rank: int, ranks: int, group: dist.ProcessGroup, *, overlapped: bool) -> list[Tensor | None]:
    """Outputs and all gradients."""
    x, matrices, biases, gradients = tensors(case, rank, ranks)
    leaves = [x, *matrices, *(bias for bias in biases if bias is not None)]
    for leaf in leaves:
        leaf.requires_grad_()

    def forward(x: Tensor) -> list[Tensor]:
        seen = [matrix.T if case.transposed else matrix for matrix in matrices]
        if overlapped:
            return in_chunks(case, x, seen, biases, Overlap(group, case.chunks))  # type: ignore[arg-type]
        return plain(case, x, seen, biases, group)

    outs = checkpoint(forward, x, use_reentrant=False) if case.again else forward(x)
    torch.autograd.backward(outs, gradients)
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]


def compare(rank: int, ranks: int, cases: list[Case], backend: str) -> None:
    group = dist.new_group(backend=register_backend() if backend == "shared memory" else "gloo")
    for case in cases:
        found, expected = (run(case, rank, ranks, group, overlapped=overlapped) for overlapped in (True, False))
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert mine.shape == theirs.shape
            error, largest = (mine - theirs).abs().max().item(), theirs.abs().max().item()
            tolerance = 0 if case.whole else TOLERANCE[case.dtype] * largest
            assert error <= tolerance, (case, number, error, largest)


def fans(form: str) -> tuple[int, ...]:
    return (1, 2, 3) if form in ("gathered", "copied") else (1,)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_of_sums_that_are_exact(form: str, ranks: int) -> None:
    """Every number of chunks, even and not, along both dims, with every fan, with biases and without."""
    cases = [
        Case(form, chunks, fan, dim, dtype, bias, tokens=tokens * ranks)
        for chunks in (1, 2, 3, 4, 8)
        for fan in fans(form)
        for dim, dtype, bias in ((1, torch.float32, True), (0, torch.bfloat16, False), (1, torch.float64, False))
        for tokens in (8, 11)
    ]
    run_ranks(ranks, compare, cases, "shared memory")


@pytest.mark.parametrize("form", FORMS)
def test_within_rounding(form: str) -> None:
    cases = [
        Case(form, chunks, fan, dtype=dtype, bias=True, whole=False, tokens=16)
        for chunks in (1, 3, 8)
        for fan in fans(form)
        for dtype in FORMATS
    ]
    run_ranks(2, compare, cases, "shared memory")


@pytest.mark.parametrize("form", FORMS)
def test_over_gloo_computed_again_and_with_transposed_matrices(form: str) -> None:
    cases = [Case(form, 3, fans(form)[-1], dim, again=True, transposed=True, bias=True) for dim in (0, 1)]
    run_ranks(2, compare, cases, "gloo")
    run_ranks(4, compare, cases, "gloo")
