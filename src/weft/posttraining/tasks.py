"""Evaluation on tasks in a job with a trainer: before the first step, every N steps, and after training."""

from typing import Any

import torch.distributed as dist
import transformers

from weft.integrations.models import core_of
from weft.launch.heartbeat import Heartbeat
from weft.posttraining.job import TrainerJob
from weft.training.metrics import MetricsWriter
from weft.training.task_evaluation import TaskEvaluator


class TaskCallback(transformers.TrainerCallback):
    """Callback of a trainer that evaluates its model on the tasks of the job. Its methods are collective."""

    def __init__(self, trainer: Any, job: TrainerJob, writer: MetricsWriter, heartbeat: Heartbeat):
        """
        Args:
            trainer: trainer with a plan.
            job: job with tasks.
            writer: writer of the results, used on rank 0.
        """
        self.trainer, self.job, self.writer, self.heartbeat = trainer, job, writer, heartbeat
        self.evaluator: TaskEvaluator | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate before the first step."""
        if self.job.eval.every and state.global_step == 0:
            self.evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate after every N steps but the last one, after which the trainer may load its best weights."""
        every = self.job.eval.every
        if every and state.global_step % every == 0 and not control.should_training_stop:
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> None:
        """Evaluate the model after a number of steps, and write the results."""
        accelerator = self.trainer.accelerator
        if self.evaluator is None:
            model = core_of(self.trainer.model)
            self.evaluator = TaskEvaluator(model, self.job.eval, self.job.model.path, accelerator.device, self._beat)
        with accelerator.logits_of_rank():
            evaluation = self.evaluator.evaluate(step)
        self.heartbeat.phase("script")
        if dist.get_rank() == 0:
            self.writer.tasks(evaluation)
            print(f"step {step}  {evaluation.text()}", flush=True)

    def _beat(self, step: int) -> None:
        self.heartbeat.phase("evaluating", step)
