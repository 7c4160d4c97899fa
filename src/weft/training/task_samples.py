"""Accuracy and samples of an exported model on held-out records, by plain Transformers or Diffusers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.anatomy.classes import auto_class
from weft.checkpoint.model_config import read_config
from weft.data import IGNORED, Prepared, RecordBatch, TaskRows, open_rows
from weft.data.image_text import encode, prompt_of
from weft.data.labels import REGRESSION, SINGLE_LABEL, targets_of
from weft.data.noise import make_scheduler
from weft.job import Job, Model, Task
from weft.training.run_folder import PICTURE
from weft.training.task_scores import label_scores, scores_of, speech_scores, text_scores

RECORDS = 256
"""Maximum held-out records that are tried; of those for which the model writes text, `WRITTEN`."""
WRITTEN = 32
SHOWN = 8
PROMPT = 4
"""Maximum tokens with which Whisper begins an answer, which count as positions of its decoder."""
GAP = 4
"""Pixels between two samples of a picture."""
STEPS = 50
"""Maximum steps from noise to a sample of diffusion."""


@torch.no_grad()
def sample_task(job: Job, prepared: Prepared, out: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """Try the exported model of a task other than causal.

    Args:
        out: run folder with `export`.
        log: called with a line about metrics whose library is not installed.

    Returns:
        Entries of run.json: `sample` is a text with examples; `accuracy` the fraction of right answers on held-out records, or
        None; `metrics` the other metrics of the task. Samples of diffusion are in `PICTURE`.
    """
    export, kind = out / "export", job.task.kind
    config = read_config(Model(path=str(export)), kind)
    model = auto_class(kind, config).from_pretrained(export, local_files_only=True).eval()
    if kind == "diffusion":
        return {"sample": draw(model, out / PICTURE, make_scheduler(job.task)), "accuracy": None}
    rows = open_rows(job, prepared, config, held_out=bool(prepared.held_out))
    if kind in ("seq2seq", "vlm"):
        return _written(model, rows, prepared, job.task, log)
    count = min(len(rows), RECORDS)
    batches = [
        rows.collate(range(begin, min(begin + 32, count)), min(32, count - begin)) for begin in range(0, count, 32)
    ]
    if kind == "masked":
        found = [(batch, model(**batch.inputs).logits.argmax(-1)) for batch in batches]
        right = sum(int((best == batch.targets).sum()) for batch, best in found)
        targets = sum(int((batch.targets != IGNORED).sum()) for batch, _ in found)
        return {"sample": _hidden_words(*found[0], prepared), "accuracy": right / targets if targets else None}
    assert prepared.labels is not None  # of a classifier
    problem = targets_of(prepared.labels, job.model, config).problem
    logits = torch.cat([model(**batch.inputs).logits.float() for batch in batches])
    wanted = torch.cat([batch.targets if batch.predicted is None else batch.predicted for batch in batches])
    best = logits.argmax(-1) if problem == SINGLE_LABEL else (logits > 0).float()
    hits = best == wanted if problem == SINGLE_LABEL else (best == wanted.round()).all(-1)
    answers = logits if problem == REGRESSION else best
    return {
        "sample": _answers(rows, wanted[:SHOWN].tolist(), answers[:SHOWN].tolist(), config, problem),
        "accuracy": None if problem == REGRESSION else float(hits.float().mean()),
        "metrics": scores_of(label_scores, problem, logits, wanted, log=log),
    }


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


def _answers(rows: TaskRows, right: list[Any], answers: list[Any], config: Any, problem: str) -> str:
    """First held-out records with their classes or numbers, and the answers of the model."""
    lines = []
    for index, pair in enumerate(zip(right, answers, strict=True)):
        record = rows.example(index).record
        text = str(record.get("text", f"{'audio' if 'audio' in record else 'image'} {index}"))[:60]
        wanted, answer = (_named(value, config, problem) for value in pair)
        lines.append(f"{text}: {wanted}, answer {answer}")
    return "\n".join(lines)


def _named(value: Any, config: Any, problem: str) -> str:
    """Name of a class, names of several, or numbers of a regression."""
    if problem == SINGLE_LABEL:
        return str(config.id2label.get(value, value))
    if problem == REGRESSION:
        return " ".join(f"{number:.4g}" for number in value)
    return " + ".join(str(config.id2label.get(index, index)) for index, has in enumerate(value) if has > 0.5) or "none"


def _written(model: Any, rows: TaskRows, prepared: Prepared, task: Task, log: Callable[[str], None]) -> dict[str, Any]:
    """Answers that a model writes, token by token the most likely one, compared with the right ones as text."""
    from transformers import AutoProcessor, AutoTokenizer

    library: Any = AutoProcessor if task.kind == "vlm" else AutoTokenizer
    reader = library.from_pretrained(prepared.tokenizer, local_files_only=True)
    tokenizer = getattr(reader, "tokenizer", reader)
    asked, found, right = [], [], []
    batches = [rows.collate([index], 1) for index in range(min(len(rows), WRITTEN))]
    targets = [batch.targets[batch.targets != IGNORED].tolist() for batch in batches]
    longest = task.max_new_tokens or max(map(len, targets))
    if limit := getattr(model.config, "max_target_positions", None):
        longest = min(longest, limit - PROMPT)
    end = model.generation_config.eos_token_id
    settings = {"do_sample": False, "num_beams": 1, "eos_token_id": tokenizer.eos_token_id if end is None else end}
    for index, batch in enumerate(batches):
        record, inputs = rows.example(index).record, batch.inputs
        if task.kind == "vlm":
            inputs = encode(reader, [prompt_of(reader, record["prompt"])], [record["image"]])
            inputs.pop("labels", None)
        else:
            inputs.pop("decoder_input_ids")
        ids = model.generate(**inputs, max_new_tokens=longest, **settings)[0]
        ids = ids[inputs["input_ids"].shape[1] :] if task.kind == "vlm" else ids
        # Tokens such as those of languages, or <|notimestamps|>, are on both sides, and are no words.
        found.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
        wanted = record["answer"] if task.kind == "vlm" else tokenizer.decode(targets[index], skip_special_tokens=True)
        right.append(wanted.strip())
        asked.append(record.get("prompt", record.get("source", f"audio {index}")))
    lines = [
        f"{text}\n  answer:   {own}\n  expected: {wanted}"
        for text, own, wanted in zip(asked, found, right, strict=True)
    ]
    compute = speech_scores if "audio" in prepared.fields else text_scores
    return {
        "sample": "\n".join(lines[:SHOWN]),
        "accuracy": sum(own == wanted for own, wanted in zip(found, right, strict=True)) / len(right),
        "metrics": scores_of(compute, found, right, log=log),
    }


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
