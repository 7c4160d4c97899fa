"""Labels of classifiers: losses, kinds of problem and names as the forward of the library has them, refusals, metrics."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification, pipeline

import weft
from tests.lab.pool import run_ranks
from tests.lab.runs import observe, train_in_the_pool
from tests.lab.small_models import save_classifier
from tests.lab.task_jobs import task_job
from tests.training.test_kinds import optimizer_of
from weft.checkpoint.convert import to_huggingface
from weft.errors import DataError, JobError
from weft.job import Job
from weft.training.task_scores import label_scores, scores_of, speech_scores

TEXTS = [
    "red blue",
    "one",
    "two three green",
    "blue one red",
    "three",
    "green one",
    "red",
    "two two blue",
    "one two",
] * 2
ROWS = 6
MULTI, SINGLE = "multi_label_classification", "single_label_classification"
NAMES = {"zebra": 0, "ant": 1, "mole": 2}


def named(ids: dict[str, int]) -> dict[str, Any]:
    """Settings of a configuration whose outputs have names."""
    return {"num_labels": len(ids), "label2id": ids, "id2label": {id_: name for name, id_ in ids.items()}}


def repeated(values: list[Any]) -> list[Any]:
    return (values * len(TEXTS))[: len(TEXTS)]


def write_records(folder: Path, labels: list[Any]) -> str:
    path = folder / "records.jsonl"
    lines = [json.dumps({"text": text, "label": label}) for text, label in zip(TEXTS, repeated(labels), strict=True)]
    path.write_text("\n".join(lines))
    return str(path)


def label_job(folder: Path, path: str, source: str = "jsonl", **tables: Any) -> Job:
    """Job of one step on the first records, in their order."""
    found: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "config": None},
        "data": {"source": source, "path": path, "shuffle": False},
        "train": {"steps": 1, "global_batch_size": ROWS},
    }
    return task_job(
        "text classification", folder, **{key: found.get(key, {}) | tables.get(key, {}) for key in {*found, *tables}}
    )


def plain_loss(tokenizer: Any, model: Any, labels: Tensor) -> float:
    """Loss of the first texts, computed by the model of the library, which also chooses the kind of problem."""
    batch = tokenizer(TEXTS[: len(labels)], padding=True, return_tensors="pt")
    return model(batch["input_ids"], batch["attention_mask"], labels=labels).loss.item()


def first(values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(repeated(values)[:ROWS], dtype=dtype)


FLOAT = torch.float32
LABELS: dict[str, tuple[dict[str, Any], list[Any], Tensor]] = {
    "names of the model": (named({"POS": 0, "NEG": 1}), ["POS", "NEG", "NEG"], first([0, 1, 1])),
    "only id2label": ({"id2label": {0: "POS", 1: "NEG"}}, ["POS", "NEG"], first([0, 1])),
    "names of a model without names": ({"num_labels": 2}, ["yes", "no", "no"], first([1, 0, 0])),
    "numerals as texts": ({"num_labels": 11}, [str(number) for number in range(11)], first(list(range(11)))),
    "numbers of a data frame": ({"num_labels": 11}, [0.0, 2.0, 10.0], first([0, 2, 10])),
    "booleans": ({"num_labels": 2}, [True, False, False], first([1, 0, 0])),
    "regression of floats": ({"num_labels": 1, "problem_type": "regression"}, [0.5, -1.25], first([0.5, -1.25], FLOAT)),
    "regression of integers": ({"num_labels": 1}, [4, 0, 3], first([4, 0, 3], FLOAT)),
    "regression of two values": (
        {"num_labels": 2, "problem_type": "regression"},
        [[0.5, 2], [1, -1]],
        first([[0.5, 2], [1, -1]], FLOAT),
    ),
    "lists of 0 and 1": (
        {"num_labels": 3, "problem_type": MULTI},
        [[1, 0, 1], [0, 0, 0]],
        first([[1, 0, 1], [0, 0, 0]], FLOAT),
    ),
    "lists without a problem_type": ({"num_labels": 2}, [[1.0, 0.25], [0, 1]], first([[1, 0.25], [0, 1]], FLOAT)),
    "lists of names": (
        named(NAMES) | {"problem_type": MULTI},
        [["mole", "zebra"], [], ["ant"]],
        first([[1, 0, 1], [0, 0, 0], [0, 1, 0]], FLOAT),
    ),
}


@pytest.mark.parametrize("name", LABELS)
def test_the_loss_and_the_kind_of_problem_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    settings, labels, tensor = LABELS[name]
    tokenizer, model = save_classifier(tmp_path / "model", **settings)
    expected = plain_loss(tokenizer, model, tensor)
    assert expected > 1e-3
    run = observe(label_job(tmp_path, write_records(tmp_path, labels)), 2)
    assert run.losses[0] == pytest.approx(expected, rel=1e-5)
    assert run.metrics[0].tokens == ROWS
    exported = AutoModelForSequenceClassification.from_pretrained(run.folder / "export").config
    assert exported.problem_type == model.config.problem_type
    assert exported.num_labels == model.config.num_labels


def test_label2id_alone_numbers_the_names(tmp_path: Path) -> None:
    tokenizer, model = save_classifier(tmp_path / "model", **named({"POS": 0, "NEG": 1}))
    file = tmp_path / "model" / "config.json"
    settings = json.loads(file.read_text())
    del settings["id2label"]
    file.write_text(json.dumps(settings))
    run = observe(label_job(tmp_path, write_records(tmp_path, ["POS", "NEG", "NEG"])), 2)
    assert run.losses[0] == pytest.approx(plain_loss(tokenizer, model, first([0, 1, 1])), rel=1e-5)
    exported = AutoModelForSequenceClassification.from_pretrained(run.folder / "export").config
    assert exported.id2label == {0: "POS", 1: "NEG"}


def class_labels(folder: Path) -> str:
    """Dataset with names of its classes, in their own order."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(NAMES))})
    Dataset.from_dict({"text": TEXTS, "label": repeated([0, 1, 2])}, features=features).save_to_disk(
        str(folder / "set")
    )
    return str(folder / "set")


