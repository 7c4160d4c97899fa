"""What counting alone achieves: unigram and bigram cross entropy, the figures a trained model has to beat."""

import numpy as np

from weft.data.batches import IGNORED, evaluation_batches
from weft.data.rows import Rows

WEIGHT_PAIRS = 2**20  # of each half of the train pairs: more change the weight by less than 0.01
WEIGHT_BITS = 12


def scored_pairs(rows: Rows, max_rows: int | None = None) -> np.ndarray:
    """Every (previous, target) pair of a split that a model is scored on, in order: int64 [2, pairs].

    Args:
        rows: a split.
        max_rows: look at the first rows only, as `evaluation_batches` does.
    """
    parts = [np.empty((2, 0), np.int64)]
    for batch in evaluation_batches(rows, micro_batch=256, data_rank=0, data_ranks=1, max_rows=max_rows):
        scored = batch.targets != IGNORED
        parts.append(np.stack([batch.input_ids[scored].numpy(), batch.targets[scored].numpy()]))
    return np.concatenate(parts, axis=1)


def unigram_and_bigram(train_pairs: np.ndarray, held_out_pairs: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """Held-out cross entropy of two counting models, in nats per token.

    The unigram model adds one to each count. The bigram model is that of Witten and Bell (1991): a previous token with c
    successors counted, t of them different, gives (count + t * unigram) / (c + t). On little text these counts mislead, so
    that the bigram model is mixed with the unigram by one weight that the train pairs decide (see `bigram_weight`).

    Args:
        train_pairs: int64 [2, pairs] to count, from `scored_pairs`.
        held_out_pairs: int64 [2, pairs] to score.
        vocab_size: number of token ids.

    Returns:
        Cross entropy of the unigram and of the bigram model.
    """
    weight = bigram_weight(train_pairs, vocab_size)
    unigram, bigram = _probabilities(train_pairs, held_out_pairs, vocab_size)
    return float(-np.log(unigram).mean()), float(-np.log(weight * bigram + (1 - weight) * unigram).mean())


def bigram_weight(train_pairs: np.ndarray, vocab_size: int) -> float:
    """Weight of the bigram model beside the unigram, from 0 to 1: deleted interpolation (Jelinek and Mercer, 1980).

    Each half of the pairs is scored with the counts of the other half, and the weight is the one under which the pairs are
    most likely.

    Args:
        train_pairs: int64 [2, pairs]; the first 2 * 2**20 are used.
        vocab_size: number of token ids.
    """
    half = min(train_pairs.shape[1] // 2, WEIGHT_PAIRS)
    if not half:
        return 0.0
    first, second = train_pairs[:, :half], train_pairs[:, half : 2 * half]
    scored = _probabilities(first, second, vocab_size), _probabilities(second, first, vocab_size)
    unigram, bigram = (np.concatenate(parts) for parts in zip(*scored, strict=True))
    low, high = 0.0, 1.0
    for _ in range(WEIGHT_BITS):  # the slope of the log-likelihood falls with the weight, and is zero at the best one
        weight = (low + high) / 2
        slope = ((bigram - unigram) / (weight * bigram + (1 - weight) * unigram)).sum()
        low, high = (weight, high) if slope > 0 else (low, weight)
    return (low + high) / 2


def _probabilities(counted: np.ndarray, scored: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Probability of each scored target under the unigram and under Witten and Bell's bigram model; float64 [pairs]."""
    previous, target = scored
    unigram = ((np.bincount(counted[1], minlength=vocab_size) + 1) / (counted.shape[1] + vocab_size))[target]
    codes, counts = np.unique(counted[0] * vocab_size + counted[1], return_counts=True)
    successors = np.bincount(counted[0], minlength=vocab_size)[previous]
    different = np.bincount(codes // vocab_size, minlength=vocab_size)[previous]
    wanted = previous * vocab_size + target
    place = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    count = np.where(codes[place] == wanted, counts[place], 0)
    # A previous token that was never seen has no successors: the unigram model stands in for it.
    bigram = np.where(successors > 0, (count + different * unigram) / np.maximum(successors + different, 1), unigram)
    return unigram, bigram
