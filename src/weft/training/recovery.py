"""Rollback to a checkpoint during training, after a loss spike or after silent data corruption."""

from collections.abc import Callable
from typing import Any

from weft.checkpoint.manifest import Position
from weft.errors import RankFailure
from weft.job import Guard
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.precision.spikes import SpikeDetector
from weft.training.checkpoints import Checkpoints
from weft.training.sdc_check import check_replicas


class Recovery:
    """Spike and corruption checks before and after each update. All ranks have the same inputs and take the same decisions.

    Args:
        settings: fault handling of the job.
        checkpoints: checkpoints of the run.
        model: parallelized model.
        optimizer: optimizer of its parameters.
        position: position where training starts.
        log: function that prints a progress line on one rank.
    """

    def __init__(
        self,
        settings: Guard,
        checkpoints: Checkpoints,
        model: Any,
        optimizer: DistributedOptimizer,
        position: Position,
        log: Callable[[str], None],
    ):
        self.settings, self.checkpoints, self.log = settings, checkpoints, log
        self.model, self.optimizer = model, optimizer
        self.spikes = _spike_detector(position)
        self.spike: str | None = None
        """Reason why the last step is a spike; None if it is not."""
        self.last_spike_step = self.last_mismatch_step = 0
        """Steps of the last rollback after a spike, and after a mismatch of replicas."""

    @property
    def skips(self) -> bool:
        """True if `skip_reason` decides on each update; else each step with finite gradients is observed."""
        return self.settings.spikes in ("skip", "rollback")

    def skip_reason(self, loss: float, grad_norm: float) -> str | None:
        """Reason to skip the update of a step with finite loss and gradients; None to apply it."""
        self.observe(loss, grad_norm)
        return self.spike

    def observe(self, loss: float, grad_norm: float) -> None:
        """Note loss and gradient norm of a step in which they are finite."""
        if self.settings.spikes != "off":
            self.spike = self.spikes.observe(loss, grad_norm)

    def after_step(self, position: Position, due: bool) -> tuple[Position, bool]:
        """Check the state after a step, and roll back if necessary.

        Args:
            position: position after the step.
            due: True if a checkpoint follows, which must not hold corrupt state.

        Returns:
            Position from which training continues, and True if training was rolled back.

        Raises:
            RankFailure: on every rank, if replicas differ at the same step again, or no checkpoint for a rollback exists.
        """
        spike, self.spike = self.spike, None
        if spike and self.settings.spikes == "warn":
            self.log(f"step {position.step} is a spike: {spike}")
        if spike and self.settings.spikes == "rollback" and (earlier := self._skip_spike(position)):
            return earlier, True
        every = self.settings.sdc_check_interval
        if every and (due or position.step % every == 0) and (earlier := self._compare_replicas(position)):
            return earlier, True
        return position.model_copy(update={"watch": self.spikes.state()}) if due else position, False

    def _skip_spike(self, position: Position) -> Position | None:
        """Roll back after a spike, and continue with the batches after the batch of the spike (PaLM, 2022)."""
        step = position.step
        if step <= self.last_spike_step:
            self.log(f"step {step} is a spike again, with other batches: its update is skipped, and training continues")
            return None
        earlier = self.checkpoints.roll_back(max(step - self.settings.rollback_steps, 0))
        if earlier is None:
            self.log(
                f"there is no checkpoint {self.settings.rollback_steps} steps before step {step}: its update is skipped"
            )
            return None
        self.last_spike_step, self.spikes = step, _spike_detector(earlier)
        excluded = earlier.next_batch, position.next_batch
        self.log(f"batches {excluded[0]} to {excluded[1] - 1} are skipped")
        return earlier.model_copy(
            update={"next_batch": position.next_batch, "excluded_batches": (*earlier.excluded_batches, excluded)}
        )

    def _compare_replicas(self, position: Position) -> Position | None:
        """Compare replicas, and roll back to repeat the steps if they differ."""
        problem, step = check_replicas(self.model, self.optimizer), position.step
        if problem is None:
            if step == self.last_mismatch_step:
                self.log(f"after repeating the steps, replicas are equal after step {step}: the fault was transient")
            return None
        if step <= self.last_mismatch_step:
            raise RankFailure(
                f"replicas differ after step {step}, again: the fault is persistent\n{problem}",
                where="guard.sdc_check_interval",
                rule="ranks that hold the same part of the model must hold bit-equal copies",
                fix="take the device of the named rank out of service, and continue with --resume auto",
            )
        self.log(f"replicas differ after step {step}: {problem}")
        self.last_mismatch_step = step
        earlier = self.checkpoints.roll_back(step - 1)
        if earlier is None:
            raise RankFailure(
                f"replicas differ after step {step}, and there is no valid checkpoint to roll back to\n{problem}",
                where="guard.sdc_check_interval",
                rule="ranks that hold the same part of the model must hold bit-equal copies",
                fix="set checkpoint.every, so that training can roll back and repeat the steps",
            )
        self.spikes = _spike_detector(earlier)
        return earlier


def _spike_detector(position: Position) -> SpikeDetector:
    return SpikeDetector.from_state(position.watch) if position.watch else SpikeDetector()
