"""Training steps of a run with what they cost: the messages of a step, and once the memory at its peak."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from weft.checkpoint.slices import check_states
from weft.comm.desync_check import TIMEOUT, DesyncCheck
from weft.comm.recorder import Message, Recorder
from weft.data import AnyBatch
from weft.memory.live_bytes import LiveBytes
from weft.parallel.runtime import runtime, set_dropout_seed
from weft.training.optimizer import learning_rate, set_learning_rate
from weft.training.profiler import Profiler
from weft.training.recovery import Recovery
from weft.training.session import Session
from weft.training.step import RankValues, StepResult, train_step


@dataclass(frozen=True)
class PeakMemory:
    """Breakdown of the peak memory of a step on this rank."""

    bytes_by_kind: dict[str, int]
    """Bytes by kind; activations by the part of the model that computed them."""
    operation: str
    """Operation at the peak, the part of the model it belongs to, and the shapes of its results."""


class MeasuredSteps:
    """Training steps of a run.

    Messages are recorded in the first step that is not skipped, because later steps send the same. Memory is tracked in the
    first step after it with allocated optimizer state.

    Compiled blocks are compiled in the first step, and the recorder leaves their insides alone. Memory cannot be tracked inside
    of compiled code, and the same step without it may not fit: with torch.compile only a run that is profiled tracks it. The
    step with tracked memory runs eagerly.

    Args:
        recovery: decides whether a step is skipped.
        profiler: traces the operators of the step with tracked memory.
        log: function that prints a line.
    """

    def __init__(self, session: Session, recovery: Recovery, profiler: Profiler, log: Callable[[str], None]):
        self.session, self.recovery, self.profiler, self.log = session, recovery, profiler, log
        self.compiled = runtime(session.model).compiled
        self.regions: int | None = None
        """Compiled regions that ran in the last step on this rank; None without torch.compile."""
        self._expected_regions = 1
        self.sent: list[Message] = []
        """Messages that this rank sends in a step."""
        self.peak: PeakMemory | None = None
        """Memory of the last step at its peak; None if it was not tracked."""
        self._knows_messages = False
        # Eager FlexAttention holds all scores.
        is_compiled = self.compiled is not None or session.job.plan.compute.attention == "flex"
        self._knows_memory = is_compiled and not profiler.steps

    def run(self, step: int, micro_batches: list[AnyBatch], values: Callable[[], RankValues]) -> StepResult:
        """Train one step.

        Args:
            step: number of the step, from 1.
            micro_batches: micro-batches of this rank, on its device.
            values: as for `train_step`.
        """
        train = partial(self._train, micro_batches, values)
        job, optimizer = self.session.job, self.session.optimizer
        set_learning_rate(optimizer.inner, learning_rate(step, job.train.steps, job.optimizer))
        set_dropout_seed(self.session.model, job.train.seed, step)
        self.peak = None
        before = self.compiled.forwards if self.compiled else 0
        if not self._knows_messages:
            # Another rank may still compile: then only the watchdog ends the wait.
            timeout = timedelta(seconds=job.guard.hang_timeout_seconds) if self.compiled else TIMEOUT
            with Recorder() as recorder, DesyncCheck("first step", timeout):
                result = train()
            self.sent = recorder.messages
            self._knows_messages = not result.problem  # a skipped step may run its backward twice
            check_states(optimizer.inner)  # now, not at the first checkpoint
        elif optimizer.state and not self._knows_memory:
            result = self._train_with_memory_tracking(train)
            self._knows_memory = True
        else:
            result = train()
        if job.optimizer.name == "onebit-adam" and step == job.optimizer.freeze_steps:
            self._knows_messages = False  # the optimizer compresses its messages from now on
        if self.compiled:
            self._check_regions(step, self.compiled.forwards - before)
        return result

    def _check_regions(self, step: int, regions: int) -> None:
        """Count the compiled regions of a step; print a line where torch has fallen back to eager code."""
        self.regions = regions
        if self.peak is not None:  # the step with tracked memory runs eagerly
            return
        if regions < self._expected_regions:
            self.log(
                f"step {step}: {regions} of {self._expected_regions} compiled regions ran; torch runs the others eagerly, and "
                "TORCH_LOGS=recompiles,graph_breaks says why"
            )
        self._expected_regions = regions  # one line for each change

    def _train(self, micro_batches: list[AnyBatch], values: Callable[[], RankValues]) -> StepResult:
        session, recovery = self.session, self.recovery
        clip_norm, skip_reason = session.job.optimizer.clip_norm, recovery.skip_reason if recovery.skips else None
        result = train_step(session.model, session.optimizer, micro_batches, clip_norm, skip_reason, values)
        if not recovery.skips and not result.problem:
            recovery.observe(result.loss, result.grad_norm)
        return result

    def _train_with_memory_tracking(self, train: Callable[[], StepResult]) -> StepResult:
        """Train a step with memory tracking, which intercepts every operation and therefore slows the step down."""
        # Inside of the mode, torch would forget compiled code for the rest of the process, also that of a user's model.
        may_compile = "torch._dynamo" in sys.modules
        eagerly = torch.compiler.set_stance("force_eager") if may_compile else nullcontext()
        with eagerly, LiveBytes() as live:
            self.session.optimizer.track(live)
            live.track_roles(self.session.model, self.session.anatomy)
            with self.profiler.trace_operators(live):
                result = train()
        parts: dict[str, int] = {kind: size for kind, size in live.at_peak.items() if kind != "activations" and size}
        parts |= {f"activations: {role}": size for role, size in live.roles_at_peak.items() if size}
        operation, shapes, role = live.peak_operation
        self.peak = PeakMemory(parts, f"{operation} in {role}: {', '.join(map(str, shapes))}")
        return result
