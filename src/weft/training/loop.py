"""Per-rank training loop."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.profiler import record_function

from weft.checkpoint.manifest import Position
from weft.comm.collectives import all_reduce
from weft.comm.objects import broadcast_json
from weft.comm.stopwatch import collective_clock
from weft.errors import CheckpointError, NumericError
from weft.job import states_of
from weft.launch.heartbeat import Heartbeat
from weft.memory.quantized_weights import quantized_bytes
from weft.parallel.moe_aux_loss import imbalances_of_blocks
from weft.parallel.runtime import runtime
from weft.parallel.state_size import count_local_parameters, model_state_bytes
from weft.precision.scaling import LossScale
from weft.topology.mesh import AXES
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
from weft.training.step import StepResult, evaluate
from weft.training.step_metrics import communication_metrics, step_metrics_builder
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
    job, started, position, checkpoints = session.job, time.perf_counter(), session.position, session.checkpoints
    assert checkpoints is not None
    console = Console(quiet=session.rank > 0, soft_wrap=True)
    log = partial(console.print, markup=False, highlight=False)
    if _has_ended(session, out):
        log(f"the run has ended, after step {position.step} of {job.train.steps}; increase train.steps to continue it")
        checkpoints.close()
        return 0
    row_file = RowFile(session)
    row_file.check()  # a restart comes later than the preparation
    to_metrics, signals = step_metrics_builder(session), catch_signals(job.checkpoint.signals)
    routers, optimizer = runtime(session.model).router_stats, session.optimizer
    relocation = runtime(session.model).relocation
    beat = partial(heartbeat.phase, "evaluating")
    tasks = TaskEvaluator(session.model, job.eval, session.prepared.tokenizer, session.torch_device, beat)
    recovery = Recovery(job.guard, checkpoints, session.model, optimizer, position, log)
    batches, blocked, stop, consecutive_skips, interrupted = train_batches(session, position), 0.0, 0.0, 0, False
    profiler, rebalance = Profiler(session, out), Rebalance(session)
    steps = MeasuredSteps(session, recovery, profiler, log)
    expenses = Expenses(session, dist.get_node_local_rank(0))
    attempt = expenses.attempt(began, position.step, dist.get_world_size())
    writer = RankTimesWriter(out, session.mesh, session.device.type, position.step + 1, log)
    with _observers(session, out, console, attempt, followers) as observers, writer as times:
        if job.train.evaluate_every and position.step == 0:
            _evaluate(session, 0, observers, heartbeat)
        if job.eval.every and position.step == 0:
            _evaluate_tasks(tasks, 0, observers)
        while position.step < job.train.steps and not stop:
            step, scale = position.step + 1, optimizer.loss_scale
            heartbeat.phase("step", step)
            profiler.begin(step)
            start = times.begin_step()
            with record_function("weft: data"):
                micro_batches = next(batches)
            times.begin_compute()
            with collective_clock(session.device) as clock:
                result = steps.run(step, micro_batches)
                loads = routers.take_loads()
                if loads and job.train.router_bias_rate and not result.problem:
                    routers.correct(loads, job.train.router_bias_rate)
                imbalances = None if loads is None else imbalances_of_blocks(session.anatomy, loads)
                values = session.device.peak_memory_bytes(), signals.first, times.wants_probe(), *(imbalances or ())
                peak_memory, stop, probes, *agreed = _agree_on_largest(session, *values)
                imbalances = None if imbalances is None else agreed
            clock.read()  # the host has just waited for the device
            seconds, comm = (
                times.end_step(step, clock.exposed, blocked) - start,
                communication_metrics(steps.sent, clock),
            )
            if steps.peak is None:
                rebalance.add(seconds, sum(clock.exposed.values()))
            spent = expenses.take()
            profiler.end(step)
            for observer in observers:
                observer.step(
                    to_metrics(
                        position, result, scale, seconds, int(peak_memory), comm, imbalances, blocked, steps, spent
                    )
                )
            if probes:
                heartbeat.phase("measuring links", step)
                times.measure_links(step)
            if relocation is not None and relocation.report and not result.problem:
                log(f"step {step}: {relocation.report}")
            if step == profiler.last_step:
                checkpoints.close()
                return 0
            if result.problem:
                log(f"step {step} skipped, weights unchanged: {result.problem}")
            consecutive_skips = consecutive_skips + 1 if result.problem else 0
            if consecutive_skips == job.guard.max_skipped:
                unsaved = checkpoints.save_last(_next_position(position, result))
                raise _too_many_skips(consecutive_skips, step, result, unsaved)
            last = step == job.train.steps or stop > 0
            interrupted = stop > 0 and step < job.train.steps
            target = checkpoints.due(step, last, interrupted)
            if target or last:  # before steps with other rows are saved
                row_file.check()
            heartbeat.phase("checking", step)
            position, rolled_back = recovery.after_step(_next_position(position, result), due=target is not None)
            if rolled_back:
                optimizer.loss_scale = position.loss_scale
                batches, blocked = train_batches(session, position), 0.0
                continue
            if target and not last and (rows := rebalance.decide(position)):
                position = position.model_copy(update={"rows_per_rank": rows})
                batches = train_batches(session, position)
                log(f"step {step}: from now on the data ranks have {', '.join(map(str, rows))} rows, by measured speed")
            if interrupted and target:  # save first: the process may be killed before evaluation and export end
                heartbeat.phase("saving", step)
                checkpoints.snapshots.take(position, target)
                checkpoints.finish()
            if last or _is_due(step, job.train.evaluate_every):
                _evaluate(session, step, observers, heartbeat)
            if (last and not interrupted) or _is_due(step, job.eval.every):
                _evaluate_tasks(tasks, step, observers)
            heartbeat.phase("saving", step)
            blocked = checkpoints.snapshots.take(position, target) if target and not interrupted else 0.0
            for text in checkpoints.snapshots.take_messages():
                log(text)
            _report_checkpoints(checkpoints, observers)
        heartbeat.phase("saving", position.step)
        checkpoints.finish()
        unsaved = "" if checkpoints.is_saved(position.step, interrupted) else checkpoints.save_last(position)
        for text in checkpoints.snapshots.take_messages():
            log(text)
        _report_checkpoints(checkpoints, observers)
    if not interrupted and 0 < position.step == len(position.skipped):
        raise _nothing_trained(position.step, unsaved)
    heartbeat.phase("exporting", position.step)
    _export(session, out, checkpoints, position, unsaved)
    _summarize(session, out, position.step, time.perf_counter() - started)
    checkpoints.close()
    for observer in observers:
        if isinstance(observer, Callback):
            observer.end(out)
    return int(stop)


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


def _report_checkpoints(checkpoints: Checkpoints, observers: list[Observer]) -> None:
    """Tell the callbacks of the job about checkpoints that are complete on the disk."""
    folders = checkpoints.snapshots.take_committed()
    for callback in (observer for observer in observers if isinstance(observer, Callback)):
        for folder in folders:
            callback.checkpoint(folder)


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


def _next_position(position: Position, result: StepResult) -> Position:
    """Training position after a step."""
    step = position.step + 1
    return position.model_copy(
        update={
            "step": step,
            "next_batch": position.next_batch + 1,
            "loss_scale": result.loss_scale,
            "skipped": (*position.skipped, step) if result.problem else position.skipped,
        }
    )


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
    session: Session, out: Path, console: Console, attempt: Attempt, followers: Sequence[Callback]
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


def _agree_on_largest(session: Session, *values: float) -> list[float]:
    """Maximum of each value over all ranks, in one small all-reduce."""
    maxima = torch.tensor(values, dtype=torch.float64, device=session.torch_device)
    return all_reduce(maxima, session.mesh, AXES, "max").tolist()


def _summarize(session: Session, out: Path, steps: int, seconds: float) -> None:
    """Write run.json, the summary for the report. Memory is that of rank 0; in a pipeline, of the stages of rank 0."""
    micro_batches = next(train_batches(session, Position(step=0, next_batch=0, loss_scale=LossScale())))
    measured = measure_model_state(session.model, session.optimizer, micro_batches)
    dense, experts = count_local_parameters(session.model)
    frozen = count_local_parameters(session.model, frozen=True)
    predicted = model_state_bytes(dense, session.job.plan, experts, states_of(session.job.optimizer.name), frozen)
    predicted["parameters"] += quantized_bytes(session.model)
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