def lists_of_class_labels(folder: Path) -> str:
    features = Features({"text": Value("string"), "label": List(ClassLabel(names=list(NAMES)))})
    labels = repeated([[0], [1, 2], [2]])
    Dataset.from_dict({"text": TEXTS, "label": labels}, features=features).save_to_disk(str(folder / "set"))
    return str(folder / "set")


def data_frame(folder: Path) -> str:
    """Parquet of pandas, whose texts are large strings."""
    pandas.DataFrame({"text": TEXTS, "label": repeated(list(NAMES))}).to_parquet(folder / "frame.parquet")
    return str(folder / "frame.parquet")


@pytest.mark.parametrize(
    ("source", "write", "settings", "ids"),
    [
        ("datasets", class_labels, {"num_labels": 3}, NAMES),
        ("datasets", class_labels, named({"mole": 0, "zebra": 1, "ant": 2}), {"mole": 0, "zebra": 1, "ant": 2}),
        ("datasets", lists_of_class_labels, {"num_labels": 3}, NAMES),
        ("parquet", data_frame, {"num_labels": 3}, {"ant": 0, "mole": 1, "zebra": 2}),
        ("parquet", data_frame, {"num_labels": 4}, {"ant": 0, "mole": 1, "zebra": 2, "LABEL_3": 3}),
    ],
)
def test_pipelines_of_the_export_print_the_names(
    source: str, write: Any, settings: dict[str, Any], ids: dict[str, int], tmp_path: Path
) -> None:
    """Also of a checkpoint. The loss tells which output has learned which name."""
    tokenizer, model = save_classifier(tmp_path / "model", **settings)
    labels = torch.tensor([ids[name] for name in repeated(list(NAMES))[:ROWS]])
    if write is lists_of_class_labels:
        labels = torch.zeros(ROWS, 3)
        for row, names in enumerate(repeated([["zebra"], ["ant", "mole"], ["mole"]])[:ROWS]):
            labels[row, [ids[name] for name in names]] = 1
    loss = plain_loss(tokenizer, model, labels)
    run = observe(label_job(tmp_path, write(tmp_path), source, checkpoint={"every": 1}), 2)
    assert run.losses[0] == pytest.approx(loss, rel=1e-5)
    to_huggingface(run.folder / "step-00000001", tmp_path / "exported")
    for folder in (run.folder / "export", tmp_path / "exported"):
        classify = pipeline("text-classification", str(folder))
        assert classify.model.config.label2id == ids
        assert {answer["label"] for answer in classify(TEXTS)} <= set(ids)


