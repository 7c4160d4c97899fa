"""Classifiers of images with the processors and configurations of their families, and refusals before a rank starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    CLIPConfig,
    CLIPImageProcessorPil,
    ResNetConfig,
    SiglipConfig,
    SiglipImageProcessorPil,
    ViTConfig,
    ViTImageProcessorPil,
    pipeline,
)

from tests.lab.kinds import NO_DROPOUT, PICTURE, SIZES
from tests.lab.runs import observe
from tests.lab.task_jobs import stripes, task_job
from weft.adapters.model import build_model
from weft.errors import JobError, ModelError, WeftError
from weft.job import Job
from weft.planner.dryrun.assumed import assumed_row
from weft.training.session import Session

SMALL = {"height": 16, "width": 16}
TEXT = {**SIZES, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Any] = {
    "vit of one channel": (
        ViTConfig(**PICTURE, **NO_DROPOUT, num_channels=1, num_labels=3),
        ViTImageProcessorPil(size=SMALL, image_mean=[0.4], image_std=[0.3]),
    ),
    "clip": (
        CLIPConfig(vision_config=PICTURE, text_config=TEXT, num_labels=3),
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=SMALL),
    ),
    "siglip": (
        SiglipConfig(vision_config=PICTURE, text_config=TEXT, num_labels=3),
        SiglipImageProcessorPil(size=SMALL),
    ),
}


def image_job(folder: Path, config: Any, processor: Any, **tables: Any) -> Job:
    """Job that continues the training of a model in a folder, with its processor, if there is one."""
    torch.manual_seed(0)
    AutoModelForImageClassification.from_config(config).save_pretrained(folder / "model")
    if processor is not None:
        processor.save_pretrained(folder / "model")
    job = task_job("image classification", folder, **tables)
    return Job.parse({**job.model_dump(exclude_none=True), "model": {"path": str(folder / "model")}})


@pytest.mark.parametrize(("name", "ranks"), [(name, 1) for name in MODELS] + [("clip", 2)])
def test_losses_are_those_of_the_model_and_its_processor(name: str, ranks: int, tmp_path: Path) -> None:
    config, processor = MODELS[name]
    job = image_job(tmp_path, config, processor, data={"shuffle": False}, train={"steps": 1})
    run = observe(job, ranks)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    rows = list(stripes(None))[:6]
    mode = "L" if name == "vit of one channel" else "RGB"
    pixels = processor([row["image"].convert(mode) for row in rows], return_tensors="pt")["pixel_values"]
    expected = model(pixel_values=pixels, labels=torch.tensor([row["label"] for row in rows])).loss.item()
    assert run.losses == pytest.approx([expected], rel=1e-5)
    if mode == "RGB":  # to which a pipeline converts every image
        export = str(run.folder / "export")
        (found,) = pipeline("image-classification", export, top_k=1)(rows[0]["image"])
        trained = AutoModelForImageClassification.from_pretrained(export)(pixel_values=pixels[:1]).logits.softmax(-1)
        assert found["score"] == pytest.approx(trained.max().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("config", "processor", "problem"),
    [
        (MODELS["clip"][0], CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=24), r"24\*24"),
        (MODELS["vit of one channel"][0], CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16), "channel"),
        (MODELS["vit of one channel"][0], ViTImageProcessorPil(size=SMALL), "mean must have 1 elements"),
        (ViTConfig(**PICTURE, num_channels=5, num_labels=3), None, "reads 5 channels"),
        (ResNetConfig(hidden_sizes=[8, 16], depths=[1, 1], embedding_size=8, num_labels=3), None, "no image_size"),
    ],
)
def test_a_processor_of_another_model_is_refused(config: Any, processor: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=problem) as caught:
        observe(image_job(tmp_path, config, processor), 1)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    assert not (tmp_path / "run").exists()


def sizes(data: Any) -> Iterator[dict[str, Any]]:
    """Images of two sizes."""
    for index, row in enumerate(stripes(None)):
        yield {**row, "image": row["image"].resize((16, 16 + 4 * (index == 7)))}


def test_a_processor_that_leaves_images_of_several_sizes_is_refused(tmp_path: Path) -> None:
    config, own = (
        MODELS["vit of one channel"][0],
        ViTImageProcessorPil(do_resize=False, image_mean=[0.4], image_std=[0.3]),
    )
    data = {"source": "tests.training.test_image_records:sizes"}
    with pytest.raises(ModelError, match=r"20\*16") as caught:
        observe(image_job(tmp_path, config, own, data=data), 1)
    assert "record 7 of" in str(caught.value)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_stages_and_dry_runs_have_images_of_a_nested_configuration(name: str, tmp_path: Path) -> None:
    """The first losses of two stages are those of one rank; a dry run has an image of the size of the model."""
    config, processor = MODELS[name]
    jobs = [
        image_job(tmp_path, config, processor, data={"shuffle": False}, train={"steps": 1}, plan={"parallel": parallel})
        for parallel in ({}, {"pp": 2, "zero": 0})
    ]
    losses = [observe(job, 1 + number).losses for number, job in enumerate(jobs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    row = assumed_row(jobs[0], build_model(jobs[0], torch.float32))
    assert row is not None
    assert row.inputs["pixel_values"].shape == (1, 3, 16, 16)


def test_the_processor_of_data_tokenizer_is_used(tmp_path: Path) -> None:
    config, processor = MODELS["clip"]
    processor.save_pretrained(tmp_path / "own")
    wrong = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=24)
    run = observe(image_job(tmp_path, config, wrong, data={"tokenizer": str(tmp_path / "own")}, train={"steps": 1}), 1)
    assert AutoImageProcessor.from_pretrained(run.folder / "export").size == processor.size


def gradients(data: Any) -> Iterator[dict[str, Any]]:
    """Pictures of 16 bits whose values lie above 255, and the same ones in 8 bits."""
    for index in range(12):
        values = np.linspace(300, 4000 * (index // 2 + 1), 256).reshape(16, 16)
        scale = 257 if data.path == "8" else 1
        dtype = np.uint8 if data.path == "8" else np.uint16
        yield {"image": Image.fromarray(np.round(values.round() / scale).astype(dtype)), "label": index % 3}


def test_images_of_16_bits_are_those_of_8_bits(tmp_path: Path) -> None:
    """Without a scale, all of them would be white."""
    found = []
    for bits in ("8", "16"):
        data = {"source": "tests.training.test_image_records:gradients", "path": bits, "shuffle": False}
        found += observe(task_job("image classification", tmp_path, data=data, train={"steps": 2}), 1).losses
    assert found[:2] == found[2:]


def with_damaged(data: Any) -> Iterator[dict[str, Any]]:
    """Twelve records, two of which have no image in their file."""
    for index, row in enumerate(stripes(None)):
        if index < 12:
            yield {**row, "image": {"bytes": b"", "path": None}} if index in (3, 7) else row


def labels_of(session: Session) -> list[int]:
    """Labels of the rows of a rank, in their order."""
    rows: Any = session.train_rows
    return [rows.example(index).record["label"] for index in range(len(rows))]


@pytest.mark.effect(
    "data.bad_files", "rows of a rank: without the two whose images are damaged, which a line at start counts"
)
def test_records_with_damaged_images_are_left_out(tmp_path: Path) -> None:
    data = {"source": "tests.training.test_image_records:with_damaged", "bad_files": "skip"}
    job = task_job("image classification", tmp_path, data={**data, "shuffle": False, "held_out": 0.0})
    run = observe(job, 1, probe=labels_of)
    assert run.facts == [[index % 3 for index in range(12) if index not in (3, 7)]]
    assert any("2 of 12 records cannot be read" in line for line in run.screen)


DENOISERS: dict[str, Any] = {
    "latents of published models": ({"in_channels": 4, "out_channels": 4}, JobError, "in_channels = 4"),
    "learned variances of latents": ({"in_channels": 4, "out_channels": 8}, JobError, "in_channels = 4"),
    "a convolutional network": (
        {"_class_name": "UNet2DModel", "sample_size": 8, "block_out_channels": [32, 32], "layers_per_block": 1}
        | {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2},
        ModelError,
        "UNet2DModel has no argument hidden_states",
    ),
    "a model that reads a text": (
        {"_class_name": "PixArtTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 16}
        | {"in_channels": 3, "out_channels": 3, "num_layers": 1, "sample_size": 8, "cross_attention_dim": 32}
        | {"caption_channels": 16, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 10},
        ModelError,
        "PixArtTransformer2DModel needs encoder_hidden_states",
    ),
}


@pytest.mark.parametrize("name", DENOISERS)
def test_models_that_do_not_denoise_pixels_are_refused(name: str, tmp_path: Path) -> None:
    changes, error, problem = DENOISERS[name]
    job = task_job("diffusion", tmp_path)
    assert isinstance(job.model.config, dict)
    model = changes if "_class_name" in changes else {**job.model.config, **changes}
    with pytest.raises(error, match=problem):
        observe(Job.parse({**job.model_dump(exclude_none=True), "model": {"config": model}}), 1)
    assert not (tmp_path / "run").exists()


def without_labels(data: Any) -> Iterator[dict[str, Any]]:
    return ({"image": row["image"]} for row in stripes(None))


def test_records_without_a_class_for_a_model_of_classes_are_refused(tmp_path: Path) -> None:
    job = task_job("diffusion", tmp_path, data={"source": "tests.training.test_image_records:without_labels"})
    with pytest.raises(JobError, match="records without label, and the model has 3 classes"):
        observe(job, 1)
    assert not (tmp_path / "run").exists()
