"""Blocks of visible pairs: each visible pair once, no hidden pair without a mask, and no mask without need."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.compute.attention import AttentionBlock, Visibility, read_visibility, visible_blocks

ALL = slice(None)


@st.composite
def visibilities(draw: st.DrawFn, seq_len: int) -> Visibility:
    starts = draw(st.sets(st.integers(1, seq_len - 1), max_size=6))
    return Visibility((0, *sorted(starts)), draw(st.none() | st.integers(1, seq_len + 2)))


def visible(visibility: Visibility, seq_len: int) -> torch.Tensor:
    """Reference mask from the definition."""
    token = torch.arange(seq_len)
    document = sum((token >= start).long() for start in visibility.starts)
    distance = token[:, None] - token
    seen = (distance >= 0) & (document[:, None] == document)
    return seen if visibility.window is None else seen & (distance < visibility.window)


def count(blocks: list[AttentionBlock], seq_len: int) -> torch.Tensor:
    """Number of times that each pair is computed unmasked."""
    times = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    for block in blocks:
        shape = len(block.queries), len(block.keys)
        masks = {"full": torch.ones(shape), "causal": torch.ones(shape).tril()}
        mask = block.visibility.mask(block.queries, block.keys) if block.kind == "masked" else masks[block.kind]
        times[block.queries.start : block.queries.stop, block.keys.start : block.keys.stop] += mask.long()
    return times


@given(st.data(), st.sampled_from([1, 2, 4]), st.integers(3, 8), st.integers(1, 20), st.none() | st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_every_visible_pair_is_covered_once(
    data: st.DataObject, parts: int, size: int, tile: int, largest: int | None
) -> None:
    seq_len = parts * size
    visibility = data.draw(visibilities(seq_len))
    chunks = [range(start, start + size) for start in range(0, seq_len, size)]
    split = data.draw(st.integers(0, parts))  # keys come from two ranks
    blocks = [
        b
        for keys in (chunks[:split], chunks[split:])
        if keys
        for b in blocks_of(visibility, chunks, keys, tile, largest)
    ]
    expected = visible(visibility, seq_len)
    assert torch.equal(count(blocks, seq_len), expected.long())
    for block in blocks:
        seen = expected[block.queries.start : block.queries.stop, block.keys.start : block.keys.stop]
        assert seen.any()
        assert largest is None or max(seen.shape) <= largest
        if block.kind == "masked":
            assert max(seen.shape) <= tile
            assert not seen.all()


def blocks_of(
    visibility: Visibility, queries: list[range], keys: list[range], tile: int, largest: int | None
) -> list[AttentionBlock]:
    blocks = visible_blocks(ALL, visibility, queries, keys, tile, largest)
    diagonal = [block.queries == block.keys for block in blocks]
    assert diagonal == sorted(diagonal, reverse=True)  # blocks in which every token sees itself come first
    own = {token for chunk in queries if chunk in keys for token in chunk}
    assert {token for block in blocks if block.queries == block.keys for token in block.queries} == own
    return blocks


def test_plain_causal_attention_is_one_block_per_pair_of_chunks() -> None:
    chunks = [range(600), range(600, 1200)]
    blocks = visible_blocks(ALL, Visibility((0,), None), chunks, chunks, 512, None)
    assert [block.kind for block in blocks] == ["causal", "causal", "full"]


def test_long_documents_need_no_mask_and_short_documents_share_a_tile() -> None:
    row = [range(4000)]
    documents = (0, 700, 1700, 1750, 1800, 2600)
    kinds = [(b.queries, b.kind) for b in visible_blocks(ALL, Visibility(documents, None), row, row, 512, None)]
    assert kinds == [
        (range(700), "causal"),
        (range(700, 1700), "causal"),
        (range(1700, 1800), "masked"),
        (range(1800, 2600), "causal"),
        (range(2600, 4000), "causal"),
    ]


def test_window_covers_only_a_band() -> None:
    row = [range(16384)]
    blocks = visible_blocks(ALL, Visibility((0,), 1024), row, row, 512, None)
    computed = sum(len(block.queries) * len(block.keys) for block in blocks)
    assert computed < 1.75 * 16384 * 1024


def test_documents_are_runs_of_equal_values() -> None:
    found = read_visibility(torch.tensor([[3, 3, 5, 3], [1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 9, 0]]), 5)
    assert found == [
        (slice(0, 1), Visibility((0, 2, 3), 5)),
        (slice(1, 3), Visibility((0,), 5)),  # consecutive rows with equal visibility are grouped
        (slice(3, 4), Visibility((0, 2, 3), 5)),
    ]
    assert read_visibility(None, None) == [(slice(None), Visibility((0,), None))]
