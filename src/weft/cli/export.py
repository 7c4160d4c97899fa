"""weft export"""

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    to: Annotated[Path, typer.Argument(help="Output folder.")],
    step: Annotated[Optional[int], typer.Option(help="Step of a checkpoint; default: end of the run.")] = None,  # noqa: UP045
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Dtype of the weights.")] = "fp32",
) -> None:
    """Write a Hugging Face folder from a run.

    Writes the final weights or a checkpoint in the given dtype, with the tokenizer.
    """
    import transformers

    from weft.checkpoint.convert import to_huggingface
    from weft.checkpoint.folders import folder_of
    from weft.checkpoint.huggingface import convert_folder
    from weft.checkpoint.key import read_key
    from weft.job import Job

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if step is None:
        print(convert_folder(run / "export", to, dtype))
    else:
        settings = Job.load(run / "job.toml").checkpoint
        folder = folder_of(Path(settings.folder or run), step)
        print(to_huggingface(folder, to, dtype=dtype, run=run, key=read_key(settings.key_file)))
