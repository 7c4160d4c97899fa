"""`find_tiling_error` against a reference that counts how many boxes hold each element."""

import time

import numpy as np
import pytest

from weft.checkpoint import boxes
from weft.checkpoint.boxes import find_tiling_error


def by_counting(lows: np.ndarray, highs: np.ndarray, shape: tuple[int, ...]) -> bool:
    held = np.zeros(shape, int)
    for low, high in zip(lows, highs, strict=True):
        held[tuple(map(slice, low, high))] += 1
    return bool((held == 1).all())


def cut_up(rng: np.random.Generator, shape: tuple[int, ...], cuts: int) -> list[list[tuple[int, int]]]:
    """Boxes from repeated cuts of a tensor along random axes, in random order."""
    parts = [[(0, size) for size in shape]]
    for _ in range(cuts):
        part = parts.pop(rng.integers(len(parts)))
        axis = rng.integers(len(shape))
        low, high = part[axis]
        middle = int(rng.integers(low, high + 1))
        parts += [[*part[:axis], ends, *part[axis + 1 :]] for ends in ((low, middle), (middle, high))]
    rng.shuffle(parts)  # type: ignore[arg-type]
    return parts


def test_random_boxes_match_the_reference() -> None:
    rng, found = np.random.default_rng(3), []
    for _ in range(500):
        shape = tuple(map(int, rng.integers(1, 6, size=rng.integers(1, 4))))
        ends = np.array(cut_up(rng, shape, int(rng.integers(1, 8))))
        lows, highs = ends[..., 0].copy(), ends[..., 1].copy()
        assert find_tiling_error(lows, highs, shape) is None
        box, axis = rng.integers(len(lows)), rng.integers(len(shape))
        shift = 1 if highs[box, axis] < shape[axis] else -1
        if lows[box, axis] + shift >= 0:
            lows[box, axis] += shift
            highs[box, axis] += shift
        good = by_counting(lows, highs, shape)
        assert (find_tiling_error(lows, highs, shape) is None) == good
        found.append(good)
    assert 100 < found.count(False) < 500


def test_boxes_without_a_straight_cut_are_compared_pairwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four boxes around a central box."""
    lows = np.array([[0, 0], [0, 2], [1, 0], [2, 1], [1, 1]])
    highs = np.array([[1, 2], [2, 3], [3, 1], [3, 3], [2, 2]])
    assert find_tiling_error(lows, highs, (3, 3)) is None
    monkeypatch.setattr(boxes, "MAX_PAIRWISE", 4)
    assert find_tiling_error(lows, highs, (3, 3)) == "are not separated by straight cuts"


def test_boxes_of_a_scalar() -> None:
    assert find_tiling_error(np.zeros((1, 0), int), np.zeros((1, 0), int), ()) is None
    assert find_tiling_error(np.zeros((2, 0), int), np.zeros((2, 0), int), ()) == "have 2 elements, expected 1"


def test_thirty_thousand_boxes_take_less_than_quadratic_time() -> None:
    """Pairwise comparison would take 30,000 squared steps, and as much memory."""
    rows, columns = (part.ravel() for part in np.meshgrid(np.arange(300), np.arange(100)))
    lows = np.stack([rows, columns], 1)
    begin = time.monotonic()
    assert find_tiling_error(lows, lows + 1, (300, 100)) is None
    lows[17] = lows[18]
    assert find_tiling_error(lows, lows + 1, (300, 100)) == "overlap"
    assert time.monotonic() - begin < 10
