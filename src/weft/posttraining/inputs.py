"""Files and folders of a job with a trainer, checked before torch is imported."""

from glob import glob
from pathlib import Path

from weft.checkpoint.weight_files import check_model_folder
from weft.errors import CheckpointError, DataError, JobError, refuse_hub_id
from weft.posttraining.job import TrainerJob


def check_inputs(job: TrainerJob, resume: str | None = None) -> None:
    """Refuse a job whose model, rewards or rows are missing, and a missing checkpoint. Reads no rows.

    Args:
        resume: checkpoint folder of the trainer to resume from, "auto", or None for a new run.

    Raises:
        WeftError: names the key and the path.
    """
    if resume not in (None, "auto") and not Path(resume, "trainer_state.json").is_file():
        raise CheckpointError(
            f"there is no checkpoint in {resume}",
            where=f"--resume {resume}",
            rule="a checkpoint of a trainer is a folder with a trainer_state.json",
            fix="name a folder checkpoint-N of the run, or use --resume auto",
        )
    check_model(job.model.path, "model.path")
    for key, path in (("trainer.reference", job.trainer.reference), ("trainer.teacher", job.trainer.teacher)):
        if path:
            check_model(path, key)
    for reward in job.trainer.rewards:
        check_reward(reward)
    for key, rows in (("data.path", job.data.path), ("data.eval_path", job.data.eval_path)):
        if rows:
            find_rows(rows, key)


def check_model(path: str, key: str) -> None:
    """Refuse a path that is no model folder with a tokenizer.

    Raises:
        JobError: a file is missing, or the folder has adapters.
        ModelError, CheckpointError: the folder has no weights, or its path reads as the id of a model on the Hub.
    """
    refuse_hub_id(path, key)
    folder = Path(path)
    if (folder / "adapter_config.json").is_file():
        raise JobError(
            f"{path} has adapters, not a model",
            where=f"{key} = {path!r}",
            rule="training starts from a folder with all weights",
            fix="merge the adapters: `weft export RUN TO --merge`",
        )
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise JobError(
                f"{path} has no {name}" if folder.is_dir() else f"there is no folder {path}",
                where=f"{key} = {path!r}",
                rule="a model is a Hugging Face folder with config, weights and tokenizer",
                fix="check the path; it is relative to the current folder",
            )
    check_model_folder(folder, key)


def check_reward(name: str) -> None:
    """Refuse a reward that is neither the folder of a reward model nor the name of a function.

    Raises:
        JobError: it is neither; see also `check_model`.
    """
    if Path(name).is_dir():
        check_model(name, "trainer.rewards")
    elif ":" not in name:
        raise JobError(
            f"no folder and no function {name}",
            where="trainer.rewards",
            rule='a reward is a function, "package.module:function", or the folder of a reward model',
            fix="check the name; paths are relative to the current folder",
        )


def find_rows(path: str, key: str) -> list[str]:
    """Files of rows, or their folder, sorted.

    Raises:
        DataError: there are none.
    """
    files = sorted(glob(path, recursive=True))
    if not files:
        raise DataError(
            f"there is no file {path}",
            where=f"{key} = {path!r}",
            rule="rows are a .jsonl or .parquet file, a glob of such files, or a folder of Dataset.save_to_disk",
            fix="check the path; it is relative to the current folder",
        )
    return files
