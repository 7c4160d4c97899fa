"""What each rank of `weft compare` runs: python -m weft.train.compare_rank FOLDER STEPS STEP."""

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

from weft.checkpoint.huggingface import arrange_packed
from weft.comm.collectives import all_reduce
from weft.comm.objects import all_gather_json
from weft.data import MicroBatch, Prepared
from weft.job import Job
from weft.launch.launcher import rank_main
from weft.parallel.dropout import set_dropout_seed
from weft.parallel.pipeline.runtime import running_stage
from weft.parallel.sequence_sharding import shard_sequence
from weft.parallel.weights import part_bounds
from weft.precision.scaling import LossScale
from weft.topology.mesh import AXES, data_rank, ranks_along
from weft.train.compare import KINDS, Kind, Seen, SeenStep, Side, tensor_file
from weft.train.loop import STEPS_OF_A_SEED
from weft.train.optimizer import learning_rate, set_learning_rate
from weft.train.session import Session, open_session, train_batches
from weft.train.step import StepResult, train_step

STAGE_AXES = AXES[1:]  # all but pp: the ranks of one stage, which do the same at the same time


def record(session: Session, folder: Path, steps: int, recorded: int = 1) -> None:
    """Run the first steps of a job, and leave in a folder what `weft.train.compare.compare_folders` compares.

    One step runs twice: in a rehearsal, which looks at outputs and gradients and updates nothing, then as it would in training.
    Every rank must call it; the first rank of each stage of a pipeline writes what the stage has, so that all need the same
    folder. A rank holds one whole tensor at a time beside its share of the model.

    Args:
        session: of this rank; its model is trained.
        folder: exists; files in it are overwritten.
        steps: how many, at most those of the job.
        recorded: the step, from 1 to `steps`, whose tensors are written.
    """
    job, model = session.job, session.model
    tensors: list[Seen] = []
    seen, scale = [], LossScale.from_plan(job.plan.precision.loss_scale)
    for step, micro_batches in enumerate(islice(train_batches(session, session.position), steps), 1):
        set_learning_rate(session.optimizer, learning_rate(step, job.train.steps, job.optimizer))
        if step == recorded:
            tensors = _rehearse(session, folder, micro_batches, step, scale)
        if step == recorded > 1:  # at step 1 both sides begin with the same weights
            for name, parameter in model.named_parameters():
                _write_whole(session, folder, "weight before", name, parameter)
        result = _step(session, session.optimizer, micro_batches, step, scale, job.optimizer.clip_norm)
        scale = result.loss_scale
        seen.append(SeenStep(result.loss, result.grad_norm, result.problem))
        if step == recorded:
            tensors += [_write_whole(session, folder, "weight", name, p) for name, p in model.named_parameters()]
    tensors = _join_stages(session, tensors)
    if session.rank == 0:
        tensors = _count_tied_once(session, folder, tensors)
        Side(seen, learning_rate(recorded, job.train.steps, job.optimizer), tensors, recorded).write(folder)


def _rehearse(
    session: Session, folder: Path, micro_batches: list[MicroBatch], step: int, scale: LossScale
) -> list[Seen]:
    """Forward and backward of a step: outputs and gradients of this rank's stages, as they are in the files."""
    gradients: list[Seen] = []

    def look() -> None:
        for name, parameter in _in_backward_order(session.model, calls):
            if parameter.grad is not None:
                gradients.append(_write_whole(session, folder, "gradient", name, parameter.grad))

    observer = GradientObserver([p for group in session.optimizer.param_groups for p in group["params"]], look)
    before = None
    with _calls_noted(session.model) as calls, _outputs_written(session, folder, micro_batches) as outputs:
        while scale != before:  # an overflow lowers a dynamic scale: try again with the next one
            before = scale
            result = _step(session, observer, micro_batches, step, scale, clip_norm=0)
            scale = result.loss_scale if result.problem else scale
    return [Seen("output", name, largest) for name, largest in outputs.items()] + gradients


