"""What counting alone achieves: unigram and bigram cross entropy, the figures a trained model has to beat."""

import numpy as np

from weft.data.batches import IGNORED, evaluation_batches
from weft.data.rows import Rows


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

    The unigram model adds one to each count. The bigram model is interpolated with it after Witten and Bell: a
    previous token with c successors counted, t of them different, gives (count + t * unigram) / (c + t).

    Args:
        train_pairs: int64 [2, pairs] to count, from `scored_pairs`.
        held_out_pairs: int64 [2, pairs] to score.
        vocab_size: number of token ids.

    Returns:
        Cross entropy of the unigram and of the bigram model.
    """
    previous, target = held_out_pairs
    unigram = (np.bincount(train_pairs[1], minlength=vocab_size) + 1) / (train_pairs.shape[1] + vocab_size)
    codes, counts = np.unique(train_pairs[0] * vocab_size + train_pairs[1], return_counts=True)
    successors = np.bincount(train_pairs[0], minlength=vocab_size)[previous]
    different = np.bincount(codes // vocab_size, minlength=vocab_size)[previous]
    wanted = previous * vocab_size + target
    place = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    count = np.where(codes[place] == wanted, counts[place], 0)
    # A previous token that was never seen has no successors: the unigram model stands in for it.
    bigram = np.where(
        successors > 0, (count + different * unigram[target]) / np.maximum(successors + different, 1), unigram[target]
    )
    return float(-np.log(unigram[target]).mean()), float(-np.log(bigram).mean())
