"""Sets of disjoint time intervals, sorted, in seconds."""

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Merge spans, which may overlap, into disjoint intervals. Empty spans are left out."""
    merged: Intervals = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: Intervals, removed: Intervals) -> Intervals:
    """Parts of the intervals that are in none of the removed intervals."""
    left: Intervals = []
    index = 0
    for start, end in intervals:
        while index < len(removed) and removed[index][1] <= start:
            index += 1
        at = index
        while at < len(removed) and removed[at][0] < end:
            if removed[at][0] > start:
                left.append((start, removed[at][0]))
            start = max(start, removed[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def intersect(intervals: Intervals, others: Intervals) -> Intervals:
    """Parts of the intervals that are also in the others."""
    return subtract(intervals, subtract(intervals, others))


def total(intervals: Intervals) -> float:
    """Sum of the lengths."""
    return sum(end - start for start, end in intervals)
