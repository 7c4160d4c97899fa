"""Training, as one rank lives it."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from weft.anatomy.flops import training_flops_per_token
from weft.checkpoint.manifest import Position
from weft.comm.collectives import Message, Recorder, all_reduce
from weft.comm.desync_check import DesyncCheck
from weft.comm.objects import broadcast_json
from weft.comm.stopwatch import CollectiveClock
from weft.data import MicroBatch
from weft.errors import CheckpointError, NumericError
from weft.launch.heartbeat import Heartbeat
from weft.memory.live_bytes import LiveBytes
from weft.memory.pool import pools_of
from weft.parallel.dropout import set_dropout_seed
from weft.parallel.fsdp import count_split, model_state_bytes
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import AXES
from weft.train.metrics import Evaluation, MetricsWriter, StepMetrics, TerminalProgress, utilization
from weft.train.optimizer import learning_rate, set_learning_rate
from weft.train.recovery import Recovery
from weft.train.run_folder import SUMMARY, read_run_id, read_table, write_summary
from weft.train.session import Session, held_out_batches, save_weights, train_batches
from weft.train.state_bytes import measure_model_state
from weft.train.step import StepResult, evaluate, train_step

Observer = MetricsWriter | TerminalProgress

STEPS_OF_A_SEED = 2**24  # no two seeds and steps of real jobs meet


def train(session: Session, out: Path, pulse: Heartbeat) -> None:
    """Train to the end, or to the first signal, and leave metrics, weights, checkpoints and a summary in `out`.

    A run that has ended is left as it is.
    """
    job, started, position, checkpoints = session.job, time.perf_counter(), session.position, session.checkpoints
    assert checkpoints is not None
    console = Console(quiet=session.rank > 0, soft_wrap=True)
    say = partial(console.print, markup=False, highlight=False)
    if _has_ended(session, out):
        say(f"the run has ended, after step {position.step} of {job.train.steps}; more train.steps let it go on")
        return checkpoints.close()
    to_metrics, signals = _metrics_of(session), _catch_signals()
    routers: Any = session.model.router_watch
    recovery = Recovery(job.guard, checkpoints, session.model, session.optimizer, session.mesh, position, say)
    batches, blocked, stop, has_watched = train_batches(session, position), 0.0, 0.0, False
    skipped, interrupted = 0, False  # steps in a row
    messages: list[list[Message]] = []
    with _observers(session, out, console) as observers:
        if job.train.evaluate_every and position.step == 0:
            _evaluate(session, 0, observers, pulse)
        while position.step < job.train.steps and not stop:
            step, scale = position.step + 1, position.loss_scale
            pulse.phase("step", step)
            begin = time.perf_counter()
            micro_batches = next(batches)
            rate = learning_rate(step, job.train.steps, job.optimizer)
            set_learning_rate(session.optimizer, rate)
            set_dropout_seed(session.model, job.train.seed * STEPS_OF_A_SEED + step)
            watched: Watched | None = None
            with CollectiveClock() as stopwatch:
                if messages and not has_watched:  # the second, in which the optimizer has its states
                    result, watched = _watched_step(session, micro_batches, scale, recovery)
                    has_watched = True
                elif messages:
                    result = _step(session, micro_batches, scale, recovery)
                else:  # every step of a layout sends the same messages: the first is compared and counted
                    with Recorder() as recorder, DesyncCheck("first step"):
                        result = _step(session, micro_batches, scale, recovery)
                    messages.append(recorder.messages)
            load = routers.take_load()
            values = session.device.peak_memory_bytes(), signals.first, load or 0.0
            peak_memory, stop, largest_load = _agree_on_largest(session, *values)
            imbalance = None if load is None else largest_load
            seconds, comm = time.perf_counter() - begin, comm_of(messages[0], stopwatch)
            for observer in observers:
                observer.step(
                    to_metrics(step, result, rate, scale, seconds, int(peak_memory), comm, imbalance, blocked, watched)
                )
            if result.problem:
                say(f"step {step} skipped, weights untouched: {result.problem}")
            skipped = skipped + 1 if result.problem else 0
            if skipped == job.guard.max_skipped:
                checkpoints.keep(_after(position, result))
                raise _endless_skipping(skipped, step, result)
            last = step == job.train.steps or stop > 0
            interrupted = stop > 0 and step < job.train.steps
            target = checkpoints.due(step, last, interrupted)
            pulse.phase("checking", step)
            position, went_back = recovery.look(_after(position, result), due=target is not None)
            if went_back:
                batches, blocked = train_batches(session, position), 0.0
                continue
            if interrupted and target:  # what sent the signal may not wait for the evaluation and the export
                pulse.phase("saving", step)
                checkpoints.snapshots.take(position, target)
                checkpoints.finish()
            if last or _is_due(step, job.train.evaluate_every):
                _evaluate(session, step, observers, pulse)
            pulse.phase("saving", step)
            blocked = checkpoints.snapshots.take(position, target) if target and not interrupted else 0.0
            for text in checkpoints.snapshots.take_news():
                say(text)
        pulse.phase("saving", position.step)
        checkpoints.finish()
        unsaved = "" if checkpoints.is_saved(position.step, interrupted) else checkpoints.keep(position)
        for text in checkpoints.snapshots.take_news():
            say(text)
    pulse.phase("exporting", position.step)
    if problem := save_weights(session, out / "export"):
        unsaved = unsaved or checkpoints.keep(position, try_disk=False)
        unsaved = f"the export cannot be written: {problem}\n{unsaved or 'the last checkpoint is on the disk'}"
    if unsaved:
        raise CheckpointError(
            unsaved,
            where=str(out),
            rule="a run ends with its weights and its last checkpoint on the disk",
            fix="make room there, then run the same command with --resume auto: it goes on from what is kept",
        )
    _summarize(session, out, position.step, time.perf_counter() - started)
    checkpoints.close()


def _endless_skipping(count: int, step: int, result: StepResult) -> NumericError:
    return NumericError(
        f"the updates of {count} steps in a row were left out, the last of them step {step}: {result.problem}",
        where=f"guard.max_skipped = {count}",
        rule="a step whose loss or gradients are not finite leaves the weights as they were",
        fix="look at the data and at what is named; a smaller optimizer.lr or precision.param_dtype fp32 may help; "
        "the state is saved, --resume auto goes on from it",
    )


def _has_ended(session: Session, out: Path) -> bool:
    """Whether no step is left, and the summary, which is written last, is of this step."""
    step, ended = session.position.step, False
    if session.rank == 0 and step >= session.job.train.steps and (out / "export").exists():
        with suppress(OSError, ValueError):  # a damaged summary is none
            ended = read_table(out / SUMMARY).get("steps") == step
    return broadcast_json(ended)


def _after(position: Position, result: StepResult) -> Position:
    """Where training stands after a step."""
    step = position.step + 1
    return position.model_copy(
        update={
            "step": step,
            "next_batch": position.next_batch + 1,
            "loss_scale": result.loss_scale,
            "skipped": (*position.skipped, step) if result.problem else position.skipped,
        }
    )


def _step(session: Session, micro_batches: list[MicroBatch], scale: LossScale, recovery: Recovery) -> StepResult:
    plan, clip_norm = session.job.plan, session.job.optimizer.clip_norm
    return train_step(
        session.model, session.optimizer, micro_batches, plan, session.mesh, scale, clip_norm, recovery.judge
    )


@dataclass(frozen=True)
class Watched:
    """The fullest moment of a step on this rank."""

    peak: dict[str, int]
    """Bytes by kind, activations by the part of the model that made them."""
    maker: str


def _watched_step(
    session: Session, micro_batches: list[MicroBatch], scale: LossScale, recovery: Recovery
) -> tuple[StepResult, Watched]:
    """A step, and where its memory goes: every operation is looked at, which takes its time."""
    with LiveBytes() as live:
        live.track_training(session.model, session.optimizer)
        live.watch_roles(session.model, session.anatomy)
        result = _step(session, micro_batches, scale, recovery)
    parts: dict[str, int] = {kind: size for kind, size in live.at_peak.items() if kind != "activations" and size}
    parts |= {f"activations: {role}": size for role, size in live.roles_at_peak.items() if size}
    operation, shapes, role = live.made_peak
    return result, Watched(parts, f"{operation} in {role}: {', '.join(map(str, shapes))}")


def _evaluate(session: Session, step: int, observers: list[Observer], pulse: Heartbeat) -> None:
    """Measure the loss on held-out rows, if there are any, and show it."""
    pulse.phase("evaluating", step)
    batches = held_out_batches(session)
    if batches:
        evaluation = Evaluation(step, evaluate(session.model, batches, session.mesh))
        for observer in observers:
            observer.evaluation(evaluation)


@contextmanager
def _observers(session: Session, out: Path, console: Console) -> Iterator[list[Observer]]:
    """Who is told of each step: on rank 0 the files and the terminal, elsewhere nobody."""
    with ExitStack() as stack:
        if session.rank == 0:
            progress = TerminalProgress(session.job.train.steps, console)
            writer = MetricsWriter(out, progress.message)
            yield [stack.enter_context(writer), stack.enter_context(progress)]
        else:
            yield []


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _agree_on_largest(session: Session, *values: float) -> list[float]:
    """The largest of each value over all ranks, in one small reduction."""
    shared = torch.tensor(values, dtype=torch.float64, device=session.place)
    return all_reduce(shared, session.mesh, AXES, "max").tolist()


def comm_of(messages: Sequence[Message], stopwatch: CollectiveClock) -> dict[str, dict[str, float]]:
    """What a step sent, and the time that took, by axis and link."""
    found: dict[str, dict[str, float]] = {}
    for message in messages:
        sent = found.setdefault(f"{message.axis} {message.link}".strip(), {"bytes": 0, "messages": 0})
        sent["bytes"] += message.bytes
        sent["messages"] += 1
        sent[f"{message.operation}_bytes"] = sent.get(f"{message.operation}_bytes", 0) + message.bytes
    for where, sent in found.items():
        if where in stopwatch.exposed:
            sent |= {"exposed_seconds": stopwatch.exposed[where], "hidden_seconds": stopwatch.hidden[where]}
    return found


def _metrics_of(session: Session) -> Callable[..., StepMetrics]:
    """Turns what a step did into a line of metrics.jsonl."""
    job, config = session.job, session.model.config
    flops_per_token = training_flops_per_token(session.anatomy, config, job.data.seq_len)
    peak = session.device.peak_flops(DTYPES[job.plan.precision.param_dtype])
    available = peak * dist.get_world_size() if peak else None

    def to_metrics(
        step: int,
        result: StepResult,
        rate: float,
        scale: LossScale,
        seconds: float,
        peak_memory: int,
        comm: dict[str, dict[str, float]],
        imbalance: float | None,
        blocked: float,
        watched: Watched | None,
    ) -> StepMetrics:
        return StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens=result.tokens,
            step_seconds=seconds,
            tokens_per_second=result.tokens / seconds,
            mfu=utilization(flops_per_token * result.tokens / seconds, available),
            peak_memory_bytes=peak_memory,
            comm_bytes=sum(int(sent["bytes"]) for sent in comm.values()),
            comm=comm or None,
            loss_scale=scale.value,
            skipped=result.problem is not None,
            overflowed=result.overflowed,
            expert_imbalance=imbalance,
            checkpoint_seconds=blocked,
            peak=watched.peak if watched else None,
            peak_maker=watched.maker if watched else None,
            pools={name: pool.counters() for name, pool in pools_of(session.model, session.optimizer).items()} or None,
        )

    return to_metrics


def _summarize(session: Session, out: Path, steps: int, seconds: float) -> None:
    """Write run.json: what the report shows beside the metrics. Memory is that of rank 0: of a pipeline, of its stages."""
    micro_batches = next(train_batches(session, Position(step=0, next_batch=0, loss_scale=LossScale())))
    measured = measure_model_state(session.model, session.optimizer, micro_batches, session.job.plan, session.mesh)
    dense, experts = count_split(session.model)
    predicted = model_state_bytes(dense, session.job.plan, experts)
    if session.rank == 0:
        anatomy = session.anatomy
        summary = {
            "run_id": read_run_id(out),
            "model_type": anatomy.family,
            "parameters": anatomy.parameters,
            "active_parameters": anatomy.active_parameters,
            "anatomy": {role: f"{count} x {pattern}" for role, pattern, count in anatomy.table()},
            "memory": {"measured": measured, "predicted": predicted},
            "world_size": dist.get_world_size(),
            "device": session.device.name,
            "steps": steps,
            "seconds": seconds,
        }
        write_summary(out, summary, partial(print, flush=True), "what it says")


@dataclass
class Signals:
    """The first SIGINT or SIGTERM that came, or 0. The step in hand is finished before anybody looks."""

    first: int = 0


def _catch_signals() -> Signals:
    caught = Signals()

    def remember(number: int, _: object) -> None:
        caught.first = caught.first or number

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, remember)
    return caught
