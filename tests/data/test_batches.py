import gc
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.synthetic import documents_of, rows_of, saved_rows, stored
from weft.data import Rows, RowSplit, batches, evaluation_batches
from weft.data.batches import PREFETCH_STEPS, collate

FIELDS = ("input_ids", "position_ids", "targets")


def per_token(stream: list[tuple[int, int]], begin: int, seq_len: int) -> list[list[int]]:
    """Reference inputs, positions and targets of a packed row from (token, document) pairs, one token at a time."""
    inputs, positions, targets = [], [], []
    for i in range(begin, begin + seq_len):
        (token, document), (following, next_document) = stream[i], stream[i + 1]
        continues = i > begin and stream[i - 1][1] == document
        inputs.append(token)
        positions.append(positions[-1] + 1 if continues else 0)
        targets.append(following if next_document == document else -100)
    return [inputs, positions, targets]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=20),
    seq_len=st.integers(2, 12),
    shard_tokens=st.integers(20, 90),
)
def test_packed_rows_match_a_reference_token_by_token(tmp_path_factory, lengths, seq_len, shard_tokens):
    documents = documents_of(lengths)
    spans, _ = stored(tmp_path_factory.mktemp("store") / "store", documents, shard_tokens=shard_tokens)
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    shards = [stream[i : i + shard_tokens] for i in range(0, len(stream), shard_tokens)]
    expected = [per_token(s, b, seq_len) for s in shards for b in range(0, len(s) - seq_len, seq_len)]
    rows = rows_of(spans, seq_len)
    assert len(rows) == len(expected)
    batch = collate(rows, range(len(rows)), len(rows))
    for i, field in enumerate(FIELDS):
        tensor = getattr(batch, field)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        assert tensor.tolist() == [row[i] for row in expected]


