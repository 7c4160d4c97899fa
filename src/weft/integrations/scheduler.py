"""Learning rate schedule of a script under a plan: `accelerate`'s wrapper around the scheduler that the script has made."""

import warnings
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

DATA_RANKS = "weft.data_ranks"
"""Key of the number of data ranks in the state of a scheduler."""


class PlacedScheduler(AcceleratedScheduler):
    """Steps the scheduler once for each data rank in an update; `accelerate` would count the ranks that share rows too."""

    def __init__(self, prepared: AcceleratedScheduler, data_ranks: int):
        """
        Args:
            prepared: wrapper of accelerate.
            data_ranks: number of data ranks.
        """
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, prepared.split_batches)
        self.data_ranks = data_ranks

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step with the update of the optimizer; nothing after a micro-batch before the last one, or a skipped update."""
        if isinstance(self.scheduler, ReduceLROnPlateau):  # it counts evaluations, not updates
            self.scheduler.step(*args, **kwargs)
            return
        if not self.step_with_optimizer or self.split_batches or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.data_ranks):
            # A OneCycle schedule ends with its total steps.
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """State of the scheduler, and the number of data ranks."""
        return {**self.scheduler.state_dict(), DATA_RANKS: self.data_ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue; with another number of data ranks than before, a new scheduler takes the steps of as many updates."""
        state = dict(state_dict)
        before = state.pop(DATA_RANKS, self.data_ranks)
        if before == self.data_ranks or "last_epoch" not in state or isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.load_state_dict(state)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it steps before the optimizer
            for _ in range(state["last_epoch"] // before * self.data_ranks - self.scheduler.last_epoch):
                self.scheduler.step()
