"""The loss of a model without a language head is the mean over the targets, rows or elements of all ranks."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    ElectraConfig,
    ElectraForTokenClassification,
)

from tests.lab.loops import Loop, check_loop, train_on_rank
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ROWS = (4, 2)  # of rank 0 and 1
CLASSES = 3


def model_of(kind: type, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = ElectraConfig(embedding_size=32, **SIZES) if "Electra" in kind.__name__ else BertConfig(**SIZES)
    for name, value in {"num_labels": CLASSES, **settings}.items():
        setattr(config, name, value)
    return kind(config)


def batch(kind: str, step: int, rank: int) -> dict[str, Tensor]:
    """Rows of a rank: other numbers of rows, and of targets in a row."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = ROWS[rank]
    ids = torch.randint(3, 96, (rows, 10), generator=generator)
    if kind in ("tokens", "row means"):
        labels = torch.randint(0, CLASSES, (rows, 10), generator=generator)
        for row in range(rows):
            labels[row, 1 + row + 3 * (1 - rank) :] = -100
        return {"input_ids": ids, "labels": labels}
    if kind == "spans":
        ends = torch.randint(0, 14, (2, rows), generator=generator)  # some are outside of the row
        ends[:, 0] = 2
        return {"input_ids": ids, "start_positions": ends[0], "end_positions": ends[0].clone()}
    if kind == "choices":
        return {"input_ids": ids.view(rows, 2, 5), "labels": torch.randint(0, 2, (rows,), generator=generator)}
    labels = {
        "rows": torch.randint(0, CLASSES, (rows,), generator=generator),
        "squares": torch.randn(rows, generator=generator),
        "squares of several": torch.randn(rows, CLASSES, generator=generator),
        "classes": torch.randint(0, 2, (rows, CLASSES), generator=generator).float(),
    }[kind]
    return {"input_ids": ids, "labels": labels}


class MeanOfRows(BertForTokenClassification):
    """A user's own: the mean over rows of the mean over the targets of a row."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        output = super().forward(input_ids)
        if labels is not None:
            output.loss = mean_of_rows(output.logits, labels)
        return output


def mean_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(*row) for row in zip(logits, labels, strict=True)]).mean()


MODELS: dict[str, Any] = {
    "tokens": partial(model_of, ElectraForTokenClassification),
    "rows": partial(model_of, BertForSequenceClassification),
    "squares": partial(model_of, BertForSequenceClassification, num_labels=1, problem_type="regression"),
    "squares of several": partial(model_of, BertForSequenceClassification, problem_type="regression"),
    "classes": partial(model_of, BertForSequenceClassification, problem_type="multi_label_classification"),
    "choices": partial(model_of, BertForMultipleChoice),
    "spans": partial(model_of, BertForQuestionAnswering, num_labels=2),
    "row means": partial(model_of, MeanOfRows),
}


def loss(kind: str, model: Any, step: int, rank: int) -> Tensor:
    return model(**batch(kind, step, rank)).loss


def pooled(kind: str, model: Any, step: int) -> Tensor:
    """Loss of the model for the rows of both ranks at once."""
    both = [batch(kind, step, rank) for rank in range(2)]
    return model(**{name: torch.cat([own[name] for own in both]) for name in both[0]}).loss


@pytest.mark.must("a classifier's loss is the mean over the targets of all ranks", case="2-tokens")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("zero", [0, 2])
def test_losses_and_weights_are_those_of_one_process(kind: str, zero: int) -> None:
    loop = Loop(MODELS[kind], partial(loss, kind), partial(pooled, kind))
    found = check_loop(loop, plan_for("fp32", zero=zero), tolerance=1e-5)
    assert found[0].losses == found[1].losses


class Smoothed(BertForSequenceClassification):
    """A loss that is none of the means."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        output = super().forward(input_ids)
        output.loss = F.cross_entropy(output.logits, labels, label_smoothing=0.1)
        return output


def train_with_warnings(rank: int, ranks: int, loop: Loop, plan: Any) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train_on_rank(rank, ranks, loop, plan)
    return found.losses, [str(one.message) for one in caught if "no mean" in str(one.message)]


def test_a_loss_that_is_no_known_mean_is_named_once() -> None:
    loop = Loop(partial(model_of, Smoothed), partial(loss, "rows"))
    found = run_ranks(2, train_with_warnings, loop, plan_for("fp32", zero=0))
    assert [len(lines) for _, lines in found] == [1, 0]
    assert "the loss of Smoothed" in found[0][1][0]
    assert found[0][0] == found[1][0]  # the mean over both ranks
