"""Micro-batches of a dry run, which reads no data: rows as long as the job allows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data import AnyBatch, MicroBatch, RecordBatch, RowSplit
from weft.data.audio import features_of
from weft.data.images import image_shape
from weft.data.record_batches import Example, vlm
from weft.errors import JobError
from weft.job import Job, ResolvedJob


def assumed_batches(job: ResolvedJob, device: torch.device, row: RecordBatch | None = None) -> Sequence[AnyBatch]:
    """Micro-batches of the data rank with the most rows; packed rows contain two documents of equal length.

    Args:
        device: device of the rank.
        row: row of a task other than causal: result of `assumed_row`.
    """
    data, split = job.data, RowSplit.of_job(job)
    sizes = max((split.sizes(part) for part in range(split.data_ranks)), key=sum)
    if row is not None:
        return [_repeated(row, size) for size in sizes]
    packed = data.packing and data.source != "tokens"
    positions = torch.arange(data.seq_len, device=device) % (data.seq_len // 2 if packed else data.seq_len)
    zeros = [torch.zeros(size, data.seq_len, dtype=torch.int64, device=device) for size in sizes]
    return [MicroBatch(rows, positions.repeat(len(rows), 1), rows.clone()) for rows in zeros]


def _repeated(row: RecordBatch, count: int) -> RecordBatch:
    """Rows of a micro-batch: integers have the values of the row, so that image tokens are where they are."""

    def repeat(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.zeros(count * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype)
        return tensor.repeat(count, *[1] * (tensor.ndim - 1))

    predicted = None if row.predicted is None else repeat(row.predicted)
    return RecordBatch({name: repeat(value) for name, value in row.inputs.items()}, repeat(row.targets), predicted)


def assumed_row(job: Job, model: Any) -> RecordBatch | None:
    """One row of a task other than causal: `data.seq_len` tokens, an image of the size of the model; None for causal rows.

    Args:
        model: its model; may be on the meta device.

    Raises:
        JobError: a task of images and text has no processor on this machine.
    """
    kind, config, length = job.task.kind, model.config, job.data.seq_len
    if kind == "causal":
        return None
    ids = torch.zeros(1, length, dtype=torch.int64)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    of_row = torch.zeros(1, dtype=torch.int64)
    if kind == "masked":
        return RecordBatch(text, ids)
    has_audio = getattr(model, "main_input_name", None) in ("input_features", "input_values")
    if kind == "seq2seq":
        return RecordBatch({**(_audio(job) if has_audio else text), "decoder_input_ids": ids}, ids)
    if kind == "vlm":
        return _image_and_text(job, config)
    if kind == "diffusion":
        size = config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.zeros(1, config.in_channels, height, width)
        inputs = {"hidden_states": pixels, "timestep": torch.zeros(1)}
        if getattr(config, "num_embeds_ada_norm", None):
            inputs["class_labels"] = of_row
        return RecordBatch(inputs, of_row, pixels)
    if has_audio:
        return RecordBatch(_audio(job), of_row)
    if getattr(model, "main_input_name", None) == "pixel_values":
        return RecordBatch({"pixel_values": torch.zeros(1, *image_shape(config))}, of_row)
    return RecordBatch(text, of_row)


def _processor_folder(job: Job, sizes: str) -> Path:
    folder = job.model.path if job.data.tokenizer == "train" else job.data.tokenizer
    if folder is None or not Path(folder).is_dir():
        raise JobError(
            f"a dry run with task.kind = {job.task.kind!r} without a processor",
            where="data.tokenizer",
            rule=f"the processor decides how many {sizes} has",
            fix="set data.tokenizer to a folder with the processor",
        )
    return Path(folder)


def _audio(job: Job) -> dict[str, Tensor]:
    """Features of half a minute of silence, to which the feature extractor of Whisper also pads."""
    features = features_of(_processor_folder(job, "features audio"))
    return features([{"audio": {"array": np.zeros(30 * 16000), "sampling_rate": 16000}}])


def _image_and_text(job: Job, config: Any) -> RecordBatch:
    """A white image of the size of the vision tower and an answer, which the processor makes a row of `data.seq_len` tokens."""
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(_processor_folder(job, "tokens an image"), local_files_only=True)
    size = getattr(config.vision_config, "image_size", None) or 448
    record = {"image": Image.new("RGB", (size, size), "white"), "prompt": "", "answer": ""}
    batch = vlm(processor, [Example(record, torch.Generator())])
    inputs, length = dict(batch.inputs), max(job.data.seq_len, batch.inputs["input_ids"].shape[1])
    for name, value in inputs.items():
        if value.ndim == 2 and value.shape == batch.targets.shape:
            fill = {"input_ids": 0, "attention_mask": 1}.get(name, 0)
            inputs[name] = torch.nn.functional.pad(value, (0, length - value.shape[1]), value=fill)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return RecordBatch(inputs, torch.zeros_like(inputs["input_ids"]))
