"""Codecs: sizes from the length alone, what comes back, beside the plain reference of each, and what is not finite."""

from collections.abc import Callable
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.comm.compression.codec import Codec, decode, encode
from weft.comm.compression.codecs import CODECS
from weft.comm.compression.half import float16_reference
from weft.comm.compression.int8 import int8_reference
from weft.comm.compression.one_bit import one_bit_reference
from weft.comm.compression.structured import structured_reference

REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda numbers: numbers.bfloat16().float(),
    "fp16": float16_reference,
    "int8": int8_reference,
    "2:4": structured_reference,
    "1-bit": one_bit_reference,
}
BITS = {"bf16": 16, "fp16": 16 + 32 / 4096, "int8": 8 + 32 / 256, "2:4": 9, "1-bit": 1 + 16 / 64}
# Of a block, the largest error relative to the largest magnitude of it.
BOUNDS = {"bf16": 2**-8, "fp16": 2**-11, "int8": 0.5 / 127 + 1e-6}

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def there_and_back(codec: Codec, numbers: Tensor) -> Tensor:
    """Of one row."""
    messages = encode(codec, numbers[None])
    assert messages.shape == (1, codec.bytes(len(numbers)))
    assert messages.dtype == torch.uint8
    return decode(codec, messages, len(numbers))[0]


def random_numbers(length: int, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator) * torch.exp(spread * torch.randn(length, generator=generator))


@every_codec
def test_bytes_a_number(codec: Codec) -> None:
    assert codec.bytes_per_number * 8 == BITS[codec.name]


@every_codec
@given(length=st.integers(1, 1100), seed=st.integers(0, 2**31), exponent=st.integers(-120, 110), spread=st.floats(0, 3))
@settings(deadline=None, max_examples=60)
def test_beside_the_reference(codec: Codec, length: int, seed: int, exponent: int, spread: float) -> None:
    numbers = random_numbers(length, seed, spread) * 2.0**exponent
    numbers[torch.rand(length, generator=torch.Generator().manual_seed(seed)) < 0.2] = 0
    found, expected = there_and_back(codec, numbers), REFERENCES[codec.name](numbers)
    if codec.name == "1-bit":  # a mean, added up in another order, may be rounded to the next bfloat16
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-40)
    else:
        assert torch.equal(found, expected)
    if codec.name in BOUNDS:
        assert (found - numbers).abs().max() <= BOUNDS[codec.name] * numbers.abs().max() + 1e-45


@every_codec
def test_many_pieces_and_rows_at_once(codec: Codec) -> None:
    rows = random_numbers(2 * (2**18 + 77), 3).view(2, -1)
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
@given(length=st.integers(1, 600), place=st.integers(0, 599), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_what_is_not_finite_is_not_hidden(codec: Codec, bad: float, length: int, place: int, seed: int) -> None:
    numbers = random_numbers(length, seed)
    numbers[place % length] = bad
    assert not there_and_back(codec, numbers).isfinite().all()


@every_codec
def test_zeros_come_back(codec: Codec) -> None:
    numbers = random_numbers(1024, 0)
    numbers[256:512] = 0
    assert not there_and_back(codec, numbers)[256:512].any()
    if codec.name != "1-bit":  # zeros among others
        numbers[::3] = 0
        assert not there_and_back(codec, numbers)[::3].any()


def test_structured_takes_the_two_largest() -> None:
    quarters = [
        [1.0, 5.0, 0.0, 1.0, 7.0],
        [-4.0, 5.0, 0.0, 2.0, 0.0],
        [3.0, 5.0, -0.5, 8.0, 0.0],
        [2.0, 5.0, 0.0, -9.0],
    ]
    kept = [[0.0, 5.0, 0.0, 0.0, 7.0], [-4.0, 5.0, 0.0, 0.0, 0.0], [3.0, 0.0, -0.5, 8.0, 0.0], [0.0, 0.0, 0.0, -9.0]]
    numbers = torch.tensor([list(chain(*quarters))])
    assert decode(CODECS["2:4"], encode(CODECS["2:4"], numbers), 19).tolist() == [list(chain(*kept))]


def test_float16_does_not_overflow() -> None:
    numbers = torch.tensor([[3e38, 1e30, -2e38, 0.0]])
    found = decode(CODECS["fp16"], encode(CODECS["fp16"], numbers), 4)
    torch.testing.assert_close(found, numbers, rtol=2**-11, atol=1e27)


def test_int8_rounds_ties_to_even() -> None:
    numbers = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert decode(CODECS["int8"], encode(CODECS["int8"], numbers), 6).tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0]]
