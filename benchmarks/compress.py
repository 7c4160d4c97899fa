"""Size, held-out loss and time of the recipes of `weft compress`, on SmolLM2-135M and Python's standard library.

    python examples/fetch_smollm.py models/smollm2
    python benchmarks/compress.py models/smollm2            # about half an hour on two free cores
    python benchmarks/compress.py models/smollm2 --recipes int8,fp8
    python benchmarks/compress.py models/smollm2 --beside    # torchao on the same layers, in the same formats
    python benchmarks/compress.py models/smollm2 --beside --llm-compressor llmc/bin/python    # of an environment that has it

Losses are measured by plain Transformers in a process without Weft; the same held-out rows for all recipes.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from weft.compress.measure import measure
from weft.compress.recipe import Recipe
from weft.compress.report import compress_model
from weft.compress.rows import read_data, read_rows
from weft.compress.run import compress
from weft.device.cpu import Cpu

TEXT = '[data]\nsource = "python"\nseq_len = 256\n'

BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "int8, a scale for each channel": ("int8", {"weights": "int8"}),
    "fp8, a scale for each channel": ("fp8", {"weights": "fp8"}),
    "int4, groups of 64": ("int4-64", {"weights": "int4", "group_size": 64}),
}
"""By title: the format of torchao, and keys of a recipe that stores as many bytes."""


def beside(model: Path, data_file: Path, held_out_rows: int, llm_compressor: Path | None) -> None:
    """Print the losses of other libraries' rounding and of Weft's recipes, of the linear layers of blocks, on the same rows.

    Args:
        model: Hugging Face folder.
        data_file: job with the text.
        held_out_rows: number of rows.
        llm_compressor: Python of an environment with llm-compressor; None: without it.
    """
    peers = Path(__file__).parent / "peers"
    others = {"torchao": (Path(sys.executable), peers / "torchao_weights.py")}
    if llm_compressor is not None:
        others["llm-compressor, GPTQ"] = llm_compressor.absolute(), peers / "llm_compressor_weights.py"
    data = read_data(data_file, model)
    assert data
    split = read_rows(data, model, Recipe().rows, held_out_rows, print)
    held_out = [text for text in split.held_out if len(text) > data.seq_len]  # the others read rows of one length
    calibration = [text for text in split.calibration if len(text) == data.seq_len]
    columns = ("format", *others, "Weft, nearest", "Weft, GPTQ")
    table = Table(*columns, title=f"{Cpu().name}: change of the held-out loss")
    before = measure(model, held_out).loss
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.safetensors"
        save_file({"rows": torch.stack(held_out), "calibration": torch.stack(calibration)}, file)
        for title, (form, keys) in BESIDE.items():
            losses = []
            for python, script in others.values():
                command = [python, script, model.absolute(), file, form]
                ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=scratch)
                losses.append(json.loads(ended.stdout.splitlines()[-1])["loss"])
            for method in ("nearest", "gptq"):
                out = Path(scratch) / f"{form}-{method}"
                compress(
                    model,
                    out,
                    Recipe.model_validate({**keys, "method": method}),
                    calibration,
                    lambda line: None,
                )
                losses.append(measure(out, held_out).loss)
            table.add_row(title, *(f"{loss / before - 1:+.3%}" for loss in losses))
    Console(width=120).print(table)


def main(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder.")],
    recipes: Annotated[str, typer.Option(help="Names of recipes.")] = "int8,w8a8,fp8,int4,2:4,int4+2:4",
    held_out_rows: Annotated[int, typer.Option(help="Held-out rows of 256 tokens.")] = 8,
    with_torchao: Annotated[
        bool, typer.Option("--beside", help="Compare losses with torchao, which must be importable.")
    ] = False,
    llm_compressor: Annotated[
        Path | None, typer.Option(help="With --beside: Python of an environment with llm-compressor.")
    ] = None,
) -> None:
    """Compress the model by each recipe, and print the table."""
    transformers.logging.set_verbosity_error()
    columns = ("recipe", "MB", "of before", "loss", "change", "seconds", "tokens/s")
    table = Table(*columns, title=f"{Cpu().name}: {model.name}, {held_out_rows} held-out rows")
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data.toml"
        data.write_text(TEXT)
        if with_torchao:
            beside(model, data, held_out_rows, llm_compressor)
            return
        for index, name in enumerate(recipes.split(",")):
            out = Path(scratch) / f"out-{index}"
            found = compress_model(model, out, name, calibrate=data, held_out_rows=held_out_rows, log=lambda line: None)
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
