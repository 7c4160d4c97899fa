"""Folders of any format as sources of conversions: their format, their model on the meta device, and their tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError
from transformers import PretrainedConfig, PreTrainedModel

from weft.anatomy.build import build_on_meta
from weft.checkpoint import dcp, megatron
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.manifest import NAME, Manifest, verify_folder
from weft.checkpoint.model_config import read_config
from weft.checkpoint.restore import Reader
from weft.checkpoint.sources import TensorSource, from_checkpoint, from_dcp, from_huggingface
from weft.errors import CheckpointError, refuse_hub_id
from weft.job import Job, Model, Task
from weft.precision.dtypes import DTYPES

FolderFormat = Literal["checkpoint", "huggingface", "megatron", "dcp"]

CAUSAL = Task()
OPTIONS: dict[FolderFormat, tuple[str, str]] = {
    "checkpoint": ("weft", "checkpoint"),
    "huggingface": ("hf", "Hugging Face folder"),
    "megatron": ("megatron", "checkpoint of Megatron-Core"),
    "dcp": ("dcp", "DCP folder"),
}
"""Value of --to that writes a format, and the name of the format."""


def detect_format(source: Path) -> FolderFormat:
    """Format of a folder, detected by its manifest.json, .metadata (and metadata.json) or config.json.

    Raises:
        CheckpointError: the path is no folder, or a folder in none of these formats.
        ModelError: the path reads as the id of a model on the Hub.
    """
    refuse_hub_id(source, "command line")
    formats: dict[str, FolderFormat] = {NAME: "checkpoint", dcp.METADATA: "dcp", "config.json": "huggingface"}
    for name, format in formats.items():
        if (source / name).is_file():
            return "megatron" if format == "dcp" and (source / megatron.FORMAT).is_file() else format
    problem, fix = f"nothing to convert in {source}", "name a checkpoint, such as RUN/step-00000100"
    if not source.is_dir():
        problem = f"{source} is a file" if source.exists() else f"there is no folder {source}"
    elif runs := list_checkpoints(source):
        problem, fix = f"{source} is a run with {len(runs)} checkpoints", f"name one of them, such as {runs[0]}"
    elif folders := [file.parent for file in sorted(source.glob(f"*/{megatron.FORMAT}"))]:
        problem, fix = f"{source} has {len(folders)} checkpoints of Megatron-Core", f"name one, such as {folders[-1]}"
    raise CheckpointError(
        problem,
        rule=f"a checkpoint has a {NAME}, a Megatron-Core or DCP folder a {dcp.METADATA}, a Hugging Face folder a config.json",
        fix=fix,
    )


class SourceFolder(NamedTuple):
    """Folder that is converted, with its model on the meta device."""

    model: Model
    task: Task
    config: PretrainedConfig
    meta: PreTrainedModel
    tensors: TensorSource
    manifest: Manifest | None
    """Manifest of a checkpoint."""


def source_format(source: Path, to: FolderFormat) -> FolderFormat:
    """Format of a folder, which must be another than that of the target.

    Raises:
        CheckpointError: the folder has the format `to`, or no format that is known.
    """
    format = detect_format(source)
    if format == to:
        option, kind = OPTIONS[to]
        raise CheckpointError(
            f"{source} is already a {kind}",
            rule=f"--to {option} converts folders of other formats",
            fix="use it as it is",
        )
    return format


@contextmanager
def open_source(
    source: Path, format: FolderFormat, job: Job | None, key: bytes | None = None, dtype: str | None = None
) -> Iterator[SourceFolder]:
    """Context manager: open a folder for reading.

    Args:
        source: folder.
        format: its format.
        job: job that names the model; required for a Megatron-Core or DCP folder.
        key: key that signed the manifest of a checkpoint, of which every byte is verified.
        dtype: dtype in which a Hugging Face folder is loaded into memory; None: that of its configuration.

    Raises:
        CheckpointError: the folder is damaged, or its model is not known.
        ModelError: the configuration of the model cannot be read.
    """
    if format == "checkpoint":
        with Reader(source, verify_folder(source, key)) as reader:
            model, task = (_model_of(reader), _task_of(reader)) if job is None else (job.model, job.task)
            tensors = from_checkpoint(reader)
            yield SourceFolder(model, task, *_build(model, task, tensors), tensors, reader.manifest)
    elif format == "huggingface":
        model = Model(path=str(source.resolve()))
        config, meta = _build(model)
        saved = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        yield SourceFolder(
            model, CAUSAL, config, meta, from_huggingface(source, DTYPES[dtype] if dtype else saved), None
        )
    else:
        model = need_job(source, job).model
        config, meta = _build(model)
        yield SourceFolder(model, CAUSAL, config, meta, _weights_of(source, format, config, meta), None)


def _weights_of(source: Path, format: FolderFormat, config: PretrainedConfig, meta: PreTrainedModel) -> TensorSource:
    """Weights of a Megatron-Core or DCP folder."""
    if format == "megatron":
        return megatron.from_megatron(source, megatron.fused_weights(config, meta))
    return from_dcp(dcp.DcpFolder(source), meta)


def need_job(source: Path, job: Job | None) -> Job:
    """The job, which a folder needs that does not name its model.

    Raises:
        CheckpointError: there is no job.
    """
    if job is None:
        raise CheckpointError(
            f"{source} does not name its model",
            rule="a Megatron-Core or DCP folder has tensors but no model configuration",
            fix="name a job with this model: --job JOB.toml",
        )
    return job


def _model_of(reader: Reader) -> Model:
    if reader.manifest.job.get("adapter", {}).get("kind", "none") != "none":
        raise CheckpointError(
            "the checkpoint has adapters, and no weights of their base",
            where=str(reader.folder),
            rule="a conversion needs all weights of the model",
            fix="merge them by `weft export RUN TO --merge --step N`, and convert TO",
        )
    try:
        return Model.model_validate(reader.manifest.job.get("model"))
    except ValidationError as error:
        raise CheckpointError(
            f"the manifest does not name a model: {str(error).splitlines()[0]}",
            where=str(reader.folder),
            fix="name a job with this model: --job JOB.toml",
        ) from None


def _task_of(reader: Reader) -> Task:
    """Task of the job of a checkpoint; those of versions without tasks are causal."""
    return Task.model_validate(reader.manifest.job.get("task", {}))


def _build(source: Model, task: Task = CAUSAL, tensors: TensorSource | None = None) -> tuple[Any, Any]:
    """Configuration and model on the meta device, with the weights of `tensors` untied that these have apart."""
    config = read_config(source, task.kind, task.classes)
    model = build_on_meta(config, torch.float32, task.kind)
    if task.kind == "diffusion":
        return model.config, model
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    if tensors is not None and any(f"weights/{name}" in tensors.specs for name in ties):
        config.tie_word_embeddings = False
        model = build_on_meta(config, torch.float32, task.kind)
    if hasattr(config, "use_cache"):  # it is switched off for training
        config.use_cache = model.config.use_cache = read_config(source, task.kind, task.classes).use_cache
    return config, model
