"""`Run`: a parallelized model in a custom training loop.

    weft.init()                                       # torchrun, srun, mpirun, or one process
    run = weft.prepare(model, optimizer=lambda shards: torch.optim.AdamW(shards, lr=1e-4), plan="plan.toml")
    for batch in loader:                              # rows of this data rank: run.data_rank of run.data_ranks
        with run.accumulate():
            loss = run.backward(run.model(**batch).loss)
        run.clip_grad_norm_(1.0)
        run.step()

Loss, gradients and updates are those of one process that has the rows of all ranks, under every plan. Nothing of the plan is
ignored: loss scale, placement and dtype of states, recompute, compression and overlap work as in `weft train`.
"""

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.checkpoint.folders import folder_of
from weft.checkpoint.huggingface import export_model
from weft.checkpoint.manifest import Position
from weft.checkpoint.parameter_groups import check_kind, restore_settings
from weft.checkpoint.restore import Reader, restore_training, verify_together
from weft.checkpoint.snapshot import Snapshots, Target
from weft.comm.collectives import all_reduce
from weft.comm.objects import all_gather_json, broadcast_json
from weft.data import IGNORED, MicroBatch
from weft.device.device import Device
from weft.errors import CheckpointError, ModelError, PlanError
from weft.job import Job, Model
from weft.parallel.distributed_optimizer import DistributedOptimizer
from weft.parallel.fsdp import begin_micro_batch, free_gathered_weights
from weft.parallel.labels import count_targets
from weft.parallel.logits import gather_logits
from weft.parallel.runtime import Runtime, runtime, set_dropout_seed
from weft.parallel.sequence_sharding import pad_rows, row_multiple
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import AXES, data_rank
from weft.train.step import compute_gradients, evaluate

STEP_FOLDER = re.compile(r"step-(\d+)")


class Update(NamedTuple):
    """Result of `Run.step`; the same on every rank."""

    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """True if a gradient was not finite, so that nothing was updated."""