REFUSED: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "other names": (named({"POS": 0, "NEG": 1}), ["POS", "good"], r"{POS: 0, NEG: 1}, and lacks {good} .* {POS, good}"),
    "names that contradict": (
        {"label2id": {"a": 0, "b": 1}, "id2label": {0: "b", 1: "a"}},
        ["a", "b"],
        "label2id has {a: 0, b: 1}, and id2label {b: 0, a: 1}",
    ),
    "names of a regression": ({"num_labels": 1}, ["a", "b"], "names, for regression"),
    "three classes of two": ({"num_labels": 2}, ["a", "b", "c"], "3 classes, the model has 2"),
    "three numbers of two": ({"num_labels": 2}, [0, 1, 2], "3 classes, the model has 2"),
    "fractions of two classes": ({"num_labels": 2}, [0.5, 1.5], "labels from 0.5 to 1.5"),
    "negative classes": ({"num_labels": 2}, [0, -1], "labels from -1 to 0"),
    "one number for three outputs": (
        {"num_labels": 3, "problem_type": "regression"},
        [0.5, 1.5],
        "one number for 3 outputs",
    ),
    "one class of several": ({"num_labels": 3, "problem_type": MULTI}, [0, 1, 2], f"numbers, for {MULTI}"),
    "lists of one class": (
        {"num_labels": 2, "problem_type": SINGLE},
        [[0, 1], [1, 0]],
        f"lists of numbers, for {SINGLE}",
    ),
    "short lists": ({"num_labels": 3, "problem_type": MULTI}, [[0, 1], [1, 0]], "lists of 2 numbers for 3 outputs"),
    "lists of two lengths": ({"num_labels": 3}, [[0, 1], [1, 0, 1]], "lists of 2 to 3 numbers"),
    "lists beyond 1": ({"num_labels": 2}, [[0, 2], [1, 0]], "labels from 0 to 2"),
    "not a number": ({"num_labels": 1}, [0.5, float("nan")], "9 labels are missing or not finite"),
    "tables": ({"num_labels": 2}, [{"a": 1}], "label is of the type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_with_a_fix_that_works(name: str, tmp_path: Path) -> None:
    settings, labels, problem = REFUSED[name]
    save_classifier(tmp_path / "model", **settings)
    path = write_records(tmp_path, labels)
    with pytest.raises((DataError, JobError)) as refused:
        train_in_the_pool(label_job(tmp_path, path), 2)
    assert re.search(problem if "lacks" in problem else re.escape(problem), str(refused.value))
    assert not (tmp_path / "run").exists()
    outputs = re.search(r"task\.classes = (\d+)", str(refused.value.fix))
    kind = re.search(r'problem_type to "(\w+)"', str(refused.value.fix))
    if not outputs and not kind:
        assert re.search("correct|rename|write", str(refused.value.fix))
        return
    file = tmp_path / "model" / "config.json"
    if kind:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"problem_type": kind[1]}))
    task = {"classes": int(outputs[1])} if outputs else {}
    assert observe(label_job(tmp_path, path, task=task), 2).losses[0] > 0


@pytest.mark.parametrize("problem", ["regression", SINGLE, MULTI])
def test_metrics_of_held_out_records_are_those_of_the_export(problem: str, tmp_path: Path) -> None:
    """Computed again by their definitions from what plain Transformers answers."""
    labels = {
        "regression": [0.5, -1.0, 2.0, 0.25, 1.0],
        SINGLE: [0, 1, 2, 1, 1],
        MULTI: [[1, 0, 1], [0, 1, 1], [1, 1, 0]],
    }
    save_classifier(tmp_path / "model", num_labels=1 if problem == "regression" else 3, problem_type=problem)
    job = label_job(tmp_path, write_records(tmp_path, labels[problem]), data={"held_out": 0.5})
    out, _ = train_in_the_pool(job, 2)
    model = AutoModelForSequenceClassification.from_pretrained(out / "export").eval()
    batch = AutoTokenizer.from_pretrained(out / "export")(TEXTS[-9:], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["attention_mask"]).logits.numpy()
    wanted = np.array(repeated(labels[problem])[-9:])
    facts = json.loads((out / "run.json").read_text())
    found = facts["metrics"]
    if problem == "regression":
        assert facts["accuracy"] is None
        assert found["pearson"] == pytest.approx(np.corrcoef(logits[:, 0], wanted)[0, 1], rel=1e-4)
        assert found["mse"] == pytest.approx(np.square(logits[:, 0] - wanted).mean(), rel=1e-4)
        return
    truth = np.eye(3)[wanted] if problem == SINGLE else wanted
    best = np.eye(3)[logits.argmax(1)] if problem == SINGLE else logits > 0
    assert facts["accuracy"] == pytest.approx((truth == best).all(1).mean())
    both, either = (truth * best).sum(0), truth.sum(0) + best.sum(0)
    assert found["f1_macro"] == pytest.approx(np.mean(2 * both[either > 0] / either[either > 0]))
    scores = logits if problem == MULTI else np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    pairs = [
        (scores[truth[:, c] == 1, c][:, None], scores[truth[:, c] == 0, c])
        for c in range(3)
        if 0 < truth[:, c].sum() < 9
    ]
    aucs = [((high > low) + 0.5 * (high == low)).mean() for high, low in pairs]
    assert found["auc_macro"] == pytest.approx(np.mean(aucs))


