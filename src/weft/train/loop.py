"""Training, as one rank lives it."""

import json
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.flops import training_flops_per_token
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import build_on_meta, gather_weights, materialize, read_config, save_folder
from weft.cluster.device import Device, detect
from weft.cluster.launch import connect
from weft.cluster.mesh import AXES, build_mesh, data_rank
from weft.comm.collectives import Recorder, all_reduce
from weft.data import MicroBatch, Prepared, Rows, batches, evaluation_batches
from weft.job import Job
from weft.parallel.data import model_state_bytes
from weft.parallel.parallelize import parallelize
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.train.metrics import Evaluation, MetricsWriter, Progress, StepMetrics
from weft.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from weft.train.state_bytes import measure_model_state
from weft.train.step import StepResult, evaluate, train_step

EVALUATION_ROWS = 256
Observer = MetricsWriter | Progress


@dataclass
class Session:
    """What one rank trains with; made by `open_session`, read by everything after."""

    job: Job
    """With its plan resolved."""
    prepared: Prepared
    device: Device
    place: torch.device
    rank: int
    mesh: DeviceMesh
    anatomy: Anatomy
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    train_rows: Rows
    held_out_rows: Rows


def open_session(job: Job, prepared: Prepared) -> Session:
    """Join the other ranks, split the model, give it its weights, and open the data."""
    device = detect()
    rank, world_size, local_rank = connect(device)
    place = device.torch_device(local_rank)
    plan = job.plan.resolve(world_size)
    mesh = build_mesh(plan, device.type, world_size)
    model = build_on_meta(read_config(job.model), DTYPES[plan.precision.update])
    anatomy = read_anatomy(model)
    parallelize(model, plan, mesh)
    materialize(model, job.model, place)
    model.train()
    torch.manual_seed(job.train.seed + data_rank(mesh))  # dropout

    def rows(split: str, shuffle: bool) -> Rows:
        data, spans = job.data, getattr(prepared, split)
        return Rows(spans, seq_len=data.seq_len, packing=data.packing, shuffle=shuffle, seed=job.train.seed)

    return Session(
        job=job.model_copy(update={"plan": plan}),
        prepared=prepared,
        device=device,
        place=place,
        rank=rank,
        mesh=mesh,
        anatomy=anatomy,
        model=model,
        optimizer=build_optimizer(model, job.optimizer),
        train_rows=rows("train", job.data.shuffle),
        held_out_rows=rows("held_out", False),
    )


def train(session: Session, out: Path) -> int:
    """Train to the end, or to the first signal, and leave metrics, weights and a summary in `out`.

    Returns:
        The signal that ended training early, or 0.
    """
    job, model, optimizer, mesh = session.job, session.model, session.optimizer, session.mesh
    to_metrics = _metrics_of(session)
    signals = _catch_signals()
    scale = LossScale.from_plan(job.plan.precision.loss_scale)
    comm_bytes, started = 0, time.perf_counter()
    with ExitStack() as stack:
        console = Console(soft_wrap=True, quiet=session.rank > 0)
        observers: list[Observer] = []
        if session.rank == 0:
            observers = [
                stack.enter_context(MetricsWriter(out)),
                stack.enter_context(Progress(job.train.steps, console)),
            ]
        for step, batches_of_step in enumerate(_train_batches(session), start=1):
            begin = time.perf_counter()
            rate = learning_rate(step, job.train.steps, job.optimizer)
            set_learning_rate(optimizer, rate)
            micro_batches = [_to_device(batch, session.place) for batch in batches_of_step]
            # Every step of a layout sends the same bytes: the first is counted.
            with Recorder() if step == 1 else nullcontext() as recorder:
                result = train_step(model, optimizer, micro_batches, job.plan, mesh, scale, job.optimizer.clip_norm)
            comm_bytes = recorder.total_bytes if recorder else comm_bytes
            peak_memory, stop = _agree_on_largest(session, session.device.peak_memory_bytes(), signals.first)
            metrics = to_metrics(step, result, rate, scale, time.perf_counter() - begin, peak_memory, comm_bytes)
            for observer in observers:
                observer.step(metrics)
            if result.problem:
                console.print(
                    f"step {step} skipped, weights untouched: {result.problem}", markup=False, highlight=False
                )
            scale = result.loss_scale
            last = step == job.train.steps or stop > 0
            if last or _is_due(step, job.train.evaluate_every):
                _evaluate(session, step, observers)
            if _is_due(step, job.train.checkpoint_every):
                save(session, out / f"step-{step:08d}")
            if last:
                break
    save(session, out / "export")
    _summarize(session, micro_batches[0], out, time.perf_counter() - started)
    return stop


