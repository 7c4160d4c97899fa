"""weft checkpoint ls, verify, diff, convert"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import typer

from weft.cli.command import add_command

if TYPE_CHECKING:
    from weft.checkpoint.diff import Difference

SHOWN = 5  # keys that differ, of each list that --all shows whole

KeyFile = Annotated[str, typer.Option("--key-file", help="The checkpoint.key_file of the run, if it had one.")]

checkpoint = typer.Typer(help="List, verify, compare and convert checkpoints.", no_args_is_help=True)


def ls(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or another in which checkpoints lie.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte: only then one is called good.")] = False,
    key_file: KeyFile = "",
) -> None:
    """List the checkpoints of a run, with size, layout and state.

    Checkpoints that are damaged, set aside or unfinished are listed too.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from weft.checkpoint.key import read_key
    from weft.checkpoint.listing import list_run

    table = Table(
        "folder", "step", Column("MiB", justify="right"), "written", "layout", Column("state", overflow="fold")
    )
    for row in list_run(run, verify=verify, key=read_key(key_file)):
        size, written = f"{row.bytes / 2**20:.1f}", f"{row.written:%Y-%m-%d %H:%M:%S}"
        table.add_row(escape(row.name), str(row.step), size, written, row.layout, escape(row.state))
    Console(highlight=False).print(table)


def verify(
    folders: Annotated[list[Path], typer.Argument(help="Checkpoints, or runs for all of theirs.")],
    key_file: KeyFile = "",
) -> None:
    """Check every byte of checkpoints.

    Exit code 0: all are good; 1: one does not verify.
    """
    from weft.checkpoint.key import read_key
    from weft.checkpoint.listing import checkpoints_at
    from weft.checkpoint.manifest import verify_folder
    from weft.errors import CheckpointError

    bad, key = 0, read_key(key_file)
    for folder in checkpoints_at(folders):
        try:
            manifest = verify_folder(folder, key)
        except CheckpointError as error:
            bad += 1
            print(f"{folder} does not verify: {error}")
        else:
            print(f"{folder} is good: {len(manifest.files)} files, {manifest.bytes / 2**20:.1f} MiB")
    raise typer.Exit(1 if bad else 0)


def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(help="Another, under any layout.")],
    generators: Annotated[bool, typer.Option("--generators", help="Compare random number generators too.")] = False,
    every: Annotated[bool, typer.Option("--all", help="List every tensor and key that differs.")] = False,
    key_file: KeyFile = "",
) -> None:
    """Compare two checkpoints bit by bit.

    Exit code 0: tensors and position are equal; 1: they differ; 2: one of them does not verify.
    """
    from weft.checkpoint.diff import diff as diff_folders
    from weft.checkpoint.key import read_key

    found = diff_folders(a, b, generators=generators, key=read_key(key_file))
    print_difference(found, every=every)
    raise typer.Exit(0 if found.equal else 1)


def print_difference(found: "Difference", *, every: bool = False) -> None:
    """Print the first tensor that differs, the number that do by kind, and names and keys that do.

    Args:
        found: what differs.
        every: print every tensor, name and key; else the first few of each list, and how many more there are.
    """
    from rich.console import Console
    from rich.table import Table

    from weft.checkpoint.diff import kind_of

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if found.tensors:
        console.print(f"The first tensor that differs is {found.tensors[0]}")
    table = Table("tensors", "compared", "differ")
    for kind, number in found.compared.items():
        table.add_row(kind, str(number), str(sum(kind_of(tensor.name) == kind for tensor in found.tensors)))
    console.print(table)
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            console.print(f"{len(names)} tensors are in {side} alone, the first is {names[0]}")
    lists = {
        "tensors": [str(tensor) for tensor in found.tensors] * every,
        "tensors of A alone": found.only_a * every,
        "tensors of B alone": found.only_b * every,
        "keys of the position": [f"position.{text}" for text in found.position],
        "keys of the job": [f"job.{text}" for text in found.job],
    }
    for what, lines in lists.items():
        shown = lines if every else lines[:SHOWN]
        for line in shown:
            console.print(line)
        if len(shown) < len(lines):
            console.print(f"{len(lines) - len(shown)} more {what} differ; --all lists them")
    if found.equal:
        console.print("The checkpoints are equal: tensors, bit by bit, and position.")


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint, a Hugging Face folder, or one of torch's DCP.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    to: Annotated[Literal["hf", "weft"], typer.Option(help="What to write.")],
    dtype: Annotated[
        Optional[Literal["fp32", "bf16", "fp16"]],  # noqa: UP045
        typer.Option(help="Number format of the weights, with --to hf; default that in which they are."),
    ] = None,
    tokenizer: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of a tokenizer, with --to hf; default the one of the run around a checkpoint."),
    ] = None,
    job: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Job as TOML: whose model a DCP folder holds; and what will go on from the checkpoint."),
    ] = None,
    key_file: KeyFile = "",
) -> None:
    """Convert between checkpoints, Hugging Face folders and DCP.

    Write a checkpoint as a Hugging Face folder; or such a folder, or one of torch's DCP, as a checkpoint.
    """
    from weft.job import Job

    chosen = Job.load(job) if job else None

    import transformers

    from weft.checkpoint.convert import to_checkpoint, to_huggingface
    from weft.checkpoint.key import read_key

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if to == "hf":
        print(to_huggingface(source, target, dtype=dtype, tokenizer=tokenizer, job=chosen, key=read_key(key_file)))
        if not any(target.glob("tokenizer*")):
            print("There is no tokenizer in it: no run around the source names one. --tokenizer FOLDER does.")
    elif dtype or tokenizer:
        raise typer.BadParameter(
            "--dtype and --tokenizer belong to --to hf; a checkpoint has the format of the job's plan"
        )
    else:
        print(to_checkpoint(source, target, job=chosen))


for command in (ls, verify, diff, convert):
    add_command(checkpoint, command)