def _step(
    session: Session,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[MicroBatch],
    step: int,
    scale: LossScale,
    clip_norm: float,
) -> StepResult:
    set_dropout_seed(session.model, session.job.train.seed * STEPS_OF_A_SEED + step)
    return train_step(session.model, optimizer, micro_batches, session.job.plan, session.mesh, scale, clip_norm)


def _leads(session: Session) -> bool:
    """Whether this is the first rank of its stages."""
    return all(session.mesh.get_local_rank(axis) == 0 for axis in STAGE_AXES)


class GradientObserver(torch.optim.Optimizer):
    """Stands in the place of an optimizer: where that would update the weights, it looks at their gradients."""

    def __init__(self, parameters: list[nn.Parameter], look: Callable[[], None]):
        super().__init__([{"params": parameters}], {})  # of a rank whose stages are frozen there are none
        self.look = look

    def step(self, closure: Any = None) -> Any:
        self.look()


# Outputs


@contextmanager
def _outputs_written(session: Session, folder: Path, micro_batches: list[MicroBatch]) -> Iterator[dict[str, float]]:
    """Write what embedding, blocks, last norm and head put out, whole and by row; yields the largest value of each by name.

    Stages take micro-batches in an order of their own: which one runs is told by its tokens.
    """
    anatomy, model = session.anatomy, session.model
    names = [anatomy.embedding, *(block.name for block in anatomy.blocks), anatomy.final_norm, anatomy.head]
    largest: dict[str, float] = {}
    numbers = {id(batch.input_ids): number for number, batch in enumerate(micro_batches)}
    running = 0

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal running
        running = numbers[id(kwargs["input_ids"])]

    @torch.no_grad()
    def write(name: str, output: Any) -> None:
        if running_stage(model) != _stage_of(session, name):  # it only passes on what other stages make
            return
        output = output[0] if isinstance(output, tuple) else output
        whole = _whole_rows(session, output.detach(), anatomy.vocab_size if name == anatomy.head else output.shape[-1])
        if _leads(session):
            for row, value in zip(_row_numbers(session.job, running, len(output)), whole, strict=True):
                if row is not None:
                    _save(value, tensor_file(folder, "output", name, row))
            largest[name] = max(largest.get(name, 0.0), _largest(whole))

    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, args, output, name=name: write(name, output))
        for name in names
        if name
    ]
    hooks.append(model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def _whole_rows(session: Session, output: Tensor, width: int) -> Tensor:
    """The rows of all data ranks, [data_ranks * rows, seq_len, width], of one micro-batch, on every rank of a stage.

    Each rank puts its part into zeros at its place; the sum over ranks has all parts. What is cut over tp is told by its size.

    Args:
        session: of this rank.
        output: [rows, tokens of this rank, width or this rank's part of it].
        width: of the whole.
    """
    mesh, data_ranks = session.mesh, session.job.plan.parallel.data_ranks
    tp, tp_rank, columns = ranks_along(mesh, "tp"), mesh.get_local_rank("tp"), slice(None)
    places = shard_sequence(torch.arange(session.job.data.seq_len, device=output.device)[None], mesh)[0]
    cuts_sequence, cuts_width = output.shape[1] < len(places), output.shape[2] < width
    if cuts_sequence:
        places = places.chunk(tp)[tp_rank]
    if cuts_width:
        start, length = part_bounds(width, tp, tp_rank)
        columns = slice(start, start + length)
    whole = output.new_zeros(data_ranks, len(output), session.job.data.seq_len, width)
    if cuts_sequence or cuts_width or tp_rank == 0:  # else all ranks of tp have the same
        whole[data_rank(mesh)][:, places, columns] = output
    return all_reduce(whole, mesh, STAGE_AXES).flatten(0, 1)


def _row_numbers(job: Job, micro_batch: int, rows: int) -> Iterator[int | None]:
    """Which row of the global batch each row of `_whole_rows` is, as `weft.data.batches` deals them; None: it only fills up."""
    data_ranks, size = job.plan.parallel.data_ranks, job.train.global_batch_size
    for part in range(data_ranks):
        low, high = part * size // data_ranks, (part + 1) * size // data_ranks
        first = low + micro_batch * job.train.micro_batch_size
        yield from (row if row < high else None for row in range(first, first + rows))


# Gradients and weights


@contextmanager
def _calls_noted(model: nn.Module) -> Iterator[dict[str, None]]:
    """Yields the names of modules that have parameters of their own, in the order in which forward first calls them."""
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
    """Named parameters, those of the module that forward called last first."""
    order = {name: number for number, name in enumerate(calls)}
    return sorted(model.named_parameters(), key=lambda item: -order.get(item[0].rpartition(".")[0], -1))


@torch.no_grad()
def _write_whole(session: Session, folder: Path, kind: Kind, name: str, tensor: Tensor) -> Seen:
    """Write a parameter or its gradient as the model's authors know it, and see whether all ranks of a stage have the same."""
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    highest, lowest = (
        all_reduce(whole.clone(), session.mesh, STAGE_AXES, "max"),
        all_reduce(-whole, session.mesh, STAGE_AXES, "max"),
    )
    spread = _largest(highest + lowest)
    whole = arrange_packed(session.model, {name: whole}, to_rest=False)[name]
    if _leads(session):
        _save(whole, tensor_file(folder, kind, name))
    return Seen(kind, name, _largest(whole), spread)


# Stages


def _stage_of(session: Session, name: str) -> int:
    """The stage of a module or of a parameter; 0 without a pipeline."""
    if session.job.plan.parallel.pp == 1:
        return 0
    model: Any = session.model
    anatomy, relay = session.anatomy, model.pipeline.relay
    for stage, blocks in enumerate(relay.stages):
        if any(f"{name}.".startswith(f"{anatomy.blocks[number].name}.") for number in blocks):
            return stage
    last = (*relay.chain.last, anatomy.final_norm, anatomy.head)
    return len(relay.stages) - 1 if any(f"{name}.".startswith(f"{end}.") for end in last) else 0


def _join_stages(session: Session, own: list[Seen]) -> list[Seen]:
    """What the stages of all ranks have seen, in the order in which it is compared."""
    tables = [own]
    if session.job.plan.parallel.pp > 1:
        gathered = all_gather_json([astuple(seen) for seen in own], session.mesh.get_group("pp"))
        tables = [[Seen(*seen) for seen in table] for table in gathered]

    def order(seen: Seen) -> tuple[int, int]:
        stage = _stage_of(session, seen.name)
        return KINDS.index(seen.kind), -stage if seen.kind == "gradient" else stage

    return sorted((seen for table in tables for seen in table), key=order)


def _count_tied_once(session: Session, folder: Path, tensors: list[Seen]) -> list[Seen]:
    """Of a tied weight on two stages, the head's copy is left out: how far it is from the embedding counts as spread."""
    model: Any = session.model
    if session.job.plan.parallel.pp == 1 or not model.pipeline.shares_tied:
        return tensors
    embedding, copy = f"{session.anatomy.embedding}.weight", f"{session.anatomy.head}.weight"
    apart: dict[str, float] = {}
    for kind in (seen.kind for seen in tensors if seen.name == copy):
        files = [tensor_file(folder, kind, name) for name in (embedding, copy)]
        x, y = (load_file(file)["tensor"] for file in files)
        apart[kind] = _largest(x - y)
        shutil.rmtree(files[1].parent)
    return [
        replace(seen, spread=max(seen.spread, apart[seen.kind])) if seen.name == embedding else seen
        for seen in tensors
        if seen.name != copy
    ]


def _save(tensor: Tensor, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tensor": tensor.contiguous().cpu()}, file)


def _largest(tensor: Tensor) -> float:
    """Magnitude of the largest value that is a number."""
    return tensor.abs().nan_to_num(0, 0, 0).max().item()


def main() -> None:
    """Open the folder of one side, run its steps, and leave."""
    # FSDP2 of torch 2.13 calls collectives by the names it deprecates itself.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    # It counts the messages of DTensor.full_tensor; here none has to be fast.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, steps, recorded = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    prepared = Prepared.from_json((folder / "prepared.json").read_text(encoding="utf-8"))
    record(open_session(Job.load(folder / "job.toml"), prepared), folder, steps, recorded)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
