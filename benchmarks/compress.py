"""Size, held-out loss and time of the recipes of `weft compress`, on SmolLM2-135M and Python's standard library.

    python examples/fetch_smollm.py models/smollm2
    python benchmarks/compress.py models/smollm2            # about half an hour on two free cores
    python benchmarks/compress.py models/smollm2 --recipes int8,fp8

Losses are measured by plain Transformers in fresh processes; the same held-out rows for all recipes.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console
from rich.table import Table

from weft.compress.recipe import read_recipe
from weft.compress.report import compress_and_report
from weft.device.cpu import Cpu

TEXT = '[data]\nsource = "python"\nseq_len = 256\n'


def main(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder.")],
    recipes: Annotated[str, typer.Option(help="Names of recipes.")] = "int8,fp8,int4,2:4,int4+2:4",
    held_out_rows: Annotated[int, typer.Option(help="Held-out rows of 256 tokens.")] = 8,
) -> None:
    """Compress the model by each recipe, and print the table."""
    transformers.logging.set_verbosity_error()
    columns = ("recipe", "MB", "of before", "loss", "change", "seconds", "tokens/s")
    table = Table(*columns, title=f"{Cpu().name}: {model.name}, {held_out_rows} held-out rows")
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data.toml"
        data.write_text(TEXT)
        for index, name in enumerate(recipes.split(",")):
            out = Path(scratch) / f"out-{index}"
            found = compress_and_report(
                model, out, read_recipe(name), data_file=data, held_out_rows=held_out_rows, log=lambda line: None
            )
            assert found.before
            assert found.after
            assert found.change is not None
            if not index:
                speed = f"{found.before.tokens_per_second:.0f}"
                table.add_row("none", f"{found.bytes_before / 1e6:.1f}", "", f"{found.before.loss:.4f}", "", "", speed)
            table.add_row(
                name,
                f"{found.bytes_after / 1e6:.1f}",
                f"{found.bytes_after / found.bytes_before:.1%}",
                f"{found.after.loss:.4f}",
                f"{found.change:+.2%}",
                f"{found.seconds:.0f}",
                f"{found.after.tokens_per_second:.0f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
