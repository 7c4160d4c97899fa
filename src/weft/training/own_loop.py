"""`Run`: a parallelized model in a custom training loop.

    weft.init()                                       # torchrun, srun, mpirun, or one process
    run = weft.prepare(model, optimizer=lambda shards: torch.optim.AdamW(shards, lr=1e-4), plan="plan.toml")
    for batch in loader:                              # rows of this data rank: run.data_rank of run.data_ranks
        with run.accumulate():
            loss = run.backward(run.model(**batch).loss)
        run.clip_grad_norm_(1.0)
        run.step()

Loss, gradients and updates are those of one process that has the rows of all ranks. Nothing of the plan is ignored.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from weft.comm.collectives import all_reduce
from weft.comm.objects import broadcast_json
from weft.device.device import Device
from weft.errors import ModelError, PlanError
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp import begin_micro_batch, free_gathered_weights
from weft.parallel.data.gradients import clip_factor
from weft.parallel.data.outside_calls import explain_shards
from weft.parallel.loss.logits import gather_logits
from weft.parallel.runtime import Runtime, runtime, set_dropout_seed
from weft.topology.mesh import DATA_AXES, data_rank
from weft.training.own_batches import OnDevice, split_batches
from weft.training.own_checkpoints import OwnCheckpoints, export
from weft.training.own_step import OwnStep, StepState
from weft.training.own_weights import check_accumulate, record_forward, unknown_weight, weigh
from weft.training.step import compute_gradients, evaluate


class Update(NamedTuple):
    """Result of `Run.step`; the same on every rank."""

    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """True if a gradient was not finite, so that nothing was updated."""


class Run:
    """A parallelized model with its optimizer; made by `prepare`."""

    def __init__(self, model: Any, optimizer: DistributedOptimizer, device: Device, torch_device: torch.device):
        self.model, self.optimizer, self.device, self.torch_device = model, optimizer, device, torch_device
        self.runtime: Runtime = runtime(model)
        self.plan, self.mesh = self.runtime.plan, self.runtime.mesh
        self.rank = dist.get_rank()
        self.data_rank, self.data_ranks = data_rank(self.mesh), self.plan.parallel.data_ranks
        self.steps = 0
        """Calls of `step` so far."""
        self._seed = broadcast_json(torch.initial_seed() % 2**31)  # of dropout: that of torch.manual_seed on rank 0
        self._step, self._loss = OwnStep(), math.nan
        self._checkpoints = OwnCheckpoints(model, optimizer, device, torch_device)
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    # Forward and backward

    @contextmanager
    def accumulate(self, *, last: bool = True) -> Iterator[None]:
        """Context of forward and backward of one micro-batch.

        Args:
            last: False if another micro-batch of the same step follows. Gradients are reduced and complete after the last one.

        Raises:
            PlanError: the plan has a pipeline, whose schedule runs all micro-batches together, a backward in fp16, or
                compression and the step has several micro-batches.
            ModelError: the step has its last micro-batch already, or the model has an auxiliary loss of its routers.
            JobError: the plan has 1-bit compression, and the optimizer is not 1-bit Adam.
            ModelError, from inside: full tensors are mixed with shards.
        """
        step, reducer = self._step, self.runtime.gradient_reducer
        check_accumulate(self.runtime)
        step.check_enter()
        if self.runtime.feedback is not None and (step.is_begun or not last):
            raise PlanError(
                f"several micro-batches in a step with plan.comm.compression = {self.plan.comm.compression}",
                where="weft.Run.accumulate",
                rule="the compression error of a step is added to the gradients of the next step, and here the weights of "
                "micro-batches are known only after the last one",
                fix="call run.train_batch(batch), or run a step as one micro-batch",
            )
        if reducer is not None:  # before a part of the model is called, without the forward of the model
            reducer.prepare(self.model, None)
        if not step.is_begun:
            set_dropout_seed(self.model, self._seed, self.steps + 1)
            self.optimizer.begin_step()
        step.enter(last)
        begin_micro_batch(self.model, self.plan, reducer, last=last)
        try:
            yield
        except RuntimeError as error:
            explain_shards(error)
            raise
        finally:
            step.leave()

    def backward(self, loss: Tensor, items: Tensor | int | None = None) -> Tensor:
        """Run backward from the loss of a micro-batch, inside of `accumulate`.

        The gradients of several micro-batches are averaged by their numbers of targets, as if they were one batch.

        Args:
            loss: scalar, a mean over `items`: the `loss` of the model's output, or a loss of your own.
            items: number of elements of this data rank that the loss averages; may differ between the data ranks. None: the
                targets in the labels of the forward in this `accumulate`; without labels, all micro-batches and ranks count the
                same.

        Returns:
            The mean of the loss over the data ranks, weighted by `items`, detached; the same on every rank.

        Raises:
            ModelError: outside of `accumulate`, or the second time inside of one; `items` is negative, or zero on all ranks, or
                differs between ranks for a loss of the model; the weights of several micro-batches are not known.
        """
        step = self._step
        step.check_backward()
        found = weigh(step.forward, items, step.has_several, self.mesh, self.torch_device)
        if step.is_begun and found.is_counted != step.gradients.is_counted:
            raise unknown_weight("micro-batches of which some have labels or items and others have neither")
        step.go(StepState.BACKWARD)
        own = loss.detach().double() * found.share / self.data_ranks
        mean = all_reduce(own, self.mesh, DATA_AXES).to(loss.dtype)
        factor = step.gradients.add(mean, found.weight.to(loss.device, torch.float64), found.is_counted)
        wide = torch.promote_types(loss.dtype, torch.float32)  # a loss scale of 65536 is infinite in fp16
        (loss.to(wide) * (factor * found.share * self.optimizer.loss_scale.value).to(loss.device, wide)).backward()
        step.finish_backward()
        return mean

    def train_batch(
        self, batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]], *, micro_batch_size: int = 1
    ) -> float:
        """Run forward and backward of a step under any plan, with or without a pipeline.

        Args:
            batch: rows of this data rank, or a sequence of such batches: of a decoder of text input_ids [rows, tokens], and
                optionally labels, position_ids that restart in each document, and an attention_mask that hides padding at
                the ends of rows; else arguments of the forward, with int64 labels, or with numbers [rows, num_labels] of a
                classifier for regression or several classes. -100 in int64 labels is no target.
            micro_batch_size: rows per micro-batch; it must divide the rows of each batch.

        Returns:
            Mean loss over the targets of all data ranks.

        Raises:
            ModelError: the rows cannot be divided, the mask hides more than padding, or there are earlier gradients.
        """
        if self._step.is_begun:
            raise ModelError(
                "run.train_batch with the gradients of an earlier batch",
                where="weft.Run.train_batch",
                rule="train_batch is a complete step: its batch is divided into micro-batches",
                fix="call run.step() before the next batch, or pass all rows of the step at once",
            )
        given = [batch] if isinstance(batch, Mapping) else batch
        split = split_batches(given, micro_batch_size, self.model, "train_batch")
        micro_batches = [part.to(self.torch_device) for part in split]
        set_dropout_seed(self.model, self._seed, self.steps + 1)
        found = compute_gradients(self.model, self.optimizer, micro_batches)
        gradients = self._step.gradients
        gradients.add(torch.tensor(found.loss), torch.ones((), dtype=torch.float64), is_counted=False)
        gradients.norm = found.grad_norm
        self._step.go(StepState.COMPLETE)
        return found.loss

    @property
    def loss(self) -> float:
        """Mean loss of the micro-batches of this step so far over all data ranks, weighted by their numbers of targets. Before
        the first micro-batch, the loss of the previous step."""
        return self._step.gradients.loss() if self._step.is_begun else self._loss

    # Update

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the global gradient norm; the next `step` applies it. Collective.

        Returns:
            Global norm before clipping, without loss scale, the same on every rank; not finite if a gradient is not finite.

        Raises:
            ModelError: there are no gradients of a complete step.
        """
        self._step.check_complete("clip_grad_norm_")
        norm = self._grad_norm()
        self._step.gradients.clip = clip_factor(norm, max_norm)
        return norm

    def step(self) -> Update:
        """Update the weights, and free the gradients. Collective. Skips the update if a gradient is not finite on any rank.

        Raises:
            ModelError: there are no gradients of a complete step.
        """
        self._step.check_complete("step")
        norm, self._loss, gradients = self._grad_norm(), self.loss, self._step.gradients
        finite = math.isfinite(norm)
        if finite:
            free_gathered_weights(self.model)  # of a forward between backward and step
        self.optimizer.update(finite, gradients.clip * gradients.share())
        self.zero_grad()
        self.steps += 1
        return Update(norm, not finite)

    def _grad_norm(self) -> float:
        gradients = self._step.gradients
        if gradients.norm is None:
            gradients.norm = self.optimizer.grad_norm(gradients.share())
        return gradients.norm

    # Evaluation and results

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]], *, micro_batch_size: int = 1) -> float:
        """Mean cross entropy over the targets of all batches of all data ranks, without gradients. Collective.

        Args:
            batches: batches as for `train_batch`, the same number of rows on every data rank.
            micro_batch_size: rows per micro-batch.

        Raises:
            ModelError: ranks have different numbers of micro-batches, or none.
        """
        micro_batches = split_batches(batches, micro_batch_size, self.model, "evaluate")
        held_out = evaluate(self.model, OnDevice(micro_batches, self.torch_device))
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
            tokenizer: folder whose tokenizer files are copied; default: the folder from which the model was loaded.

        Raises:
            CheckpointError: the folder has something else than an export, or cannot be written; the same on every rank.
        """
        export(self.model, folder, tokenizer)

    # Checkpoints

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Save the training state in the background: weights, optimizer, random numbers and loss scale. Collective.

        The checkpoint is that of `weft train`: digested, without pickle, complete when its folder appears, and it resumes under
        any plan. A checkpoint that is still being written is finished first.

        Args:
            folder: "step-N" in a folder of checkpoints; written as step-0000000N.
            extra: values of your own that JSON can hold, the same on every rank, such as the state of a scheduler; `load`
                returns them.

        Raises:
            CheckpointError: the name is not step-N, a checkpoint of this step exists, `extra` would change as JSON, or the last
                checkpoint could not be written; the same on every rank.
            JobError: the hosts do not share the folder; the same on every rank.
        """
        self._checkpoints.save(Path(folder), self.steps, extra)

    def finish(self) -> None:
        """Wait until the last checkpoint is written; call it before the program ends. Collective.

        Raises:
            CheckpointError: a checkpoint could not be written; the same on every rank.
        """
        self._checkpoints.finish()

    def load(self, folder: str | Path, key_file: str | Path | None = None) -> dict[str, Any] | None:
        """Load a checkpoint of this model, saved under any plan. Collective.

        Args:
            folder: checkpoint of `save` or of `weft train`.
            key_file: file with the key that signed it, where `weft train` has signed it (checkpoint.key_file).

        Returns:
            The `extra` of `save`.

        Raises:
            CheckpointError: the checkpoint is damaged, or it is of another model or optimizer; the same on every rank.
            ModelError: a step is not complete.
        """
        if self._step.is_begun and not self._step.is_complete:
            raise ModelError(
                "run.load between two micro-batches of a step",
                where="weft.Run.load",
                rule="gradients of earlier micro-batches are not reduced yet",
                fix="load before the first or after the last micro-batch of a step",
            )
        position = self._checkpoints.load(Path(folder), key_file)
        self.steps = position.next_batch
        self.zero_grad()
        return position.extra

    def zero_grad(self) -> None:
        """Free the gradients, and forget the micro-batches of a step that will not be completed."""
        self.optimizer.zero_grad()
        self._step = OwnStep()

    def _count(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook: count the targets of a micro-batch, if there are several in the step; move it to the device."""
        step = self._step
        if step.is_inside:
            step.forward = record_forward(self.model, args, kwargs, step.has_several, self.mesh)
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.torch_device), (args, kwargs))
