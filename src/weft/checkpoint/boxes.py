"""A check that boxes of a tensor make it up: each number lies in one of them, and in one only."""

import numpy as np

DEEPEST = 64  # cuts inside of cuts: layouts make one for each axis of the mesh, at most
LARGEST = 2048  # boxes that no straight cut parts, which no layout makes, and which are compared pair by pair


def find_fault(lows: np.ndarray, highs: np.ndarray, shape: tuple[int, ...]) -> str | None:
    """Find what is wrong with boxes that should make up a tensor; None if they do.

    A line is swept along an axis: where no box reaches across it, it parts them into groups that have nothing in common, and
    each group is swept again. Of n boxes that a mesh of devices holds that takes n log n steps, not n squared.

    Args:
        lows: first index of each box along each axis, [boxes, axes].
        highs: one after the last, [boxes, axes].
        shape: of the tensor; all boxes lie inside.
    """
    found, wanted = sum(_sizes(lows, highs)), int(np.prod(np.array(shape, dtype=object)))
    if found != wanted:
        return f"have {found} numbers of {wanted}"
    full = np.flatnonzero((lows < highs).all(1))
    groups = [(full, 0)]
    while groups:
        group, depth = groups.pop()
        if len(group) < 2:
            continue
        parts = _cut(group, lows, highs)
        if parts is not None and depth < DEEPEST:
            groups += [(part, depth + 1) for part in parts]
        elif len(group) > LARGEST:
            return "do not lie in rows and columns"
        elif _meet(lows[group], highs[group]):
            return "overlap"
    return None


def _meet(lows: np.ndarray, highs: np.ndarray) -> bool:
    """Look at each box with each other: whether two have a number in common."""
    common = (np.maximum(lows[:, None], lows) < np.minimum(highs[:, None], highs)).all(-1)
    return int(common.sum()) > len(lows)


def _sizes(lows: np.ndarray, highs: np.ndarray) -> list[int]:
    return [int(np.prod(sizes)) for sizes in (highs - lows).astype(object)]


def _cut(group: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> list[np.ndarray] | None:
    """Boxes parted by the straight cuts along the first axis that has any."""
    for axis in range(lows.shape[1]):
        order = group[np.argsort(lows[group, axis], kind="stable")]
        reach = np.maximum.accumulate(highs[order, axis])
        cuts = np.flatnonzero(lows[order[1:], axis] >= reach[:-1]) + 1
        if len(cuts):
            return np.split(order, cuts)
    return None
