"""Labels of records, and the targets of a classifier: chosen as the forward of Transformers chooses its loss.

The configuration of the model decides: its `label2id` numbers the names, its `problem_type`, or else the number of outputs and
the type of the labels, the kind of problem.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from weft.errors import DataError, JobError
from weft.job import Model

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE_LABEL: Problem = "single_label_classification"
MULTI_LABEL: Problem = "multi_label_classification"
REGRESSION: Problem = "regression"
NUMERAL = re.compile(r"-?\d+(\.\d+)?")
SHOWN = 20
"""Names that a message lists."""


@dataclass(frozen=True)
class Labels:
    """Labels of all records, as they are stored."""

    low: float
    """Smallest number."""
    high: float
    """Largest number."""
    is_whole: bool
    """All numbers are integers."""
    is_list: bool = False
    """A record has a list of labels."""
    lengths: tuple[int, ...] = ()
    """Different lengths of the lists."""
    names: tuple[str, ...] = ()
    """Names of the numbers 0, 1, ...; empty: the labels are numbers."""
    used: tuple[str, ...] = ()
    """Names that a record has."""

    @property
    def classes(self) -> int:
        """Number of classes of labels that are names, or numbers of classes."""
        return len(self.names) or int(self.high) + 1

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> "Labels":
        """Restore an object from the table of `dataclasses.asdict`, which JSON has made one of lists."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        return cls(**fields)


@dataclass(frozen=True)
class Targets:
    """Rule by which the labels of records become targets of a classifier."""

    problem: Problem
    outputs: int
    """Outputs of the classifier."""
    ids: tuple[int, ...]
    """Output of each stored number; empty: numbers are used as they are."""
    names: dict[int, str]
    """Names of the outputs; empty for a regression."""


def encode_names(records: Any, where: str) -> Any:
    """Dataset whose labels are numbers or numbers with names: texts become a ClassLabel of the library datasets.

    Args:
        records: dataset with a column `label`.
        where: source, for the message.

    Raises:
        DataError: labels are neither numbers, texts nor lists of the one or the other.
    """
    import datasets
    import pyarrow.compute as pc

    feature, is_list = records.features["label"], _has_lists(records)
    inner = feature.feature if is_list else feature
    dtype = "" if isinstance(inner, datasets.List | datasets.LargeList) else str(getattr(inner, "dtype", ""))
    if "string" in dtype:
        texts = [text for text in pc.unique(_values(records)).to_pylist() if text is not None]
        by_value = all(NUMERAL.fullmatch(text) for text in texts)
        made: Any = datasets.ClassLabel(names=sorted(texts, key=float if by_value else None))
        return records.cast_column("label", datasets.List(made) if is_list else made)
    if not re.match("u?int|float|bool", dtype):
        raise DataError(
            f"label is of the type {feature}",
            where=where,
            rule="labels are numbers, texts, or lists of the one or the other",
            fix='write a class, such as 2 or "sports", a value, such as 0.5, or a list of them',
        )
    return records


def _has_lists(records: Any) -> bool:
    import datasets

    return isinstance(records.features["label"], datasets.List | datasets.LargeList)


def _values(records: Any) -> Any:
    """Labels of all records one after the other, as an Arrow array."""
    import pyarrow.compute as pc

    column = records.data.column("label")
    return pc.list_flatten(column) if _has_lists(records) else column


