"""Order of documents in which rows of whole documents are well filled."""

from bisect import bisect_left, insort

import numpy as np

WINDOW = 2**14  # documents that are packed together
MULTIPLIER = 2654435761  # multiplicative hash (Knuth, 1973)


def best_fit_order(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Order of documents in which consecutive documents fill rows: best-fit decreasing (Johnson, 1973) within windows.

    Rows that take the next documents while they fit (`Rows`) are never more than the rows that best-fit decreasing makes. Rows
    are in random order within a window, so that no part of it prefers long or short documents.

    Args:
        lengths: tokens of each document, int64 [documents]; none above `capacity`.
        capacity: maximum tokens of a row.

    Returns:
        Permutation of the documents, int64 [documents].
    """
    order: list[int] = []
    for begin in range(0, len(lengths), WINDOW):
        window = lengths[begin : begin + WINDOW]
        rows: list[list[int]] = []
        space: list[tuple[int, int]] = []  # free tokens and index of each row, sorted
        for document in np.argsort(-window, kind="stable").tolist():
            length = int(window[document])
            at = bisect_left(space, (length, 0))
            free, row = space.pop(at) if at < len(space) else (capacity, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(document)
            insort(space, (free - length, row))
        rows.sort(key=lambda documents: documents[0] * MULTIPLIER % 2**32)
        order += [begin + document for documents in rows for document in documents]
    return np.asarray(order, np.int64)
