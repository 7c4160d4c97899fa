"""Entry point of each rank of `weft compare`: python -m weft.training.compare_rank FOLDER STEPS STEP."""

import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.comm.collectives import all_reduce
from weft.comm.objects import all_gather_json
from weft.data import Prepared, RowSplit
from weft.job import Job, ResolvedJob
from weft.launch.rank_entry import rank_main
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.pipeline.runtime import running_stage
from weft.parallel.runtime import reorder_packed, runtime, set_dropout_seed
from weft.parallel.sequence.rows import shard_sequence
from weft.parallel.weights import part_bounds
from weft.topology.mesh import AXES, data_rank, ranks_along
from weft.training.compare_records import KINDS, RecordedStep, RecordedTensor, Side, TensorKind, tensor_file
from weft.training.optimizer import learning_rate, set_learning_rate
from weft.training.session import Session, open_session, train_batches
from weft.training.step import StepResult, train_step

STAGE_AXES = AXES[1:]  # all axes but pp: the ranks of one stage, which run the same operations at the same time


def record(session: Session, folder: Path, steps: int, recorded: int = 1) -> None:
    """Run the first steps of a job, and record the tensors of one step for `weft.training.compare.compare_folders`. Collective.

    The recorded step runs twice: first to record outputs and gradients, without an update, then as in training. The first rank
    of each pipeline stage writes the tensors of the stage, so all ranks need the same folder. A rank holds one unsharded tensor
    at a time, besides its shards of the model.

    Args:
        session: session of this rank; its model is trained.
        folder: existing folder; files in it are overwritten.
        steps: number of steps, at most the steps of the job.
        recorded: step whose tensors are written, from 1 to `steps`.
    """
    job, model = session.job, session.model
    runtime(model).linear_loss = None  # logits are among the recorded outputs
    tensors: list[RecordedTensor] = []
    recorded_steps: list[RecordedStep] = []
    for step, micro_batches in enumerate(islice(train_batches(session, session.position), steps), 1):
        set_learning_rate(session.optimizer.inner, learning_rate(step, job.train.steps, job.optimizer))
        if step == recorded:
            tensors = _record_gradients(session, folder, micro_batches, step)
        if step == recorded > 1:  # not in step 1, which both sides start with the same weights
            for name, parameter in model.named_parameters():
                _write_full(session, folder, "weight before", name, parameter)
        result = _step(session, session.optimizer, micro_batches, step, job.optimizer.clip_norm)
        recorded_steps.append(RecordedStep(result.loss, result.grad_norm, result.problem))
        if step == recorded:
            tensors += [_write_full(session, folder, "weight", name, p) for name, p in model.named_parameters()]
    tensors = _join_stages(session, tensors)
    if session.rank == 0:
        tensors = _merge_tied_copies(session, folder, tensors)
        Side(recorded_steps, learning_rate(recorded, job.train.steps, job.optimizer), tensors, recorded).write(folder)


def _record_gradients(session: Session, folder: Path, micro_batches: list[Any], step: int) -> list[RecordedTensor]:
    """Run forward and backward of a step, and write outputs and gradients of the stages of this rank."""
    gradients: list[RecordedTensor] = []

    def write_gradients() -> None:
        for name, parameter in _in_backward_order(session.model, calls):
            if parameter.grad is not None:
                gradients.append(_write_full(session, folder, "gradient", name, parameter.grad))

    observer = DistributedOptimizer(
        GradientObserver(session.optimizer.inner.param_groups, write_gradients), session.model, session.device
    )
    observer.loss_scale, previous = session.optimizer.loss_scale, None
    with _record_calls(session.model) as calls, _record_outputs(session, folder) as outputs:
        while observer.loss_scale != previous:  # an overflow lowers a dynamic scale: retry with the lower scale
            previous = observer.loss_scale
            if not _step(session, observer, micro_batches, step, clip_norm=0).problem:
                break
    return [RecordedTensor("output", name, largest) for name, largest in outputs.items()] + gradients


def _step(
    session: Session,
    optimizer: DistributedOptimizer,
    micro_batches: list[Any],
    step: int,
    clip_norm: float,
) -> StepResult:
    set_dropout_seed(session.model, session.job.train.seed, step)
    return train_step(session.model, optimizer, micro_batches, clip_norm)


