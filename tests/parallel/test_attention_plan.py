"""Plans of attention: each visible pair in one call, no query without a key, one call a step, one plan a micro-batch."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.parallel.sequence.attention_plan import AttentionPlans, Call, plan_attention
from weft.parallel.sequence.context_grid import zigzag_indices

CPU = torch.device("cpu")


def visible(documents: Tensor, window: int | None) -> Tensor:
    """Reference mask [rows, queries, keys] from the definition, for documents with values of their own."""
    positions = torch.arange(documents.shape[1])
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (documents[:, :, None] == documents[:, None])
    return seen if window is None else seen & (distance < window)


def tokens(slices: tuple[slice, ...] | None, count: int) -> list[int]:
    """Tokens of a side of a call, in order."""
    own = (slice(0, count),) if slices is None else slices
    return [token for part in own for token in range(part.start, part.stop)]


def add_pairs(counts: Tensor, call: Call, queries: Tensor, keys: Tensor) -> None:
    """Add the pairs of a call to counts [rows, queries, keys], given the row and position of each token that a rank holds."""
    sequences = call.sequences
    own_queries, own_keys = tokens(call.queries, len(queries)), tokens(call.keys, len(keys))
    assert (sequences.queries[-1], sequences.keys[-1]) == (len(own_queries), len(own_keys))
    assert sequences.query_borders.tolist() == list(sequences.queries)
    assert sequences.key_borders.tolist() == list(sequences.keys)
    ranges = zip(pairwise(sequences.queries), pairwise(sequences.keys), strict=True)
    longest = [0, 0]
    for (start, stop), (first, last) in ranges:
        size, key_size = stop - start, last - first
        longest = [max(longest[0], size), max(longest[1], key_size)]
        if sequences.right == 0:
            assert size == key_size
        aligned = torch.arange(size)[:, None] + key_size - size
        index = torch.arange(key_size)
        seen = torch.ones(size, key_size, dtype=torch.bool)
        if sequences.left >= 0:
            seen &= index >= aligned - sequences.left
        if sequences.right >= 0:
            seen &= index <= aligned + sequences.right
        assert seen.any(1).all()
        assert seen.any(0).all()
        row, position = queries[own_queries[start:stop]].T
        key_row, key_position = keys[own_keys[first:last]].T
        assert {*row.tolist()} == {*key_row.tolist()}
        counts[row[:, None], position[:, None], key_position] += seen.long()
    assert longest == [sequences.longest_query, sequences.longest_key]


def held(rows: int, seq_len: int, ring: int, rank: int) -> Tensor:
    """Row and position of each token of a ring rank, [rows * seq_len / ring, 2]."""
    positions = zigzag_indices(seq_len, ring, rank)
    return torch.stack([torch.arange(rows).repeat_interleave(len(positions)), positions.repeat(rows)], 1)


def check_plan(documents: Tensor, ring: int, window: int | None) -> int:
    """Compare the pairs of all ranks and steps with the definition; returns the largest number of calls of a step."""
    rows, seq_len = documents.shape
    counts, most = torch.zeros(rows, seq_len, seq_len, dtype=torch.int64), 0
    for rank in range(ring):
        steps = plan_attention(documents, rows, seq_len, ring, rank, window, CPU)
        assert len(steps) == ring
        first = steps[0][0]  # in which every token sees itself
        assert (first.queries, first.keys, first.sequences.right) == (None, None, 0)
        for step, calls in enumerate(steps):
            most = max(most, len(calls))
            for call in calls:
                add_pairs(
                    counts, call, held(rows, seq_len, ring, rank), held(rows, seq_len, ring, (rank - step) % ring)
                )
    assert torch.equal(counts, visible(documents, window).long())
    return most


@given(st.data(), st.sampled_from([1, 2, 3, 4]), st.integers(1, 4), st.integers(1, 2))
@settings(max_examples=50, deadline=None)
def test_every_visible_pair_is_computed_once(data: st.DataObject, ring: int, size: int, rows: int) -> None:
    seq_len = 2 * ring * size
    starts = data.draw(st.lists(st.sets(st.integers(1, seq_len - 1), max_size=6), min_size=rows, max_size=rows))
    documents = torch.stack([sum((torch.arange(seq_len) >= s).long() for s in (0, *own)) for own in starts])
    window = data.draw(st.none() | st.integers(1, seq_len + 2))
    most = check_plan(documents, ring, window)
    if window is None or window >= seq_len:
        assert most == 1


def test_a_window_over_a_ring_adds_calls() -> None:
    assert check_plan(torch.zeros(1, 32, dtype=torch.int64), 2, 6) == 2
    assert check_plan(torch.zeros(1, 32, dtype=torch.int64), 2, 40) == 1


def test_without_a_mask_a_sequence_has_no_window() -> None:
    """Kernels are faster without a window; here it hides nothing between the chunks."""
    (_, other) = plan_attention(None, 1, 32, 2, 0, 31, CPU)
    assert [(call.sequences.left, call.sequences.right) for call in other][:1] == [(-1, -1)]


def test_documents_are_runs_of_equal_values() -> None:
    documents = torch.tensor([[3, 3, 5, 3], [1, 1, 1, 1]])
    ((call,),) = plan_attention(documents[:, None, None], 2, 4, 1, 0, None, CPU)
    assert call.sequences.queries == (0, 2, 3, 4, 8)
    ((call,),) = plan_attention(None, 2, 4, 1, 0, None, CPU)
    assert call.sequences.queries == (0, 4, 8)


def test_a_plan_is_made_once_for_a_tensor_of_documents() -> None:
    plans, documents = AttentionPlans("cpu"), torch.zeros(1, 8, dtype=torch.int64)
    arguments = (1, 8, 1, 0, None, CPU)
    steps = plans.steps(documents, *arguments)
    assert plans.steps(documents, *arguments) is steps
    windowed = plans.steps(documents, 1, 8, 1, 0, 3, CPU)
    assert windowed is not steps
    assert len(plans.made) == 1
    assert plans.steps(documents.clone(), *arguments) is not steps
    del documents
    assert not plans.made  # plans live as long as their micro-batch
