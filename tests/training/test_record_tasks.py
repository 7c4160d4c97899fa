"""Tasks other than causal: losses and weights as in a plain loop with the loss of the library, resume, samples, bad input."""

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, Wav2Vec2FeatureExtractor

from tests.lab import tones
from tests.lab.runs import train_in_the_pool
from tests.lab.task_jobs import MODELS, reversed_words, stripes, task_job
from weft.anatomy.classes import auto_class
from weft.checkpoint.convert import to_huggingface
from weft.checkpoint.model_config import read_config
from weft.data import RecordBatch, open_rows, prepare
from weft.errors import DataError, JobError, ModelError
from weft.job import Job, Model, Task
from weft.observe.report import write_report
from weft.training.metrics import read_metrics

PLANS: dict[str, dict[str, Any]] = {
    "zero 0": {"parallel": {"zero": 0}},
    "zero 3": {"parallel": {"zero": 3}, "memory": {"recompute": ["block"]}},
}
UNEQUAL = ("text classification", "decoder classification", "seq2seq")
"""Tasks that pad texts."""
UNEQUAL_TEXTS = {"source": "tests.training.test_record_tasks:texts_of_unequal_lengths", "seq_len": 32}
FP32 = {"precision": {"param_dtype": "fp32"}}


def loss_of_library(model: Any, kind: str, batch: RecordBatch) -> Tensor:
    """Mean loss as the library computes it; of diffusion, the mean squared error."""
    inputs, targets = dict(batch.inputs), batch.targets
    if kind == "diffusion":
        return F.mse_loss(model(**inputs).sample, batch.predicted)
    if kind == "vlm":  # whose model moves the labels by one token
        targets = torch.cat([torch.full_like(targets[:, :1], -100), targets[:, :-1]], 1)
    return model(**inputs, labels=targets).loss


