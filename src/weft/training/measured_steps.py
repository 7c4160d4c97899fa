"""Training steps of a run with what they cost: the messages of a step, and once the memory at its peak."""

from weft.checkpoint.slices import check_states
from weft.comm.desync_check import DesyncCheck
from weft.comm.recorder import Message, Recorder
from weft.data import AnyBatch
from weft.memory.live_bytes import LiveBytes
from weft.parallel.dropout import STEPS_PER_SEED
from weft.parallel.runtime import set_dropout_seed
from weft.training.optimizer import learning_rate, set_learning_rate
from weft.training.profiler import Profiler
from weft.training.recovery import Recovery
from weft.training.session import Session
from weft.training.step import StepResult, train_step
from weft.training.step_metrics import PeakMemory


class MeasuredSteps:
    """Training steps of a run.

    Messages are recorded in the first step that is not skipped, because later steps send the same. Memory is tracked in the
    first step after it with allocated optimizer state.

    Args:
        session: training state of this rank.
        recovery: decides whether a step is skipped.
        profiler: traces the operators of the step with tracked memory.
    """

    def __init__(self, session: Session, recovery: Recovery, profiler: Profiler):
        self.session, self.recovery, self.profiler = session, recovery, profiler
        self.sent: list[Message] = []
        """Messages that this rank sends in a step."""
        self.peak: PeakMemory | None = None
        """Memory of the last step at its peak; None if it was not tracked."""
        self._knows_messages = self._knows_memory = False

    def run(self, step: int, micro_batches: list[AnyBatch]) -> StepResult:
        """Train one step.

        Args:
            step: number of the step, from 1.
            micro_batches: micro-batches of this rank, on its device.
        """
        job, optimizer = self.session.job, self.session.optimizer
        set_learning_rate(optimizer.inner, learning_rate(step, job.train.steps, job.optimizer))
        set_dropout_seed(self.session.model, job.train.seed * STEPS_PER_SEED + step)
        self.peak = None
        if not self._knows_messages:
            with Recorder() as recorder, DesyncCheck("first step"):
                result = self._train(micro_batches)
            self.sent = recorder.messages
            self._knows_messages = not result.problem  # a skipped step may run its backward twice
            check_states(optimizer.inner)  # now, not at the first checkpoint
        elif optimizer.state and not self._knows_memory:
            result = self._train_with_memory_tracking(micro_batches)
            self._knows_memory = True
        else:
            result = self._train(micro_batches)
        if job.optimizer.name == "onebit-adam" and step == job.optimizer.freeze_steps:
            self._knows_messages = False  # the optimizer compresses its messages from now on
        return result

    def _train(self, micro_batches: list[AnyBatch]) -> StepResult:
        clip_norm = self.session.job.optimizer.clip_norm
        return train_step(
            self.session.model, self.session.optimizer, micro_batches, clip_norm, self.recovery.skip_reason
        )

    def _train_with_memory_tracking(self, micro_batches: list[AnyBatch]) -> StepResult:
        """Train a step with memory tracking, which intercepts every operation and therefore slows the step down."""
        with LiveBytes() as live:
            self.session.optimizer.track(live)
            live.track_roles(self.session.model, self.session.anatomy)
            with self.profiler.trace_operators(live):
                result = self._train(micro_batches)
        parts: dict[str, int] = {kind: size for kind, size in live.at_peak.items() if kind != "activations" and size}
        parts |= {f"activations: {role}": size for role, size in live.roles_at_peak.items() if size}
        operation, shapes, role = live.peak_operation
        self.peak = PeakMemory(parts, f"{operation} in {role}: {', '.join(map(str, shapes))}")
        return result