def test_metrics_without_a_meaning_are_no_numbers() -> None:
    """No correlation of one value, no AUC of one class."""
    found = label_scores("regression", torch.ones(4, 1), torch.arange(4.0)[:, None])
    assert np.isnan(found["pearson"])
    assert found["mse"] == 1.5
    assert np.isnan(label_scores(SINGLE, torch.eye(3), torch.ones(3, dtype=torch.int64))["auc_macro"])


def losses_of_own_loop(rank: int, ranks: int, settings: dict[str, Any], labels: list[Any], folder: Path) -> list[float]:
    """Losses of two steps of `train_batch` on this rank's share of the rows."""
    model = BertForSequenceClassification.from_pretrained(folder)
    run: Any = weft.prepare(model, optimizer=optimizer_of, plan=weft.Plan())
    batch = plain_batch(folder) | {"labels": torch.tensor(labels)}
    own, losses = {key: value[run.data_rank :: 2] for key, value in batch.items()}, []
    for _ in range(2):
        losses.append(run.train_batch(own, micro_batch_size=1))
        run.step()
    return losses


def plain_batch(folder: Path) -> dict[str, Tensor]:
    made = AutoTokenizer.from_pretrained(folder)(TEXTS[:4], padding=True, return_tensors="pt")
    return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]}


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"num_labels": 1}, [0.5, -1.0, 2.0, 0.25]),
        ({"num_labels": 2, "problem_type": "regression"}, [[0.5, 1.0], [-1.0, 0.0], [2.0, 0.5], [0.25, 0.75]]),
        ({"num_labels": 2, "problem_type": MULTI}, [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]),
    ],
)
def test_own_loops_have_the_loss_of_the_model(settings: dict[str, Any], labels: list[Any], tmp_path: Path) -> None:
    _, model = save_classifier(tmp_path, **settings)
    model.eval()
    optimizer, losses = optimizer_of(model.parameters()), []
    for _ in range(2):
        loss = model(**plain_batch(tmp_path), labels=torch.tensor(labels)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for found in run_ranks(2, losses_of_own_loop, settings, labels, tmp_path):
        assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("axes", [{"pp": 2, "zero": 0}, {"tp": 2, "sp": False}, {"zero": 3}])
@pytest.mark.parametrize("name", ["regression of two values", "lists of names"])
def test_the_loss_does_not_depend_on_the_layout(name: str, axes: dict[str, Any], tmp_path: Path) -> None:
    settings, labels, tensor = LABELS[name]
    tokenizer, model = save_classifier(tmp_path / "model", **settings)
    plan = {"parallel": axes, "precision": {"param_dtype": "fp32"}}
    run = observe(label_job(tmp_path, write_records(tmp_path, labels), plan=plan), 2)
    assert run.losses[0] == pytest.approx(plain_loss(tokenizer, model, tensor), rel=1e-5)
    assert run.metrics[0].tokens == ROWS


def test_a_metric_whose_library_is_missing_is_named_with_its_extra() -> None:
    lines: list[str] = []
    found = scores_of(speech_scores, ["red blue", ""], ["red green", ""], log=lines.append)
    if find_spec("jiwer"):
        assert found == {"wer": 0.5}
        assert not lines
    else:
        assert found == {}
        assert "jiwer" in lines[0]
        assert "weft-train[tasks]" in lines[0]
