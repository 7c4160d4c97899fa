"""Pairwise covering arrays: few rows that contain every possible pair of values of two settings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

Row = dict[str, Any]


def pairs_of(row: Row) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Pairs of (setting, value) of a row."""
    return combinations(row.items(), 2)


def covering_array(settings: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]) -> list[Row]:
    """Rows of one value for each setting, which together contain each pair of values of a possible row.

    Greedy and deterministic: the next row is the first one that covers the most uncovered pairs.

    Args:
        settings: values by name of a setting.
        possible: True if a row is possible.
    """
    names = list(settings)
    combinations_of_indices = product(*(range(len(values)) for values in settings.values()))
    rows = [indices for indices in combinations_of_indices if possible(_row(settings, indices))]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(names))  # [rows, settings]
    axes = list(combinations(range(len(names)), 2))
    missing = {(a, b): np.zeros([len(settings[names[a]]), len(settings[names[b]])], dtype=np.int64) for a, b in axes}
    for a, b in axes:
        missing[a, b][table[:, a], table[:, b]] = 1
    found = []
    while any(pairs.any() for pairs in missing.values()):
        gains = np.sum([missing[a, b][table[:, a], table[:, b]] for a, b in axes], axis=0)
        best = rows[int(gains.argmax())]
        for a, b in axes:
            missing[a, b][best[a], best[b]] = 0
        found.append(_row(settings, best))
    return found


def _row(settings: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> Row:
    return {name: values[index] for (name, values), index in zip(settings.items(), indices, strict=True)}
