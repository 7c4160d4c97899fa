"""weft compress"""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import Step


def compress(
    source: Annotated[Path, typer.Argument(help="Run folder, or Hugging Face folder of a causal language model.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    recipe: Annotated[
        str,
        typer.Option(help="int8, int4, fp8, 2:4, prune=0.3, drop=0.3, several joined by +; trained; or a .toml file."),
    ] = "int8",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="TOML file with a table data, such as a job; default: the job of the run."),
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate/--no-evaluate", help="Measure the held-out loss of both models.")
    ] = True,
    held_out_rows: Annotated[int, typer.Option(min=1, help="Maximum rows of the held-out split.")] = 64,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share rows and matrices.")] = 1,
    step: Step = None,
) -> None:
    """Write a smaller copy of a model.

    Quantizes or prunes the weights, block by block, in the format of compressed-tensors, which Transformers loads. Writes
    compression.json and report.html, with the sizes, the error of each layer, and the held-out loss before and after.
    """
    from weft.checkpoint.remote import require_local
    from weft.inputs import check_new, check_source

    require_local(source, out)
    check_source(source, step)
    check_new(out)

    import transformers  # after the checks above, because importing torch and Transformers takes seconds

    from weft.compress.report import compress_model, print_report

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = compress_model(
        source,
        out,
        recipe,
        calibrate=calibrate,
        held_out_rows=held_out_rows if evaluate else 0,
        step=step,
        ranks=nproc_per_node,
        log=print,
    )
    print_report(found)
