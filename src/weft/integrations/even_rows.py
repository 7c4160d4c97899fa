"""Held-out rows of a trainer over data ranks: each row once, with the same number of rows on each rank in every step.

Trainers of TRL compute means over the rows of all ranks by collectives, and each step of an evaluation counts the same.
Rows that fill up the last batch would count twice, and the rows of a small last batch more than others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor

SMALLEST, LARGEST = "min", "max"
"""Words in the names of metrics that are no means."""


class Step(NamedTuple):
    """Step of an evaluation."""

    rows: list[int]
    """Rows of this data rank."""
    all_rows: list[int]
    """Rows of all data ranks, each once."""
    is_shared: bool
    """True if all data ranks have the same rows: too few are left to give each rank as many as the others."""


def even_steps(order: Sequence[int], batch: int, rank: int, ranks: int, group: int = 1) -> list[Step]:
    """Divide rows into steps.

    Args:
        order: indices of the rows, in order; groups of equal indices are adjacent.
        batch: maximum number of rows of a data rank in a step, where a group is not larger.
        rank: data rank.
        ranks: number of data ranks.
        group: rows that a step must have together, as completions of one prompt.
    """
    unit = math.lcm(group, ranks)  # rows that complete groups, and that the ranks can divide evenly
    size = ranks * batch // unit * unit
    divided = len(order) // unit * unit if size else 0
    steps = []
    for start in range(0, divided, size or 1):
        rows = list(order[start : min(start + size, divided)])
        own = len(rows) // ranks
        steps.append(Step(rows[rank * own : (rank + 1) * own], rows, ranks == 1))
    shared = max(batch // group, 1) * group
    for start in range(divided, len(order), shared):
        rows = list(order[start : start + shared])
        steps.append(Step(rows, rows, True))
    return steps


class EvenRows(DataLoaderShard):
    """Loader of the steps of an evaluation, in place of one that accelerate has prepared."""

    def __init__(self, loader: Any, steps: list[Step], device: torch.device):
        """
        Args:
            loader: prepared loader of a dataset with a length.
            steps: result of `even_steps`.
            device: device of the batches.
        """
        same = {name: getattr(loader, name) for name in ("collate_fn", "num_workers", "pin_memory")}
        super().__init__(loader.dataset, device, batch_sampler=[step.rows for step in steps], **same)
        self.steps, self.step = steps, steps[0]

    def __iter__(self) -> Iterator[Any]:
        # The batches first: they tell accelerate that they are at their end.
        for batch, step in zip(super().__iter__(), self.steps, strict=True):
            self.step = step
            yield batch

    def once(self, gathered: Tensor, ranks: int, batch: int) -> Tensor:
        """Values of the rows of the current step, each once.

        Args:
            gathered: values of all data ranks, as many of each.
            ranks: number of data ranks.
            batch: number of times that the Trainer repeats the loss of a step.
        """
        parts = gathered.chunk(ranks)[: 1 if self.step.is_shared else ranks]
        is_loss = gathered.ndim == 1 and len(parts[0]) == batch
        return torch.cat([part[: len(self.step.rows)] if is_loss else part for part in parts])


def join_steps(metrics: Mapping[str, list[float]], loader: EvenRows) -> dict[str, float]:
    """Metrics over all rows.

    Args:
        metrics: values of the steps by name; NaN for a step without a value, of which a metric may also have none.
        loader: loader of the steps.
    """
    joined = {}
    for name, values in metrics.items():
        weights = [float(count) for count in _counts(name, loader) if count]
        known = [(v, w) for v, w in zip(values, weights, strict=False) if not math.isnan(v)]
        if len(values) != len(weights) or not known:  # one value of all steps
            joined[name] = sum(values) / len(values)
            continue
        words = name.replace("/", "_").split("_")
        ends = [v for v, _ in known]
        mean = sum(v * w for v, w in known) / sum(w for _, w in known)
        joined[name] = min(ends) if SMALLEST in words else max(ends) if LARGEST in words else mean
    if _labels(loader) and {"rewards/chosen", "rewards/rejected"} <= joined.keys():
        joined["rewards/margins"] = joined["rewards/chosen"] - joined["rewards/rejected"]
    return joined


def _counts(name: str, loader: EvenRows) -> list[int]:
    """Rows of each step that a metric counts: of judged answers, those that are wanted or unwanted."""
    rows = [step.all_rows for step in loader.steps]
    kind, labels = name.rpartition("/")[2], _labels(loader)
    if not labels or kind not in ("chosen", "rejected"):
        return [len(own) for own in rows]
    return [sum(labels[row] == (kind == "chosen") for row in own) for own in rows]


def _labels(loader: EvenRows) -> list[bool]:
    """Judgement of each row, of KTO; empty for other rows."""
    return list(loader.dataset["label"]) if "label" in getattr(loader.dataset, "column_names", ()) else []
