"""Boxes that make up a tensor are told from those that do not, as by counting every number."""

import time

import numpy as np
import pytest

from weft.checkpoint import boxes
from weft.checkpoint.boxes import find_fault


def by_counting(lows: np.ndarray, highs: np.ndarray, shape: tuple[int, ...]) -> bool:
    held = np.zeros(shape, int)
    for low, high in zip(lows, highs, strict=True):
        held[tuple(map(slice, low, high))] += 1
    return bool((held == 1).all())


def cut_up(chance: np.random.Generator, shape: tuple[int, ...], cuts: int) -> list[list[tuple[int, int]]]:
    """A box, cut in two again and again along any axis."""
    parts = [[(0, size) for size in shape]]
    for _ in range(cuts):
        part = parts.pop(chance.integers(len(parts)))
        axis = chance.integers(len(shape))
        low, high = part[axis]
        middle = int(chance.integers(low, high + 1))
        parts += [[*part[:axis], ends, *part[axis + 1 :]] for ends in ((low, middle), (middle, high))]
    chance.shuffle(parts)  # type: ignore[arg-type]
    return parts


def test_random_boxes() -> None:
    chance, found = np.random.default_rng(3), []
    for _ in range(500):
        shape = tuple(map(int, chance.integers(1, 6, size=chance.integers(1, 4))))
        ends = np.array(cut_up(chance, shape, int(chance.integers(1, 8))))
        lows, highs = ends[..., 0].copy(), ends[..., 1].copy()
        assert find_fault(lows, highs, shape) is None
        box, axis = chance.integers(len(lows)), chance.integers(len(shape))
        shift = 1 if highs[box, axis] < shape[axis] else -1
        if lows[box, axis] + shift >= 0:
            lows[box, axis] += shift
            highs[box, axis] += shift
        good = by_counting(lows, highs, shape)
        assert (find_fault(lows, highs, shape) is None) == good
        found.append(good)
    assert 100 < found.count(False) < 500


def test_boxes_that_no_straight_cut_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four around one in the middle."""
    lows = np.array([[0, 0], [0, 2], [1, 0], [2, 1], [1, 1]])
    highs = np.array([[1, 2], [2, 3], [3, 1], [3, 3], [2, 2]])
    assert find_fault(lows, highs, (3, 3)) is None
    monkeypatch.setattr(boxes, "LARGEST", 4)
    assert find_fault(lows, highs, (3, 3)) == "do not lie in rows and columns"


def test_a_tensor_without_axes() -> None:
    assert find_fault(np.zeros((1, 0), int), np.zeros((1, 0), int), ()) is None
    assert find_fault(np.zeros((2, 0), int), np.zeros((2, 0), int), ()) == "have 2 numbers of 1"


def test_thirty_thousand_parts_take_no_time() -> None:
    """They took 30,000 squared comparisons, and as much memory."""
    rows, columns = (part.ravel() for part in np.meshgrid(np.arange(300), np.arange(100)))
    lows = np.stack([rows, columns], 1)
    begin = time.monotonic()
    assert find_fault(lows, lows + 1, (300, 100)) is None
    lows[17] = lows[18]
    assert find_fault(lows, lows + 1, (300, 100)) == "overlap"
    assert time.monotonic() - begin < 10
