"""The blocks of visible pairs: every visible pair once, nothing hidden without a mask, and no mask without need."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.compute.attention import AttentionBlock, Visibility, read_sights, visible_blocks

ALL = slice(None)


@st.composite
def a_sight(draw: st.DrawFn, seq_len: int) -> Visibility:
    starts = draw(st.sets(st.integers(1, seq_len - 1), max_size=6))
    return Visibility((0, *sorted(starts)), draw(st.none() | st.integers(1, seq_len + 2)))


def visible(sight: Visibility, seq_len: int) -> torch.Tensor:
    """Straight from the rule."""
    token = torch.arange(seq_len)
    document = sum((token >= start).long() for start in sight.starts)
    distance = token[:, None] - token
    seen = (distance >= 0) & (document[:, None] == document)
    return seen if sight.window is None else seen & (distance < sight.window)


def count(blocks: list[AttentionBlock], seq_len: int) -> torch.Tensor:
    """How often each pair is computed and not masked."""
    times = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    for block in blocks:
        shape = len(block.queries), len(block.keys)
        forms = {"full": torch.ones(shape), "causal": torch.ones(shape).tril()}
        mask = block.sight.mask(block.queries, block.keys) if block.form == "masked" else forms[block.form]
        times[block.queries.start : block.queries.stop, block.keys.start : block.keys.stop] += mask.long()
    return times


@given(st.data(), st.sampled_from([1, 2, 4]), st.integers(3, 8), st.integers(1, 20), st.none() | st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_every_visible_pair_once(data: st.DataObject, parts: int, size: int, tile: int, largest: int | None) -> None:
    seq_len = parts * size
    sight = data.draw(a_sight(seq_len))
    chunks = [range(start, start + size) for start in range(0, seq_len, size)]
    split = data.draw(st.integers(0, parts))  # keys come from two ranks
    blocks = [
        b for keys in (chunks[:split], chunks[split:]) if keys for b in blocks_of(sight, chunks, keys, tile, largest)
    ]
    expected = visible(sight, seq_len)
    assert torch.equal(count(blocks, seq_len), expected.long())
    for block in blocks:
        seen = expected[block.queries.start : block.queries.stop, block.keys.start : block.keys.stop]
        assert seen.any()
        assert largest is None or max(seen.shape) <= largest
        if block.form == "masked":
            assert max(seen.shape) <= tile
            assert not seen.all()


def blocks_of(
    sight: Visibility, queries: list[range], keys: list[range], tile: int, largest: int | None
) -> list[AttentionBlock]:
    blocks = visible_blocks(ALL, sight, queries, keys, tile, largest)
    diagonal = [block.queries == block.keys for block in blocks]
    assert diagonal == sorted(diagonal, reverse=True)  # every token sees itself first
    own = {token for chunk in queries if chunk in keys for token in chunk}
    assert {token for block in blocks if block.queries == block.keys for token in block.queries} == own
    return blocks


def test_plain_causality_is_one_call_a_pair_of_chunks() -> None:
    chunks = [range(600), range(600, 1200)]
    blocks = visible_blocks(ALL, Visibility((0,), None), chunks, chunks, 512, None)
    assert [block.form for block in blocks] == ["causal", "causal", "full"]


def test_long_documents_need_no_mask_and_short_ones_share_one() -> None:
    row = [range(4000)]
    documents = (0, 700, 1700, 1750, 1800, 2600)
    forms = [(b.queries, b.form) for b in visible_blocks(ALL, Visibility(documents, None), row, row, 512, None)]
    assert forms == [
        (range(700), "causal"),
        (range(700, 1700), "causal"),
        (range(1700, 1800), "masked"),
        (range(1800, 2600), "causal"),
        (range(2600, 4000), "causal"),
    ]


def test_a_window_costs_a_band() -> None:
    row = [range(16384)]
    blocks = visible_blocks(ALL, Visibility((0,), 1024), row, row, 512, None)
    computed = sum(len(block.queries) * len(block.keys) for block in blocks)
    assert computed < 1.75 * 16384 * 1024


def test_documents_are_runs_of_equal_numbers() -> None:
    found = read_sights(torch.tensor([[3, 3, 5, 3], [1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 9, 0]]), 5)
    assert found == [
        (slice(0, 1), Visibility((0, 2, 3), 5)),
        (slice(1, 3), Visibility((0,), 5)),  # neighbours that see the same share their blocks
        (slice(3, 4), Visibility((0, 2, 3), 5)),
    ]
    assert read_sights(None, None) == [(slice(None), Visibility((0,), None))]
