"""Grouped matmuls of 16 bits on a CPU: results, gradients, and the sizes that oneDNN compiles."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from weft.compute.grouped_mm import grouped_mm, rounded_size

BORDERS = torch.tensor([0, 100, 100, 259, 261], dtype=torch.int32)
"""Groups of 0, 100, 0, 159 and 2 of 300 rows."""


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (300, 24), (5, 24, 40), (300, 40)
    rows, matrices, gradient = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    rows[261:] = torch.nan  # rows of no group
    return rows.requires_grad_(), matrices.requires_grad_(), gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.must("the only product of groups in 16 bits on a CPU")
def test_products_and_gradients(dtype: torch.dtype) -> None:
    rows, matrices, gradient = operands(dtype)
    out = grouped_mm(rows, matrices, BORDERS)[:261]
    found = torch.autograd.grad(out, (rows, matrices), gradient[:261])
    wide, wide_matrices = rows.detach().double().requires_grad_(), matrices.detach().double().requires_grad_()
    groups = torch.tensor([1] * 100 + [3] * 159 + [4] * 2)
    expected = torch.einsum("rk,rkn->rn", wide[:261], wide_matrices[groups])
    gradients = torch.autograd.grad(expected, (wide, wide_matrices), gradient[:261].double())
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    found_rows, found_matrices = found
    pairs = zip((out, found_rows[:261], found_matrices), (expected, gradients[0][:261], gradients[1]), strict=True)
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
    assert not found_matrices[[0, 2]].any()


def test_other_dtypes_are_torch_s() -> None:
    rows, matrices, _ = operands(torch.float32)
    found, expected = grouped_mm(rows, matrices, BORDERS), F.grouped_mm(rows, matrices, offs=BORDERS)
    assert torch.equal(found[:261], expected[:261])


def test_few_sizes_serve_all_routings() -> None:
    """With any routing; torch's own operator has a size for each number of rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(8, 16, 32, dtype=torch.bfloat16, requires_grad=True)

    def sizes(product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> set[str]:
        with torch.profiler.profile(record_shapes=True) as profile:
            for _ in range(20):
                counts = torch.multinomial(torch.rand(8, generator=generator), 1000, True, generator=generator)
                rows = torch.ones(1000, 16, dtype=torch.bfloat16, requires_grad=True)
                out = product(rows, weight, counts.bincount(minlength=8).cumsum(0).int())
                out.backward(torch.ones_like(out))
        return {str(event.input_shapes) for event in profile.events() if event.name == "aten::mm"}

    possible = {rounded_size(rows) for rows in range(1, 1001)}
    assert len(possible) == 20
    assert 10 < len(sizes(grouped_mm)) <= 3 * len(possible)
    assert len(sizes(lambda rows, weight, borders: F.grouped_mm(rows, weight, offs=borders))) > 3 * len(possible)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 128, 129, 1000, 1025, 100_000])
def test_sizes_are_at_most_a_quarter_larger(rows: int) -> None:
    assert rows <= rounded_size(rows) <= max(1.25 * rows, rows + 15)


def test_shapes_without_values() -> None:
    with FakeTensorMode():
        rows, borders = torch.empty(300, 24, dtype=torch.bfloat16), torch.empty(5, dtype=torch.int32)
        assert grouped_mm(rows, rows.new_empty(5, 24, 40), borders).shape == (300, 40)
        assert grouped_mm(rows.T, rows.new_empty(300, 40), borders).shape == (5, 24, 40)