class Run:
    """A parallelized model with its optimizer; made by `prepare`."""

    def __init__(
        self, model: PreTrainedModel, optimizer: DistributedOptimizer, device: Device, torch_device: torch.device
    ):
        self.model, self.optimizer, self.device, self.torch_device = model, optimizer, device, torch_device
        self.runtime: Runtime = runtime(model)
        self.plan, self.mesh = self.runtime.plan, self.runtime.mesh
        self.rank = dist.get_rank()
        self.data_rank, self.data_ranks = data_rank(self.mesh), self.plan.parallel.data_ranks
        self.steps = 0
        """Calls of `step` so far."""
        self._counted: Tensor | None = None
        """Number of targets of the last forward over all data ranks; None if not counted."""
        self._loss = math.nan
        self._snapshots: Snapshots | None = None
        self._begin()
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _begin(self) -> None:
        """Forget the micro-batches of a step."""
        self._items: list[Tensor] = []
        """Number of targets of each micro-batch of this step over all data ranks."""
        self._losses: list[Tensor] = []
        self._norm: float | None = None
        self._clip = 1.0
        self._inside = False
        """True in `accumulate`."""
        self._is_last = True
        self._is_complete = False
        """True after the backward of the last micro-batch of the step."""

    # Forward and backward

    @contextmanager
    def accumulate(self, *, last: bool = True) -> Iterator[None]:
        """Context of forward and backward of one micro-batch.

        Args:
            last: False if another micro-batch of the same step follows. Gradients are reduced and complete after the last one.

        Raises:
            PlanError: the plan has a pipeline, whose schedule runs all micro-batches together, a backward in fp16, or 1-bit
                compression with several micro-batches.
            ModelError: the step has its last micro-batch already, or the model has an auxiliary loss of its routers.
        """
        if self.runtime.pipeline is not None:
            raise PlanError(
                f"run.accumulate under plan.parallel.pp = {self.plan.parallel.pp}",
                where="weft.Run.accumulate",
                rule="the schedule of a pipeline runs forward and backward of all micro-batches of a step together",
                fix="call run.train_batch(batch) instead of forward and run.backward",
            )
        if self.plan.precision.backward == "fp16":
            raise PlanError(
                'run.accumulate with plan.precision.backward = "fp16"',
                where="weft.Run.accumulate",
                rule="gradients become fp16 between the loss and the logits, in the loss that Weft computes",
                fix="call run.train_batch(batch) instead of forward and run.backward",
            )
        if self.runtime.router_stats.coefficient > 0:
            raise ModelError(
                "run.accumulate with output_router_logits = True",
                where="weft.Run.accumulate",
                rule="the auxiliary loss of the model's own forward depends on which tokens a rank has",
                fix="call run.train_batch(batch), which adds the same auxiliary loss under every plan",
            )
        if self._is_complete:
            raise ModelError(
                "run.accumulate after the last micro-batch of a step",
                where="weft.Run.accumulate",
                rule="gradients are reduced after the last micro-batch",
                fix="pass last=False for all micro-batches but the last, or call run.step() before",
            )
        feedback = self.runtime.feedback
        if self._losses and feedback is not None and feedback.takes_momentum:
            raise PlanError(
                "a second micro-batch with plan.comm.compression = 1-bit",
                where="weft.Run.accumulate",
                rule="the momenta of 1-bit Adam are reduced once a step, with all gradients of the step",
                fix="call run.train_batch(batch), or run a step as one micro-batch",
            )
        if not self._losses:
            set_dropout_seed(self.model, self.steps + 1)
            self.optimizer.begin_step()
        self._is_last, self._inside = last, True
        begin_micro_batch(self.model, self.plan, self.runtime.gradient_reducer, last=last)
        try:
            yield
        finally:
            self._inside = False

    def backward(self, loss: Tensor, items: Tensor | int | None = None) -> Tensor:
        """Run backward from the loss of a micro-batch, inside of `accumulate`.

        The gradients of several micro-batches are averaged by their numbers of targets, as if they were one batch.

        Args:
            loss: scalar, a mean over `items`: the `loss` of the model's output, or a loss of your own.
            items: number of elements that the loss averages, summed over the data ranks, the same on every rank. None: the
                targets in the labels of the last forward; without labels, all micro-batches count the same.

        Returns:
            The loss, detached.

        Raises:
            ModelError: outside of `accumulate`, or `items` is not positive or differs between ranks.
        """
        if not self._inside:
            raise ModelError(
                "run.backward outside of run.accumulate",
                where="weft.Run.backward",
                rule="accumulate says whether more micro-batches of the step follow",
                fix="with run.accumulate(): run.backward(run.model(**batch).loss)",
            )
        if items is not None:
            self._check_items(float(items))
        counted = self._counted if items is None else torch.as_tensor(items)
        weight = torch.ones(()) if counted is None else counted
        self._items.append(weight.to(loss.device, torch.float64))
        self._losses.append(loss.detach())
        # Relative to the first micro-batch, so that a step of one micro-batch has exactly its gradients.
        factor = self._items[-1] / self._items[0].clamp(min=1) if len(self._items) > 1 else torch.ones(())
        wide = torch.promote_types(loss.dtype, torch.float32)  # a loss scale of 65536 is infinite in fp16
        (loss.to(wide) * (factor * self.optimizer.loss_scale.value).to(loss.device, wide)).backward()
        self._norm, self._is_complete = None, self._is_last
        return loss.detach()

    def _check_items(self, items: float) -> None:
        """Refuse `items` that are not positive, or differ between ranks. Collective."""
        largest = torch.tensor([items, -items], dtype=torch.float64, device=self.torch_device)
        high, low = all_reduce(largest, self.mesh, AXES, "max").tolist()
        if high != -low or low >= 0:
            raise ModelError(
                f"items is between {-low:g} and {high:g} on the ranks",
                where="weft.Run.backward",
                rule="items is a positive number, summed over the data ranks, so that it is the same on every rank",
                fix="add it up over the ranks before, for example with weft.count_targets(labels, run.mesh)",
            )

    def train_batch(self, batch: Mapping[str, Tensor], *, micro_batch_size: int = 1) -> float:
        """Run forward and backward of a step under any plan, with or without a pipeline.

        Args:
            batch: input_ids [rows, tokens] of this data rank, and optionally labels, position_ids that restart in each
                document, and an attention_mask that hides padding at the ends of rows. -100 in labels is no target.
            micro_batch_size: rows per micro-batch; it must divide the rows.

        Returns:
            Mean cross entropy over the targets of all data ranks, the same on every rank.

        Raises:
            ModelError: the rows cannot be divided, ranks have different numbers of micro-batches, the mask hides more than
                padding at the ends of rows, or there are gradients of an earlier batch.
        """
        if self._losses:
            raise ModelError(
                "run.train_batch with the gradients of an earlier batch",
                where="weft.Run.train_batch",
                rule="train_batch is a complete step: its batch is divided into micro-batches",
                fix="call run.step() before the next batch, or pass all rows of the step at once",
            )
        micro_batches = self._micro_batches(batch, micro_batch_size)
        _check_counts(len(micro_batches), "train_batch")
        set_dropout_seed(self.model, self.steps + 1)
        found = compute_gradients(self.model, self.optimizer, micro_batches)
        self._items, self._losses = [torch.ones((), dtype=torch.float64)], [torch.tensor(found.loss)]
        self._norm, self._is_complete = found.grad_norm, True
        return found.loss

    @property
    def loss(self) -> float:
        """Mean over all targets of the micro-batches of this step so far; of the last step before the first micro-batch."""
        if not self._losses:
            return self._loss
        items = torch.stack(self._items)
        return ((torch.stack(self._losses).double() * items).sum() / items.sum().clamp(min=1)).item()

    # Update

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the global gradient norm; the next `step` applies it. Collective.

        Returns:
            Global norm before clipping, without loss scale, the same on every rank; not finite if a gradient is not finite.

        Raises:
            ModelError: there are no gradients of a complete step.
        """
        self._check_complete("clip_grad_norm_")
        norm = self._grad_norm()
        self._clip = min(1.0, max_norm / (norm + 1e-6))
        return norm

    def step(self) -> Update:
        """Update the weights, and free the gradients. Collective. Skips the update if a gradient is not finite on any rank.

        Raises:
            ModelError: there are no gradients of a complete step.
        """
        self._check_complete("step")
        norm, self._loss = self._grad_norm(), self.loss
        finite = math.isfinite(norm)
        if finite:
            free_gathered_weights(self.model)  # of a forward between backward and step
            self.optimizer.step(self._clip * self._share())
        self.optimizer.zero_grad()
        self.optimizer.loss_scale = self.optimizer.loss_scale.after(finite)
        self._begin()
        self.steps += 1
        return Update(norm, not finite)

    def _check_complete(self, method: str) -> None:
        if not self._is_complete:
            raise ModelError(
                f"run.{method} without the gradients of a step",
                where=f"weft.Run.{method}",
                rule="the last micro-batch of a step runs in run.accumulate(last=True), which is the default",
                fix=f"call run.backward in run.accumulate, or run.train_batch, before run.{method}",
            )

    def _share(self) -> float:
        """Weight of the first micro-batch divided by the sum of all weights."""
        if len(self._items) == 1:
            return 1.0
        return (self._items[0].clamp(min=1) / torch.stack(self._items).sum().clamp(min=1)).item()

    def _grad_norm(self) -> float:
        if self._norm is None:
            square = self.optimizer.squared_grad_norm_share().to(self.torch_device)
            scale = self.optimizer.loss_scale.value / self._share()
            self._norm = all_reduce(square, self.mesh, AXES).item() ** 0.5 / scale
        return self._norm

    # Evaluation and results

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]], *, micro_batch_size: int = 1) -> float:
        """Mean cross entropy over the targets of all batches of all data ranks, without gradients. Collective.

        Args:
            batches: batches as for `train_batch`, the same number of rows on every data rank.
            micro_batch_size: rows per micro-batch.

        Raises:
            ModelError: ranks have different numbers of micro-batches, or none.
        """
        micro_batches = [part for batch in batches for part in self._micro_batches(batch, micro_batch_size)]
        _check_counts(len(micro_batches), "evaluate")
        held_out = evaluate(self.model, micro_batches)
        free_gathered_weights(self.model)
        return held_out

    def gather_logits(self, logits: Tensor, tokens: int) -> Tensor:
        """Logits of full rows and of the full vocabulary, for a loss of your own under tp and cp. Differentiable; collective.

        The loss must be a mean over rows of this data rank; all ranks of tp and cp compute the same loss.

        Args:
            logits: `logits` of the model's output, of the tokens and the part of the vocabulary of this rank.
            tokens: tokens of a row that was passed to the model.

        Returns:
            [rows, tokens, vocabulary], the same on all ranks that share rows.
        """
        return gather_logits(self.model, logits, tokens)

    def export(self, folder: str | Path, tokenizer: str | Path | None = None) -> None:
        """Write the weights as a Hugging Face folder, which `from_pretrained` loads. Collective.

        Args:
            folder: folder to write; an earlier export is replaced when the new one is complete.
            tokenizer: folder whose tokenizer files are copied.

        Raises:
            CheckpointError: the folder has something else than an export, or cannot be written; the same on every rank.
        """
        if broadcast_json(_has_other_files(Path(folder))):
            raise CheckpointError(
                "the folder has other files than an export",
                where=str(folder),
                rule="an export replaces an earlier export only: a folder with config.json and without folders",
                fix="choose another folder",
            )
        source = Path(tokenizer) if tokenizer else None
        if problem := export_model(self.model, Path(folder), source, DTYPES[self.plan.precision.update]):
            raise CheckpointError(f"the weights cannot be written: {problem}", where=str(folder))

    # Checkpoints

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Save the training state in the background: weights, optimizer, random numbers and loss scale. Collective.

        The checkpoint is that of `weft train`: digested, without pickle, complete when its folder appears, and it resumes under
        any plan. A checkpoint that is still being written is finished first.

        Args:
            folder: "step-N" in a folder of checkpoints; written as step-0000000N.
            extra: values of your own that JSON can hold, such as the state of a scheduler; `load` returns them.

        Raises:
            CheckpointError: the name is not step-N, a checkpoint of this step exists, `extra` would change as JSON, or the last
                checkpoint could not be written; the same on every rank.
        """
        step, problem = STEP_FOLDER.fullmatch(Path(folder).name), ""
        try:
            if extra is not None and (not isinstance(extra, dict) or json.loads(json.dumps(extra)) != extra):
                problem = "JSON would change it: keys become text, and tuples become lists"
        except (TypeError, ValueError) as error:
            problem = str(error)
        if problem:
            raise CheckpointError(
                f"extra cannot be saved: {problem}",
                where=str(folder),
                rule="extra is a dict that JSON returns unchanged",
                fix="use lists, text keys, numbers and text",
            )
        if step is None:
            raise CheckpointError(
                f"a checkpoint named {Path(folder).name}",
                where=str(folder),
                rule="a checkpoint is named after its step, so that the newest is known",
                fix='name it "step-100", in a folder for checkpoints',
            )
        self.finish()
        number = int(step[1])
        if broadcast_json(folder_of(Path(folder).parent, number).exists()):
            raise CheckpointError(
                f"a checkpoint of step {number} exists",
                where=str(folder),
                rule="a checkpoint is never overwritten",
                fix="choose another folder, or remove the checkpoint",
            )
        position = Position(
            step=number,
            next_batch=self.steps,
            loss_scale=self.optimizer.loss_scale,
            extra=extra,
        )
        self._snapshot_writer().take(position, Target(Path(folder).parent, self.rank == 0, keep=0, keep_hours=0))

    def finish(self) -> None:
        """Wait until the last checkpoint is written; call it before the program ends. Collective.

        Raises:
            CheckpointError: a checkpoint could not be written; the same on every rank.
        """
        if self._snapshots is None:
            return
        self._snapshots.finish()
        failed = [text for text in self._snapshots.take_messages() if text.startswith("no checkpoint")]
        if failed := broadcast_json(failed):
            raise CheckpointError(failed[-1], where="weft.Run.save", fix="mend the cause, and save again")

    def load(self, folder: str | Path) -> dict[str, Any] | None:
        """Load a checkpoint of this model, saved under any plan. Collective.

        Returns:
            The `extra` of `save`.

        Raises:
            CheckpointError: the checkpoint is damaged, or it is of another model or optimizer; the same on every rank.
            ModelError: a step is not complete.
        """
        if self._losses and not self._is_complete:
            raise ModelError(
                "run.load between two micro-batches of a step",
                where="weft.Run.load",
                rule="gradients of earlier micro-batches are not reduced yet",
                fix="load before the first or after the last micro-batch of a step",
            )
        self.finish()
        dist.barrier()
        path = Path(folder)
        if (step := STEP_FOLDER.fullmatch(path.name)) and not path.exists():
            path = path.with_name(f"step-{int(step[1]):08d}")
        manifest = verify_together(path)
        check_kind(self.optimizer.inner, manifest.position.parameter_groups, path)
        free_gathered_weights(self.model)
        self.optimizer.finish_offload()
        self.optimizer.state.clear()
        with Reader(path, manifest) as reader:
            if (message := restore_training(self.model, self.optimizer, self.device, reader)) and self.rank == 0:
                warnings.warn(message, stacklevel=2)
        position = manifest.position
        restore_settings(self.optimizer.inner, position.parameter_groups)
        self.optimizer.loss_scale, self.steps = position.loss_scale, position.next_batch
        self.zero_grad()
        return position.extra

    def zero_grad(self) -> None:
        """Free the gradients, and forget the micro-batches of a step that will not be completed."""
        self.optimizer.zero_grad()
        self._begin()

    def _snapshot_writer(self) -> Snapshots:
        if self._snapshots is None:
            config = json.loads(self.model.config.to_json_string(use_diff=False))
            job = Job(model=Model(config=config), plan=self.plan)
            self._snapshots = Snapshots(job, self.model, self.optimizer, self.device, self.torch_device)
        return self._snapshots

    # Batches

    def _count(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: count the targets of a micro-batch, if there are several in the step."""
        labels, self._counted = kwargs.get("labels"), None
        several = self._inside and (bool(self._losses) or not self._is_last)
        if several and kwargs.get("num_items_in_batch") is not None:
            raise ModelError(
                "num_items_in_batch in run.accumulate",
                where="weft.Run.accumulate",
                rule="run.backward weights the micro-batches of a step by their numbers of targets",
                fix="leave num_items_in_batch out",
            )
        if several and isinstance(labels, Tensor):
            self._counted = count_targets(labels, self.mesh)

    def _micro_batches(self, batch: Mapping[str, Tensor], size: int) -> list[MicroBatch]:
        rows = batch["input_ids"].to(self.torch_device)
        labels = batch.get("labels", rows).to(self.torch_device)
        if len(rows) % size:
            raise ModelError(
                f"{len(rows)} rows in micro-batches of {size}",
                where="weft.Run.train_batch",
                rule="all micro-batches have the same number of rows",
                fix="pass a micro_batch_size that divides the rows of a data rank",
            )
        mask = batch.get("attention_mask")
        if mask is not None and not bool((mask[:, 1:] <= mask[:, :-1]).all()):
            raise ModelError(
                "an attention_mask that hides more than padding at the ends of rows",
                where="weft.Run.train_batch",
                rule="rows begin with their first token; documents of a row are told apart by position_ids that restart",
                fix='pad on the right (tokenizer.padding_side = "right")',
            )
        if mask is not None:
            labels = labels.masked_fill(mask.to(labels.device) == 0, IGNORED)
        positions = batch.get("position_ids")
        positions = torch.arange(rows.shape[1]).expand_as(rows) if positions is None else positions.expand_as(rows)
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        starts = torch.nn.functional.pad(positions[:, 1:], (0, 1)) == 0  # the next token is of another document
        targets = targets.masked_fill(starts.to(targets.device), IGNORED)
        multiple = row_multiple(self.runtime.anatomy, self.plan) if self.runtime.takes_full_rows else 1
        # Position 0 makes each padding token a separate document.
        padding = ((rows, 0), (positions.to(self.torch_device), 0), (targets, IGNORED))
        tensors = [pad_rows(tensor, multiple, value) for tensor, value in padding]
        parts = zip(*(tensor.contiguous().split(size) for tensor in tensors), strict=True)
        return [MicroBatch(*part) for part in parts]


def _has_other_files(folder: Path) -> bool:
    """True if a folder exists and is neither empty nor an earlier export."""
    found = list(folder.iterdir()) if folder.is_dir() else [folder] * folder.exists()
    is_export = any(path.name == "config.json" for path in found) and not any(path.is_dir() for path in found)
    return bool(found) and not is_export


def _check_counts(own: int, method: str) -> None:
    """Refuse different numbers of micro-batches, for whose collectives other ranks would wait. Collective."""
    counts = all_gather_json(own)
    if len(set(counts)) > 1 or not own:
        raise ModelError(
            f"between {min(counts)} and {max(counts)} micro-batches on the ranks",
            where=f"weft.Run.{method}",
            rule="all ranks run the same number of micro-batches, at least one",
            fix="give each data rank the same number of rows; fill up with rows whose labels are -100",
        )
