"""Two lanes: the order of hand-overs, registers, errors, and dispatch modes."""

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm.lanes import Lanes


class Cell:
    """Registers with one value."""

    def __init__(self) -> None:
        self.value = "start"

    def take(self) -> Any:
        return self.value

    def give(self, values: Any, other: Any) -> None:
        self.value = values


def lane(name: str, lanes: Lanes, cell: Cell, events: list[str], parts: int) -> str:
    for part in range(parts):
        if part:
            lanes.hand_over()
            assert cell.value == f"{name}{part - 1}"
        events.append(f"{name}{part}")
        cell.value = f"{name}{part}"
    return name


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(3, 3, "F0 B0 F1 B1 F2 B2"), (1, 3, "F0 B0 B1 B2"), (4, 2, "F0 B0 F1 B1 F2 F3")],
)
def test_lanes_take_turns(first: int, second: int, expected: str) -> None:
    lanes, cell, events = Lanes(), Cell(), list[str]()
    lanes.registers.append(cell)
    for _ in range(2):
        events.clear()
        result = lanes.run(
            lambda: lane("F", lanes, cell, events, first), lambda: lane("B", lanes, cell, events, second)
        )
        assert (result, " ".join(events)) == ("F", expected)


def test_a_held_lane_keeps_its_turn() -> None:
    lanes, cell, events = Lanes(), Cell(), list[str]()

    def first() -> None:
        with lanes.held():
            lane("F", lanes, cell, events, 3)
        lanes.hand_over()
        events.append("end")

    lanes.run(first, lambda: lane("B", lanes, cell, events, 2))
    assert events == ["F0", "F1", "F2", "B0", "end", "B1"]


def test_messages_in_flight_together_hand_over_once() -> None:
    """A lane that has handed over since the start of a message keeps its turn."""
    lanes, events = Lanes(), list[str]()

    def first() -> None:
        for count in (2, 1):
            for wait in [lanes.begin_message() for _ in range(count)]:
                wait()
                events.append("F")

    def second() -> None:
        events.append("B0")
        lanes.hand_over()
        events.append("B1")

    lanes.run(first, second)
    assert events == ["B0", "F", "F", "B1", "F"]


def failing(lanes: Lanes, handovers: int, text: str) -> None:
    for _ in range(handovers):
        lanes.hand_over()
    raise ValueError(text)


@pytest.mark.parametrize("handovers", [0, 1, 2])
def test_an_error_of_a_lane_ends_both(handovers: int) -> None:
    lanes, cell, events = Lanes(), Cell(), list[str]()
    for number in range(2):  # the lanes can be used again
        events.clear()
        runs = [lambda: lane("other", lanes, cell, events, 9), lambda: failing(lanes, handovers, "broken")]
        with pytest.raises(ValueError, match="broken"):
            lanes.run(*(runs if number else runs[::-1]))
        assert len(events) <= handovers + 1
    assert lanes.run(lambda: 1, lambda: 2) == 1


def test_hand_over_without_another_lane_does_nothing() -> None:
    lanes = Lanes()
    lanes.hand_over()
    assert lanes.handovers == 0


def test_lanes_run_in_turn_in_a_dispatch_mode() -> None:
    lanes, threads = Lanes(), []
    with TorchDispatchMode():
        lanes.run(lambda: threads.append(threading.get_ident()), lambda: threads.append(threading.get_ident()))
    assert threads == [threading.get_ident()] * 2


def test_a_backward_runs_in_the_other_lane() -> None:
    lanes, x = Lanes(), torch.ones(3, requires_grad=True)
    loss = (x * x).sum()
    assert lanes.run(lambda: (x * 3).sum().item(), loss.backward) == 9
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
