"""Evaluation of a trainer under a plan: each held-out row counts once, whatever the ranks and the batch."""

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import find_batch_size, recursively_apply
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

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Targets of a step over all ranks; None for labels of whole rows in an evaluation, whose losses are means.

        The Trainer multiplies a loss by the number of ranks because it expects the model to divide by this number, which
        the losses of many classifiers do not. In training, with gradients, this is left as it is under DDP.
        """
        labels = [batch.get("labels") for batch in batch_samples if hasattr(batch, "get")]
        of_rows = any(isinstance(each, torch.Tensor) and not has_tokens(each) for each in labels)
        if of_rows and self.compute_loss_func is None and not torch.is_grad_enabled():
            return None
        return super()._get_num_items_in_batch(batch_samples, device)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Run forward of a batch of an evaluation, whose loss leaves out the rows that fill up the last batch.

        A loss of tokens is the mean over the targets of all data ranks: that of one process with the same number of rows in
        a batch. Another loss is the mean over the rows of this rank, and the Trainer weighs the ranks by their rows.
        """
        labels: Any = inputs.get("labels") if hasattr(inputs, "get") else None
        is_exact = isinstance(labels, torch.Tensor) and has_tokens(labels)
        is_exact = is_exact and self.model_accepts_loss_kwargs and self.args.average_tokens_across_devices
        rows = find_batch_size(inputs) or 0
        repeated = self.accelerator.repeated_rows(rows)
        if is_exact and repeated:
            inputs["labels"] = labels.clone()
            inputs["labels"][rows - repeated :] = IGNORED
        if steps := self._pipelined():
            return steps.evaluate(self._prepare_inputs(inputs)), None, None
        own = rows if is_exact else max(rows - repeated, 1)
        if own < rows:
            inputs = recursively_apply(lambda value: value[:own] if len(value) == rows else value, inputs)
        with self.accelerator.logits_of_rank(prediction_loss_only and not self._reads_logits()):
            loss, logits, found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if is_exact and loss is not None:
            loss = self.accelerator.mean_over_data_ranks(loss)
        if own < rows:  # the Trainer gathers as many rows of each rank, and drops those at the end

            def filled(value: torch.Tensor) -> torch.Tensor:
                return torch.cat([value, *[value[-1:]] * (rows - own)]) if len(value) == own else value

            logits, found = (recursively_apply(filled, value) for value in (logits, found))
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
        # Before the ranks share them.
        batches = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)
        rank, ranks = self.accelerator.data_rank, self.accelerator.data_ranks
        group = getattr(self, "num_generations_eval", 1)
        steps = even_steps(list(batches.sampler), self.args.eval_batch_size, rank, ranks, group)
        return EvenRows(dataloader, steps, self.accelerator.device)


def has_tokens(labels: torch.Tensor) -> bool:
    """True for labels [rows, tokens]; False for classes and numbers."""
    return labels.ndim == 2 and not labels.is_floating_point()
