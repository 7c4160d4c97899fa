"""Going back to a checkpoint while training: past the batches of a spike, or to see whether silent corruption comes again."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from weft.checkpoint.manifest import Position
from weft.errors import RankFailure
from weft.job import Guard
from weft.parallel.sdc_check import check_replicas
from weft.precision.spikes import SpikeWatch
from weft.train.checkpoints import Checkpoints


class Recovery:
    """Looks at every step, before and after its update. All ranks see the same numbers, and decide the same.

    Args:
        settings: of the job.
        checkpoints: of the run.
        model: parallelized.
        optimizer: over its parameters.
        mesh: of all ranks.
        position: where training begins.
        say: prints a line, on one rank.
    """

    def __init__(
        self,
        settings: Guard,
        checkpoints: Checkpoints,
        model: Any,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        position: Position,
        say: Callable[[str], None],
    ):
        self.settings, self.checkpoints, self.say = settings, checkpoints, say
        self.model, self.optimizer, self.mesh = model, optimizer, mesh
        self.spikes = _watch_of(position)
        self.spike: str | None = None
        """Why the last step is one."""
        self.spiked_at = self.differed_at = 0
        """Steps that training went back from."""

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Why the update of a step, whose numbers are finite, is left out; None if it is not."""
        if self.settings.spikes == "off":
            return None
        self.spike = self.spikes.observe(loss, grad_norm)
        return self.spike if self.settings.spikes != "warn" else None

    def look(self, position: Position, due: bool) -> tuple[Position, bool]:
        """What follows from a step.

        Args:
            position: after it.
            due: whether a checkpoint will be taken, which must not hold what is corrupt.

        Returns:
            Where training goes on, and whether that is back in time.

        Raises:
            RankFailure: on every rank, when replicas differ at the same step again, or there is no checkpoint to go back to.
        """
        spike, self.spike = self.spike, None
        if spike and self.settings.spikes == "warn":
            self.say(f"step {position.step} is a spike: {spike}")
        if spike and self.settings.spikes == "rollback" and (back := self._pass_over(position)):
            return back, True
        every = self.settings.sdc_check_interval
        if every and (due or position.step % every == 0) and (back := self._compare(position)):
            return back, True
        return position.model_copy(update={"watch": self.spikes.state()}) if due else position, False

    def _pass_over(self, position: Position) -> Position | None:
        """After a spike: the state of some steps ago, and the batches after that of the spike (PaLM, 2022)."""
        step = position.step
        if step <= self.spiked_at:
            self.say(f"step {step} is a spike again, with other batches: its update is left out, and training goes on")
            return None
        earlier = self.checkpoints.go_back(max(step - self.settings.rollback_steps, 0))
        if earlier is None:
            self.say(
                f"there is no checkpoint {self.settings.rollback_steps} steps before step {step}: its update is left out"
            )
            return None
        self.spiked_at, self.spikes = step, _watch_of(earlier)
        left_out = earlier.next_batch, position.next_batch
        self.say(f"batches {left_out[0]} to {left_out[1] - 1} are left out")
        return earlier.model_copy(update={"next_batch": position.next_batch, "left_out": (*earlier.left_out, left_out)})

    def _compare(self, position: Position) -> Position | None:
        """Where replicas differ: the state before, to run the steps again."""
        problem, step = check_replicas(self.model, self.optimizer, self.mesh), position.step
        if problem is None:
            if step == self.differed_at:
                self.say(f"run again, replicas are equal after step {step}: the fault was transient")
            return None
        if step <= self.differed_at:
            raise RankFailure(
                f"replicas differ after step {step}, again: the fault is persistent\n{problem}",
                where="guard.sdc_check_interval",
                rule="ranks that hold the same part of a model hold the same bits of it",
                fix="take the device of the rank that is named out of service, and go on with --resume auto",
            )
        self.say(f"replicas differ after step {step}: {problem}")
        self.differed_at = step
        earlier = self.checkpoints.go_back(step - 1)
        if earlier is None:
            raise RankFailure(
                f"replicas differ after step {step}, and there is no good checkpoint to go back to\n{problem}",
                where="guard.sdc_check_interval",
                rule="ranks that hold the same part of a model hold the same bits of it",
                fix="set checkpoint.every, so that training can go back and run the steps again",
            )
        self.spikes = _watch_of(earlier)
        return earlier


def _watch_of(position: Position) -> SpikeWatch:
    return SpikeWatch.from_state(position.watch) if position.watch else SpikeWatch()