def _leads(session: Session) -> bool:
    """True on the first rank of each stage."""
    return all(session.mesh.get_local_rank(axis) == 0 for axis in STAGE_AXES)


class GradientObserver(torch.optim.Optimizer):
    """Optimizer whose step calls a function, which reads the gradients, instead of updating the weights."""

    def __init__(self, groups: list[dict[str, Any]], on_step: Callable[[], None]):
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.on_step = on_step

    def step(self, closure: Any = None) -> Any:
        self.on_step()


# Outputs


@contextmanager
def _record_outputs(session: Session, folder: Path) -> Iterator[dict[str, float]]:
    """Write the outputs of embedding, blocks, final norm and head, unsharded and by row; yield their largest values by name.

    The order of micro-batches depends on the pipeline schedule.
    """
    anatomy, model = session.anatomy, session.model
    pipeline, slot = runtime(model).pipeline, runtime(model).forward_slot
    names = [anatomy.embedding, *(block.name for block in anatomy.blocks), anatomy.final_norm, anatomy.head]
    largest: dict[str, float] = {}

    @torch.no_grad()
    def write(name: str, output: Any) -> None:
        if running_stage(pipeline) != _stage_of(session, name):  # the module passes its input through in this stage
            return
        assert slot.current is not None
        current = slot.current.index
        output = output[0] if isinstance(output, tuple) else output
        rows = max(_sizes(session.job, current))
        full = _gather_rows(
            session, output.detach(), rows, anatomy.vocab_size if name == anatomy.head else output.shape[-1]
        )
        if _leads(session):
            for row, value in zip(_row_indices(session.job, current), full, strict=True):
                if row is not None:
                    _save(value, tensor_file(folder, "output", name, row))
            largest[name] = max(largest.get(name, 0.0), _largest(full))

    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, args, output, name=name: write(name, output))
        for name in names
        if name
    ]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def _gather_rows(session: Session, output: Tensor, rows: int, width: int) -> Tensor:
    """Gather the output of one micro-batch from all ranks of a stage, by an all-reduce of zero-padded shards.

    The sizes of the local output show whether it is split over tp along the sequence or the width.

    Args:
        output: local output, [own rows, local tokens, width or local part of it].
        rows: largest number of rows of a data rank.
        width: full width.

    Returns:
        [data_ranks * rows, seq_len, width], the same on every rank of the stage.
    """
    mesh, data_ranks = session.mesh, session.job.plan.parallel.data_ranks
    tp, tp_rank, columns = ranks_along(mesh, "tp"), mesh.get_local_rank("tp"), slice(None)
    tokens = shard_sequence(torch.arange(session.job.data.seq_len, device=output.device)[None], mesh)[0]
    splits_sequence, splits_width = output.shape[1] < len(tokens), output.shape[2] < width
    if splits_sequence:
        tokens = tokens.chunk(tp)[tp_rank]
    if splits_width:
        start, length = part_bounds(width, tp, tp_rank)
        columns = slice(start, start + length)
    full = output.new_zeros(data_ranks, rows, session.job.data.seq_len, width)
    if splits_sequence or splits_width or tp_rank == 0:  # else all tp ranks have the same output: add it once
        full[data_rank(mesh)][: len(output), tokens, columns] = output
    return all_reduce(full, mesh, STAGE_AXES).flatten(0, 1)


def _sizes(job: ResolvedJob, micro_batch: int) -> list[int]:
    """Rows of a micro-batch on each data rank, including padding rows."""
    split = RowSplit.of_job(job)
    return [split.sizes(part)[micro_batch] for part in range(split.data_ranks)]


def _row_indices(job: ResolvedJob, micro_batch: int) -> Iterator[int | None]:
    """Global-batch index of each row of `_gather_rows`; None for padding rows."""
    split, rows = RowSplit.of_job(job), max(_sizes(job, micro_batch))
    for part in range(split.data_ranks):
        own, _ = split.micro_batches(part)[micro_batch]
        yield from (own[row] if row < len(own) else None for row in range(rows))


# Gradients and weights


