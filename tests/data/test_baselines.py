import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from tests.data.synthetic import rows_of, stored
from weft.data import scored_pairs, unigram_and_bigram


def by_dictionary(train, held_out, vocab_size):
    """Unigram and bigram cross entropy, one pair at a time."""
    unigrams, bigrams = Counter(target for _, target in train), defaultdict(Counter)
    for previous, target in train:
        bigrams[previous][target] += 1
    losses = [0.0, 0.0]
    for previous, target in held_out:
        unigram = (unigrams[target] + 1) / (len(train) + vocab_size)
        seen = bigrams[previous]
        types, total = len(seen), sum(seen.values())
        bigram = (seen[target] + types * unigram) / (total + types) if total else unigram
        losses = [losses[0] - math.log(unigram), losses[1] - math.log(bigram)]
    return [loss / len(held_out) for loss in losses]


def test_both_match_a_dictionary(tmp_path):
    random = np.random.default_rng(1)
    vocab_size = 40
    documents = [(random.zipf(1.5, size=random.integers(2, 60)) % vocab_size).tolist() for _ in range(80)]
    train, held_out = stored(tmp_path / "store", documents, held_out=0.2)
    pairs = [scored_pairs(rows_of(spans, 16)) for spans in (train, held_out)]
    expected = by_dictionary(pairs[0].T.tolist(), pairs[1].T.tolist(), vocab_size)
    assert unigram_and_bigram(*pairs, vocab_size) == pytest.approx(expected, rel=1e-12)


def test_a_previous_token_that_was_never_seen_falls_back_to_the_unigram():
    train, held_out = np.array([[0, 0], [0, 1]]), np.array([[7], [1]])
    unigram, bigram = unigram_and_bigram(train, held_out, 8)
    assert unigram == bigram == pytest.approx(-math.log(2 / 10))


def test_pairs_are_all_inside_documents(tmp_path):
    documents = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    spans, _ = stored(tmp_path / "store", documents)
    pairs = scored_pairs(rows_of(spans, 3))
    assert pairs.T.tolist() == [[1, 2], [2, 3], [4, 5], [7, 8], [8, 9], [9, 10]]
    assert scored_pairs(rows_of(spans, 3), max_rows=1).T.tolist() == [[1, 2], [2, 3]]