def save(session: Session, folder: Path) -> None:
    """Write the weights as a Hugging Face folder with tokenizer. Every rank must call it; rank 0 writes."""
    weights = gather_weights(session.model)
    if session.rank == 0:
        config = session.model.config
        if session.job.model.path is None:  # a fresh model learns where texts end from its tokenizer
            config.bos_token_id = config.eos_token_id = session.prepared.end_of_text
        tokenizer = Path(session.prepared.tokenizer) if session.prepared.tokenizer else None
        save_folder(config, weights, tokenizer, folder, DTYPES[session.job.plan.precision.update])
    dist.barrier()


def _train_batches(session: Session) -> Iterable[list[MicroBatch]]:
    train = session.job.train
    return batches(
        session.train_rows,
        steps=train.steps,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        data_rank=data_rank(session.mesh),
        data_ranks=session.job.plan.parallel.data_ranks,
    )


def _evaluate(session: Session, step: int, observers: Sequence[Observer]) -> None:
    """Measure the loss on held-out rows, and show it."""
    if not len(session.held_out_rows):
        return
    rows = evaluation_batches(
        session.held_out_rows,
        micro_batch=session.job.train.micro_batch,
        data_rank=data_rank(session.mesh),
        data_ranks=session.job.plan.parallel.data_ranks,
        max_rows=EVALUATION_ROWS,
    )
    loss = evaluate(session.model, [_to_device(batch, session.place) for batch in rows], session.mesh)
    for observer in observers:
        observer.evaluation(Evaluation(step, loss))


def _to_device(batch: MicroBatch, place: torch.device) -> MicroBatch:
    tensors = (getattr(batch, field.name).to(place, non_blocking=True) for field in fields(batch))
    return MicroBatch(*tensors)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _agree_on_largest(session: Session, *values: int) -> list[int]:
    """The largest of each value over all ranks, in one small reduction."""
    shared = torch.tensor(values, dtype=torch.int64, device=session.place)
    return all_reduce(shared, session.mesh, AXES, "max").tolist()


def _metrics_of(session: Session) -> Callable[..., StepMetrics]:
    """Turns what a step did into a line of metrics.jsonl."""
    job, config = session.job, session.model.config
    flops_per_token = training_flops_per_token(session.anatomy, config, job.data.seq_len)
    peak = session.device.peak_flops(DTYPES[job.plan.precision.forward])
    available = peak * dist.get_world_size() if peak else None

    def to_metrics(
        step: int, result: StepResult, rate: float, scale: LossScale, seconds: float, peak_memory: int, comm_bytes: int
    ) -> StepMetrics:
        return StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens=result.tokens,
            step_seconds=seconds,
            tokens_per_second=result.tokens / seconds,
            mfu=flops_per_token * result.tokens / seconds / available if available else None,
            peak_memory_bytes=peak_memory,
            comm_bytes=comm_bytes,
            loss_scale=scale.value,
            skipped=result.problem is not None,
        )

    return to_metrics


def _summarize(session: Session, batch: MicroBatch, out: Path, seconds: float) -> None:
    """Write run.json: what the report shows beside the metrics."""
    measured = measure_model_state(session.model, session.optimizer, batch, session.job.plan)
    if session.rank == 0:
        anatomy = session.anatomy
        summary = {
            "model_type": anatomy.family,
            "parameters": anatomy.parameters,
            "active_parameters": anatomy.active_parameters,
            "anatomy": {role: f"{count} x {pattern}" for role, pattern, count in anatomy.table()},
            "memory": {"measured": measured, "predicted": model_state_bytes(anatomy.parameters, session.job.plan)},
            "world_size": dist.get_world_size(),
            "device": session.device.name,
            "seconds": seconds,
        }
        (out / "run.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")


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
