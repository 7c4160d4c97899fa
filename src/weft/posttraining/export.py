"""Model of a finished run with a trainer, as a folder in a given dtype, with adapters merged or beside it."""

import shutil
import tempfile
from pathlib import Path

import transformers

from weft.adapters.model import import_peft
from weft.checkpoint.export_files import copy_files, drop_same_generation, write_config
from weft.checkpoint.huggingface import save_model
from weft.errors import CheckpointError, JobError
from weft.inputs import check_new
from weft.posttraining.job import TrainerJob
from weft.posttraining.trainers import EXPORT, load_plain
from weft.precision.dtypes import DTYPES


def export_model(run: Path, target: Path, *, merge: bool, dtype: str) -> Path:
    """Write the model of a run, or its adapters, as a new folder.

    Args:
        run: run folder of a job with a trainer.
        target: folder to write; it must not exist.
        merge: True to merge adapters into the weights of their model, in float32, with PEFT's `merge_and_unload`.
        dtype: dtype of the written weights, a name of `weft.precision.dtypes`. Adapters alone are copied as they are.

    Returns:
        The written folder.

    Raises:
        CheckpointError: the target exists, or the run has no model yet.
        JobError: `merge` for a run without adapters.
    """
    check_new(target)
    job, source = TrainerJob.load(run / "job.toml"), run / EXPORT
    has_adapters = job.adapter.kind != "none"
    if not (source / ("adapter_config.json" if has_adapters else "config.json")).is_file():
        raise CheckpointError(
            f"{run} has no model yet", where=str(source), rule="a run saves its model at its end", fix="let the run end"
        )
    if merge and not has_adapters:
        raise JobError(
            f"--merge for {run}, which has no adapters",
            where="command line",
            rule="only adapters are merged; this run has trained all weights",
            fix="leave --merge out",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as scratch:
        written = Path(scratch) / "model"
        if has_adapters and not merge:
            shutil.copytree(source, written)
        else:
            _write_model(job, source, written, dtype)
        written.rename(target)
    return target


def _write_model(job: TrainerJob, source: Path, written: Path, dtype: str) -> None:
    if job.adapter.kind == "none":
        model = load_plain(job, source)
    else:
        plain = load_plain(job, job.model.path)
        adapted = import_peft().PeftModel.from_pretrained(plain, str(source), torch_device="cpu")
        model = adapted.merge_and_unload()
    origin = source if job.adapter.kind == "none" else Path(job.model.path)
    save_model(model, dict(model.state_dict()), written, DTYPES[dtype], origin, source)


def keep_files(folder: Path, source: Path) -> None:
    """Give a model that a trainer has saved the files around the weights of its source, byte for byte unless they have changed.

    Args:
        folder: folder with the model, or with adapters, and a tokenizer.
        source: folder of the model from which training has started.
    """
    shutil.rmtree(folder / "ref", ignore_errors=True)  # a copy of the adapters at the start, TRL's reference
    if has_model := (folder / "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        write_config(config, folder, source, config.dtype)
        drop_same_generation(folder, config, source)
    with tempfile.TemporaryDirectory() as scratch:
        transformers.AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(scratch)
        saved = {path.relative_to(scratch): path.read_bytes() for path in Path(scratch).rglob("*") if path.is_file()}
    if all((folder / path).is_file() and (folder / path).read_bytes() == content for path, content in saved.items()):
        for path in saved:
            (folder / path).unlink()
    copy_files(folder, source if has_model else None, source)
