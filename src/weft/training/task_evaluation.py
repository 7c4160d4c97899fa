"""Evaluation on tasks during training: lm-eval's requests run on the parallelized model, under every plan.

Every rank builds all requests. Each data rank runs its part of them through the forward of training, together with the ranks of
tp, cp and pp that share its rows. Data ranks may need different numbers of forwards, but a forward of a sharded model is
collective: before each, the ranks agree whether any of them has rows left, and a rank without rows runs a row of padding.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weft.comm.collectives import all_reduce
from weft.data import IGNORED, MicroBatch
from weft.errors import JobError
from weft.evaluation.harness import evaluate_tasks
from weft.evaluation.results import TaskEvaluation
from weft.evaluation.source import load_tokenizer
from weft.evaluation.tasks import Tasks, check_examples, load_tasks
from weft.job import Eval
from weft.parallel.loss.logits import gather_logits
from weft.parallel.runtime import runtime
from weft.parallel.sequence.forward_pass import ForwardPass
from weft.parallel.sequence.rows import pad_rows, row_multiple
from weft.topology.mesh import AXES, DATA_AXES, data_rank
from weft.training.forward_backward import forward

SHARING_AXES = tuple(axis for axis in AXES if axis not in ("pp", *DATA_AXES))
"""Axes of ranks with the same rows and the same stage."""


def check_tasks(settings: Eval, tokenizer: str | None) -> None:
    """Load the tasks of a job before its ranks start.

    Args:
        settings: table `eval` of the job.
        tokenizer: folder with the tokenizer of the run; None for a run on token ids.

    Raises:
        JobError: lm-eval is not installed, a name is no task, or a task generates text.
        DataError: a record breaks a rule, or a data set is not on this disk.
        ModelError: the run has no tokenizer.
    """
    if not settings.tasks:
        return
    tasks = load_tasks(settings.tasks, settings.num_fewshot)
    check_examples(tasks)
    if generating := tasks.generating():
        raise JobError(
            f"the task {generating[0]} generates text",
            where="eval.tasks",
            rule="during training, tasks are evaluated by the forward of the parallelized model, without a KV cache",
            fix=f"remove it from eval.tasks, and run `weft eval RUN --tasks {generating[0]}` after training",
        )
    if tokenizer is None:
        raise JobError(
            "eval.tasks for a run on token ids",
            where="eval.tasks",
            rule="tasks are texts, and data.source = tokens has no tokenizer",
            fix="remove eval.tasks",
        )
    load_tokenizer(Path(tokenizer))


class TaskEvaluator:
    """Evaluation of a model in training on the tasks of its job, which are loaded once."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Eval,
        tokenizer: str | None,
        device: torch.device,
        beat: Callable[[int], None],
    ):
        """
        Args:
            model: parallelized model, whose outputs are those of this rank.
            settings: table `eval` of the job, which `check_tasks` has accepted.
            tokenizer: folder with the tokenizer of the run; None without tasks.
            beat: called with the step at each forward, so that a long evaluation counts as progress.
        """
        self.model, self.settings, self.tokenizer, self.device = model, settings, tokenizer, device
        self.beat, self.step = beat, 0
        self.loaded: tuple[Tasks, Any] | None = None

    def evaluate(self, step: int) -> TaskEvaluation:
        """Evaluate the model. Collective. The training mode of the model and the random state are unchanged.

        Args:
            step: optimizer steps that the model has had.
        """
        self.step = step
        if self.loaded is None:
            self.loaded = load_tasks(self.settings.tasks, self.settings.num_fewshot), self._language_model()
        was_training = self.model.training
        self.model.eval()
        try:
            results = evaluate_tasks(self.loaded[1], self.loaded[0], self.settings.limit or None)
        finally:
            self.model.train(was_training)
        return TaskEvaluation(step, results)

    def _language_model(self) -> Any:
        from weft.evaluation.language_model import DistributedLM  # imports lm-eval, an extra

        assert self.tokenizer is not None  # `check_tasks`
        parallelized = runtime(self.model)
        mesh, sharded = parallelized.mesh, ShardedModel(self.model, self.device, lambda: self.beat(self.step))
        return DistributedLM(
            sharded,
            load_tokenizer(Path(self.tokenizer)),
            self.settings.batch_size,
            part=data_rank(mesh),
            parts=parallelized.plan.parallel.data_ranks,
            leads=sharded.has_logits and all(mesh.get_local_rank(axis) == 0 for axis in SHARING_AXES),
            finish=sharded.finish,
        )


class ShardedModel:
    """Parallelized model as a callable from rows of tokens to full logits. All ranks make the same number of forwards."""

    def __init__(self, model: PreTrainedModel, device: torch.device, beat: Callable[[], None]):
        """
        Args:
            model: parallelized model.
            beat: called at each forward.
        """
        self.model, self.config, self.device, self.beat = model, model.config, device, beat
        parallelized = runtime(model)
        self.mesh = parallelized.mesh
        self.has_logits = parallelized.pipeline is None or parallelized.pipeline.stage_io.has_last()
        """False on the ranks of a pipeline without its last stage: their logits are zeros."""

    def __call__(self, rows: Tensor) -> SimpleNamespace:
        """Logits of full rows.

        Args:
            rows: int64 [rows, tokens], padded at the end; the same on all ranks of tp, cp and pp.

        Returns:
            `logits`, float32 (or float64) [rows, tokens, vocabulary].
        """
        self._agree(True)
        return SimpleNamespace(logits=self._forward(rows))

    def finish(self) -> None:
        """Run rows of padding until all data ranks have run all their rows."""
        while self._agree(False):
            self._forward(torch.zeros(1, 1, dtype=torch.int64, device=self.device))

    def _agree(self, has_rows: bool) -> bool:
        """True if any data rank has rows for the next forward."""
        flag = torch.tensor(float(has_rows), device=self.device)
        return bool(all_reduce(flag, self.mesh, DATA_AXES, "max"))

    @torch.no_grad()
    def _forward(self, rows: Tensor) -> Tensor:
        self.beat()
        parallelized, tokens = runtime(self.model), rows.shape[1]
        padded = pad_rows(rows, row_multiple(parallelized.anatomy, parallelized.plan), 0)
        positions = torch.arange(padded.shape[1], device=self.device).expand_as(padded).contiguous()
        batch = MicroBatch(padded, positions, torch.full_like(padded, IGNORED))
        found: list[Tensor] = []

        def keep(forward_pass: ForwardPass) -> Tensor:
            logits = gather_logits(self.model, forward_pass.output.logits, padded.shape[1])[:, :tokens]
            found.append(logits.to(torch.promote_types(logits.dtype, torch.float32)))
            return logits.new_zeros(())

        if parallelized.pipeline is None:
            keep(forward(self.model, batch))
        else:
            parallelized.pipeline.evaluate([batch], partial(forward, self.model), keep)
        vocabulary = parallelized.anatomy.vocab_size
        return found[0] if found else torch.zeros(1, device=self.device).expand(*rows.shape, vocabulary)
