"""Metrics of answers to held-out records, by the libraries of the field: scikit-learn, SciPy, sacrebleu and jiwer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.labels import REGRESSION, SINGLE_LABEL, Problem
from weft.errors import JobError
from weft.own_code import import_extra

Scores = dict[str, float]


def _library(name: str) -> Any:
    return import_extra(name, "tasks", "task.kind", "metrics of held-out records are those of a library")


def scores_of(compute: Callable[..., Scores], *answers: Any, log: Callable[[str], None]) -> Scores:
    """Metrics that are finite numbers; none, with a line that names the extra, if their library is not installed.

    Args:
        compute: function of this module.
        answers: its arguments.
        log: called with the line.
    """
    try:
        return {name: value for name, value in compute(*answers).items() if math.isfinite(value)}
    except JobError as error:
        log(f"{'metrics':<12}none: {error.what}; {error.fix}")
        return {}


def label_scores(problem: Problem, logits: Tensor, wanted: Tensor) -> Scores:
    """Metrics of a classifier or a regression.

    Args:
        problem: kind of problem.
        logits: outputs, float [records, outputs].
        wanted: classes, int64 [records]; or numbers, float [records, outputs].

    Returns:
        Pearson and Spearman correlation and mean squared error; or macro F1, of several classes micro F1, too, and macro AUC
        over the classes that some records have and others have not. Undefined ones are NaN.
    """
    if problem == REGRESSION:
        stats = _library("scipy.stats")
        pairs = [(a, b) for a, b in zip(logits.T.numpy(), wanted.T.numpy(), strict=True) if np.ptp(a) and np.ptp(b)]
        return {
            "pearson": _mean([stats.pearsonr(a, b).statistic for a, b in pairs]),
            "spearman": _mean([stats.spearmanr(a, b).statistic for a, b in pairs]),
            "mse": float((logits - wanted).square().mean()),
        }
    metrics = _library("sklearn.metrics")
    if problem == SINGLE_LABEL:
        best, right = logits.argmax(-1), wanted
        chances, truth = logits.softmax(-1).numpy(), (wanted[:, None] == torch.arange(logits.shape[1])).numpy()
    else:
        best, right = (logits > 0).int(), (wanted > 0.5).int()
        chances, truth = logits.sigmoid().numpy(), right.numpy()
    averages = ["macro"] if problem == SINGLE_LABEL else ["macro", "micro"]
    found = {f"f1_{kind}": metrics.f1_score(right, best, average=kind, zero_division=0) for kind in averages}
    both = [index for index in range(truth.shape[1]) if 0 < truth[:, index].sum() < len(truth)]
    aucs = [metrics.roc_auc_score(truth[:, index], chances[:, index]) for index in both]
    return {name: float(value) for name, value in found.items()} | {"auc_macro": _mean(aucs)}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def text_scores(written: Sequence[str], right: Sequence[str]) -> Scores:
    """chrF and BLEU of texts, from 0 to 100.

    Args:
        written: texts that the model has written.
        right: right texts.
    """
    library = _library("sacrebleu")
    return {
        "chrf": library.corpus_chrf(list(written), [list(right)]).score,
        "bleu": library.corpus_bleu(list(written), [list(right)]).score,
    }


def speech_scores(written: Sequence[str], right: Sequence[str]) -> Scores:
    """Word error rate of transcripts: wrong, missing and additional words by words of the right texts, of which each has one.

    Args:
        written: texts that the model has written.
        right: right texts.
    """
    pairs = [pair for pair in zip(right, written, strict=True) if pair[0]]
    library = _library("jiwer")
    return {"wer": float(library.wer([own for own, _ in pairs], [own for _, own in pairs]))} if pairs else {}
