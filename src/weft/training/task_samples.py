"""Accuracy and samples of an exported model on held-out records, by plain Transformers or Diffusers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft.anatomy.classes import auto_class
from weft.checkpoint.model_config import read_config
from weft.data import IGNORED, Prepared, RecordBatch, TaskRows, open_rows
from weft.data.image_text import encode, prompt_of
from weft.data.noise import make_scheduler
from weft.job import Job, Model
from weft.training.run_folder import PICTURE

RECORDS = 256
"""Maximum held-out records that are tried; of those for which the model writes text, `WRITTEN`."""
WRITTEN = 32
SHOWN = 8
NEW_TOKENS = 64
GAP = 4
"""Pixels between two samples of a picture."""
STEPS = 50
"""Maximum steps from noise to a sample of diffusion."""


@torch.no_grad()
def sample_task(job: Job, prepared: Prepared, out: Path) -> dict[str, Any]:
    """Try the exported model of a task other than causal.

    Args:
        job: job of the run.
        prepared: its prepared data.
        out: run folder with `export`.

    Returns:
        Entries of run.json: `sample` is a text with examples; `accuracy` the fraction of right answers on held-out records, or
        None. Samples of diffusion are in `PICTURE`.
    """
    export, kind = out / "export", job.task.kind
    config = read_config(Model(path=str(export)), kind)
    model = auto_class(kind, config).from_pretrained(export, local_files_only=True).eval()
    if kind == "diffusion":
        return {"sample": draw(model, out / PICTURE, make_scheduler(job.task)), "accuracy": None}
    rows = open_rows(job, prepared, config, held_out=bool(prepared.held_out))
    if kind in ("seq2seq", "vlm"):
        return _written(model, rows, prepared, kind)
    count = min(len(rows), RECORDS)
    batches = [
        rows.collate(range(begin, min(begin + 32, count)), min(32, count - begin)) for begin in range(0, count, 32)
    ]
    found = [(batch, model(**batch.inputs).logits.argmax(-1)) for batch in batches]
    right = sum(int((best == batch.targets).sum()) for batch, best in found)
    targets = sum(int((batch.targets != IGNORED).sum()) for batch, _ in found)
    shown = _hidden_words(*found[0], prepared) if kind == "masked" else _classes(rows, *found[0])
    return {"sample": shown, "accuracy": right / targets}


def _hidden_words(batch: RecordBatch, best: torch.Tensor, prepared: Prepared) -> str:
    """First held-out rows with the hidden words that the model finds, in brackets; the right one where it is wrong."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(prepared.tokenizer, local_files_only=True)
    lines = []
    for ids, targets, found in zip(batch.inputs["input_ids"], batch.targets, best, strict=True):
        parts = []
        for id_, target, guess in zip(ids.tolist(), targets.tolist(), found.tolist(), strict=True):
            if target == IGNORED:
                parts.append(tokenizer.decode([id_]))
            elif target == guess:
                parts.append(f"[{tokenizer.decode([guess])}]")
            else:
                parts.append(f"[{tokenizer.decode([guess])} instead of {tokenizer.decode([target])}]")
        lines.append("".join(parts))
    return "\n\n".join(lines[:2])


def _classes(rows: TaskRows, batch: RecordBatch, best: torch.Tensor) -> str:
    """First held-out records with their class and the answer of the model."""
    pairs = list(zip(batch.targets.tolist(), best.tolist(), strict=True))[:SHOWN]
    records = [rows.example(index).record for index in range(len(pairs))]
    texts = [
        str(record.get("text", f"{'audio' if 'audio' in record else 'image'} {index}"))[:60]
        for index, record in enumerate(records)
    ]
    return "\n".join(
        f"{text}: class {right}, answer {answer}" for text, (right, answer) in zip(texts, pairs, strict=True)
    )


