"""Check that boxes (axis-aligned blocks of a tensor) tile the tensor: each element lies in exactly one box."""

import math

import numpy as np

MAX_DEPTH = 64  # nested cuts; a layout makes at most one for each axis of the mesh
MAX_PAIRWISE = 2048  # boxes to compare pair by pair where no straight cut separates them; no layout makes such boxes


def find_tiling_error(lows: np.ndarray, highs: np.ndarray, shape: tuple[int, ...]) -> str | None:
    """Reason why boxes do not tile a tensor, as the end of a sentence; None if they do.

    A sweep along one axis looks for positions that no box crosses. Each such position separates the boxes into two disjoint
    groups, and the groups are swept again. For n boxes of a device mesh this takes O(n log n) instead of O(n^2) steps.

    Args:
        lows: first index of each box along each axis, int64 [boxes, axes].
        highs: index after the last along each axis, int64 [boxes, axes].
        shape: shape of the tensor; all boxes lie inside.
    """
    expected = math.prod(shape)
    held = sum(_sizes(lows, highs, expected))
    if held != expected:
        return f"have {held} elements, expected {expected}"
    not_empty = np.flatnonzero((lows < highs).all(1))
    groups = [(not_empty, 0)]
    while groups:
        group, depth = groups.pop()
        if len(group) < 2:
            continue
        parts = _split(group, lows, highs)
        if parts is not None and depth < MAX_DEPTH:
            groups += [(part, depth + 1) for part in parts]
        elif len(group) > MAX_PAIRWISE:
            return "are not separated by straight cuts"
        elif _overlap(lows[group], highs[group]):
            return "overlap"
    return None


def _overlap(lows: np.ndarray, highs: np.ndarray) -> bool:
    """True if two of the boxes share an element; compares all pairs."""
    common = (np.maximum(lows[:, None], lows) < np.minimum(highs[:, None], highs)).all(-1)
    return int(common.sum()) > len(lows)


def _sizes(lows: np.ndarray, highs: np.ndarray, expected: int) -> list[int]:
    """Number of elements of each box, none of which has more than the tensor."""
    return (highs - lows).astype(np.int64 if expected < 2**62 else object).prod(1).tolist()


def _split(group: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> list[np.ndarray] | None:
    """Groups of boxes between the straight cuts along the first axis that has a cut; None if no axis has one."""
    for axis in range(lows.shape[1]):
        order = group[np.argsort(lows[group, axis], kind="stable")]
        reach = np.maximum.accumulate(highs[order, axis])
        cuts = np.flatnonzero(lows[order[1:], axis] >= reach[:-1]) + 1
        if len(cuts):
            return np.split(order, cuts)
    return None
