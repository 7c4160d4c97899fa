"""Rows in 8 bits: message sizes, round trips against a reference, and non-finite elements."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lab.rounding import rounded
from weft.comm.compression import rows as module
from weft.comm.compression.rows import DTYPES, RowFormat, decode_rows, encode_rows, row_bytes

every_format = pytest.mark.parametrize("kind", DTYPES)


def round_trip(rows: Tensor, kind: RowFormat) -> Tensor:
    messages = encode_rows(rows, kind)
    assert (messages.dtype, *messages.shape) == (torch.uint8, len(rows), row_bytes(rows.shape[1]))
    found = torch.empty_like(rows, memory_format=torch.contiguous_format)
    decode_rows(messages, found, kind)
    return found


def test_message_sizes() -> None:
    assert [row_bytes(length) for length in (1, 128, 129, 7168)] == [2, 129, 131, 7168 + 56]


@every_format
@given(seed=st.integers(0, 2**31), length=st.integers(1, 300), exponent=st.integers(-100, 100))
@settings(deadline=None, max_examples=60)
def test_round_trip_equals_the_reference(kind: RowFormat, seed: int, length: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, length, generator=generator) * 2.0**exponent
    rows *= torch.exp2(torch.randint(-9, 9, rows.shape, generator=generator))
    rows[torch.rand(rows.shape, generator=generator) < 0.2] = 0
    rows[0] = 0
    found = round_trip(rows, kind)
    assert torch.equal(found, rounded(rows, kind))
    assert torch.equal(round_trip(found, kind), found)
    assert torch.equal(found.bfloat16().float(), found)


@every_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_strides(kind: RowFormat, dtype: torch.dtype) -> None:
    rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)).to(dtype).T
    assert torch.equal(round_trip(rows, kind), rounded(rows, kind))
    assert round_trip(rows[:0], kind).shape == (0, 200)


@every_format
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_elements_stay_visible(kind: RowFormat, value: float) -> None:
    rows = torch.ones(2, 200)
    rows[1, 150] = value
    assert round_trip(rows, kind).isfinite().sum(1).tolist() == [200, 128]


@every_format
def test_long_messages_are_made_in_parts(kind: RowFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(10, 200, generator=torch.Generator().manual_seed(0))
    expected = encode_rows(rows, kind)
    monkeypatch.setattr(module, "piece_size", lambda device: 700)
    assert torch.equal(encode_rows(rows, kind), expected)
    assert torch.equal(round_trip(rows, kind), rounded(rows, kind))
