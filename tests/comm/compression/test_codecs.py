"""Codecs: message sizes, round trips against a reference, and non-finite elements."""

from collections.abc import Callable
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.comm.compression.references import (
    float16_reference,
    int8_reference,
    one_bit_reference,
    structured_reference,
)
from weft.comm.compression.codec import Codec, decode, encode
from weft.comm.compression.codecs import CODECS

REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda elements: elements.bfloat16().float(),
    "fp16": float16_reference,
    "int8": int8_reference,
    "2:4": structured_reference,
    "1-bit": one_bit_reference,
}
BITS = {"bf16": 16, "fp16": 16 + 32 / 4096, "int8": 8 + 32 / 256, "2:4": 9, "1-bit": 1 + 16 / 64}
# Maximum error relative to the maximum magnitude of a block.
BOUNDS = {"bf16": 2**-8, "fp16": 2**-11, "int8": 0.5 / 127 + 1e-6}

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def round_trip(codec: Codec, elements: Tensor) -> Tensor:
    """Encode and decode one row."""
    messages = encode(codec, elements[None])
    assert messages.shape == (1, codec.bytes(len(elements)))
    assert messages.dtype == torch.uint8
    return decode(codec, messages, len(elements))[0]


def random_elements(length: int, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator) * torch.exp(spread * torch.randn(length, generator=generator))


@every_codec
def test_bytes_per_element(codec: Codec) -> None:
    assert codec.bytes_per_element * 8 == BITS[codec.name]


@pytest.mark.must("parity: compressed gradients")
@every_codec
@given(length=st.integers(1, 1100), seed=st.integers(0, 2**31), exponent=st.integers(-120, 110), spread=st.floats(0, 3))
@settings(deadline=None, max_examples=60)
def test_round_trip_equals_the_reference(codec: Codec, length: int, seed: int, exponent: int, spread: float) -> None:
    elements = random_elements(length, seed, spread) * 2.0**exponent
    elements[torch.rand(length, generator=torch.Generator().manual_seed(seed)) < 0.2] = 0
    found, expected = round_trip(codec, elements), REFERENCES[codec.name](elements)
    if codec.name == "1-bit":  # a mean that is summed in another order may round to the adjacent bfloat16
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-40)
    else:
        assert torch.equal(found, expected)
    if codec.name in BOUNDS:
        assert (found - elements).abs().max() <= BOUNDS[codec.name] * elements.abs().max() + 1e-45


@every_codec
def test_several_pieces_and_rows(codec: Codec) -> None:
    rows = random_elements(2 * (2**18 + 77), 3).view(2, -1)
    together = encode(codec, rows)
    assert together.shape == (2, codec.bytes(rows.shape[1]))
    assert torch.equal(together, torch.stack([encode(codec, row[None])[0] for row in rows]))
    found = decode(codec, together, rows.shape[1])
    few = (slice(0, 4096), slice(2**18 - 4096, 2**18))
    for part in (*((slice(2**18),) if codec.name == "2:4" else few), slice(2**18, None)):
        expected = torch.stack([REFERENCES[codec.name](row[part]) for row in rows])
        torch.testing.assert_close(found[:, part], expected, rtol=1e-5, atol=0)


@every_codec
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@given(length=st.integers(1, 600), index=st.integers(0, 599), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_non_finite_elements_stay_visible(codec: Codec, bad: float, length: int, index: int, seed: int) -> None:
    elements = random_elements(length, seed)
    elements[index % length] = bad
    assert not round_trip(codec, elements).isfinite().all()


@every_codec
def test_zeros_are_exact(codec: Codec) -> None:
    elements = random_elements(1024, 0)
    elements[256:512] = 0
    assert not round_trip(codec, elements)[256:512].any()
    if codec.name != "1-bit":  # zeros among other elements
        elements[::3] = 0
        assert not round_trip(codec, elements)[::3].any()


def test_structured_keeps_the_two_largest() -> None:
    quarters = [
        [1.0, 5.0, 0.0, 1.0, 7.0],
        [-4.0, 5.0, 0.0, 2.0, 0.0],
        [3.0, 5.0, -0.5, 8.0, 0.0],
        [2.0, 5.0, 0.0, -9.0],
    ]
    kept = [[0.0, 5.0, 0.0, 0.0, 7.0], [-4.0, 5.0, 0.0, 0.0, 0.0], [3.0, 0.0, -0.5, 8.0, 0.0], [0.0, 0.0, 0.0, -9.0]]
    elements = torch.tensor([list(chain(*quarters))])
    assert decode(CODECS["2:4"], encode(CODECS["2:4"], elements), 19).tolist() == [list(chain(*kept))]


def test_float16_does_not_overflow() -> None:
    elements = torch.tensor([[3e38, 1e30, -2e38, 0.0]])
    found = decode(CODECS["fp16"], encode(CODECS["fp16"], elements), 4)
    torch.testing.assert_close(found, elements, rtol=2**-11, atol=1e27)


def test_int8_rounds_ties_to_even() -> None:
    elements = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert decode(CODECS["int8"], encode(CODECS["int8"], elements), 6).tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0]]
