"""Files and folders of a job, checked before torch is imported."""

from pathlib import Path

from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.weight_files import check_model_folder
from weft.errors import ModelError, refuse_hub_id
from weft.inputs import check_tokenizer_folder, find_files
from weft.job import Job, Model, packs_base
from weft.object_store import is_url


def check_inputs(job: Job, resume: str | None = None) -> None:
    """Refuse a job whose model, teacher, data or tokenizer is missing, and a missing checkpoint. Reads no data.

    Args:
        resume: checkpoint folder or URL to resume from, "auto", or None for a new run.

    Raises:
        WeftError: names the key and the path.
    """
    if resume not in (None, "auto") and not is_url(resume):
        read_manifest(Path(resume), read_key(job.checkpoint.key_file))
    check_config(job.model)
    if job.model.path and not (resume and list_checkpoints(Path(job.checkpoint.folder or job.out))):
        check_model_folder(Path(job.model.path), "model.path", in_4_bits=packs_base(job))
    if job.distillation.teacher:
        check_model_folder(Path(job.distillation.teacher), "distillation.teacher")
    if job.data.tokenizer != "train":
        check_tokenizer_folder(Path(job.data.tokenizer).expanduser())
    if job.data.source != "python" and ":" not in job.data.source:  # a function of the user interprets its path
        for path in job.data.sets or [job.data.path]:
            find_files(job.data.model_copy(update={"path": path}))


def check_config(model: Model) -> None:
    """Refuse a model whose configuration is missing; its weights are not needed.

    Raises:
        ModelError: there is no such file or folder, or its path reads as the id of a model on the Hub.
    """
    given = model.path or model.config
    if isinstance(given, str):
        where = f"model.{'path' if model.path else 'config'} = {given!r}"
        refuse_hub_id(given, where)
        file = Path(given, "config.json") if model.path else Path(given)
        if not file.is_file():
            raise ModelError(
                f"there is no file {file}",
                where=where,
                rule="model.path is a folder with a config.json; model.config is a config.json",
                fix="check the path; it is relative to the current folder",
            )