def train_alone(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the untouched model in one process, with the rows of the job."""
    kind, train = job.task.kind, job.train
    config = read_config(job.model, kind)
    torch.manual_seed(0)
    model = auto_class(kind, config).from_config(config)
    prepared = prepare(job.data, model_folder=None, log=lambda text: None, task=job.task)
    rows = open_rows(job, prepared, model.config, held_out=False)
    settings = job.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, settings.betas, settings.eps, weight_decay=0)
    model.train()
    torch.manual_seed(train.seed)  # DiT leaves out some classes at random
    losses = []
    for step in range(train.steps):
        batch = rows.collate(range(step * train.global_batch_size, (step + 1) * train.global_batch_size), 6)
        loss = loss_of_library(model, kind, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def losses_of(out: Path) -> list[float]:
    return [row.loss for row in read_metrics(out / "metrics.jsonl")]


@pytest.mark.must("parity: jobs of other tasks", case="masked-zero 0")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "diffusion"])
def test_losses_and_weights_are_those_of_one_process(name: str, plan: str, tmp_path: Path) -> None:
    """Ranks and micro-batches have unequal numbers of targets: the mean is over all targets of the global batch."""
    job = task_job(name, tmp_path, plan={**FP32, **PLANS[plan]})
    losses, weights = train_alone(job)
    out, _ = train_in_the_pool(job, 2)
    assert losses_of(out) == pytest.approx(losses, rel=1e-5)
    found = auto_class(job.task.kind, read_config(job.model)).from_pretrained(out / "export").state_dict()
    assert set(found) == set(weights)
    for key, weight in found.items():
        torch.testing.assert_close(weight, weights[key], rtol=1e-4, atol=2e-5, msg=key)


def texts_of_unequal_lengths(data: Any) -> Iterator[dict[str, Any]]:
    """Texts of 1 to 22 words, with a class or another text."""
    for index in range(40):
        text = " ".join(["red", "blue"][(index + place) % 2] for place in range(1 + 7 * index % 22))
        yield {"text": text, "label": index % 3, "source": text, "target": " ".join(text.split()[::-2])}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("diffusion", "image classification")])
def test_the_loss_does_not_depend_on_the_micro_batch(name: str, tmp_path: Path) -> None:
    """Rows of unequal lengths are padded to other lengths in micro-batches of eight than in those of one."""
    found = []
    for micro_batch in (1, 8):
        train = {"steps": 1, "global_batch_size": 8, "micro_batch_size": micro_batch}
        data = UNEQUAL_TEXTS if name in UNEQUAL else {}
        out, _ = train_in_the_pool(task_job(name, tmp_path, train=train, plan=FP32, data=data), 1)
        found += losses_of(out)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def tones_of_unequal_lengths(data: Any) -> Iterator[dict[str, Any]]:
    """One to three tones, and their number as a class."""
    for index in range(40):
        sound = tones.write_tones(["low", "high", "middle"][: index % 3 + 1])
        yield {"audio": {"bytes": sound, "path": None}, "label": index % 3}


@pytest.mark.parametrize("has_mask", [False, True])
def test_padded_audio_has_the_same_loss_in_each_micro_batch(has_mask: bool, tmp_path: Path) -> None:
    """Of wav2vec2-base, whose first norm is over time and whose extractor makes no mask, and of wav2vec2-large."""
    model = {**tones.WAV2VEC2, "feat_extract_norm": "layer" if has_mask else "group", "do_stable_layer_norm": has_mask}
    Wav2Vec2FeatureExtractor(sampling_rate=tones.RATE, return_attention_mask=has_mask).save_pretrained(tmp_path / "own")
    data = {
        "source": "tests.training.test_record_tasks:tones_of_unequal_lengths",
        "tokenizer": str(tmp_path / "own"),
    }
    found = []
    for micro_batch in (1, 8):
        train = {"steps": 1, "global_batch_size": 8, "micro_batch_size": micro_batch}
        job = task_job("audio classification", tmp_path, train=train, plan=FP32, model={"config": model}, data=data)
        found += losses_of(train_in_the_pool(job, 1)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("name", UNEQUAL)
def test_padded_texts_have_the_loss_of_texts_alone(name: str, tmp_path: Path) -> None:
    """The library reads each text without padding."""
    train = {"steps": 1, "global_batch_size": 8, "micro_batch_size": 4}
    job = task_job(name, tmp_path, train=train, data={**UNEQUAL_TEXTS, "shuffle": False}, plan=FP32)
    out, _ = train_in_the_pool(job, 2)
    config = read_config(job.model, job.task.kind)
    torch.manual_seed(0)
    model = auto_class(job.task.kind, config).from_config(config)
    tokenizer = AutoTokenizer.from_pretrained(json.loads((out / "prepared.json").read_text())["tokenizer"])
    total = count = 0.0
    for record in islice(texts_of_unequal_lengths(None), 8):
        ids, labels = torch.tensor([tokenizer(record["text"])["input_ids"]]), torch.tensor([record["label"]])
        if name == "seq2seq":
            labels = torch.tensor([tokenizer(text_target=record["target"])["input_ids"]])
            assert labels[0, -1] == ids[0, -1] == tokenizer.eos_token_id
        total += model(input_ids=ids, labels=labels).loss.item() * labels.numel()
        count += labels.numel()
    assert losses_of(out)[0] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(("source", "padding"), [("config", None), ("config", -1), ("folder", None)])
def test_a_model_without_padding_is_refused_with_a_fix_that_works(
    source: str, padding: int | None, tmp_path: Path
) -> None:
    job = task_job("decoder classification", tmp_path, plan=FP32, train={"steps": 1})
    model, folder = Model(config={**MODELS["decoder classification"], "pad_token_id": padding}), tmp_path / "base"
    if source == "folder":
        config = read_config(model, "classification")
        auto_class("classification", config).from_config(config).save_pretrained(folder)
        model = Model(path=str(folder))
    with pytest.raises(JobError, match=f"pad_token_id = {padding} of a model with 280 tokens") as caught:
        train_in_the_pool(job.model_copy(update={"model": model}), 2)
    assert not (tmp_path / "run").exists()
    key, _, value = str(caught.value.fix).removeprefix("set ").partition(" to ")
    if source == "folder":
        assert key == f"pad_token_id in {folder}/config.json"
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "pad_token_id": int(value)}))
    else:
        assert key == "model.config.pad_token_id"
        model = Model(config={**MODELS["decoder classification"], "pad_token_id": int(value)})
    out, _ = train_in_the_pool(job.model_copy(update={"model": model}), 2)
    assert losses_of(out)


AXES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "sp": False},
    "tp and sp": {"tp": 2},
    "cp": {"cp": 2, "cp_ulysses": 2},
    "pp": {"pp": 2, "zero": 0},
}


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    "name", ["vlm", "masked", "seq2seq", "audio seq2seq", "text classification", "image classification"]
)
def test_axes_of_a_task(name: str, axes: str, tmp_path: Path) -> None:
    """All ranks have the same rows; under cp they also have the same losses, which count once."""
    plan = {**FP32, "parallel": {"zero": 2, **AXES[axes]}}
    if name == "image classification" and axes != "pp":  # 16 patches and a class token
        plan["parallel"] |= {"cp": 1, "cp_ulysses": 1, "tp": 2, "sp": False}
    job = task_job(name, tmp_path, plan=plan)
    losses, weights = train_alone(job)
    out, _ = train_in_the_pool(job, 2)
    assert losses_of(out) == pytest.approx(losses, rel=1e-5)
    found = auto_class(job.task.kind, read_config(job.model)).from_pretrained(out / "export").state_dict()
    for key, weight in found.items():
        torch.testing.assert_close(weight, weights[key], rtol=1e-4, atol=2e-5, msg=key)


def test_diffusion_trains_as_one_process(tmp_path: Path) -> None:
    """On one rank in one micro-batch, with the classes that DiT leaves out; and under ZeRO 3 as under ZeRO 0."""
    job = task_job("diffusion", tmp_path, train={"micro_batch_size": 6})
    losses, _ = train_alone(job)
    out, _ = train_in_the_pool(job, 1)
    assert losses_of(out) == pytest.approx(losses, rel=1e-5)
    found = []
    for plan in PLANS.values():
        out, _ = train_in_the_pool(task_job("diffusion", tmp_path, plan={**FP32, **plan}), 2)
        found.append(losses_of(out))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_resumes_bit_equal(name: str, tmp_path: Path) -> None:
    tables = {"train": {"steps": 4}, "checkpoint": {"every": 2}, "plan": {**FP32, **PLANS["zero 3"]}}
    whole = task_job(name, tmp_path, **tables)
    out, _ = train_in_the_pool(whole, 2)
    expected = losses_of(out)
    half = task_job(name, tmp_path, **{**tables, "train": {"steps": 2}}).model_copy(
        update={"out": str(tmp_path / "two")}
    )
    train_in_the_pool(half, 2)
    rest = whole.model_copy(update={"out": half.out})
    out, _ = train_in_the_pool(rest, 2, resume="auto")
    assert losses_of(out) == expected


@pytest.mark.parametrize("name", MODELS)
def test_global_batches_do_not_depend_on_ranks(name: str, tmp_path: Path) -> None:
    """Rows, hidden tokens and noise are those of the position."""
    job = task_job(name, tmp_path)
    config = read_config(job.model, job.task.kind)
    if name == "diffusion":
        config = auto_class("diffusion", config).from_config(config).config
    prepared = prepare(job.data, model_folder=None, log=lambda text: None, task=job.task)
    rows = open_rows(job, prepared, config, held_out=False)
    together, alone = rows.collate(range(50, 54), 4), rows.collate([52], 1)
    for key, value in alone.inputs.items():
        whole = together.inputs[key][2:3]
        assert torch.equal(value, whole[:, : value.shape[1]] if value.ndim == 2 else whole), key
    padded = rows.collate([52], 3)
    assert (padded.targets[1:] == -100).all()
    assert (padded.targets[0] != -100).any()


@pytest.mark.parametrize("name", MODELS)
def test_summary_and_report(name: str, tmp_path: Path) -> None:
    """The export is tried by the plain library; the report shows it."""
    out, _ = train_in_the_pool(task_job(name, tmp_path), 1)
    facts = json.loads((out / "run.json").read_text())
    assert facts["task"] == name.rpartition(" ")[2]
    assert facts["sample"]
    page = write_report(out).read_text()
    assert ("data:image/png;base64," in page) == (name == "diffusion")
    assert ("Accuracy" in page) == (name != "diffusion")


def test_fine_tuning_of_a_pretrained_model(tmp_path: Path) -> None:
    """From a folder with five classes to three, with the new classifier of Transformers; and export of a checkpoint."""
    config = read_config(task_job("image classification", tmp_path).model, "classification", classes=5)
    torch.manual_seed(1)
    auto_class("classification", config).from_config(config).save_pretrained(tmp_path / "base")
    job = task_job("image classification", tmp_path, checkpoint={"every": 3})
    job = job.model_copy(update={"model": Model(path=str(tmp_path / "base"))})
    with pytest.raises(JobError, match="the records have 3 classes") as caught:  # a classifier of two
        train_in_the_pool(job.model_copy(update={"task": Task(kind="classification", classes=2)}), 2)
    assert "task.classes = 3" in str(caught.value)
    job = job.model_copy(update={"task": Task(kind="classification", classes=3)})
    out, _ = train_in_the_pool(job, 2)
    losses = losses_of(out)
    assert losses[0] == pytest.approx(math.log(3), rel=0.2)
    to_huggingface(out / "step-00000003", tmp_path / "exported", run=out)
    last = load_file(out / "export" / "model.safetensors")
    for name, weight in load_file(tmp_path / "exported" / "model.safetensors").items():
        assert torch.equal(weight, last[name])


@pytest.mark.must("format: records of tasks")
@pytest.mark.parametrize("kind", ["seq2seq", "image classification"])
def test_records_in_files_are_those_of_a_function(kind: str, tmp_path: Path) -> None:
    """JSON lines with paths of images, Parquet, and a folder of datasets, under other names of the fields."""
    found = []
    rows = list(stripes(None) if kind == "image classification" else reversed_words(None))
    for index, row in enumerate(rows):
        if "image" in row:
            (tmp_path / "images").mkdir(exist_ok=True)
            row["image"].save(tmp_path / "images" / f"{index}.png")
    lines = [{**row, **({"image": f"images/{index}.png"} if "image" in row else {})} for index, row in enumerate(rows)]
    first = "image" if "image" in rows[0] else "source"
    renamed = [{("my " + key if key == first else key): value for key, value in line.items()} for line in lines]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, renamed)))
    Dataset.from_list(rows).to_parquet(tmp_path / "records.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "folder"))
    sources: list[dict[str, Any]] = [
        {},
        {"data": {"source": "parquet", "path": str(tmp_path / "records.parquet")}},
        {"data": {"source": "datasets", "path": str(tmp_path / "folder")}},
        {
            "data": {"source": "jsonl", "path": str(tmp_path / "records.jsonl")},
            "task": {"fields": {first: f"my {first}"}},
        },
    ]
    for tables in sources:
        job = task_job(kind, tmp_path, **tables)
        prepared = prepare(job.data, model_folder=None, log=lambda text: None, task=job.task)
        opened = open_rows(job, prepared, read_config(job.model, job.task.kind), held_out=False)
        batch = opened.collate(range(8), 8)
        found.append([*batch.inputs.values(), batch.targets])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_held_out_records_are_of_all_classes(tmp_path: Path) -> None:
    """A source that is sorted by class is shuffled before it is divided; no record is in both splits."""
    job = task_job("image classification", tmp_path, data={"source": "tests.training.test_record_tasks:sorted_classes"})
    prepared = prepare(job.data, model_folder=None, log=lambda text: None, task=job.task)
    config = read_config(job.model, "classification")
    seen = []
    for held_out in (False, True):
        rows = open_rows(job, prepared, config, held_out=held_out)
        seen.append([rows.read(index) for index in range(len(rows))])
    numbers = [{record["image"].getpixel((0, 0)) for record in split} for split in seen]
    assert {record["label"] for record in seen[1]} == {0, 1, 2}
    assert not numbers[0] & numbers[1]
    assert len(numbers[0] | numbers[1]) == 60


def sorted_classes(data: Any) -> Any:
    """Grey images, each with another value, sorted by class."""
    from PIL import Image

    return ({"image": Image.new("L", (16, 16), index), "label": index // 20} for index in range(60))


def without_target(data: Any) -> list[dict[str, Any]]:
    """Records of which one has no target."""
    return [{"source": "one", "target": "two"}, {"source": "two", "target": None}]


@pytest.mark.parametrize(
    ("name", "tables", "problem"),
    [
        ("seq2seq", {"data": {"source": "text", "path": __file__}}, "data.source"),
        (
            "seq2seq",
            {"data": {"source": "tests.training.test_record_tasks:without_target"}},
            "1 records have no target",
        ),
        ("text classification", {"model": {"config": {**MODELS["text classification"], "num_labels": 2}}}, "3 classes"),
        ("masked", {"data": {"seq_len": 64}}, "longer than the model's 32 positions"),
        ("masked", {"task": {"kind": "masked", "classes": 3}}, "task.classes"),
        ("seq2seq", {"task": {"kind": "seq2seq", "fields": {"source": "article"}}}, "the records have the fields"),
        ("vlm", {"data": {"tokenizer": "train"}}, "processor"),
        ("diffusion", {"plan": {"parallel": {"pp": 2}}}, "plan.parallel.pp for a module: DiTTransformer2DModel"),
        ("image classification", {"plan": {"parallel": {"cp": 2}}}, "plan.parallel.cp"),
        ("diffusion", {"model": {"config": {**MODELS["diffusion"], "num_layer": 2}}}, "num_layer is no key"),
        ("diffusion", {"model": {"config": {"num_layers": 2}}}, "_class_name"),
        ("seq2seq", {"model": {"config": MODELS["image classification"]}}, "Transformers cannot build"),
        ("text classification", {"adapter": {"kind": "lora"}}, "adapter.kind"),
    ],
)
def test_bad_input_is_refused(name: str, tables: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises((DataError, JobError, ModelError)) as caught:
        train_in_the_pool(task_job(name, tmp_path, **tables), 2)
    assert problem in str(caught.value)
    assert not (tmp_path / "run").exists()
