"""Unigram and bigram cross entropy: baselines from token counts that a trained model has to beat."""

import numpy as np

from weft.data.batches import IGNORED, evaluation_batches
from weft.data.rows import Rows

WEIGHT_PAIRS = 2**20  # pairs used from each half; more pairs change the weight by less than 0.01
WEIGHT_BITS = 12


def scored_pairs(rows: Rows, max_rows: int | None = None) -> np.ndarray:
    """All (previous token, target) pairs of a split on which a model is scored, in order: int64 [2, pairs].

    Args:
        rows: rows of the split.
        max_rows: maximum number of rows, as in `evaluation_batches`.
    """
    parts = [np.empty((2, 0), np.int64)]
    for batch in evaluation_batches(rows, micro_batch=256, data_rank=0, data_ranks=1, max_rows=max_rows):
        scored = batch.targets != IGNORED
        parts.append(np.stack([batch.input_ids[scored].numpy(), batch.targets[scored].numpy()]))
    return np.concatenate(parts, axis=1)


def unigram_and_bigram(train_pairs: np.ndarray, held_out_pairs: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """Held-out cross entropy of a unigram and a bigram model, in nats per token.

    The unigram model has add-one smoothing. The bigram model has Witten-Bell smoothing (Witten and Bell, 1991): for a previous
    token that occurs c times with t distinct successors, the probability is (count + t * unigram) / (c + t). Because this
    overfits on small corpora, the bigram model is interpolated with the unigram model; the weight is estimated from the
    training pairs (see `bigram_weight`).

    Args:
        train_pairs: int64 [2, pairs] to count, from `scored_pairs`.
        held_out_pairs: int64 [2, pairs] to score.
        vocab_size: number of token ids.

    Returns:
        Cross entropy of the unigram model and of the bigram model.
    """
    weight = bigram_weight(train_pairs, vocab_size)
    unigram, bigram = _probabilities(train_pairs, held_out_pairs, vocab_size)
    return float(-np.log(unigram).mean()), float(-np.log(weight * bigram + (1 - weight) * unigram).mean())


def bigram_weight(train_pairs: np.ndarray, vocab_size: int) -> float:
    """Interpolation weight of the bigram model, from 0 to 1: deleted interpolation (Jelinek and Mercer, 1980).

    Each half of the pairs is scored with the counts of the other half. The result is the weight of maximum likelihood.

    Args:
        train_pairs: int64 [2, pairs]; at most the first 2 * 2**20 pairs are used.
        vocab_size: number of token ids.
    """
    half = min(train_pairs.shape[1] // 2, WEIGHT_PAIRS)
    if not half:
        return 0.0
    first, second = train_pairs[:, :half], train_pairs[:, half : 2 * half]
    scored = _probabilities(first, second, vocab_size), _probabilities(second, first, vocab_size)
    unigram, bigram = (np.concatenate(parts) for parts in zip(*scored, strict=True))
    low, high = 0.0, 1.0
    for _ in range(WEIGHT_BITS):  # bisection: the log-likelihood is concave in the weight
        weight = (low + high) / 2
        slope = ((bigram - unigram) / (weight * bigram + (1 - weight) * unigram)).sum()
        low, high = (weight, high) if slope > 0 else (low, weight)
    return (low + high) / 2


def _probabilities(counted: np.ndarray, scored: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the scored targets under the unigram and the Witten-Bell bigram model, each float64 [pairs]."""
    previous, target = scored
    unigram = ((np.bincount(counted[1], minlength=vocab_size) + 1) / (counted.shape[1] + vocab_size))[target]
    codes, counts = np.unique(counted[0] * vocab_size + counted[1], return_counts=True)
    successors = np.bincount(counted[0], minlength=vocab_size)[previous]
    different = np.bincount(codes // vocab_size, minlength=vocab_size)[previous]
    scored_codes = previous * vocab_size + target
    index = np.minimum(np.searchsorted(codes, scored_codes), len(codes) - 1)
    count = np.where(codes[index] == scored_codes, counts[index], 0)
    # Back off to the unigram model for a previous token that does not occur in the counted pairs.
    bigram = np.where(successors > 0, (count + different * unigram) / np.maximum(successors + different, 1), unigram)
    return unigram, bigram
