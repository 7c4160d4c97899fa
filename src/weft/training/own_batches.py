"""Micro-batches of a custom training loop, from batches as the untouched model takes them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.anatomy.classes import auto_class
from weft.comm.objects import all_gather_json, run_together, same_on_all
from weft.data import IGNORED, AnyBatch, MicroBatch, RecordBatch
from weft.data.labels import MULTI_LABEL, SINGLE_LABEL, problem_of
from weft.data.record_batches import shift_right
from weft.errors import ModelError
from weft.parallel.loss.labels import shifts_labels
from weft.parallel.runtime import Runtime, runtime
from weft.parallel.sequence.rows import pad_rows, row_multiple

TEXT_KEYS = frozenset(("input_ids", "labels", "position_ids", "attention_mask"))
"""Tensors of a batch of text alone."""


def split_batches(batches: Iterable[Mapping[str, Tensor]], size: int, model: Any, method: str) -> list[AnyBatch]:
    """Split batches into micro-batches whose rows have a length that tp and cp can split. Collective.

    Args:
        batches: see `weft.Run.train_batch`; the micro-batches stay on their device.
        size: rows per micro-batch.
        model: parallelized model.
        method: method of `weft.Run`, for messages.

    Raises:
        ModelError: the rows cannot be divided, the mask hides more than padding at the ends of rows, or ranks have different
            numbers of micro-batches, or none; the same on every rank.
    """
    own = run_together(lambda: [part for batch in batches for part in _split(batch, size, model, method)])
    sizes = [len(own), sum(part.rows for part in own)]
    rows = [sizes] if same_on_all(sizes) else all_gather_json(sizes)
    counts, what = [count for count, _ in rows], "micro-batches"
    if len(set(counts)) == 1:
        counts, what = [count for _, count in rows], "rows"
    if len(set(counts)) > 1 or not own:
        raise ModelError(
            f"between {min(counts)} and {max(counts)} {what} on the ranks",
            where=f"weft.Run.{method}",
            rule="all ranks run the same number of micro-batches, at least one, of the same number of rows",
            fix="give each data rank the same number of rows; fill up with rows whose labels are -100",
        )
    return own


class OnDevice(Sequence[AnyBatch]):
    """Micro-batches that are moved to a device when they are used."""

    def __init__(self, batches: Sequence[AnyBatch], device: torch.device):
        self.batches, self.device = batches, device

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        return self.batches[index].to(self.device)


def _split(batch: Mapping[str, Tensor], size: int, model: Any, method: str) -> Sequence[AnyBatch]:
    anatomy = runtime(model).anatomy
    features = [name for name in batch.keys() - TEXT_KEYS if batch[name].is_floating_point()]
    if not (anatomy.head and anatomy.is_decoder) or features:  # for example pixels
        return _split_records(batch, size, model, method)
    _check_rows(batch, "input_ids", size, method)
    return _split_text(batch, size, runtime(model), method)


def _check_rows(batch: Mapping[str, Tensor], needed: str, size: int, method: str) -> None:
    """Refuse a batch without the tensor `needed`, or whose rows cannot be divided into micro-batches of `size` rows."""
    if needed not in batch or size < 1:
        raise ModelError(
            f"micro-batches of {size} rows" if size < 1 else f"a batch of {', '.join(batch) or 'nothing'}",
            where=f"weft.Run.{method}",
            rule=f"a batch has {needed} [rows, ...], and a micro-batch has at least one row",
            fix=f"pass a dictionary with {needed}, and a positive micro_batch_size",
        )
    if len(batch[needed]) % size:
        raise ModelError(
            f"{len(batch[needed])} rows in micro-batches of {size}",
            where=f"weft.Run.{method}",
            rule="all micro-batches have the same number of rows",
            fix="pass a micro_batch_size that divides the rows of a data rank",
        )


def _split_records(batch: Mapping[str, Tensor], size: int, model: Any, method: str) -> list[RecordBatch]:
    """Micro-batches of an encoder, an encoder-decoder, a classifier, or a model of images and text."""
    _check_rows(batch, "labels", size, method)
    labels = batch["labels"]
    predicted = _values(labels, model, method)
    binary = predicted is not None and problem_of(model.config, labels.is_floating_point()) == MULTI_LABEL
    if predicted is not None:
        labels = torch.zeros(len(labels), dtype=torch.int64, device=labels.device)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs and labels.ndim > 1:  # not of classes
        inputs["decoder_input_ids"] = shift_right(model, labels)
    if shifts_labels(model, labels):
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    odd = [name for name, value in inputs.items() if len(value) != len(labels)]
    if odd and size != len(labels):
        raise ModelError(
            f"{odd[0]} {tuple(inputs[odd[0]].shape)} of {len(labels)} rows, in micro-batches of {size}",
            where=f"weft.Run.{method}",
            rule="tensors are divided along their first dim, which must be rows",
            fix=f"pass micro_batch_size = {len(labels)}, and one batch for each micro-batch",
        )
    count = len(labels) // size
    values = [None] * count if predicted is None else predicted.split(size)
    parts = zip(values, *(value.split(len(value) // count) for value in (labels, *inputs.values())), strict=True)
    return [RecordBatch(dict(zip(inputs, rest, strict=True)), targets, own, binary) for own, targets, *rest in parts]


def _values(labels: Tensor, model: Any, method: str) -> Tensor | None:
    """Labels of a regression or of several classes, [rows, outputs]; None for classes and tokens, int64."""
    config, is_float = model.config, labels.is_floating_point()
    kind = auto_class("classification", config)._model_mapping.get(type(config), None)
    is_single = kind is None or not isinstance(model, kind) or problem_of(config, is_float) == SINGLE_LABEL
    if is_single and not is_float:
        return None
    if is_single or labels.numel() != len(labels) * config.num_labels:
        raise ModelError(
            f"labels of {labels.dtype}, {list(labels.shape)}",
            where=f"weft.Run.{method}",
            rule="it computes the cross entropy of classes or tokens, int64; of a classifier for regression or several classes "
            "(problem_type) the loss of labels [rows, num_labels]",
            fix="call the model in run.accumulate(), and pass its loss to run.backward",
        )
    return labels.reshape(len(labels), -1).to(torch.promote_types(labels.dtype, torch.float32))


def _split_text(batch: Mapping[str, Tensor], size: int, runtime: Runtime, method: str) -> list[MicroBatch]:
    rows = batch["input_ids"]
    labels = batch.get("labels", rows).to(rows.device)
    mask = batch.get("attention_mask")
    if mask is not None and not bool((mask[:, 1:] <= mask[:, :-1]).all()):
        raise ModelError(
            "an attention_mask that hides more than padding at the ends of rows",
            where=f"weft.Run.{method}",
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
    multiple = row_multiple(runtime.anatomy, runtime.plan) if runtime.takes_full_rows else 1
    # Position 0 makes each padding token a separate document.
    padding = ((rows, 0), (positions.to(rows.device), 0), (targets, IGNORED))
    tensors = [pad_rows(tensor, multiple, value) for tensor, value in padding]
    parts = zip(*(tensor.contiguous().split(size) for tensor in tensors), strict=True)
    return [MicroBatch(*part) for part in parts]
