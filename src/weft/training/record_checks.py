"""Checks of records with images or audio before the ranks start: a model and its processor are tried on a row."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.adapters.model import build_model
from weft.data import Prepared, RecordBatch, open_rows
from weft.data.audio import check_audio
from weft.data.image_text import check_texts
from weft.data.record_batches import open_processor, open_records
from weft.data.record_files import place_of
from weft.errors import DataError, JobError, ModelError, Refusal, WeftError, raise_if_refused
from weft.job import ResolvedJob

GIVEN = ("hidden_states", "timestep")
"""Arguments of every model of diffusion that is trained on images; class_labels is that of one with classes."""
TEXT_SIZES = ("cross_attention_dim", "joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim")
"""Keys of models of Diffusers that read a text."""
OWN_LOOP = "train it in a loop of yours with weft.prepare, see docs/own-loop.md"
SHOWN = 300  # characters of an error message of the library that are shown


def reason_against_kind(kind: str, model: Any) -> Refusal | None:
    """Reason against a model that cannot learn a task of images whatever the records are.

    Args:
        kind: `task.kind` of the job.
        model: its model; may be on the meta device.
    """
    if kind == "vlm" and any(part.is_encoder_decoder for part in (model.config, model.config.get_text_config())):
        return Refusal(
            f'an encoder-decoder with task.kind = "vlm": {type(model).__name__}',
            where=f"model_type {model.config.model_type}",
            rule="prompt and answer are one row of a decoder; an encoder would read the answer that is to be predicted",
            fix=f"choose a model such as LLaVA, or {OWN_LOOP}",
            error=ModelError,
        )
    if kind != "diffusion":
        return None
    known = inspect.signature(model.forward).parameters
    missing = [name for name in GIVEN if name not in known]
    needed = [name for name, one in known.items() if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD]
    needed = [name for name in needed if name not in GIVEN]
    if "encoder_hidden_states" in known and "encoder_hidden_states" not in needed:
        needed += ["encoder_hidden_states"] if any(model.config.get(size) for size in TEXT_SIZES) else []
    if missing or needed or not model.config.get("sample_size"):
        problem = f"has no argument {missing[0]}" if missing else f"needs {', '.join(needed)}"
        return Refusal(
            f"{type(model).__name__} {problem if missing or needed else 'has no sample_size in its configuration'}",
            where="model.config._class_name",
            rule='task.kind = "diffusion" calls a model with hidden_states (an image of sample_size), timestep, class_labels',
            fix=f"choose a transformer such as DiTTransformer2DModel, or {OWN_LOOP}",
            error=ModelError,
        )
    return None


def check_rows(job: ResolvedJob, prepared: Prepared) -> None:
    """Check all records with images or audio against the model and its processor, and try some rows on the meta device.

    Raises:
        WeftError: a subclass; names a record, or what the model and its processor lack.
    """
    if not {"image", "audio"} & set(prepared.fields):
        return
    model = build_model(job, torch.float32).eval()
    records = open_records(prepared.train[0].tokens)
    place = partial(place_of, records, data=job.data)
    if job.task.kind == "diffusion":
        raise_if_refused(_reason_against_fields(model, prepared))
    if "audio" in prepared.fields:
        check_audio(records, Path(prepared.tokenizer) if prepared.tokenizer else None, model.config, place)
    first, reader = 0, f"the processor in {prepared.tokenizer}" if prepared.tokenizer else "no processor"
    try:
        if job.task.kind == "vlm":
            check_texts(open_processor(prepared), records, place)
        rows, tried = open_rows(job, prepared, model.config, held_out=False), _extremes(records)
        # Alone, so that a refused one has a name, and together.
        for first, *rest in [*([index] for index in tried), tried]:
            batch = rows.collate_records([records[index] for index in (first, *rest)])
            _try_forward(model, batch, f"{place(first)}, with {reader}")
    except WeftError:
        raise
    except Exception as error:  # libraries raise many types of exceptions
        raise DataError(
            f"a row cannot be made of a record: {_shown(error)}",
            where=f"{place(first)}, with {reader}",
            rule="records become rows by the processor of the model",
            fix="set data.tokenizer to the folder of the processor and the tokenizer of this model, or leave the record out",
        ) from error


def _extremes(records: Any) -> list[int]:
    """Indices of the first record, and of those with the smallest, the largest, the widest and the highest file."""
    names = [name for name in ("samples", "height", "width") if name in records.column_names]
    sizes = [records.data.column(name).to_numpy() for name in names]
    sizes += [sizes[0] / sizes[1]] if len(sizes) == 2 else []
    return sorted({0, *(int(find(size)) for size in sizes for find in (np.argmin, np.argmax))})


def _reason_against_fields(model: Any, prepared: Prepared) -> Refusal | None:
    """Reason against models of latents, and records with classes for a model without them, or the other way round."""
    config, has_labels = model.config, "label" in prepared.fields
    takes = "class_labels" in inspect.signature(model.forward).parameters
    problem = fix = ""
    if config.in_channels not in (1, 3):
        problem = f"a model with in_channels = {config.in_channels}, and images have 1 or 3 channels"
        fix = f"latents of an autoencoder are not read: set in_channels = 3 in a new configuration, or {OWN_LOOP}"
    elif has_labels and not takes:
        problem, fix = f"records with label, and {type(model).__name__} takes no class_labels", "leave label out"
    elif takes and config.get("num_embeds_ada_norm") and not has_labels:
        problem = f"records without label, and the model has {config.num_embeds_ada_norm} classes"
        fix = "add the field label to the records; one class for all of them is 0"
    if problem:
        return Refusal(
            problem,
            where=f"model.config of {type(model).__name__}",
            rule="the model denoises the pixels of the images, with their classes if it has any",
            fix=fix,
            error=JobError,
        )
    return None


def _try_forward(model: Any, batch: RecordBatch, where: str) -> None:
    """Refuse a row that the model refuses, such as an image of another size; computes shapes alone."""
    try:
        with torch.no_grad():
            model(**{name: value.to("meta") for name, value in batch.inputs.items()})
    except NotImplementedError:  # an operation without shapes on the meta device
        return
    except Exception as error:  # families raise many types of exceptions
        if "meta" in str(error) or "device" in str(error):  # the model looks at values, or has some on another device
            return
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.inputs.items())
        raise ModelError(
            f"{type(model).__name__} refuses a row of {shapes}: {_shown(error)}",
            where=where,
            rule="the processor makes the shapes that the model reads",
            fix="set data.tokenizer to the folder of the processor of this model, or correct its sizes",
        ) from None


def _shown(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:SHOWN]
