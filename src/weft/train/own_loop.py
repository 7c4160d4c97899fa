"""A training loop of your own, on the parts of `weft train`.

    weft.init()                                       # torchrun, srun, mpirun, or one process
    run = weft.prepare(model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), plan="plan.toml")
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.checkpoint.huggingface import gather_weights, materialize, save_folder
from weft.checkpoint.manifest import Position
from weft.checkpoint.restore import Reader, own_tensors, restore, restore_feedback, verify_together
from weft.checkpoint.slices import set_rng_states
from weft.checkpoint.snapshot import Snapshots, Target
from weft.comm.collectives import all_reduce
from weft.comm.objects import broadcast_json
from weft.data import IGNORED, MicroBatch
from weft.device.device import Device, detect
from weft.errors import CheckpointError, ModelError, PlanError
from weft.job import Job, Model
from weft.launch.launcher import connect
from weft.parallel.distributed_optimizer import DistributedOptimizer
from weft.parallel.fsdp import begin_micro_batch
from weft.parallel.labels import count_targets
from weft.parallel.logits import gather_logits
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import Runtime, runtime
from weft.parallel.sequence_sharding import pad_rows, row_multiple
from weft.plan import Plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import AXES, build_mesh, check_mesh, data_rank
from weft.train.step import compute_gradients, evaluate

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEP_FOLDER = re.compile(r"step-(\d+)")


class Update(NamedTuple):
    """Result of `Run.step`; the same on every rank."""

    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """True if a gradient was not finite, so that nothing was updated."""


def init() -> None:
    """Join the ranks that torchrun, srun, mpirun or `weft train` have started; one process is a job of one rank.

    Raises:
        DeviceError: this host has fewer accelerators than ranks.
        JobError: the environment does not say where the ranks meet.
    """
    if not dist.is_initialized():
        connect(detect())


def prepare(
    model: PreTrainedModel,
    *,
    optimizer: MakeOptimizer,
    plan: Plan | str | Path | None = None,
    mesh: DeviceMesh | None = None,
    weights: str | Path | None = None,
) -> "Run":
    """Parallelize a model and its optimizer for a training loop of your own. Collective; calls `init` if needed.

    Args:
        model: causal language model of Transformers with the same weights on all ranks, on any device, or on the meta device.
        optimizer: function that makes the optimizer from the list of trained parameters, which are shards.
        plan: plan, or the path of a TOML file with a plan; None: ZeRO stage 3 over all ranks.
        mesh: device mesh of the plan; None: made from the plan.
        weights: Hugging Face folder with the weights of a model on the meta device.

    Raises:
        PlanError: the plan does not fit the model, the ranks or the mesh.
        ModelError: the model cannot be read, or it is on the meta device and `weights` is missing.
    """
    init()
    device = detect()
    torch_device = device.torch_device(torch.accelerator.current_device_index() if device.type != "cpu" else 0)
    if isinstance(plan, str | Path):
        plan = Job.parse({"model": {"config": {}}, "plan": str(plan)}, where=str(plan)).plan
    plan = (plan or Plan()).resolve(dist.get_world_size())
    if mesh is None:
        mesh = build_mesh(plan, device.type, dist.get_world_size())
    check_mesh(plan, mesh)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta and weights is None:
        raise ModelError(
            f"{type(model).__name__} is on the meta device and has no weights",
            where="weft.prepare",
            rule="a model has its weights, or they are loaded straight into the shards of each rank",
            fix='pass weights="folder of the model", or build the model without the meta device',
        )
    if not on_meta:
        nn.Module.to(model, torch_device)
    parallelize(model, plan, mesh)
    if on_meta:
        materialize(model, Model(path=str(weights)), torch_device)
    model.train()
    trained: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inner = optimizer(trained or [{"params": []}])  # torch refuses an empty list, which a frozen stage of a pipeline has
    return Run(model, DistributedOptimizer(inner, model, device), device, torch_device)


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
        self._items: list[Tensor] = []
        """Number of targets of each micro-batch of this step over all ranks."""
        self._losses: list[Tensor] = []
        self._norm: float | None = None
        self._clip = 1.0
        self._counted: Tensor | None = None
        """Targets of the last forward, over all data ranks; None if it had no labels."""
        self._is_last = True
        self._snapshots: Snapshots | None = None
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    # Forward and backward

    @contextmanager
    def accumulate(self, *, last: bool = True) -> Iterator[None]:
        """Context of forward and backward of one micro-batch.

        Args:
            last: False if another micro-batch of the same step follows. Gradients are reduced and complete after the last one.

        Raises:
            PlanError: the plan has a pipeline, whose schedule runs all micro-batches together, or a backward in fp16.
        """
        if self.runtime.pipeline is not None:
            raise PlanError(
                f"run.accumulate under plan.parallel.pp = {self.plan.parallel.pp}",
                where="weft.prepare",
                rule="the schedule of a pipeline runs forward and backward of all micro-batches of a step together",
                fix="call run.train_batch(batch) instead of forward and run.backward",
            )
        if self.plan.precision.backward == "fp16":
            raise PlanError(
                'run.accumulate with plan.precision.backward = "fp16"',
                where="weft.prepare",
                rule="gradients become fp16 between the loss and the logits, in the loss that Weft computes",
                fix="call run.train_batch(batch) instead of forward and run.backward",
            )
        if not self._losses:
            self.optimizer.begin_step()
        self._is_last = last
        begin_micro_batch(self.model, self.plan, self.runtime.gradient_reducer, last=last)
        yield

    def backward(self, loss: Tensor, items: Tensor | int | None = None) -> Tensor:
        """Run backward from the loss of a micro-batch, inside of `accumulate`.

        The gradients of several micro-batches are averaged by their numbers of targets, as if they were one batch.

        Args:
            loss: scalar, a mean over `items`: the `loss` of the model's output, or a loss of your own.
            items: what the loss is a mean over, on all data ranks. None: the targets of the labels of the last forward; without
                labels, all micro-batches count the same.

        Returns:
            The loss, detached.
        """
        counted = self._counted if items is None else torch.as_tensor(items, device=loss.device)
        weight = torch.ones((), device=loss.device) if counted is None else counted.to(loss.device)
        self._items.append(weight.double().clamp(min=1))
        self._losses.append(loss.detach())
        # Relative to the first micro-batch, so that a step of one micro-batch has exactly its gradients.
        factor = self._items[-1] / self._items[0] * self.optimizer.loss_scale.value
        (loss * factor.to(loss.dtype)).backward()
        return loss.detach()

    def train_batch(self, batch: Mapping[str, Tensor], *, micro_batch_size: int = 1) -> float:
        """Run forward and backward of a step under any plan, with or without a pipeline.

        Args:
            batch: input_ids [rows, tokens] of this data rank, and optionally labels, position_ids that restart in each
                document, and an attention_mask that hides padding at the ends of rows. -100 in labels is no target.
            micro_batch_size: rows per micro-batch; it must divide the rows.

        Returns:
            Mean cross entropy over the targets of all data ranks, the same on every rank.

        Raises:
            ModelError: the rows cannot be divided, the mask hides more than padding at the ends of rows, or there are gradients
                of an earlier batch.
        """
        if self._losses:
            raise ModelError(
                "run.train_batch with the gradients of an earlier batch",
                where="weft.Run.train_batch",
                rule="train_batch is a complete step: its batch is divided into micro-batches",
                fix="call run.step() before the next batch, or pass all rows of the step at once",
            )
        found = compute_gradients(self.model, self.optimizer, self._micro_batches(batch, micro_batch_size))
        self._items = [torch.ones((), dtype=torch.float64)]
        self._losses, self._norm = [torch.tensor(found.loss)], found.grad_norm
        return found.loss

    @property
    def loss(self) -> float:
        """Loss of the step so far: the mean over all targets of its micro-batches."""
        items = torch.stack(self._items)
        return ((torch.stack(self._losses).double() * items).sum() / items.sum()).item()

    # Update

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the global gradient norm; the next `step` applies it. Collective.

        Returns:
            Global norm before clipping, without loss scale, the same on every rank; not finite if a gradient is not finite.
        """
        norm = self._grad_norm()
        self._clip = min(1.0, max_norm / (norm + 1e-6))
        return norm

    def step(self) -> Update:
        """Update the weights, and free the gradients. Collective. Skips the update if a gradient is not finite on any rank.

        Raises:
            ModelError: there are no gradients of a complete step.
        """
        if not self._losses or not self._is_last:
            raise ModelError(
                "run.step without the gradients of a step",
                where="weft.Run.step",
                rule="the last micro-batch of a step runs in run.accumulate(last=True), which is the default",
                fix="call run.backward in run.accumulate, or run.train_batch, before run.step",
            )
        norm = self._grad_norm()
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step(self._clip * self._share())
        self.optimizer.zero_grad()
        self.optimizer.loss_scale = self.optimizer.loss_scale.after(finite)
        self._items, self._losses, self._norm, self._clip = [], [], None, 1.0
        self.steps += 1
        return Update(norm, not finite)

    def _share(self) -> float:
        """Factor of the gradients of micro-batches that are weighted relative to the first one."""
        return 1.0 if len(self._items) == 1 else (self._items[0] / torch.stack(self._items).sum()).item()

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
        """
        micro_batches = [part for batch in batches for part in self._micro_batches(batch, micro_batch_size)]
        return evaluate(self.model, micro_batches)

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
            folder: folder to write; an existing folder is replaced when the new one is complete.
            tokenizer: folder whose tokenizer files are copied.

        Raises:
            CheckpointError: the folder cannot be written; the same on every rank.
        """
        weights, problem = gather_weights(self.model), ""
        if self.rank == 0:
            try:
                source = Path(tokenizer) if tokenizer else None
                save_folder(self.model.config, weights, source, Path(folder), DTYPES[self.plan.precision.update])
            except (OSError, SafetensorError) as error:
                problem = str(error)
        if problem := broadcast_json(problem):
            raise CheckpointError(f"the weights cannot be written: {problem}", where=str(folder), fix="free disk space")

    # Checkpoints

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Save the training state in the background: weights, optimizer, random numbers and loss scale. Collective.

        The checkpoint is that of `weft train`: digested, without pickle, complete when its folder appears, and it resumes under
        any plan. A checkpoint that is still being written is finished first.

        Args:
            folder: "step-N" in a folder of checkpoints; written as step-0000000N.
            extra: values of your own that JSON can hold, such as the state of a scheduler; `load` returns them.

        Raises:
            CheckpointError: the name is not step-N, or `extra` cannot be written as JSON.
        """
        step = STEP_FOLDER.fullmatch(Path(folder).name)
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra cannot be saved: {error}", where=str(folder), rule="extra is JSON") from None
        if step is None:
            raise CheckpointError(
                f"a checkpoint named {Path(folder).name}",
                where=str(folder),
                rule="a checkpoint is named after its step, so that the newest is known",
                fix='name it "step-100", in a folder of its own',
            )
        number = int(step[1])
        position = Position(step=number, next_batch=number, loss_scale=self.optimizer.loss_scale, extra=extra)
        self._snapshot_writer().take(position, Target(Path(folder).parent, self.rank == 0, keep=0, keep_hours=0))

    def finish(self) -> None:
        """Wait until the last checkpoint is written. Collective.

        Raises:
            CheckpointError: a checkpoint could not be written; the same on every rank.
        """
        if self._snapshots is None:
            return
        self._snapshots.finish()
        failed = [text for text in self._snapshots.take_messages() if text.startswith("no checkpoint")]
        if failed := broadcast_json(failed):
            raise CheckpointError(failed[-1], where="weft.Run.save", fix="free disk space, and save again")

    def load(self, folder: str | Path) -> dict[str, Any] | None:
        """Load a checkpoint of this model, saved under any plan. Collective.

        Returns:
            The `extra` of `save`.

        Raises:
            CheckpointError: the checkpoint is damaged, or it is of another model.
        """
        self.finish()
        dist.barrier()
        path = Path(folder)
        if (step := STEP_FOLDER.fullmatch(path.name)) and not path.exists():
            path = path.with_name(f"step-{int(step[1]):08d}")
        manifest = verify_together(path)
        with Reader(path, manifest) as reader:
            restore(self.model, self.optimizer, reader, lambda files: None)
            restore_feedback(self.model, self.optimizer, reader)
            if manifest.world_size == dist.get_world_size():
                own = own_tensors(manifest, "rng", self.rank)
                set_rng_states(self.device, {name: reader.read(name) for name in own})
        self.optimizer.loss_scale = manifest.position.loss_scale
        self.optimizer.zero_grad()
        self.steps = manifest.position.step
        return manifest.position.extra

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
        several = bool(self._losses) or not self._is_last
        if several and isinstance(labels, Tensor) and kwargs.get("num_items_in_batch") is None:
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
        # Position 0 makes each padding token a document of its own.
        padding = ((rows, 0), (positions.to(self.torch_device), 0), (targets, IGNORED))
        tensors = [pad_rows(tensor, multiple, value) for tensor, value in padding]
        parts = zip(*(tensor.contiguous().split(size) for tensor in tensors), strict=True)
        return [MicroBatch(*part) for part in parts]
