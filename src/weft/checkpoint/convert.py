"""Checkpoints into Hugging Face folders, and those and folders of torch.distributed.checkpoint into checkpoints.

A `TensorSource` of tensors goes into files in a hidden folder beside the target: they are the files of a checkpoint, or they are
mapped and handed to save_pretrained, which asks for the whole model at once. The target appears complete or not at all.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel

from weft.checkpoint import dcp
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.huggingface import build_on_meta, save_folder
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import (
    NAME,
    Manifest,
    Position,
    library_versions,
    sync_folder,
    verify_folder,
    write_manifest,
)
from weft.checkpoint.model_config import read_config
from weft.checkpoint.restore import Reader
from weft.checkpoint.sources import (
    TensorSource,
    from_dcp,
    from_huggingface,
    of_checkpoint,
    optimizer_of_dcp,
    state_names,
    write_files,
)
from weft.errors import CheckpointError
from weft.job import Job, Model
from weft.plan import Plan
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale

Kind = Literal["checkpoint", "huggingface", "dcp"]


def find_kind(source: Path) -> Kind:
    """What a folder is: by its manifest.json, .metadata or config.json.

    Raises:
        CheckpointError: it is none of them, or no folder.
    """
    kinds: dict[str, Kind] = {NAME: "checkpoint", dcp.METADATA: "dcp", "config.json": "huggingface"}
    for name, kind in kinds.items():
        if (source / name).is_file():
            return kind
    problem, fix = f"there is nothing to convert in {source}", "name a checkpoint, such as RUN/step-00000100"
    if not source.is_dir():
        problem = f"{source} is a file" if source.exists() else f"there is no folder {source}"
    elif runs := list_checkpoints(source):
        problem, fix = f"{source} is a run with {len(runs)} checkpoints", f"name one of them, such as {runs[0]}"
    raise CheckpointError(
        problem,
        rule=f"a checkpoint has a {NAME}, a DCP folder a {dcp.METADATA}, a Hugging Face folder a config.json",
        fix=fix,
    )


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
    """Write a checkpoint or a DCP folder as a Hugging Face folder, which plain `from_pretrained` loads.

    Args:
        source: the folder. Of a checkpoint, every byte is verified first.
        target: folder to write; it must not exist.
        dtype: format of the weights, a name of `weft.precision.dtypes`; None: that in which they are.
        run: run folder of a checkpoint, whose tokenizer goes along; None: the folder around it, if that is a run.
        tokenizer: folder of a tokenizer, instead of the run's.
        job: whose model it is; not needed for a checkpoint, which names its own.
        key: that the manifest of a checkpoint was written with.

    Returns:
        The target.

    Raises:
        CheckpointError: one of the folders is not what it should be, or a tensor is not one of the model's.
        ModelError: the configuration of the model cannot be read.
    """
    kind = find_kind(source)
    if kind == "huggingface":
        rule = "--to hf converts a checkpoint or a DCP folder"
        raise CheckpointError(f"{source} is a Hugging Face folder already", rule=rule, fix="use it as it is")
    if tokenizer and not any(tokenizer.glob("tokenizer*")):
        rule, fix = "--tokenizer is a folder with tokenizer files", "name a folder with a tokenizer.json"
        raise CheckpointError(f"there is no tokenizer in {tokenizer}", rule=rule, fix=fix)
    with _writing(source, target) as part, ExitStack() as stack:
        if kind == "checkpoint":
            reader = stack.enter_context(Reader(source, verify_folder(source, key)))
            model = _model_of(reader) if job is None else job.model
            config, meta = _build(model)
            of_run, end_of_text = _read_prepared(run or source.parent)
            tokenizer = tokenizer or _present(of_run)
            if model.path is None and end_of_text is not None:  # as training does when it saves a fresh model
                config.bos_token_id = config.eos_token_id = end_of_text
            stock = of_checkpoint(reader)
        else:
            config, meta = _build(_need_job(source, job).model)
            stock = from_dcp(dcp.Folder(source), meta)
        _write_huggingface(stock, config, meta, tokenizer, part / "folder", DTYPES[dtype] if dtype else None)
        _commit(part / "folder", target)
    return target


def to_checkpoint(source: Path, target: Path, *, job: Job | None = None) -> Path:
    """Write a Hugging Face or DCP folder as a checkpoint from which training begins.

    Weights and moments take the format plan.precision.update of the job. Of a Hugging Face folder it is step 0; of a
    DCP folder that has the optimizer's state it is the step that this counts, and otherwise 0. The batches are those of the
    job, from the first on.

    Args:
        source: the folder.
        target: folder to write; it must not exist.
        job: that will go on from the checkpoint: its data and batch size are written down, as resuming asks for them. Needed
            for a DCP folder, which does not name its model; by default a job with nothing but the model.

    Returns:
        The target.

    Raises:
        CheckpointError: one of the folders is not what it should be, or a tensor is not one of the model's.
        ModelError: the configuration of the model cannot be read.
    """
    kind = find_kind(source)
    if kind == "checkpoint":
        rule, fix = "--to weft converts a Hugging Face or DCP folder", "use it as it is: any plan reads it"
        raise CheckpointError(f"{source} is a checkpoint already", rule=rule, fix=fix)
    with _writing(source, target) as part:
        plain, optimizer = source, None
        if kind == "huggingface":
            job = (job or Job()).model_copy(update={"model": Model(path=str(source.resolve()))})
        else:
            job, plain = _need_job(source, job), part / "plain"
            config, meta = _build(job.model)
            folder = dcp.Folder(source)
            optimizer = optimizer_of_dcp(folder, meta)
            _write_huggingface(from_dcp(folder, meta), config, meta, None, plain, DTYPES[job.plan.precision.update])
        job = job.model_copy(update={"plan": Plan(precision=job.plan.precision).resolve(1)})
        stock = from_huggingface(plain, DTYPES[job.plan.precision.update])
        _write_checkpoint(stock, optimizer, job, part / "folder")
        _commit(part / "folder", target)
    return target


# What is written


def _write_huggingface(
    stock: TensorSource,
    config: PretrainedConfig,
    meta: PreTrainedModel,
    tokenizer: Path | None,
    folder: Path,
    dtype: torch.dtype | None,
) -> None:
    """Let Transformers save weights that lie in mapped files: at no time they are all in memory."""
    names = state_names(meta)
    shapes = {names[key]: tuple(value.shape) for key, value in meta.state_dict().items()}
    for name in sorted(shapes.keys() | {name for name in stock.forms if name.startswith("weights/")}):
        if name not in shapes or name not in stock.forms or stock.forms[name][1] != shapes[name]:
            raise CheckpointError(
                f"{name} has the shape {stock.forms[name][1]}" if name in stock.forms else f"{name} is missing",
                where=str(stock.where),
                rule=f"the model's has the shape {shapes[name]}" if name in shapes else "the model has no such weight",
                fix="name a job with the model's own configuration: --job JOB.toml",
            )
    dtype = dtype or next(stock.forms[name][0] for name in shapes)
    rest = folder.with_name("scratch")
    rest.mkdir()
    entries = write_files([stock._replace(forms={name: stock.forms[name] for name in shapes})], dtype, rest)[1]
    with ExitStack() as stack:
        files = {part.file for entry in entries.values() for part in entry.parts}
        opened = {name: stack.enter_context(safe_open(rest / name, "pt")) for name in files}
        mapped = {name: opened[entry.parts[0].file].get_tensor(name) for name, entry in entries.items()}
        save_folder(config, {key: mapped[name] for key, name in names.items()}, tokenizer, folder, dtype)
    shutil.rmtree(rest)


def _write_checkpoint(model: TensorSource, optimizer: TensorSource | None, job: Job, folder: Path) -> None:
    folder.mkdir()
    stocks = [model, optimizer] if optimizer else [model]
    counts = [optimizer.read(name) for name in optimizer.forms if name.startswith("step/")] if optimizer else []
    files, tensors = write_files(stocks, DTYPES[job.plan.precision.update], folder)
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
    """A hidden folder beside the target, that is gone afterwards.

    Raises:
        CheckpointError: the target is there already or inside of the source, or the disk does not take what is written.
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists", rule="converting overwrites nothing", fix="name another folder")
    if target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(
            f"{target} is inside of {source}", rule="a source stays what it is", fix="name another folder"
        )
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target} could not be made: {error}",
            rule="a conversion writes a new folder",
            fix="name a folder that you may write to, on a disk with enough space",
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _commit(folder: Path, target: Path) -> None:
    """Wait until a folder is on the disk, and give it its name."""
    for file in folder.iterdir():
        with file.open("rb") as content:
            os.fsync(content.fileno())
    sync_folder(folder)
    folder.rename(target)
    sync_folder(target.parent)