@contextmanager
def _record_calls(model: nn.Module) -> Iterator[dict[str, None]]:
    """Yield the names of modules with direct parameters, in the order of their first call in forward."""
    calls: dict[str, None] = {}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.setdefault(name))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _in_backward_order(model: nn.Module, calls: dict[str, None]) -> list[tuple[str, nn.Parameter]]:
    """Named parameters in reverse order of the forward calls of their modules."""
    order = {name: index for index, name in enumerate(calls)}
    return sorted(model.named_parameters(), key=lambda item: -order.get(item[0].rpartition(".")[0], -1))


@torch.no_grad()
def _write_full(session: Session, folder: Path, kind: TensorKind, name: str, tensor: Tensor) -> RecordedTensor:
    """Write a full parameter or gradient in the layout of the original model, and measure its spread over a stage."""
    full = tensor.detach()
    full = full.full_tensor() if isinstance(full, DTensor) else full
    maximum, negated_minimum = (
        all_reduce(full.clone(), session.mesh, STAGE_AXES, "max"),
        all_reduce(-full, session.mesh, STAGE_AXES, "max"),
    )
    spread = _largest(maximum + negated_minimum)
    full = reorder_packed(session.model, {name: full}, by_rank=False)[name]
    if _leads(session):
        _save(full, tensor_file(folder, kind, name))
    return RecordedTensor(kind, name, _largest(full), spread)


# Stages


def _stage_of(session: Session, name: str) -> int:
    """Stage of a module or parameter; 0 without a pipeline."""
    pipeline = runtime(session.model).pipeline
    if pipeline is None:
        return 0
    anatomy, stage_io = session.anatomy, pipeline.stage_io
    for stage, blocks in enumerate(stage_io.stages):
        if any(f"{name}.".startswith(f"{anatomy.chained_blocks[index].name}.") for index in blocks):
            return stage
    last = (*stage_io.chain.last, anatomy.final_norm, anatomy.head)
    return len(stage_io.stages) - 1 if any(f"{name}.".startswith(f"{end}.") for end in last) else 0


def _join_stages(session: Session, own: list[RecordedTensor]) -> list[RecordedTensor]:
    """Recorded tensors of all stages, in order of comparison."""
    tables = [own]
    if session.job.plan.parallel.pp > 1:
        gathered = all_gather_json([astuple(tensor) for tensor in own], session.mesh.get_group("pp"))
        tables = [[RecordedTensor(*fields) for fields in table] for table in gathered]

    def order(tensor: RecordedTensor) -> tuple[int, int]:
        stage = _stage_of(session, tensor.name)
        return KINDS.index(tensor.kind), -stage if tensor.kind == "gradient" else stage

    return sorted((tensor for table in tables for tensor in table), key=order)


def _merge_tied_copies(session: Session, folder: Path, tensors: list[RecordedTensor]) -> list[RecordedTensor]:
    """Remove the head's copy of a tied weight on two stages; its difference from the embedding is added to the spread."""
    pipeline = runtime(session.model).pipeline
    if pipeline is None or not pipeline.shares_tied:
        return tensors
    embedding, copy = f"{session.anatomy.embedding}.weight", f"{session.anatomy.head}.weight"
    differences: dict[str, float] = {}
    for kind in (tensor.kind for tensor in tensors if tensor.name == copy):
        files = [tensor_file(folder, kind, name) for name in (embedding, copy)]
        x, y = (load_file(file)["tensor"] for file in files)
        differences[kind] = _largest(x - y)
        shutil.rmtree(files[1].parent)
    return [
        replace(tensor, spread=max(tensor.spread, differences[tensor.kind])) if tensor.name == embedding else tensor
        for tensor in tensors
        if tensor.name != copy
    ]


def _save(tensor: Tensor, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tensor": tensor.contiguous().cpu()}, file)


def _largest(tensor: Tensor) -> float:
    """Largest magnitude of the finite elements."""
    return tensor.abs().nan_to_num(0, 0, 0).max().item()


def main() -> None:
    """Run the steps of one side and record its tensors."""
    # FSDP2 of torch 2.13 calls collectives by names that torch itself deprecates.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    # It warns of multiple messages per DTensor.full_tensor, whose speed does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, steps, recorded = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    prepared = Prepared.from_json((folder / "prepared.json").read_text(encoding="utf-8"))
    record(open_session(Job.load(folder / "job.toml"), prepared), folder, steps, recorded)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