def read_labels(records: Any, where: str) -> Labels:
    """Describe the labels of stored records.

    Args:
        records: dataset that `encode_names` has returned.
        where: source, for the message.

    Raises:
        DataError: a label is missing or not finite, or a name is missing.
    """
    import pyarrow.compute as pc

    feature, is_list = records.features["label"], _has_lists(records)
    numbers = _values(records).to_numpy().astype(np.float64)
    names = tuple(getattr(feature.feature if is_list else feature, "names", None) or ())
    wrong = ~np.isfinite(numbers) | ((numbers < 0) & bool(names))  # -1 of a ClassLabel is no label
    if wrong.any():
        raise DataError(
            f"{wrong.sum()} labels are missing or not finite, the first is label {wrong.argmax()}",
            where=where,
            rule="every record has its label, a finite number or a name",
            fix="leave records without a label out, or correct them",
        )
    return Labels(
        low=float(numbers.min()) if numbers.size else 0.0,
        high=float(numbers.max()) if numbers.size else 0.0,
        is_whole=bool((numbers == np.floor(numbers)).all()),
        is_list=is_list,
        lengths=tuple(np.unique(pc.list_value_length(records.data.column("label"))).tolist()) if is_list else (),
        names=names,
        used=tuple(names[int(index)] for index in np.unique(numbers)) if names else (),
    )


def problem_of(config: Any, is_float: bool) -> Problem:
    """Kind of problem of a classifier, by the rule of `ForSequenceClassificationLoss` of Transformers.

    Args:
        is_float: labels are values of the outputs, not numbers of classes.
    """
    if config.problem_type is not None:
        found: Problem = config.problem_type
        return found
    if config.num_labels == 1:
        return REGRESSION
    return MULTI_LABEL if is_float else SINGLE_LABEL


def targets_of(labels: Labels, model: Model, config: Any) -> Targets:
    """Targets that a classifier makes of labels.

    Args:
        model: model table of the job, for messages.

    Raises:
        JobError: labels and configuration contradict each other.
    """
    outputs, where = config.num_labels, f"{model.path}/config.json" if model.path else "model.config"
    problem, ids, names = problem_of(config, labels.is_list), tuple[int, ...](), dict[int, str]()
    wrong = _contradiction(labels, problem, outputs)
    if wrong is None and problem != REGRESSION:
        ids, names = _outputs_of_names(labels, config, where)
        if (classes := max(ids) + 1 if ids else labels.classes) > outputs and (ids or problem == SINGLE_LABEL):
            what = f"the records have {classes} classes, the model has {outputs}"
            wrong = what, "every class has an output of the model", classes, problem
    if wrong is not None:
        what, rule, wanted, kind = wrong
        parts = [f"set task.classes = {wanted}, for a newly initialized classifier on top of the model"] * bool(wanted)
        if kind not in (None, config.problem_type) and not (wanted and config.problem_type is None):
            parts.append(f'set problem_type to "{kind}" in {where}')
        raise JobError(
            what,
            where=f"labels; num_labels = {outputs} and problem_type = {config.problem_type} of the model",
            rule=rule,
            fix=", and ".join(parts) or "correct the labels",
        )
    return Targets(problem, outputs, ids, names)


Contradiction = tuple[str, str, int | None, Problem | None]
"""Problem, rule, and outputs and kind of problem of a model that would fit."""


def _contradiction(labels: Labels, problem: Problem, outputs: int) -> Contradiction | None:
    """Contradiction of labels and a model."""
    kind = f"{'lists of ' * labels.is_list}{'names' if labels.names else 'numbers'}"
    what = f"the labels are {kind}, for {problem}"
    if labels.is_list and problem == SINGLE_LABEL:
        return what, "a record has one class", None, MULTI_LABEL
    if labels.names and problem == REGRESSION:
        fitting = MULTI_LABEL if labels.is_list else SINGLE_LABEL
        return what, "a regression learns numbers", max(2, labels.classes), fitting
    if not labels.is_list and problem == MULTI_LABEL:
        rule = "a record has a list: of names of classes, or of one number from 0 to 1 for each class"
        return what, rule, None, SINGLE_LABEL
    return _wrong_numbers(labels, problem, outputs)