def _read_prepared(run: Path) -> tuple[str | None, int | None]:
    """The tokenizer of a run, and its id that ends a text; nothing where a folder is no run."""
    file = run / "prepared.json"
    if not file.is_file():
        return None, None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return fields["tokenizer"], fields["end_of_text"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{file} is damaged", fix="copy the checkpoint out of the run's folder") from None


def _present(tokenizer: str | None) -> Path | None:
    """The folder of a run's tokenizer."""
    if tokenizer is not None and not Path(tokenizer).is_dir():
        raise CheckpointError(f"the run's tokenizer is gone from {tokenizer}", fix="name one: --tokenizer FOLDER")
    return None if tokenizer is None else Path(tokenizer)


# Models


def _need_job(source: Path, job: Job | None) -> Job:
    if job is None:
        raise CheckpointError(
            f"{source} does not say which model it holds",
            rule="a DCP folder has tensors, and no configuration of a model",
            fix="name a job with this model: --job JOB.toml",
        )
    return job


def _model_of(reader: Reader) -> Model:
    try:
        return Model.model_validate(reader.manifest.job.get("model"))
    except ValidationError as error:
        raise CheckpointError(
            f"the manifest does not name a model: {str(error).splitlines()[0]}",
            where=str(reader.folder),
            fix="name a job with its model: --job JOB.toml",
        ) from None


def _build(source: Model) -> tuple[PretrainedConfig, PreTrainedModel]:
    config = read_config(source)
    return config, build_on_meta(config, torch.float32)
