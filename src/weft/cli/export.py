"""weft export"""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    to: Annotated[Path, typer.Argument(help="Output folder, or the URL of one on an object store.")],
    step: Annotated[int | None, typer.Option(help="Step of a checkpoint; default: end of the run.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into the weights of their base model.")
    ] = False,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Dtype of the weights.")] = "fp32",
) -> None:
    """Write a Hugging Face folder from a run.

    Writes the final weights or a checkpoint in the given dtype, with the tokenizer. Of a run with adapters: the adapters as
    a folder of PEFT, or with --merge the full model.
    """
    from weft.checkpoint.remote import require_local
    from weft.checkpoint.remote_export import local_folder
    from weft.inputs import check_exported, check_source
    from weft.job import has_trainer
    from weft.object_store import as_url

    require_local(run)
    with local_folder(to, run) as folder:
        check_exported(run) if step is None else check_source(run, step)
        if has_trainer(run / "job.toml"):
            _export_trainer(run, folder, step, merge, dtype)
        else:
            _export_run(run, folder, step, merge, dtype)
    print(as_url(to))


def _export_run(run: Path, to: Path, step: int | None, merge: bool, dtype: str) -> None:
    """Export a run of a job without a trainer."""
    from weft.checkpoint.folders import folder_of
    from weft.checkpoint.key import read_key
    from weft.checkpoint.manifest import read_manifest
    from weft.errors import JobError
    from weft.job import Job

    job = None if step is None else Job.load(run / "job.toml")
    kind = "causal"
    with suppress(JobError):  # an export needs no job
        kind = Job.load(run / "job.toml").task.kind
    folder = None if job is None or step is None else folder_of(Path(job.checkpoint.folder or run), step)
    key = read_key(job.checkpoint.key_file) if job else None
    if folder is not None:
        read_manifest(folder, key)

    import transformers  # after the checks above, because importing torch and Transformers takes seconds

    from weft.adapters.folder import export_adapters
    from weft.checkpoint.convert import to_huggingface
    from weft.checkpoint.export_files import explain_writes
    from weft.checkpoint.huggingface import convert_folder

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    has_adapters = job.adapter.kind != "none" if job else (run / "export" / "adapter_config.json").exists()
    if has_adapters:
        with explain_writes(to):
            export_adapters(run, to, merge=merge, dtype=dtype, checkpoint=folder, key=key)
        return
    if merge:
        raise JobError(
            f"--merge for {run}, which has no adapters",
            where="command line",
            rule="only adapters are merged; a run with adapter.kind = 'none' exports all weights",
            fix="leave --merge out, or name a run with adapters that has ended, or one of its checkpoints with --step",
        )
    with explain_writes(to):
        if folder is None:
            convert_folder(run / "export", to, dtype, kind)
        else:
            to_huggingface(folder, to, dtype=dtype, run=run, key=key)


def _export_trainer(run: Path, to: Path, step: int | None, merge: bool, dtype: str) -> None:
    """Export a run of a job with a trainer."""
    from weft.checkpoint.export_files import explain_writes
    from weft.errors import JobError
    from weft.posttraining.export import export_model

    if step is not None:
        raise JobError(
            f"--step {step} for {run}, a run with a trainer",
            where="command line",
            rule="a checkpoint of a trainer is the folder checkpoint-N, with the weights in it",
            fix=f"leave --step out, or use {run / f'checkpoint-{step}'}",
        )
    with explain_writes(to):
        export_model(run, to, merge=merge, dtype=dtype)
