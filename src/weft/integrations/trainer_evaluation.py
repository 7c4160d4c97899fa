"""Evaluation of a trainer under a plan: each held-out row counts once, whatever the ranks and the batch."""

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply
from transformers import Trainer
from transformers.trainer_utils import has_length

from weft.data import IGNORED
from weft.integrations.even_rows import EvenRows, even_steps, join_steps
from weft.integrations.loaders import has_tensors_only
from weft.integrations.trainer_pipeline import PipelinedSteps

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class EvaluationMixin(Base):
    """Part of a trainer that evaluates; see `trainer.TrainerMixin`."""

    accelerator: Any

    def _reads_logits(self) -> bool:
        raise NotImplementedError

    def _pipelined(self) -> PipelinedSteps | None:
        raise NotImplementedError

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Run forward of a batch of an evaluation.

        The loss is the mean over the targets of all data ranks, without the rows that fill up the last batch: that of one
        process with the same number of rows in a batch.
        """
        labels: Any = inputs.get("labels") if hasattr(inputs, "get") else None
        is_exact = isinstance(labels, torch.Tensor) and labels.ndim == 2 and not labels.is_floating_point()
        is_exact = is_exact and self.model_accepts_loss_kwargs and self.args.average_tokens_across_devices
        if is_exact and (repeated := self.accelerator.repeated_rows(len(labels))):
            inputs["labels"] = labels.clone()
            inputs["labels"][len(labels) - repeated :] = IGNORED
        if steps := self._pipelined():
            return steps.evaluate(self._prepare_inputs(inputs)), None, None
        with self.accelerator.logits_of_rank(prediction_loss_only and not self._reads_logits()):
            loss, logits, found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if is_exact and loss is not None:
            loss = self.accelerator.mean_over_data_ranks(loss)
        return loss, logits, found

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; each row counts once, also where Seq2SeqTrainer keeps the rows that fill up the last batch."""
        gather = self.accelerator.gather_for_metrics
        if self.gather_function == self.accelerator.gather:
            self.gather_function = gather
        own: Any = getattr(self, "_metrics", None) or getattr(self, "_stored_metrics", None)  # of trainers of TRL
        if own is None or not has_length(dataloader.dataset) or not len(dataloader.dataset):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        loader, ranks = self._even_rows(dataloader), self.accelerator.data_ranks

        def gather_once(data: Any) -> Any:
            if not has_tensors_only(data):
                return gather(data)
            return recursively_apply(lambda tensor: loader.once(tensor, ranks, self.args.eval_batch_size), gather(data))

        self.gather_function = gather_once
        result = super().evaluation_loop(loader, *args, **kwargs)
        for name, value in join_steps(own["eval"], loader).items():
            own["eval"][name] = [value]
        return result

    def _even_rows(self, dataloader: Any) -> EvenRows:
        batches = getattr(
            dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler
        )  # before the ranks share them
        rank, ranks = self.accelerator.data_rank, self.accelerator.data_ranks
        group = getattr(self, "num_generations_eval", 1)
        steps = even_steps(list(batches.sampler), self.args.eval_batch_size, rank, ranks, group)
        return EvenRows(dataloader, steps, self.accelerator.device)
