"""Conversion between Weft checkpoints, Hugging Face folders, distributed checkpoints of Megatron-Core and DCP folders.

The tensors of a `TensorSource` are written to files in a hidden folder next to the target. These files either become the files
of a checkpoint, or are memory-mapped and passed to save_pretrained, which needs the full model at once. The target folder
appears complete or not at all.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from weft.checkpoint import dcp, megatron
from weft.checkpoint.dcp_writer import write_dcp
from weft.checkpoint.export_files import describe_task, new_folder, set_end_of_text
from weft.checkpoint.folders import sync_tree
from weft.checkpoint.huggingface import save_model
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import (
    Manifest,
    Position,
    library_versions,
    sync_folder,
    write_manifest,
)
from weft.checkpoint.plain_model import kept_in_float32
from weft.checkpoint.source_folder import need_job, open_source, source_format
from weft.checkpoint.sources import (
    TensorSource,
    from_huggingface,
    optimizer_from_dcp,
    state_names,
    write_files,
)
from weft.data import Prepared
from weft.errors import CheckpointError
from weft.job import Job, Model, resolve_job
from weft.plan import Plan
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale


def to_huggingface(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    run: Path | None = None,
    tokenizer: Path | None = None,
    job: Job | None = None,
    key: bytes | None = None,
) -> Path:
    """Convert a checkpoint, of Weft, Megatron-Core or DCP, to a Hugging Face folder, which plain `from_pretrained` loads.

    Args:
        source: folder to convert. Every byte of a checkpoint is verified first.
        target: folder to write; it must not exist.
        dtype: dtype of the written weights, a name of `weft.precision.dtypes`; None keeps the dtype of the source.
        run: run folder whose tokenizer is copied; None: the parent folder of the checkpoint, if it is a run folder.
        tokenizer: tokenizer folder to copy instead of the run's tokenizer.
        job: job that names the model. Not needed for a checkpoint, whose manifest names the model.
        key: key that signed the manifest of the checkpoint.

    Returns:
        The target.

    Raises:
        CheckpointError: source or target is refused, or the source has a tensor that is not part of the model.
        ModelError: the configuration of the model cannot be read.
    """
    format = source_format(source, "huggingface")
    if tokenizer and not any(tokenizer.glob("tokenizer*")):
        rule, fix = "--tokenizer is a folder with tokenizer files", "name a folder with a tokenizer.json"
        raise CheckpointError(f"there is no tokenizer in {tokenizer}", rule=rule, fix=fix)
    with _writing(source, target) as part, open_source(source, format, job, key) as opened:
        model, task, meta = opened.model, opened.task, opened.meta
        if opened.manifest is not None:
            of_run, end_of_text = read_prepared(run or source.parent)
            tokenizer = tokenizer or existing_folder(of_run)
            is_new = model.path is None and task.kind == "causal"
            if is_new and end_of_text is not None:  # as training does when it saves a fresh model
                set_end_of_text(meta, end_of_text)
            if task.kind in ("classification", "seq2seq") and of_run is not None:
                describe_task(
                    meta, model, Prepared.from_json((run or source.parent).joinpath("prepared.json").read_text())
                )
        origin = Path(model.path) if model.path else None
        _write_huggingface(opened.tensors, meta, part / "folder", DTYPES[dtype] if dtype else None, origin, tokenizer)
        _commit(part / "folder", target)
    return target


def to_checkpoint(source: Path, target: Path, *, job: Job | None = None) -> Path:
    """Convert a Hugging Face, Megatron-Core or DCP folder to a checkpoint from which training starts.

    Weights and moments are converted to the dtype plan.precision.update of the job. The step of the checkpoint is the step
    count in the optimizer state of a DCP folder, and 0 where there is no optimizer state; that of Megatron-Core is not read.
    Training starts with the job's first batch.

    Args:
        source: folder to convert.
        target: folder to write; it must not exist.
        job: job that will train from the checkpoint. Its data and batch size are stored in the manifest, because resuming
            compares them. Required for a Megatron-Core or DCP folder, which does not name its model. By default a job with
            only the model.

    Returns:
        The target.

    Raises:
        CheckpointError: source or target is refused, or the source has a tensor that is not part of the model.
        ModelError: the configuration of the model cannot be read.
    """
    format = source_format(source, "checkpoint")
    with _writing(source, target) as part:
        plain, optimizer = source, None
        if format == "huggingface":
            job = (job or Job()).model_copy(update={"model": Model(path=str(source.resolve()))})
        else:
            job, plain = need_job(source, job), part / "plain"
            with open_source(source, format, job) as opened:
                if format == "dcp":
                    optimizer = optimizer_from_dcp(dcp.DcpFolder(source), opened.meta)
                _write_huggingface(opened.tensors, opened.meta, plain, DTYPES[job.plan.precision.update])
        job = resolve_job(job.model_copy(update={"plan": Plan(precision=job.plan.precision)}), 1, native_bf16=False)
        weights = from_huggingface(plain, DTYPES[job.plan.precision.update])
        _write_checkpoint(weights, optimizer, job, part / "folder")
        _commit(part / "folder", target)
    return target


def to_megatron(
    source: Path, target: Path, *, dtype: str | None = None, job: Job | None = None, key: bytes | None = None
) -> Path:
    """Convert a checkpoint, a Hugging Face or a DCP folder to a distributed checkpoint of Megatron-Core, weights alone.

    Args:
        source: folder to convert. Every byte of a checkpoint is verified first.
        target: folder to write; it must not exist. Megatron-LM finds it as CHECKPOINTS/release.
        dtype: dtype of the written weights, a name of `weft.precision.dtypes`; None keeps the dtype of the source.
        job: job that names the model; required for a DCP folder.
        key: key that signed the manifest of the checkpoint.

    Returns:
        The target.

    Raises:
        CheckpointError: source or target is refused, or the model has no counterpart in Megatron-Core.
        ModelError: the configuration of the model cannot be read.
    """
    format = source_format(source, "megatron")
    with _writing(source, target) as part, open_source(source, format, job, key, dtype) as opened:
        weights = megatron.fused_weights(opened.config, opened.meta)
        first = next(iter(_check_weights(opened.tensors, opened.meta)))
        written = DTYPES[dtype] if dtype else opened.tensors.specs[first][0]
        megatron.write_megatron(opened.tensors, weights, part / "folder", written)
        _commit(part / "folder", target)
    return target


def to_dcp(source: Path, target: Path, *, job: Job | None = None, key: bytes | None = None) -> Path:
    """Convert a folder of another format to a DCP folder, which torch loads into the untouched model without Weft.

    It has the weights and, from a checkpoint, the states and settings of the optimizer and the step, all in their dtypes.

    Args:
        source: folder to convert. Every byte of a checkpoint is verified first.
        target: folder to write; it must not exist.
        job: job that names the model; required for a Megatron-Core folder.
        key: key that signed the manifest of the checkpoint.

    Returns:
        The target.

    Raises:
        CheckpointError: source or target is refused, or the source has a tensor that is not part of the model.
        ModelError: the configuration of the model cannot be read.
    """
    format = source_format(source, "dcp")
    with _writing(source, target) as part, open_source(source, format, job, key) as opened:
        _check_weights(opened.tensors, opened.meta)
        write_dcp(opened.tensors, state_names(opened.meta), opened.manifest, part / "folder")
        _commit(part / "folder", target)
    return target


# Writers


def _write_huggingface(
    tensors: TensorSource,
    meta: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype | None,
    source: Path | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Save weights with save_pretrained from memory-mapped files, so that they are never all in memory at once.

    Arguments are those of `save_model`.
    """
    names, specs = state_names(meta), tensors.specs
    shapes = _check_weights(tensors, meta)
    kept = {names[key] for key in kept_in_float32(meta, names, dtype)} if dtype else set(shapes)
    scratch = folder.with_name("scratch")
    scratch.mkdir()
    own = tensors._replace(specs={name: specs[name] for name in shapes})
    files, entries = write_files([own], dtype or torch.float32, scratch, kept)
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(scratch / name, "pt")) for name in files]
        mapped = {name: opened[entry.file or 0].get_tensor(name) for name, entry in entries.items()}
        save_model(meta, {key: mapped[name] for key, name in names.items()}, folder, dtype, source, tokenizer)
    shutil.rmtree(scratch)


