import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.synthetic import documents_of, rows_of, saved_rows, stored
from weft.data.rows import shuffled


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 700), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**40))
def test_the_order_is_a_permutation(count, seed, epoch):
    assert sorted(shuffled(i, count, seed, epoch) for i in range(count)) == list(range(count))


def test_the_order_is_random_and_depends_on_seed_and_epoch():
    orders = {
        (s, e): np.array([shuffled(i, 1000, s, e) for i in range(1000)]) for s, e in [(0, 0), (0, 1), (1, 0), (1, 1)]
    }
    index = np.arange(1000)
    for order in [*orders.values(), orders[0, 0][orders[0, 1].argsort()], orders[0, 0][orders[1, 0].argsort()]]:
        assert abs(np.corrcoef(index, order)[0, 1]) < 0.15
        assert (np.diff(order) == 1).sum() < 10  # few rows keep their successor


def test_each_epoch_has_every_row_once(tmp_path):
    rows = rows_of(saved_rows(tmp_path / "rows.npy", 5, 3), 3, shuffle=True, seed=7)
    epochs = [[rows[5 * e + i].tokens[0].item() // 4 for i in range(5)] for e in range(6)]
    assert all(sorted(order) == list(range(5)) for order in epochs)
    assert len(set(map(tuple, epochs))) > 1
    plain = rows_of(saved_rows(tmp_path / "rows.npy", 5, 3), 3)
    assert [plain[p].tokens[0].item() // 4 for p in range(10)] == [*range(5), *range(5)]
    with pytest.raises(IndexError):
        plain[-1]


@pytest.mark.parametrize("kind", ["stream", "rows"])
def test_a_row_is_a_view_of_the_mapped_file(tmp_path, kind):
    if kind == "stream":
        spans, _ = stored(tmp_path / "store", documents_of([3000, 5000]))
    else:
        spans = saved_rows(tmp_path / "rows.npy", 500, 15)
    rows = rows_of(spans, 15)
    row = rows[300].tokens
    assert row.dtype == torch.int32
    assert row.shape == (16,)
    assert np.shares_memory(row.numpy(), rows.maps[0][0].numpy())
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(spans[0].tokens)]
    ranges = [[int(x, 16) for x in re.match(r"(\w+)-(\w+)", line).groups()] for line in mapped]
    assert any(low <= row.data_ptr() and row.data_ptr() + 64 <= high for low, high in ranges)

    before = Path(spans[0].tokens).read_bytes()
    row.fill_(-1)  # the map is private
    assert Path(spans[0].tokens).read_bytes() == before


def test_rows_never_span_two_shards_and_cover_all_other_tokens(tmp_path):
    spans, _ = stored(tmp_path / "store", documents_of([7, 30, 3]), shard_tokens=17)
    rows = rows_of(spans, 5)
    heads = [rows[i].tokens[0].item() for i in range(len(rows))]
    assert heads == [1, 6, 11, 18, 23, 28, 35]  # shards of 17, 17 and 6 tokens: 3, 3 and 1 rows of 5 + 1
    assert all(rows[i].tokens.tolist() == list(range(head, head + 6)) for i, head in enumerate(heads))


def test_without_packing_a_row_is_part_of_one_document(tmp_path):
    spans, _ = stored(tmp_path / "store", documents_of([3, 12, 1, 6, 2]))
    rows = rows_of(spans, 5, packing=False)
    pieces = [rows[i].tokens.tolist() for i in range(len(rows))]
    assert pieces == [[1, 2, 3], [*range(4, 10)], [*range(9, 15)], [14, 15], [*range(17, 23)], [23, 24]]
    assert all(len(rows[i].starts) == 0 for i in range(len(rows)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=30),
    held_out=st.floats(0, 0.9),
    shard_tokens=st.integers(3, 80),
)
def test_splits_cover_the_stream_and_cut_at_a_nearby_document(tmp_path_factory, lengths, held_out, shard_tokens):
    folder = tmp_path_factory.mktemp("store") / "store"
    train, held = stored(folder, documents_of(lengths), held_out=held_out, shard_tokens=shard_tokens)
    parts = [[np.load(s.tokens)[s.first : s.last] for s in split] for split in (train, held)]
    assert np.concatenate([*parts[0], *parts[1]]).tolist() == list(range(1, sum(lengths) + 1))
    assert max(len(np.load(s.tokens)) for s in train + held) <= shard_tokens
    for span in train + held:
        starts = np.load(span.starts)
        assert starts[0] == 0
        assert (np.diff(starts) > 0).all()
        assert starts[-1] < len(np.load(span.tokens))
    cut, edges = sum(map(len, parts[0])), np.cumsum([0, *lengths])
    if held_out:
        continued = np.arange(0, sum(lengths), shard_tokens)  # the start of a shard counts as an edge, too
        inner = np.union1d(edges[1:-1], continued[1:])
        asked = round(sum(lengths) * (1 - held_out))
        away, reach = np.abs(inner - asked).min(), min(asked, sum(lengths) - asked) / 4
        assert abs(cut - asked) == (away if away <= reach else 0)
        assert cut in inner or away > reach
    else:
        assert not held


def test_a_single_document_is_cut_inside(tmp_path):
    train, held = stored(tmp_path / "store", documents_of([1000]), held_out=0.1)
    assert (train[0].first, train[0].last, held[0].first, held[0].last) == (0, 900, 900, 1000)


def test_documents_are_ordered_by_digest(tmp_path):
    spans, _ = stored(tmp_path / "store", [[1, 2], [3], [4, 5, 6]], digests=[9, 2**63 + 5, 3])
    assert np.load(spans[0].tokens).tolist() == [4, 5, 6, 1, 2, 3]
    assert np.load(spans[0].starts).tolist() == [0, 3, 5]