def _wrong_numbers(labels: Labels, problem: Problem, outputs: int) -> Contradiction | None:
    """Contradiction of labels of the right kind: their range, or how many numbers a record has."""
    numbers = f"labels from {labels.low:g} to {labels.high:g}"
    if labels.is_list and not labels.names:
        if len(labels.lengths) > 1:
            rule = "a list of numbers has one for each output of the model; classes in lists of any length are names"
            return f"lists of {labels.lengths[0]} to {labels.lengths[-1]} numbers", rule, None, None
        if labels.lengths != (outputs,):
            width = labels.lengths[0]
            return f"lists of {width} numbers for {outputs} outputs", "a list has a number for each output", width, None
        if problem == MULTI_LABEL and not 0 <= labels.low <= labels.high <= 1:
            return numbers, "a number for a class is from 0 to 1", None, REGRESSION
    elif problem == REGRESSION and outputs > 1:
        return f"one number for {outputs} outputs", "a regression has an output for each number of a record", 1, None
    elif problem == SINGLE_LABEL and not labels.is_whole:
        return numbers, "a class is an integer; a number that is none needs one output, for a regression", 1, REGRESSION
    elif problem == SINGLE_LABEL and labels.low < 0:
        return numbers, "classes are numbered from 0 on", None, None
    elif problem == SINGLE_LABEL and outputs < 2:
        return f"classes for {outputs} output", "a classifier has two outputs or more", max(2, labels.classes), None
    return None


def _outputs_of_names(labels: Labels, config: Any, where: str) -> tuple[tuple[int, ...], dict[int, str]]:
    """Output of each name of the labels, -1 for one that no record has; and the names of all outputs.

    The names of the model number the labels. Without names, "LABEL_0" and so on, outputs are in the order of the labels.

    Raises:
        JobError: the model lacks a name, or names its outputs in two ways.
    """
    unnamed = {f"LABEL_{id_}": id_ for id_ in range(config.num_labels)}
    by_id = {int(id_): str(name) for id_, name in (config.id2label or {}).items()}
    ids = {str(name): int(id_) for name, id_ in (config.label2id or {}).items()}
    if not ids or ids == unnamed:
        ids = {name: id_ for id_, name in by_id.items()}
    elif by_id == {id_: name for name, id_ in unnamed.items()}:
        by_id = {id_: name for name, id_ in ids.items()}
    if any(ids.get(name) != id_ for id_, name in by_id.items()):
        raise JobError(
            f"label2id has {_shown(ids)}, and id2label {_shown({name: id_ for id_, name in by_id.items()})}",
            where=where,
            rule="the classes of a model have the same numbers in both",
            fix="correct the one that is wrong",
        )
    if missing := [name for name in labels.used if name not in ids]:
        own = {name: id_ for id_, name in enumerate(labels.names)}
        if ids != unnamed:
            raise JobError(
                f"the model has the classes {_shown(ids)}, and lacks {_shown(missing)} of the records: {_shown(labels.used)}",
                where=where,
                rule="label2id of the model numbers the labels",
                fix=f"rename the labels; or, for other classes, set label2id to {_shown(own)} and id2label likewise in {where}",
            )
        ids, by_id = own, by_id | {id_: name for name, id_ in own.items()}
    return tuple(ids.get(name, -1) for name in labels.names), by_id


def _shown(names: Mapping[str, int] | Sequence[str]) -> str:
    """Names for a message, in the order of their numbers, the first `SHOWN`."""
    numbers = sorted(names.items(), key=lambda pair: pair[1]) if isinstance(names, Mapping) else []
    texts = [f"{name}: {number}" for name, number in numbers] or list(names)
    return f"{{{', '.join(texts[:SHOWN])}}}" + f" and {len(texts) - SHOWN} more" * (len(texts) > SHOWN)


def name_outputs(config: Any, targets: Targets) -> None:
    """Write the kind of problem and the names of the outputs into a configuration, in place."""
    config.problem_type = targets.problem
    if targets.names and (targets.names != config.id2label or not config.label2id):
        config.id2label, config.label2id = targets.names, {name: id_ for id_, name in targets.names.items()}
