"""Rounding to FP8 in two layouts: kernels and operators have the bits of operations of torch; compiled graphs."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from tests.compute.interpreter import needs_triton, run_interpreted
from weft.compute import fp8_cast, fp8_experts
from weft.compute.fp8 import fp8_linear
from weft.compute.fp8_cast import TENSOR, dequantize, quantize, quantize_layouts

KINDS = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def spread(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Values over six orders of magnitude, so that some are subnormal in FP8; a row and a column of zeros."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, columns)
    x[3], x[:, 5] = 0, 0
    return x.to(dtype)


def differs(found: Tensor, expected: Tensor) -> bool:
    return (
        found.shape != expected.shape or found.dtype != expected.dtype or not torch.equal(_bits(found), _bits(expected))
    )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8 if x.dtype.itemsize == 1 else torch.int32)


def cast_as_torch_does() -> None:
    """Let the interpreter round to FP8 like the devices: its own conversion loses carries and subnormals (Triton 3.7)."""
    from triton.runtime import interpreter

    own = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.name not in KINDS:
            return own(values, source, target, mode)
        return torch.tensor(values).to(KINDS[target.name]).view(torch.uint8).numpy()

    interpreter._convert_float = convert


def check_layouts() -> dict[str, bool]:
    """Results of the kernels that differ from those of torch in any bit."""
    cast_as_torch_does()
    found = {}
    for dtype, kind in product((torch.bfloat16, torch.float32), KINDS.values()):
        for shape in ((128, 256), (48, 80)):
            x = spread(*shape, dtype)
            largest = fp8_cast.launch_largest(x)
            found[f"largest {shape} {dtype}"] = differs(largest, x.abs().amax().float())
            for power in (False, True):
                arguments = x, largest, kind, power, True, True
                pairs = zip(fp8_cast.launch(*arguments), fp8_cast.reference(*arguments), strict=True)
                found |= {f"cast {shape} {dtype} {kind} {power} {i}": differs(*pair) for i, pair in enumerate(pairs)}
        x = spread(256, 384, dtype)
        for rows, (by_row, by_column) in product((1, 128), ((True, True), (True, False), (False, True))):
            arguments = x, kind, rows, by_row, by_column
            pairs = zip(fp8_cast.launch_blocks(*arguments), fp8_cast.reference_blocks(*arguments), strict=True)
            found |= {f"blocks {rows} {by_row} {dtype} {kind} {i}": differs(*pair) for i, pair in enumerate(pairs)}
    x = spread(16, 32, torch.float32)
    x[2, 3] = torch.nan
    found["NaN"] = not fp8_cast.launch_largest(x).isnan()
    values, *_ = fp8_cast.launch(x, fp8_cast.launch_largest(x), torch.float8_e4m3fn, True, True, False)
    found["NaN of the cast"] = not values.float()[2, 3].isnan()
    return found


def check_experts() -> dict[str, bool]:
    """The same for the kernels of experts: rows, and transposed groups, one of them empty, with their padding."""
    cast_as_torch_does()
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        x = spread(200, 80, dtype)
        pairs = zip(fp8_experts.launch_rows(x), fp8_experts.reference_rows(x), strict=True)
        found |= {f"rows {dtype} {i}": differs(*pair) for i, pair in enumerate(pairs)}
        starts, ends = (torch.tensor(border, dtype=torch.int32) for border in ([0, 37, 37, 170], [37, 37, 170, 186]))
        groups = x, starts, ends, torch.tensor([0, 48, 64, 208], dtype=torch.int32), 256
        (values, scale), (expected, expected_scale) = (
            fp8_experts.launch_transpose(*groups),
            fp8_experts.reference_transpose(*groups),
        )
        found[f"transposed {dtype}"] = differs(values[:, :224], expected[:, :224])
        found[f"scales {dtype}"] = differs(scale, expected_scale)
    return found


@needs_triton
def test_kernels_have_the_bits_of_torch() -> None:
    found = run_interpreted(check_layouts, check_experts)
    assert len(found) > 50
    assert not [case for case, is_other in found.items() if is_other]


@pytest.mark.parametrize("block", [TENSOR, (1, 128), (128, 128)])
def test_layouts(block: tuple[int, int]) -> None:
    x = spread(128, 256, torch.bfloat16)
    for found, side in zip(quantize_layouts(x, torch.float8_e4m3fn, block), (x, x.T), strict=True):
        for part, expected in zip(found, quantize(side, torch.float8_e4m3fn, block), strict=True):
            assert not differs(part, expected)
    rows, columns = quantize_layouts(x, torch.float8_e4m3fn, block, rows=False)
    assert rows.values.numel() == 0
    assert columns.values.shape == (256, 128)


def test_rounding_again_changes_nothing_with_powers_of_two() -> None:
    """Weights that were rounded for a gather are exact in bfloat16, and the layer finds the same product of value and scale."""
    for factor in (1, 3.7, 447.99, 448, 449, 463.9):  # the largest value is anywhere between two powers of two
        x = (spread(64, 128, torch.float32) / spread(64, 128, torch.float32).abs().max() * factor).bfloat16()
        once = dequantize(*quantize(x, torch.float8_e4m3fn, TENSOR, power_of_two=True), TENSOR)
        assert torch.equal(once.bfloat16().float(), once)
        again = quantize(once.bfloat16(), torch.float8_e4m3fn, TENSOR, power_of_two=True)
        assert torch.equal(dequantize(*again, TENSOR), once)
        assert torch.equal(again.scale.frexp().mantissa, torch.tensor(0.5))


def test_a_layer_computes_the_same_bits_with_a_rounded_weight() -> None:
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(32, 64), torch.randn(48, 64), torch.randn(32, 48)
    results = []
    for side in (weight, dequantize(*quantize(weight, torch.float8_e4m3fn, TENSOR, power_of_two=True), TENSOR)):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, side)]
        out = fp8_linear(*inputs, None, False)
        results.append([out, *torch.autograd.grad(out, inputs, gradient)])
    assert all(map(torch.equal, *results))


def test_a_compiled_block_rounds_a_shared_input_once_and_keeps_no_rounded_weight() -> None:
    """Gathered weights of ZeRO 3 are freed after forward; a copy in FP8 would stay until backward."""
    saved, counts = [], {}

    def inspect(name: str) -> Any:
        def compiler(graph: Any, _: Any) -> Any:
            counts[name] = sum(
                "fp8_cast" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"
            )
            if name == "forward":
                saved.extend(node.meta["val"] for node in graph.graph.output_node().args[0])
            return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

        return compiler

    from functorch.compile import min_cut_rematerialization_partition

    backend = aot_autograd(
        fw_compiler=inspect("forward"),
        bw_compiler=inspect("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )

    @torch.compile(backend=backend, fullgraph=True)
    def block(x: Tensor, *weights: Tensor) -> Tensor:
        return sum((fp8_linear(x, weight, None, False) for weight in weights), torch.zeros(()))

    x, *weights = (torch.randn(shape, requires_grad=True) for shape in ((1600, 32), (64, 32), (64, 32)))
    block(x, *weights).sum().backward()
    assert counts == {"forward": 3, "backward": 3}  # x and two weights; their gradient, shared too, and two weights
    in_fp8 = [tuple(value.shape) for value in saved if value.dtype.itemsize == 1]
    assert in_fp8 == [(32, 1600)]