def _written(model: Any, rows: TaskRows, prepared: Prepared, kind: str) -> dict[str, Any]:
    """Answers that a model writes, word by word the most likely one, and the share of those equal to the right ones."""
    from transformers import AutoProcessor, AutoTokenizer

    library: Any = AutoProcessor if kind == "vlm" else AutoTokenizer
    reader = library.from_pretrained(prepared.tokenizer, local_files_only=True)
    tokenizer = getattr(reader, "tokenizer", reader)
    lines, right, count = [], 0, min(len(rows), WRITTEN)
    longest = min(NEW_TOKENS, getattr(model.config, "max_target_positions", 2 * NEW_TOKENS) // 2)  # with a prompt
    for index in range(count):
        record = rows.example(index).record
        if kind == "vlm":
            inputs = encode(reader, [prompt_of(reader, record["prompt"])], [record["image"]])
            inputs.pop("labels", None)
            asked, expected = record["prompt"], record["answer"]
        else:
            inputs = rows.collate([index], 1).inputs
            inputs.pop("decoder_input_ids")
            asked, expected = record.get("source", f"audio {index}"), record["target"]
        ids = model.generate(**inputs, max_new_tokens=longest, do_sample=False, eos_token_id=tokenizer.eos_token_id)[0]
        if kind == "vlm":
            ids = ids[inputs["input_ids"].shape[1] :]
        elif "source" in record:
            ids = ids[1:]
        written = tokenizer.decode(_until(ids.tolist(), tokenizer.eos_token_id), skip_special_tokens="audio" in record)
        written = written.strip()  # of audio without tokens such as <|notimestamps|>
        right += written == expected.strip()
        lines.append(f"{asked}\n  answer:   {written}\n  expected: {expected}")
    return {"sample": "\n".join(lines[:SHOWN]), "accuracy": right / count}


def _until(ids: Sequence[int], end: int) -> list[int]:
    return list(ids[: ids.index(end)] if end in ids else ids)


def draw(model: Any, path: Path, scheduler: Any = None, columns: int = 10, rows: int = 4) -> str:
    """Draw samples of a model of diffusion: from noise along its velocity, or by a scheduler. Column i is class i.

    Args:
        model: model of Diffusers.
        path: PNG to write.
        scheduler: scheduler of Diffusers with which the model was trained; None: it was trained by flow matching.
        columns: images of a row.
        rows: rows of images.

    Returns:
        Sentence about the picture.
    """
    from PIL import Image

    config = model.config
    size, channels = config.sample_size, config.in_channels
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(rows * columns, channels, height, width, generator=generator)
    inputs: dict[str, Any] = {}
    if classes := getattr(config, "num_embeds_ada_norm", None):
        inputs["class_labels"] = (torch.arange(rows * columns) % columns) % classes
    count = STEPS if scheduler is None else min(STEPS, scheduler.config.num_train_timesteps)
    if scheduler is not None:
        scheduler.set_timesteps(count)
    for step in range(count):
        timestep = 1000 * (1 - step / count) if scheduler is None else scheduler.timesteps[step].item()
        found = model(hidden_states=image, timestep=torch.full((len(image),), timestep), **inputs).sample[:, :channels]
        if scheduler is None:
            image = image - found / count
        else:
            image = scheduler.step(found, timestep, image, generator=generator).prev_sample
    pixels = ((image.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    scale = max(1, 48 // height)
    picture = Image.new("RGB", (columns * (width * scale + GAP) - GAP, rows * (height * scale + GAP) - GAP), "white")
    for index, own in enumerate(pixels.permute(0, 2, 3, 1)):
        tile = Image.fromarray(own.squeeze(-1).numpy() if channels == 1 else own[..., :3].numpy())
        place = index % columns * (width * scale + GAP), index // columns * (height * scale + GAP)
        picture.paste(tile.resize((width * scale, height * scale), Image.Resampling.NEAREST), place)
    picture.save(path)
    return f"{rows * columns} samples in {path.name}, from noise in {count} steps" + (
        ": a column for each class" if inputs else ""
    )
