"""Forward of one micro-batch: what hooks inside of the model need, and what they and the model return.

forward_pass = ForwardPass(batch)
with runtime(model).forward_slot.running(forward_pass):
    forward_pass.output = model(input_ids=batch.input_ids)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.data import AnyBatch, MicroBatch


@dataclass
class ForwardPass:
    """Inputs and outputs of the forward of a micro-batch; in a pipeline, of one of its stages."""

    batch: AnyBatch
    index: int = 0
    """Index of the micro-batch in its step."""
    targets: Tensor | None = None
    """[rows, tokens] of the tokens of this rank, if its head computes the loss; None: the head returns logits."""
    output: Any = None
    """Output of the model, or of the stage. Its logits are zeros [rows, tokens, 1] if the head has computed the loss."""
    head_loss: Tensor | None = None
    """Sum of cross entropies, if the head has computed it."""
    hidden: Tensor | None = None
    """Input of the head [rows, tokens of this rank, channels], if `keep_hidden` is on."""
    router_sums: Tensor | None = None
    """Sums of the routers (`RouterStats.take_sums`); None without auxiliary losses."""

    def host_positions(self) -> Tensor:
        """Positions of the rows in host memory."""
        assert isinstance(self.batch, MicroBatch)
        return self.batch.host_positions()


class ForwardSlot:
    """The forward pass that a model runs now.

    The arguments and the output of an unmodified model carry only what the model knows, so hooks inside of it need one place
    where they find the micro-batch: this one. A model runs one forward at a time. The lanes of joint forwards and backwards
    exchange the slot (`weft.comm.lanes.Registers`), so that the lane of a backward finds it empty.
    """

    def __init__(self) -> None:
        self.current: ForwardPass | None = None
        """None outside of `running`, as in a forward that the user calls."""

    @contextmanager
    def running(self, forward_pass: ForwardPass) -> Iterator[None]:
        """Context of a forward."""
        assert self.current is None, "a forward of a model inside of another one"
        self.current = forward_pass
        try:
            yield
        finally:
            self.current = None

    def take(self) -> ForwardPass | None:
        """See `weft.comm.lanes.Registers`."""
        current, self.current = self.current, None
        return current

    def give(self, values: ForwardPass | None, other: ForwardPass | None) -> None:
        """See `weft.comm.lanes.Registers`."""
        self.current = values