def _check_weights(tensors: TensorSource, meta: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Shape of each weight and saved buffer of the model, by checkpoint name.

    Raises:
        CheckpointError: the source lacks one, has a weight more, or has one in another shape.
    """
    names, specs = state_names(meta), tensors.specs
    shapes = {names[key]: tuple(value.shape) for key, value in meta.state_dict().items()}
    for name in sorted(shapes.keys() | {name for name in specs if name.startswith("weights/")}):
        if name not in shapes or name not in specs or specs[name][1] != shapes[name]:
            raise CheckpointError(
                f"{name} has the shape {specs[name][1]}" if name in specs else f"{name} is missing",
                where=str(tensors.where),
                rule=f"in the model its shape is {shapes[name]}" if name in shapes else "the model has no such weight",
                fix="name a job with the configuration of this model: --job JOB.toml",
            )
    return shapes


def _write_checkpoint(model: TensorSource, optimizer: TensorSource | None, job: Job, folder: Path) -> None:
    folder.mkdir()
    sources = [model, optimizer] if optimizer else [model]
    counts = [optimizer.read(name) for name in optimizer.specs if name.startswith("step/")] if optimizer else []
    files, tensors = write_files(sources, DTYPES[job.plan.precision.update], folder)
    scale = LossScale.from_plan(job.plan.precision.loss_scale)
    manifest = Manifest(
        position=Position(step=max((int(count) for count in counts), default=0), next_batch=0, loss_scale=scale),
        world_size=1,
        job=job.model_dump(mode="json"),
        versions=library_versions(),
        files=files,
        tensors=tensors,
    )
    write_manifest(manifest, folder, read_key(job.checkpoint.key_file))


# Folders


@contextmanager
def _writing(source: Path, target: Path) -> Iterator[Path]:
    """Context manager: a hidden scratch folder next to the target, removed at the end.

    Raises:
        CheckpointError: the target exists or is inside the source, or a file cannot be written.
    """
    if target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(
            f"{target} is inside {source}", rule="a conversion does not change its source", fix="name another folder"
        )
    with new_folder(target) as part:
        yield part


def _commit(folder: Path, target: Path) -> None:
    """Flush a folder to the disk and rename it to its final name."""
    sync_tree(folder)
    folder.rename(target)
    sync_folder(target.parent)


def read_prepared(run: Path) -> tuple[str | None, int | None]:
    """Tokenizer folder and end-of-text id of a run; (None, None) if the folder is no run folder."""
    file = run / "prepared.json"
    if not file.is_file():
        return None, None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return fields["tokenizer"], fields["end_of_text"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{file} is damaged", fix="copy the checkpoint to a folder outside the run") from None


def existing_folder(tokenizer: str | None) -> Path | None:
    """Path of a run's tokenizer folder, which must exist; None if the run has no tokenizer."""
    if tokenizer is not None and not Path(tokenizer).is_dir():
        raise CheckpointError(
            f"the tokenizer of the run is no longer in {tokenizer}", fix="name its folder: --tokenizer FOLDER"
        )
    return None if tokenizer is None else Path(tokenizer)
