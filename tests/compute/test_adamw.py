"""AdamW in one Triton kernel: in Triton's interpreter, against float64 and against the formats of weights and states."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.compute.interpreter import assert_within, needs_triton, relative_error, run_interpreted
from weft.compute import adamw as op
from weft.memory.quantized_state import BlockState, build_map, pack
from weft.memory.weights import SplitWeight

SIZES = (1, 300, 1040, 3001)
MAPS = build_map(8, signed=True), build_map(8, signed=False)
WEIGHTS = ("fp32", "bf16", "split", "split_even")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Settings = dict[str, Any]


def settings_of(index: int) -> Settings:
    """Settings of the parameter group of a tensor."""
    lr, decay = (1e-2, 0.1) if index % 2 else (3e-3, 0.0)
    return {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}


def planes_of(values: Tensor, kind: str) -> tuple[Tensor, ...]:
    if kind in DTYPES:
        return (values.to(DTYPES[kind], copy=True),)
    weight = SplitWeight.empty(values.shape, values.device, even=kind == "split_even")
    weight.pack_(values)
    return (weight.high, weight.low) if weight.ties is None else (weight.high, weight.low, weight.ties)


def stored(values: Tensor, kind: str, signed: bool) -> tuple[Tensor, ...]:
    if kind in DTYPES:
        return (values.to(DTYPES[kind], copy=True),)
    packed: Any = pack(values, "int8", signed=signed)
    return packed.codes, packed.scale


def values_of(parts: tuple[Tensor, ...], signed: bool | None = None) -> Tensor:
    """float32 values of the parts of a weight, or of a moment if `signed` is given."""
    if len(parts) == 1:
        return parts[0].float()
    if signed is None:
        return SplitWeight(*parts).unpack()
    return BlockState(*parts, (SIZE_OF[parts[1].numel()],), "int8", signed).unpack()


SIZE_OF = {-(-size // op.WIDTH): size for size in SIZES}


def tensors(weight: str, gradient: str, moments: str, step: float = 3) -> Iterator[op.AdamWTensor]:
    """Tensors of several sizes and parameter groups."""
    generator = torch.Generator().manual_seed(len(weight) + len(moments))
    for index, size in enumerate(SIZES):
        w, g, m, v = (torch.randn(size, generator=generator) for _ in range(4))
        parts = planes_of(w, weight), g.to(DTYPES[gradient]) * 3
        states = stored(m * 0.1, moments, True), stored(v.square() * 0.01, moments, False)
        yield op.AdamWTensor(*parts, *states, torch.tensor(step + index), **settings_of(index))


def exact(tensor: op.AdamWTensor, factor: float) -> tuple[Tensor, ...]:
    """Weight and moments after an update, in float64."""
    w, m, v = values_of(tensor.weight), values_of(tensor.first, True), values_of(tensor.second, False)
    w, m, v, g = (values.double() for values in (w, m, v, tensor.gradient * 1.0))
    (beta1, beta2), step, g = tensor.betas, tensor.step.item() + 1, g * factor
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
    denominator = (v / (1 - beta2**step)).sqrt() + tensor.eps
    return w * (1 - tensor.lr * tensor.weight_decay) - tensor.lr * m / (1 - beta1**step) / denominator, m, v


def launch(tensors: list[op.AdamWTensor], factor: float | Tensor, overflows: Tensor | None = None) -> None:
    groups: dict[Any, list[op.AdamWTensor]] = {}
    for tensor in tensors:
        groups.setdefault(op.format_of(tensor), []).append(tensor)
    op.launch(groups, factor, MAPS, overflows)


def check_values() -> dict[str, float]:
    """Errors of weights and moments relative to the tolerance of their format."""
    errors = {}
    for case in product(WEIGHTS, DTYPES, ("fp32", "bf16", "int8")):
        found = list(tensors(*case))
        expected, gradients = [exact(tensor, 0.3) for tensor in found], [tensor.gradient.clone() for tensor in found]
        steps = [tensor.step.item() for tensor in found]
        launch(found, 0.3)
        for index, (tensor, (w, m, v)) in enumerate(zip(found, expected, strict=True)):
            assert tensor.step.item() == steps[index] + 1
            assert torch.equal(tensor.gradient, gradients[index])
            errors[f"{case} {index} weight"] = relative_error(values_of(tensor.weight), w) / TOLERANCE[case[0]]
            for name, part, value in (("first", tensor.first, m), ("second", tensor.second, v)):
                result = values_of(part, name == "first")
                errors[f"{case} {index} {name}"] = relative_error(result, value) / TOLERANCE[case[2]]
    return errors


TOLERANCE = {"fp32": 1e-6, "split": 1e-6, "split_even": 1e-6, "bf16": 8e-3, "int8": 2e-2}
"""The interpreter truncates to bfloat16 where a GPU rounds."""


def check_formats() -> dict[str, float]:
    """Number of tensors whose planes or codes differ from those of `pack_`, for the values of an update in float32."""
    different = {}
    for weight, moments in product(WEIGHTS, ("fp32", "int8")):
        plain, found = list(tensors("fp32", "fp32", "fp32")), list(tensors(weight, "fp32", moments))
        for a, b in zip(plain, found, strict=True):  # the values that the formats hold
            a.gradient.copy_(b.gradient)
            for target, values in ((a.weight, values_of(b.weight)), (a.first, values_of(b.first, True))):
                target[0].copy_(values)
            a.second[0].copy_(values_of(b.second, False))
        launch(plain, 0.7)
        launch(found, 0.7)
        for index, (a, b) in enumerate(zip(plain, found, strict=True)):
            pairs = [*zip(stored(a.first[0], moments, True), b.first, strict=True)]
            pairs += zip(stored(a.second[0], moments, False), b.second, strict=True)
            pairs += zip(planes_of(a.weight[0], weight), b.weight, strict=True) if weight != "bf16" else ()
            different[f"{weight} {moments} {index}"] = float(not all(torch.equal(*pair) for pair in pairs))
    return different


def check_bits_of_weights() -> dict[str, float]:
    """Weights that differ in a bit after an update by zero: ties, subnormals, largest values."""
    low = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    bits = ((torch.arange(0, 2**16, 61)[:, None] << 16) | low).flatten()
    values = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    values = values[values.isfinite()]
    different = {}
    for kind in ("split", "split_even"):
        zeros = [torch.zeros(len(values)) for _ in range(3)]
        moments = (zeros[1],), (zeros[2],)
        parts = planes_of(values, kind)
        before = [part.clone() for part in parts]
        tensor = op.AdamWTensor(parts, zeros[0], *moments, torch.tensor(0.0), 0.0, (0.9, 0.95), 1e-8, 0.0)
        launch([tensor], 1.0)
        different[kind] = float(not all(torch.equal(*pair) for pair in zip(parts, before, strict=True)))
    return different


def check_codes() -> dict[str, float]:
    """Blocks whose codes or scales differ from those of `pack_`: at all borders of the maps, zeros, equal magnitudes."""
    values = []
    for entries in MAPS:
        borders = (entries[1:] + entries[:-1]) / 2
        near = [borders, *(borders.nextafter(torch.tensor(side)) for side in (-2.0, 2.0)), entries]
        for block in torch.cat(near).split(255):
            values.append(torch.cat([torch.ones(1), block, torch.zeros(255 - len(block))]))
            values.append(values[-1] * -3)
    values += [
        torch.zeros(256),
        torch.tensor([1.0, -1.0] * 128),
        torch.tensor([-2.0, 2.0] * 128),
        torch.full((256,), -1e-30),
    ]
    gradient, different = torch.cat(values), {}
    empty: Any = [BlockState.empty(gradient.shape, gradient.device, "int8", signed=signed) for signed in (True, False)]
    for state in empty:
        state.pack_(torch.zeros(len(gradient)))
    states = [(state.codes, state.scale) for state in empty]
    tensor = op.AdamWTensor(
        (torch.zeros(len(gradient)),), gradient, *states, torch.tensor(0.0), 0.0, (0.0, 0.0), 1.0, 0.0
    )
    launch([tensor], 1.0)  # without betas, the moments are the gradient and its square
    for index, moment in enumerate((gradient, gradient.square())):
        for name, found, expected in zip(
            ("codes", "scale"), states[index], stored(moment, "int8", not index), strict=True
        ):
            different[f"{name} {index}"] = float((found != expected).sum())
    return different


def check_settings() -> dict[str, float]:
    """Errors with a tensor as learning rate and as factor, early and late steps, views, and empty tensors."""
    errors = {}
    for step in (0, 1, 10**6):
        found = [t._replace(lr=torch.tensor(t.lr), betas=(0.9, 0.999)) for t in tensors("fp32", "fp32", "fp32", step)]
        expected = [exact(tensor._replace(lr=float(tensor.lr)), 0.5)[0] for tensor in found]
        launch(found, torch.tensor(0.5, dtype=torch.float64))
        for index, (tensor, value) in enumerate(zip(found, expected, strict=True)):
            errors[f"step {step} {index}"] = relative_error(tensor.weight[0], value) / 1e-6
    flat = torch.randn(5, 1001).flatten()[1:]
    odd = next(tensors("fp32", "fp32", "fp32"))._replace(
        weight=(flat[:1000],),
        gradient=flat[1001:2001],
        first=(flat[2002:3002].zero_(),),
        second=(flat[3003:4003].zero_(),),
    )
    empty = odd._replace(**dict.fromkeys(("weight", "first", "second"), (torch.empty(0),)), gradient=torch.empty(0))
    empty = empty._replace(step=torch.tensor(4.0))
    expected, rest = [exact(odd, 1.0)[0]], flat[4003:].clone()
    launch([odd, empty], 1.0)
    assert empty.step == 5
    errors["changed neighbours"] = float(not torch.equal(flat[4003:], rest))
    errors["view"] = relative_error(odd.weight[0], expected[0]) / 1e-6
    return errors


def check_skips() -> dict[str, float]:
    """Number of tensors that an update with an overflow changes, or one without an overflow updates in another way."""
    different = {}
    for weight, moments in product(WEIGHTS, ("fp32", "bf16", "int8")):
        found, expected = (list(tensors(weight, "fp32", moments, 3.0)) for _ in range(2))
        for factor, overflow in ((torch.nan, 1.0), (0.7, 0.0)):
            launch(found, torch.tensor(factor, dtype=torch.float64), torch.tensor(overflow))
            if not overflow:
                launch(expected, factor)
            pairs = [
                pair
                for a, b in zip(found, expected, strict=True)
                for pair in zip(
                    (*a.weight, *a.first, *a.second, a.step), (*b.weight, *b.first, *b.second, b.step), strict=True
                )
            ]
            different[f"{weight} {moments} {overflow}"] = float(sum(not torch.equal(*pair) for pair in pairs))
    return different


@needs_triton
def test_an_overflow_changes_nothing() -> None:
    different = run_interpreted(check_skips)
    assert len(different) == 24
    assert different == dict.fromkeys(different, 0)


@needs_triton
def test_planes_and_codes_have_the_bits_of_their_formats() -> None:
    errors = run_interpreted(check_codes, check_bits_of_weights)
    assert errors == dict.fromkeys(errors, 0)
    assert len(errors) == 6


@needs_triton
def test_kernel_equals_float64_in_the_interpreter() -> None:
    errors = run_interpreted(check_values, check_settings)
    assert len(errors) == 24 * 4 * 3 + 14
    assert_within(errors)


@needs_triton
def test_every_format_has_the_bits_of_its_update_in_float32() -> None:
    different = run_interpreted(check_formats)
    assert len(different) == 32
    assert different == dict.fromkeys(different, 0)


def test_tensors_that_the_kernel_does_not_support() -> None:
    plain, split = (next(tensors(kind, "fp32", "fp32")) for kind in ("fp32", "split_even"))
    assert op.format_of(plain) == op.Format("fp32", "fp32", "fp32", False, False)
    wide = tuple(next(tensors("fp32", "fp32", "fp32")))
    two = torch.randn(8, 8)
    planes = SplitWeight(*split.weight)
    double = SplitWeight.empty((8,), torch.device("cpu"), even=True)
    for changed in (
        plain._replace(weight=(wide[0][0].double(),)),
        plain._replace(gradient=wide[1].half()),
        plain._replace(weight=(two.T,), gradient=two, first=(two,), second=(two,)),
        plain._replace(first=(wide[2][0].bfloat16(),)),
        split._replace(weight=(double.high[4:], double.low[4:], double.ties)),
    ):
        assert op.format_of(changed) is None
    assert op.format_of(split) is not None
    assert planes.ties is not None