def test_rows_without_packing_are_padded(tmp_path):
    spans, _ = stored(tmp_path / "store", documents_of([3, 6]))
    batch = collate(rows_of(spans, 4, packing=False), range(3), 3)
    assert batch.input_ids.tolist() == [[1, 2, 0, 0], [4, 5, 6, 7], [8, 0, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, -100, -100], [5, 6, 7, 8], [9, -100, -100, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
def test_ready_rows_have_no_documents(tmp_path, dtype):
    batch = collate(rows_of(saved_rows(tmp_path / "rows.npy", 3, 4, dtype), 4), [0, 2], 2)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert batch.targets.tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("packing", [True, False])
def test_the_global_batch_is_the_same_for_any_ranks_and_micro_batch_size(tmp_path, packing):
    lengths = np.random.default_rng(0).integers(1, 30, 24)
    spans, _ = stored(tmp_path / "store", documents_of(lengths), shard_tokens=200)
    rows = rows_of(spans, 8, packing=packing, shuffle=True, seed=3)

    def steps(
        data_ranks: int, micro_batch: int, start_step: int = 0, rows_per_rank: tuple[int, ...] = ()
    ) -> list[list[list[int]]]:
        """Rows of each step over all ranks, without padding rows."""
        found = [[] for _ in range(start_step, 6)]
        shapes = []
        for rank in range(data_ranks):
            split = RowSplit(12, micro_batch, data_ranks, rows_per_rank)
            produced = list(batches(rows, steps=6, start_step=start_step, split=split, data_rank=rank))
            shapes.append([[m.input_ids.shape for m in step] for step in produced])
            for k, step in enumerate(produced):
                for m in step:
                    lines = torch.stack([m.input_ids, m.position_ids, m.targets], dim=1)
                    # A row that is not padding has targets, except at document boundaries.
                    found[k] += [x.flatten().tolist() for x in lines if (x[2] != -100).any() or x[0].any()]
        if rows_per_rank:  # all ranks must run the same number of collectives
            assert len({len(step) for shape in shapes for step in shape}) == 1
        else:
            assert all(shape == shapes[0] for shape in shapes)
        assert max(shape[0] for steps in shapes for step in steps for shape in step) <= micro_batch
        return found

    reference = steps(1, 12)
    assert all(len(step) == 12 for step in reference)
    assert len(rows) < 6 * 12  # several epochs
    for data_ranks, micro_batch in [(1, 1), (1, 5), (2, 3), (3, 4), (4, 2), (5, 2), (12, 1), (16, 1)]:
        assert steps(data_ranks, micro_batch) == reference, (data_ranks, micro_batch)
    assert steps(2, 4, start_step=4) == reference[4:]
    for micro_batch, rows_per_rank in [(3, (9, 3)), (4, (1, 4, 7)), (12, (11, 1)), (2, (5, 4, 3))]:
        assert steps(len(rows_per_rank), micro_batch, 0, rows_per_rank) == reference, rows_per_rank
        assert steps(len(rows_per_rank), micro_batch, 4, rows_per_rank) == reference[4:], rows_per_rank


def test_micro_batches_are_pinned_in_the_background(tmp_path):
    threads = []

    def pin(tensor):
        threads.append(threading.current_thread().name)
        return tensor.clone()

    rows = rows_of(saved_rows(tmp_path / "rows.npy", 8, 3), 3)
    options = {"steps": 2, "split": RowSplit(4, 2, 1), "data_rank": 0}
    with mock.patch.object(torch.Tensor, "pin_memory", pin):
        pinned = list(batches(rows, pin=True, **options))
    assert len(threads) == 2 * 2 * 3  # steps, micro-batches, tensors
    assert all(name.startswith("weft-data") for name in threads)
    for step, expected in zip(pinned, batches(rows, **options), strict=True):
        for batch, plain in zip(step, expected, strict=True):
            assert all(torch.equal(getattr(batch, field), getattr(plain, field)) for field in FIELDS)


def test_evaluation_covers_every_row_once_with_equal_micro_batch_counts(tmp_path):
    rows = rows_of(saved_rows(tmp_path / "rows.npy", 23, 3), 3)
    for data_ranks, micro_batch, max_rows in [(1, 4, None), (3, 2, None), (4, 8, None), (2, 3, 10), (3, 1, 100)]:
        seen, counts = [], []
        for rank in range(data_ranks):
            produced = list(
                evaluation_batches(
                    rows, micro_batch=micro_batch, data_rank=rank, data_ranks=data_ranks, max_rows=max_rows
                )
            )
            counts.append(len(produced))
            assert all(m.input_ids.shape == (micro_batch, 3) for m in produced)
            seen += [t.item() // 4 for m in produced for t in m.input_ids[(m.targets != -100).all(dim=1), 0]]
            assert all(
                (m.targets == -100).all(dim=1).logical_or((m.targets != -100).all(dim=1)).all() for m in produced
            )
        assert sorted(seen) == list(range(min(max_rows or 23, 23)))
        assert len(set(counts)) == 1


class Watched(Rows):
    """Rows that record the largest requested position, and fail at position `breaks_at`."""

    largest = -1
    breaks_at = 10**9

    def __getitem__(self, position):
        self.largest = max(self.largest, position)
        if position >= self.breaks_at:
            raise ValueError(f"broken at {position}")
        return super().__getitem__(position)


@pytest.fixture
def watched(tmp_path):
    return Watched(saved_rows(tmp_path / "rows.npy", 50, 3), seq_len=3, packing=True, shuffle=False, seed=0)


def stream_of(rows, steps=1000):
    return batches(rows, steps=steps, split=RowSplit(2, 1, 1), data_rank=0)


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("weft-data")]


def test_only_a_few_steps_are_prepared_ahead(watched):
    stream = stream_of(watched)
    for taken in range(1, 4):
        next(stream)
        deadline = time.monotonic() + 5
        while watched.largest < 2 * (taken + PREFETCH_STEPS) - 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert watched.largest == 2 * (taken + PREFETCH_STEPS) - 1
    stream.close()


@pytest.mark.parametrize("end", ["closed", "abandoned", "exhausted"])
def test_the_thread_ends_with_the_iterator(watched, end):
    stream = stream_of(watched, steps=8)
    next(stream)
    assert len(workers()) == 1
    if end == "closed":
        stream.close()
    elif end == "exhausted":
        assert len(list(stream)) == 7
    else:
        del stream
        gc.collect()
    assert not workers()


def test_an_error_in_the_thread_reaches_the_consumer(watched):
    watched.breaks_at = 5
    stream = stream_of(watched)
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(ValueError, match="broken at 5"):
        next(stream)
    assert not workers()
