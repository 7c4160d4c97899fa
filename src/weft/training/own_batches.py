"""Micro-batches of a custom training loop, from batches as the untouched model takes them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.objects import all_gather_json, run_together
from weft.data import IGNORED, MicroBatch
from weft.errors import ModelError
from weft.parallel.runtime import Runtime
from weft.parallel.sequence_sharding import pad_rows, row_multiple


def split_batches(
    batches: Iterable[Mapping[str, Tensor]], size: int, runtime: Runtime, method: str
) -> list[MicroBatch]:
    """Split batches into micro-batches whose rows have a length that tp and cp can split. Collective.

    Args:
        batches: see `weft.Run.train_batch`; the micro-batches stay on their device.
        size: rows per micro-batch.
        runtime: runtime of the model.
        method: method of `weft.Run`, for messages.

    Raises:
        ModelError: the rows cannot be divided, the mask hides more than padding at the ends of rows, or ranks have different
            numbers of micro-batches, or none; the same on every rank.
    """
    own = run_together(lambda: [part for batch in batches for part in _split(batch, size, runtime, method)])
    rows = all_gather_json([len(own), sum(len(part.input_ids) for part in own)])
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


class OnDevice(Sequence[MicroBatch]):
    """Micro-batches that are moved to a device when they are used."""

    def __init__(self, batches: Sequence[MicroBatch], device: torch.device):
        self.batches, self.device = batches, device

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        return self.batches[index].to(self.device)


def _split(batch: Mapping[str, Tensor], size: int, runtime: Runtime, method: str) -> list[MicroBatch]:
    if not runtime.anatomy.head:
        raise ModelError(
            f"run.{method} of a {runtime.anatomy.family} model without output embeddings",
            where=f"weft.Run.{method}",
            rule="it computes the cross entropy over a vocabulary",
            fix="call the model in run.accumulate(), and pass its loss to run.backward",
        )
    if "input_ids" not in batch or size < 1:
        raise ModelError(
            f"micro-batches of {size} rows" if size < 1 else f"a batch of {', '.join(batch) or 'nothing'}",
            where=f"weft.Run.{method}",
            rule="a batch has input_ids [rows, tokens], and a micro-batch has at least one row",
            fix="pass a dictionary with input_ids, and a positive micro_batch_size",
        )
    rows = batch["input_ids"]
    labels = batch.get("labels", rows).to(rows.device)
    if len(rows) % size:
        raise ModelError(
            f"{len(rows)} rows in micro-batches of {size}",
            where=f"weft.Run.{method}",
            rule="all micro-batches have the same number of rows",
            fix="pass a micro_batch_size that divides the rows of a data rank",
        )
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
