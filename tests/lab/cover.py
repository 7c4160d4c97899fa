"""Pairwise covering arrays: few rows in which every pair of values of two settings occurs, if it is possible at all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

Row = dict[str, Any]


def pairs_of(row: Row) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Pairs of (setting, value) of a row."""
    return combinations(row.items(), 2)


def covering_array(settings: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]) -> list[Row]:
    """Rows of one value for each setting, so that each pair of values of a possible row is in one of them.

    Greedy and deterministic: the next row is the first of those that cover most of what is left.

    Args:
        settings: values by the name of a setting.
        possible: whether a row can be.
    """
    names = list(settings)
    places = product(*(range(len(values)) for values in settings.values()))
    rows = [place for place in places if possible(_row(settings, place))]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(names))  # [rows, settings]
    axes = list(combinations(range(len(names)), 2))
    missing = {(a, b): np.zeros([len(settings[names[a]]), len(settings[names[b]])], dtype=np.int64) for a, b in axes}
    for a, b in axes:
        missing[a, b][table[:, a], table[:, b]] = 1
    found = []
    while any(left.any() for left in missing.values()):
        gains = np.sum([missing[a, b][table[:, a], table[:, b]] for a, b in axes], axis=0)
        best = rows[int(gains.argmax())]
        for a, b in axes:
            missing[a, b][best[a], best[b]] = 0
        found.append(_row(settings, best))
    return found


def _row(settings: Mapping[str, Sequence[Any]], place: Sequence[int]) -> Row:
    return {name: values[index] for (name, values), index in zip(settings.items(), place, strict=True)}
