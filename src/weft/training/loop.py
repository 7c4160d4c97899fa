"""Per-rank training loop."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.profiler import record_function

from weft.checkpoint.manifest import Position
from weft.comm.objects import broadcast_json
from weft.comm.stopwatch import collective_clock
from weft.errors import CheckpointError, NumericError
from weft.job import states_of
from weft.launch.heartbeat import Heartbeat
from weft.memory.nf4 import nf4_bytes
from weft.parallel.data.state_size import count_local_parameters, model_state_bytes
from weft.parallel.runtime import runtime
from weft.precision.scaling import LossScale
from weft.training.attention import run_attention
from weft.training.checkpoints import Checkpoints
from weft.training.energy import Expenses
from weft.training.functions import Callback
from weft.training.measured_steps import MeasuredSteps
from weft.training.metrics import Attempt, Evaluation, MetricsWriter
from weft.training.profiler import Profiler
from weft.training.progress import TerminalProgress
from weft.training.rank_times import RankTimesWriter
from weft.training.rebalance import Rebalance
from weft.training.recovery import Recovery
from weft.training.row_file import RowFile
from weft.training.run_folder import SUMMARY, read_table, write_summary
from weft.training.session import Session, held_out_batches, save_weights, train_batches
from weft.training.signals import catch_signals
from weft.training.state_bytes import measure_model_state
from weft.training.step import RankValues, StepResult, evaluate
from weft.training.step_metrics import communication_metrics, step_metrics_builder
from weft.training.step_report import Agreement, StepReport, rank_values
from weft.training.task_evaluation import TaskEvaluator

Observer = MetricsWriter | TerminalProgress | Callback


def train(session: Session, out: Path, heartbeat: Heartbeat, began: float, followers: Sequence[Callback] = ()) -> int:
    """Train to the last step or the first signal; write metrics, weights, checkpoints and a summary to `out`.

    A run that has already ended is not changed.

    Args:
        session: training state of this rank, with checkpoints.
        out: run folder.
        heartbeat: heartbeat of this rank, which receives each phase.
        began: Unix time in seconds at which this rank started.
        followers: callbacks of this rank besides those of the job; they may call collectives if every rank has them.

    Returns:
        Number of the signal that ended training before its last step, the same on all ranks; 0 without one.
    """
    started, position, checkpoints = time.perf_counter(), session.position, session.checkpoints
    assert checkpoints is not None
    console = Console(quiet=session.rank > 0, soft_wrap=True)
    log = partial(console.print, markup=False, highlight=False)
    if _has_ended(session, out):
        end = f"step {position.step} of {session.job.train.steps}"
        log(f"the run has ended, after {end}; increase train.steps to continue it")
        checkpoints.close(partial(heartbeat.phase, "copying", position.step))
        return 0
    loop = Loop(session, checkpoints, out, heartbeat, log)
    times = RankTimesWriter(out, session.mesh, session.device.type, position.step + 1, log)
    attention = run_attention(session, heartbeat, log, out)
    begin, attempt = partial(_observers, session, out, console, followers), partial(loop.expenses.attempt, began)
    with attention as used, begin(attempt(position.step, used)) as loop.observers, times as loop.times:
        loop.evaluate_at_start()
        while not loop.is_over:
            report = loop.run_step()
            loop.observe(report)
            if report.step == loop.profiler.last_step:
                checkpoints.close()
                return 0
            loop.count_skips(report)
            loop.after_step(report)
        unsaved = loop.save_last()
    loop.end(unsaved, time.perf_counter() - started)
    return loop.stop


class Loop:
    """Training of one rank. All ranks call its methods together, and take the same decisions."""

    observers: list[Observer]
    times: RankTimesWriter

    def __init__(
        self, session: Session, checkpoints: Checkpoints, out: Path, heartbeat: Heartbeat, log: Callable[[str], None]
    ):
        job, position, optimizer = session.job, session.position, session.optimizer
        self.session, self.job, self.position, self.checkpoints = session, job, position, checkpoints
        self.out, self.heartbeat, self.log = out, heartbeat, log
        self.row_file = RowFile(session)
        self.row_file.check()  # a restart comes later than the preparation
        self.to_metrics, self.signals = step_metrics_builder(session), catch_signals(job.checkpoint.signals)
        beat = partial(heartbeat.phase, "evaluating")
        self.tasks = TaskEvaluator(session.model, job.eval, session.prepared.tokenizer, session.torch_device, beat)
        self.recovery = Recovery(job.guard, checkpoints, session.model, optimizer, position, log)
        self.batches = train_batches(session, position)
        self.profiler, self.rebalance = Profiler(session, out), Rebalance(session)
        self.steps = MeasuredSteps(session, self.recovery, self.profiler, log)
        self.expenses = Expenses(session, dist.get_node_local_rank(0))
        self.clock = collective_clock(session.device)
        self.loads: dict[str, Tensor] | None = None
        """Tokens of each expert in the last step; None without experts."""
        self.blocked = 0.0
        """Seconds for which the last checkpoint has blocked training."""
        self.stop = 0
        """Number of the signal that ends training; 0 without one."""
        self.consecutive_skips = 0

    @property
    def is_over(self) -> bool:
        """True after the last step, or a signal."""
        return self.position.step >= self.job.train.steps or self.stop > 0

    @property
    def is_interrupted(self) -> bool:
        """True if a signal ends training before its last step."""
        return self.stop > 0 and self.position.step < self.job.train.steps

    def evaluate_at_start(self) -> None:
        """Evaluate the weights with which a new run starts."""
        if self.position.step == 0 and self.job.train.evaluate_every:
            _evaluate(self.session, 0, self.observers, self.heartbeat)
        if self.position.step == 0 and self.job.eval.every:
            _evaluate_tasks(self.tasks, 0, self.observers)

    def run_step(self) -> StepReport:
        """Run the next step. Its ranks agree on what it cost and whether training stops, in the messages of the loss."""
        session, steps, times = self.session, self.steps, self.times
        step, scale = self.position.step + 1, session.optimizer.loss_scale
        self.heartbeat.phase("step", step)
        self.profiler.begin(step)
        start = times.begin_step()
        with record_function("weft: data"):
            micro_batches = next(self.batches)
        times.begin_compute()
        with self.clock:
            result = steps.run(step, micro_batches, self._values)
        exposed, hidden = self.clock.take()
        self._correct_routers(result)
        agreed = Agreement.of(result, has_experts=self.loads is not None)
        seconds = times.end_step(step, exposed, self.blocked) - start
        comm = communication_metrics(steps.sent, exposed, hidden)
        if steps.peak is None:
            self.rebalance.add(seconds, sum(exposed.values()))
        spent = self.expenses.take(agreed.joules)
        self.profiler.end(step)
        self.stop = agreed.signal
        return StepReport(self.position, result, scale, seconds, agreed, comm, self.blocked, steps, spent)

    def _values(self) -> RankValues:
        """Values of this rank after the last backward of a step, for which the host does not wait."""
        self.loads = runtime(self.session.model).router_stats.take_loads()
        return rank_values(
            self.session.torch_device,
            self.session.anatomy,
            self.loads,
            peak_memory=self.session.device.peak_memory_bytes(),
            signal=self.signals.first,
            wants_probe=self.times.wants_probe(),
            joules=self.expenses.own_joules(),
        )

    def _correct_routers(self, result: StepResult) -> None:
        """Correct the biases of routers by the loads of a step that was not skipped."""
        rate = self.job.train.router_bias_rate
        if self.loads and rate and not result.problem:
            runtime(self.session.model).router_stats.correct(self.loads, rate)

    def observe(self, report: StepReport) -> None:
        """Report a step to the observers and the log, and measure the links if a rank has asked for it."""
        for observer in self.observers:
            observer.step(self.to_metrics(report))
        if report.agreed.wants_probe:
            self.heartbeat.phase("measuring links", report.step)
            self.times.measure_links(report.step)
        relocation = runtime(self.session.model).relocation
        if relocation is not None and relocation.report and not report.result.problem:
            self.log(f"step {report.step}: {relocation.report}")

    def count_skips(self, report: StepReport) -> None:
        """Log a step that was skipped.

        Raises:
            NumericError: too many steps in a row were skipped; the state is saved.
        """
        problem = report.result.problem
        if problem:
            self.log(f"step {report.step} skipped, weights unchanged: {problem}")
        self.consecutive_skips = self.consecutive_skips + 1 if problem else 0
        if self.consecutive_skips == self.job.guard.max_skipped:
            unsaved = self.checkpoints.save_last(report.after)
            raise _too_many_skips(self.consecutive_skips, report.step, report.result, unsaved)

    def after_step(self, report: StepReport) -> None:
        """Check the state after a step; then roll back, or save and evaluate where they are due."""
        step, checkpoints = report.step, self.checkpoints
        last = step == self.job.train.steps or self.stop > 0
        interrupted = self.stop > 0 and step < self.job.train.steps
        target = checkpoints.due(step, last, interrupted)
        if target or last:  # before steps with other rows are saved
            self.row_file.check()
        self.heartbeat.phase("checking", step)
        self.position, rolled_back = self.recovery.after_step(report.after, due=target is not None)
        if rolled_back:
            self.session.optimizer.loss_scale = self.position.loss_scale
            self.batches, self.blocked = train_batches(self.session, self.position), 0.0
            return
        if target and not last:
            self._rebalance()
        if interrupted and target:  # save first: the process may be killed before evaluation and export end
            self.heartbeat.phase("saving", step)
            checkpoints.snapshots.take(self.position, target)
            checkpoints.finish()
        if last or _is_due(step, self.job.train.evaluate_every):
            _evaluate(self.session, step, self.observers, self.heartbeat)
        if (last and not interrupted) or _is_due(step, self.job.eval.every):
            _evaluate_tasks(self.tasks, step, self.observers)
        self.heartbeat.phase("saving", step)
        self.blocked = checkpoints.snapshots.take(self.position, target) if target and not interrupted else 0.0
        self._report_checkpoints()

    def _rebalance(self) -> None:
        """Change the rows of the data ranks to their measured speed, before a checkpoint that has the new rows."""
        if rows := self.rebalance.decide(self.position):
            self.position = self.position.model_copy(update={"rows_per_rank": rows})
            self.batches = train_batches(self.session, self.position)
            listed = ", ".join(map(str, rows))
            self.log(f"step {self.position.step}: from now on the data ranks have {listed} rows, by measured speed")

    def save_last(self) -> str:
        """Save the last position, if it is not on the disk; returns what could not be saved, "" if all was."""
        checkpoints, step = self.checkpoints, self.position.step
        self.heartbeat.phase("saving", step)
        checkpoints.finish()
        unsaved = "" if checkpoints.is_saved(step, self.is_interrupted) else checkpoints.save_last(self.position)
        self._report_checkpoints()
        return unsaved

    def end(self, unsaved: str, seconds: float) -> None:
        """Export the weights, write the summary, and tell the callbacks of the job.

        Args:
            unsaved: result of `save_last`.
            seconds: seconds since training began.

        Raises:
            NumericError: no step has changed the weights.
            CheckpointError: weights or last checkpoint are not on the disk.
        """
        position = self.position
        if not self.is_interrupted and 0 < position.step == len(position.skipped):
            raise _nothing_trained(position.step, unsaved)
        self.heartbeat.phase("exporting", position.step)
        _export(self.session, self.out, self.checkpoints, position, unsaved)
        _summarize(self.session, self.out, position.step, seconds)
        self.checkpoints.close(partial(self.heartbeat.phase, "copying", position.step), interrupted=self.is_interrupted)
        for observer in self.observers:
            if isinstance(observer, Callback):
                observer.end(self.out)

    def _report_checkpoints(self) -> None:
        """Log what the writer has said, and tell the callbacks of the job about checkpoints that are complete on the disk."""
        for text in self.checkpoints.snapshots.take_messages():
            self.log(text)
        folders = self.checkpoints.snapshots.take_committed()
        for callback in (observer for observer in self.observers if isinstance(observer, Callback)):
            for folder in folders:
                callback.checkpoint(folder)


def _export(session: Session, out: Path, checkpoints: Checkpoints, position: Position, unsaved: str) -> None:
    """Write the weights to `out`/export.

    Args:
        session: training state of this rank.
        out: run folder.
        checkpoints: hold the last checkpoint in host memory if the disk does not take the weights.
        position: last position.
        unsaved: what was not saved before, and why; "" if all was.

    Raises:
        CheckpointError: weights or last checkpoint are not on the disk.
    """
    if problem := save_weights(session, out / "export"):
        unsaved = unsaved or checkpoints.save_last(position, try_disk=False)
        unsaved = f"the export cannot be written: {problem}\n{unsaved or 'the last checkpoint is on the disk'}"
    if unsaved:
        raise CheckpointError(
            unsaved,
            where=str(out),
            rule="a run must end with its weights and its last checkpoint on disk",
            fix="free disk space there, then run the same command with --resume auto, which continues from the saved state",
        )


def _too_many_skips(count: int, step: int, result: StepResult, unsaved: str) -> NumericError:
    return NumericError(
        f"the updates of {count} consecutive steps were skipped, the last at step {step}: {result.problem}",
        where=f"guard.max_skipped = {count}",
        rule="the update of a step with non-finite loss or gradients, or with a loss spike, is skipped",
        fix="check the data and the named module; a smaller optimizer.lr or plan.precision.param_dtype fp32 may help; "
        + (unsaved or "the state is saved, and --resume auto continues from it"),
    )


def _nothing_trained(steps: int, unsaved: str) -> NumericError:
    return NumericError(
        f"the updates of all {steps} steps were skipped: the weights are those of the start, and are not exported",
        where=f"train.steps = {steps}",
        rule="the update of a step with non-finite loss or gradients, or with a loss spike, is skipped",
        fix="check the weights of the model and the data; a smaller optimizer.lr or plan.precision.param_dtype fp32 may help"
        + (f"; {unsaved}" if unsaved else ""),
    )


def _has_ended(session: Session, out: Path) -> bool:
    """True if all steps are done and the summary, which is written last, is of the last step."""
    step, ended = session.position.step, False
    if session.rank == 0 and step >= session.job.train.steps and (out / "export").exists():
        with suppress(OSError, ValueError):  # a damaged summary counts as missing
            ended = read_table(out / SUMMARY).get("steps") == step
    return broadcast_json(ended)


def _evaluate(session: Session, step: int, observers: list[Observer], heartbeat: Heartbeat) -> None:
    """Evaluate the loss on held-out rows, if there are any, and report it."""
    heartbeat.phase("evaluating", step)
    batches = held_out_batches(session)
    if batches:
        evaluation = Evaluation(step, evaluate(session.model, batches))
        for observer in observers:
            observer.evaluation(evaluation)


def _evaluate_tasks(tasks: TaskEvaluator, step: int, observers: list[Observer]) -> None:
    """Evaluate the tasks of the job, if there are any, and report their results."""
    if tasks.settings.tasks:
        evaluation = tasks.evaluate(step)
        for observer in observers:
            observer.tasks(evaluation)


@contextmanager
def _observers(
    session: Session, out: Path, console: Console, followers: Sequence[Callback], attempt: Attempt
) -> Iterator[list[Observer]]:
    """Observers of each step: metrics files, terminal and callbacks of the job on rank 0; followers on every rank."""
    with ExitStack() as stack:
        if session.rank == 0:
            progress = TerminalProgress(session.job.train.steps, console)
            writer = MetricsWriter(out, progress.message)
            writer.attempt(attempt)
            own: list[Observer] = [stack.enter_context(writer), stack.enter_context(progress)]
            yield [*own, *(Callback.load(name, session.job) for name in session.job.train.callbacks), *followers]
        else:
            yield [*followers]


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _summarize(session: Session, out: Path, steps: int, seconds: float) -> None:
    """Write run.json, the summary for the report. Memory is that of rank 0; in a pipeline, of the stages of rank 0."""
    micro_batches = next(train_batches(session, Position(step=0, next_batch=0, loss_scale=LossScale())))
    measured = measure_model_state(session.model, session.optimizer, micro_batches)
    dense, experts = count_local_parameters(session.model)
    frozen = count_local_parameters(session.model, frozen=True)
    predicted = model_state_bytes(dense, session.job.plan, experts, states_of(session.job.optimizer.name), frozen)
    predicted["parameters"] += nf4_bytes(session.model)
    if session.rank == 0:
        anatomy = session.anatomy
        summary = {
            "run_id": session.checkpoints.run_id if session.checkpoints else "",
            "model_type": anatomy.family,
            "parameters": anatomy.parameters,
            "active_parameters": anatomy.active_parameters,
            "trained_parameters": anatomy.parameters - anatomy.frozen_parameters,
            "anatomy": {role: f"{count} x {pattern}" for role, pattern, count in anatomy.table()},
            "memory": {"measured": measured, "predicted": predicted},
            "world_size": dist.get_world_size(),
            "device": session.device.name,
            "steps": steps,
            "seconds": seconds,
        }
        write_summary(out, summary, partial(print, flush=True), "the summary of the run")
