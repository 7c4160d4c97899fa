"""weft export"""

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    to: Annotated[Path, typer.Argument(help="Folder to write.")],
    step: Annotated[Optional[int], typer.Option(help="Step of a saved folder; default the end of the run.")] = None,  # noqa: UP045
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Number format of the weights.")] = "fp32",
) -> None:
    """Write a Hugging Face folder with tokenizer from a run."""
    from weft.checkpoint.huggingface import convert_folder

    print(convert_folder(run / ("export" if step is None else f"step-{step:08d}"), to, dtype))
