import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from tests.data.synthetic import rows_of, stored
from weft.data import scored_pairs, unigram_and_bigram
from weft.data.baselines import bigram_weight


def probabilities(train, held_out, vocab_size):
    """Unigram and Witten-Bell bigram probability of each held-out target, one pair at a time."""
    unigrams, bigrams = Counter(target for _, target in train), defaultdict(Counter)
    for previous, target in train:
        bigrams[previous][target] += 1
    found = []
    for previous, target in held_out:
        unigram = (unigrams[target] + 1) / (len(train) + vocab_size)
        seen = bigrams[previous]
        types, total = len(seen), sum(seen.values())
        found.append((unigram, (seen[target] + types * unigram) / (total + types) if total else unigram))
    return found


def loss_of(found, weight):
    """Cross entropy of the bigram model interpolated with the unigram model."""
    return -sum(math.log(weight * bigram + (1 - weight) * unigram) for unigram, bigram in found) / len(found)


def split_pairs(folder, documents):
    train, held_out = stored(folder, documents, held_out=0.2)
    return [scored_pairs(rows_of(spans, 16)) for spans in (train, held_out)]


def zipf_documents(number, vocab_size, seed):
    """Documents of independent tokens."""
    random = np.random.default_rng(seed)
    return [(random.zipf(1.5, size=random.integers(2, 60)) % vocab_size).tolist() for _ in range(number)]


def test_both_models_match_a_reference_with_dictionaries(tmp_path):
    vocab_size = 40
    pairs = split_pairs(tmp_path / "store", zipf_documents(80, vocab_size, seed=1))
    weight = bigram_weight(pairs[0], vocab_size)
    found = probabilities(pairs[0].T.tolist(), pairs[1].T.tolist(), vocab_size)
    expected = [loss_of(found, 0), loss_of(found, weight)]
    assert unigram_and_bigram(*pairs, vocab_size) == pytest.approx(expected, rel=1e-12)


def test_the_bigram_weight_maximizes_the_cross_validated_likelihood(tmp_path):
    vocab_size = 40
    train, _ = split_pairs(tmp_path / "store", zipf_documents(80, vocab_size, seed=2))
    half = train.shape[1] // 2
    halves = train.T.tolist()[:half], train.T.tolist()[half : 2 * half]
    found = probabilities(*halves, vocab_size) + probabilities(*reversed(halves), vocab_size)
    likeliest = min(np.linspace(0, 1, 1001), key=lambda weight: loss_of(found, weight))
    assert bigram_weight(train, vocab_size) == pytest.approx(likeliest, abs=2e-3)


@pytest.mark.parametrize("seed", range(4))
def test_the_bigram_baseline_is_no_worse_than_the_unigram_on_a_small_corpus(tmp_path, seed):
    """Independent tokens are the hardest case: Witten-Bell smoothing alone is worse by 0.1 nats by chance."""
    unigram, bigram = unigram_and_bigram(*split_pairs(tmp_path / "store", zipf_documents(40, 300, seed)), 300)
    assert bigram <= unigram + 0.02


def test_the_bigram_baseline_is_better_than_the_unigram_if_documents_have_distinct_words(tmp_path):
    random, documents = np.random.default_rng(5), []
    for number in range(12):  # every third token has a deterministic successor
        words = 100 + 40 * number + random.integers(0, 40, size=90)
        words[1::3] = random.zipf(1.5, size=30) % 50
        words[2::3] = words[1::3] + 50
        documents.append(words.tolist())
    train, held_out = split_pairs(tmp_path / "store", documents)
    unigram, bigram = unigram_and_bigram(train, held_out, 600)
    alone = loss_of(probabilities(train.T.tolist(), held_out.T.tolist(), 600), 1)
    assert bigram < min(unigram, alone)


def test_the_bigram_baseline_learns_deterministic_successors(tmp_path):
    documents = [[1 + (start + i) % 30 for i in range(60)] for start in range(0, 300, 7)]
    pairs = split_pairs(tmp_path / "store", documents)
    assert bigram_weight(pairs[0], 40) == pytest.approx(1, abs=0.01)
    assert unigram_and_bigram(*pairs, 40)[1] < 0.1


def test_a_single_pair_gives_the_unigram():
    one = np.array([[0], [1]])
    unigram, bigram = unigram_and_bigram(one, one, 8)
    assert unigram == bigram == pytest.approx(-math.log(2 / 9))


def test_a_previous_token_that_was_never_seen_falls_back_to_the_unigram():
    train, held_out = np.array([[0, 0], [0, 1]]), np.array([[7], [1]])
    unigram, bigram = unigram_and_bigram(train, held_out, 8)
    assert unigram == bigram == pytest.approx(-math.log(2 / 10))


def test_scored_pairs_never_cross_documents(tmp_path):
    documents = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    spans, _ = stored(tmp_path / "store", documents)
    pairs = scored_pairs(rows_of(spans, 3))
    assert pairs.T.tolist() == [[1, 2], [2, 3], [4, 5], [7, 8], [8, 9], [9, 10]]
    assert scored_pairs(rows_of(spans, 3), max_rows=1).T.tolist() == [[1, 2], [2, 3]]
