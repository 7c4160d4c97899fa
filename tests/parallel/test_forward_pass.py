"""The slot of the forward that a model runs now, without ranks."""

import pytest
import torch

from weft.comm.lanes import Lanes
from weft.data import MicroBatch
from weft.parallel.sequence.forward_pass import ForwardPass, ForwardSlot


def forward_pass(index: int = 0) -> ForwardPass:
    rows = torch.zeros(1, 4, dtype=torch.int64)
    return ForwardPass(MicroBatch(rows, rows, rows), index)


def test_a_forward_that_fails_leaves_no_micro_batch_behind() -> None:
    slot = ForwardSlot()
    with pytest.raises(ValueError, match="in the model"), slot.running(forward_pass()):
        raise ValueError("in the model")
    assert slot.current is None


def test_one_forward_runs_at_a_time() -> None:
    slot = ForwardSlot()
    with (
        slot.running(forward_pass()),
        pytest.raises(AssertionError, match="a forward of a model inside of another one"),
        slot.running(forward_pass(1)),
    ):
        pass


def test_the_lane_of_a_backward_sees_no_forward() -> None:
    slot, lanes, seen = ForwardSlot(), Lanes(), list[int | None]()
    lanes.registers.append(slot)

    def look() -> None:
        seen.append(None if slot.current is None else slot.current.index)
        lanes.hand_over()

    def forward() -> None:
        with slot.running(forward_pass(1)):
            look()
            look()
        look()

    def backward() -> None:
        look()
        look()

    lanes.run(forward, backward)
    assert seen == [1, None, 1, None, None]
    assert slot.current is None
