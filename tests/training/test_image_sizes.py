"""Images and text with a different number of patches in each row: rows, losses of one process, and equal costs of ranks."""

import io
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoProcessor, PaddleOCRVLProcessor, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

from tests.lab.kinds import DECODER
from tests.lab.runs import train_in_the_pool
from tests.lab.task_jobs import task_job
from tests.training.test_record_tasks import AXES, FP32, PLANS, loss_of_library, losses_of, train_alone
from weft.anatomy.classes import auto_class
from weft.checkpoint.model_config import read_config
from weft.data import RecordBatch, RowSplit, TaskRows, batches, open_rows, prepare
from weft.errors import DataError
from weft.job import Job

SPECIAL = ("<pad>", "</s>", "<unk>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
WORDS = ("what", "size", "?", "small", "wide", "high", "very")
QWEN: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        **DECODER,
        "vocab_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "patch_size": 8,
        "window_size": 32,
        "fullatt_block_indexes": [1],
        "in_channels": 3,
    },
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
}


def save_processor(folder: Path) -> None:
    """Write the image processor of Qwen2-VL, of patches of 8 pixels in squares of four, and a tokenizer.

    Qwen's own processor also reads videos, for which it needs torchvision.
    """
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    image = {"image_token": "<|image_pad|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **names, extra_special_tokens=image)
    size = {"shortest_edge": 16 * 16, "longest_edge": 96 * 96}
    images = Qwen2VLImageProcessorPil(patch_size=8, temporal_patch_size=2, merge_size=2, size=size)
    template = (
        "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
        "<|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}"
    )
    PaddleOCRVLProcessor(images, tokenizer, chat_template=template).save_pretrained(folder)


def pictures(data: Any) -> Iterator[dict[str, Any]]:
    """Images of many sizes, and answers of many lengths."""
    chance = random.Random(0)
    for _ in range(40):
        width, height = (16 * chance.randint(1, 6) for _ in range(2))
        answer = " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 9)))
        image = Image.new("RGB", (width, height), (chance.randint(0, 255), 40, 90))
        yield {"image": image, "prompt": "what size ?", "answer": answer}


def sizes_job(folder: Path, **tables: dict[str, Any]) -> Job:
    """Job of a model with patches of images of any size."""
    save_processor(folder / "qwen")
    data = {
        "source": "tests.training.test_image_sizes:pictures",
        "tokenizer": str(folder / "qwen"),
        **tables.pop("data", {}),
    }
    return task_job("vlm", folder, model={"config": QWEN}, data=data, **tables)


def opened(job: Job) -> TaskRows:
    """Training rows of a job."""
    prepared = prepare(job.data, model_folder=None, log=lambda text: None, task=job.task)
    rows = open_rows(job, prepared, read_config(job.model, "vlm"), held_out=False)
    assert isinstance(rows, TaskRows)
    return rows


@pytest.mark.must("format: images")
def test_rows_are_those_of_the_processor(tmp_path: Path) -> None:
    """Patches of all images one after another, and a loss on the answer and its end alone."""
    rows = opened(sizes_job(tmp_path))
    processor = AutoProcessor.from_pretrained(tmp_path / "qwen")
    batch = rows.collate(range(6), 6)
    assert len(set(map(tuple, batch.inputs["image_grid_thw"].tolist()))) > 1
    assert len(batch.inputs["pixel_values"]) == batch.inputs["image_grid_thw"].prod(1).sum()
    for line in range(6):
        record = rows.example(line).record
        ids, targets = batch.inputs["input_ids"][line], batch.targets[line]
        written = processor.tokenizer(record["answer"] + "</s>")["input_ids"]
        assert targets[targets != -100].tolist() == written
        places = (targets != -100).nonzero().flatten() + 1
        assert ids[places].tolist() == written


@pytest.mark.parametrize("plan", PLANS)
def test_losses_and_weights_are_those_of_one_process(plan: str, tmp_path: Path) -> None:
    check_plan(tmp_path, {**FP32, **PLANS[plan]})


@pytest.mark.parametrize("axes", ["tp", "tp and sp", "pp"])
def test_axes(axes: str, tmp_path: Path) -> None:
    check_plan(tmp_path, {**FP32, "parallel": {"zero": 2, **AXES[axes]}})


def test_unequal_rows(tmp_path: Path) -> None:
    check_plan(tmp_path, {**FP32, "parallel": {"zero": 3, "rows_per_rank": [4, 2]}})


def check_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Compare losses of three steps and all weights with one process."""
    job = sizes_job(folder, plan=plan)
    losses, weights = train_alone(job)
    out, _ = train_in_the_pool(job, 2)
    assert losses_of(out) == pytest.approx(losses, rel=1e-5)
    found = auto_class("vlm", read_config(job.model)).from_pretrained(out / "export").state_dict()
    for key, weight in found.items():
        torch.testing.assert_close(weight, weights[key], rtol=1e-4, atol=2e-5, msg=key)


def test_ranks_have_rows_of_equal_cost(tmp_path: Path) -> None:
    """Tokens and patches of ranks differ less than in contiguous shares; together they have each row of the batch once."""
    job = sizes_job(tmp_path)
    rows = opened(job)
    costs = rows.costs(range(16))
    assert costs is not None
    for position, cost in enumerate(costs):  # two blocks of vision and two of text, of the same size
        batch = rows.collate([position], 1)
        assert cost == batch.inputs["attention_mask"].sum() + len(batch.inputs["pixel_values"])
    split = RowSplit(global_batch=16, micro_batch=4, data_ranks=2)
    balanced = [split.balanced(rank, costs) for rank in range(2)]
    plain = [split.micro_batches(rank) for rank in range(2)]

    def gap(parts: Sequence[Any]) -> float:
        """Largest excess of a rank over the mean of a micro-batch, relative to the mean."""
        totals = [[sum(costs[row] for row in indices) for indices, _ in ranks] for ranks in parts]
        return max(max(pair) / (sum(pair) / 2) - 1 for pair in zip(*totals, strict=True))

    assert gap(balanced) < 0.1 < gap(plain)
    assert sorted(row for ranks in balanced for indices, _ in ranks for row in indices) == list(range(16))
    found = [next(batches(rows, steps=1, split=split, data_rank=rank)) for rank in range(2)]
    patches = [sum(len(batch.inputs["pixel_values"]) for batch in one) for one in found]
    assert max(patches) < 1.1 * min(patches)


@pytest.mark.parametrize("rows_per_rank", [(), (4, 2)])
def test_shares_have_the_gradients_of_the_global_batch(rows_per_rank: tuple[int, ...], tmp_path: Path) -> None:
    """In one process: micro-batches of all ranks, with other padding and order, add up to the batch as a whole."""
    job = sizes_job(tmp_path)
    rows, config = opened(job), read_config(job.model, "vlm")
    torch.manual_seed(0)
    model = auto_class("vlm", config).from_config(config).double()
    whole = rows.collate(range(6), 6)
    loss_of_library(model, "vlm", in_double(whole)).backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    count = (whole.targets != -100).sum()
    split = RowSplit(global_batch=6, micro_batch=2, data_ranks=2, rows_per_rank=rows_per_rank)
    for rank in range(2):
        for batch in next(batches(rows, steps=1, split=split, data_rank=rank)):
            if (batch.targets != -100).any():
                share = (batch.targets != -100).sum() / count
                (loss_of_library(model, "vlm", in_double(batch)) * share).backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def in_double(batch: RecordBatch) -> RecordBatch:
    """Batch for a model in float64."""
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in batch.inputs.items()}
    return RecordBatch(inputs, batch.targets)


@pytest.mark.parametrize("rows_per_rank", [(), (9, 4), (1, 12)])
def test_balanced_shares_have_the_sizes_of_the_split(rows_per_rank: tuple[int, ...]) -> None:
    """With padding rows of equal shares, and with unequal shares, where the cost is in proportion to the rows."""
    split = RowSplit(global_batch=13, micro_batch=12, data_ranks=2, rows_per_rank=rows_per_rank)
    costs = [float(1 + (7 * row) % 5) for row in range(13)]
    found = [split.balanced(rank, costs) for rank in range(2)]
    for rank in range(2):
        plain = split.micro_batches(rank)
        assert [(len(rows), size) for rows, size in found[rank]] == [(len(rows), size) for rows, size in plain]
    assert sorted(row for one in found for rows, _ in one for row in rows) == list(range(13))
    if rows_per_rank == (9, 4):
        means = [sum(costs[row] for row in one[0][0]) / len(one[0][0]) for one in found]
        assert means[0] == pytest.approx(means[1], rel=0.1)


@cache
def broken() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()[:10]


def broken_pictures(data: Any) -> Iterator[dict[str, Any]]:
    """Records of which one has a broken image."""
    for index in range(8):
        yield {"image": {"bytes": broken(), "path": None}, "prompt": "what ?", "answer": f"{index}"}


def test_a_broken_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the image of 8 of 8 records cannot be read"):
        opened(sizes_job(tmp_path, data={"source": "tests.training.test_image_sizes:broken_pictures"}))
