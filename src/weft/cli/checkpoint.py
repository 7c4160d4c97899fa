"""weft checkpoint ls, verify, diff, convert, fetch"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.cli.command import add_command

if TYPE_CHECKING:
    from weft.checkpoint.diff import CheckpointDifference
    from weft.job import Job

SHOWN = 5  # entries per list of differences without --all

KeyFile = Annotated[str, typer.Option("--key-file", help="Value of checkpoint.key_file of the run, if set.")]

checkpoint = typer.Typer(help="List, verify, compare and convert checkpoints.", no_args_is_help=True)


def ls(
    run: Annotated[Path, typer.Argument(help="Run folder, or another folder with checkpoints.")],
    verify: Annotated[bool, typer.Option("--verify", help="Verify every byte, as needed for the state good.")] = False,
    key_file: KeyFile = "",
) -> None:
    """List the checkpoints of a run, with size, layout and state.

    Damaged, archived and unfinished checkpoints are listed too.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from weft.checkpoint.key import read_key
    from weft.checkpoint.listing import list_run
    from weft.checkpoint.remote import require_local

    require_local(run)
    table = Table(
        "folder", "step", Column("MiB", justify="right"), "written", "layout", Column("state", overflow="fold")
    )
    for row in list_run(run, verify=verify, key=read_key(key_file)):
        size, written = f"{row.bytes / 2**20:.1f}", f"{row.written:%Y-%m-%d %H:%M:%S}"
        table.add_row(escape(row.name), str(row.step), size, written, row.layout, escape(row.state))
    Console(highlight=False).print(table)


def verify(
    folders: Annotated[list[Path], typer.Argument(help="Checkpoints, or run folders for all their checkpoints.")],
    key_file: KeyFile = "",
) -> None:
    """Verify every byte of checkpoints.

    Exit code 0: all checkpoints are good; 1: a checkpoint does not verify.
    """
    from weft.checkpoint.key import read_key
    from weft.checkpoint.listing import checkpoints_at
    from weft.checkpoint.manifest import verify_folder
    from weft.checkpoint.remote import require_local
    from weft.errors import CheckpointError, printable

    require_local(*folders)
    bad, key = 0, read_key(key_file)
    for folder in checkpoints_at(folders):
        try:
            manifest = verify_folder(folder, key)
        except CheckpointError as error:
            bad += 1
            print(printable(f"{folder} does not verify: {error}"))
        else:
            print(printable(f"{folder} is good: {len(manifest.files)} files, {manifest.bytes / 2**20:.1f} MiB"))
    raise typer.Exit(1 if bad else 0)


def diff(
    a: Annotated[Path, typer.Argument(help="Checkpoint A.")],
    b: Annotated[Path, typer.Argument(help="Checkpoint B, in any layout.")],
    generators: Annotated[bool, typer.Option("--generators", help="Compare random number generators too.")] = False,
    every: Annotated[bool, typer.Option("--all", help="List every tensor and key that differs.")] = False,
    key_file: KeyFile = "",
) -> None:
    """Compare two checkpoints bit by bit.

    Exit code 0: tensors and position are equal; 1: they differ; 2: a checkpoint does not verify.
    """
    from weft.checkpoint.key import read_key
    from weft.checkpoint.manifest import read_manifest
    from weft.checkpoint.remote import require_local

    require_local(a, b)
    key = read_key(key_file)
    for folder in (a, b):
        read_manifest(folder, key)

    # After the checks above, because importing torch takes seconds.
    from weft.checkpoint.diff import diff as diff_folders

    found = diff_folders(a, b, generators=generators, key=key)
    print_difference(found, every=every)
    raise typer.Exit(0 if found.equal else 1)


def print_difference(found: "CheckpointDifference", *, every: bool = False) -> None:
    """Print the first tensor that differs, the number of differing tensors by kind, and differing names and keys.

    Args:
        found: difference of two checkpoints.
        every: print all tensors, names and keys; else the first entries of each list and the number of others.
    """
    from rich.console import Console
    from rich.table import Table

    from weft.checkpoint.diff import kind_of
    from weft.errors import printable

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if found.tensors:
        console.print(printable(f"The first tensor that differs is {found.tensors[0]}"))
    table = Table("tensors", "compared", "differ")
    for kind, count in found.compared.items():
        table.add_row(printable(kind), str(count), str(sum(kind_of(tensor.name) == kind for tensor in found.tensors)))
    console.print(table)
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            console.print(printable(f"{len(names)} tensors are in {side} alone, the first is {names[0]}"))
    lists = {
        "tensors": [str(tensor) for tensor in found.tensors] * every,
        "tensors of A alone": found.only_a * every,
        "tensors of B alone": found.only_b * every,
        "keys of the position": [f"position.{text}" for text in found.position],
        "keys of the job": [f"job.{text}" for text in found.job],
    }
    for title, lines in lists.items():
        shown = lines if every else lines[:SHOWN]
        for line in shown:
            console.print(printable(line))
        if len(shown) < len(lines):
            console.print(f"{len(lines) - len(shown)} more {title} differ; --all lists them")
    if found.equal:
        console.print("The checkpoints are equal: tensors, bit by bit, and position.")


def convert(
    source: Annotated[
        Path, typer.Argument(help="Checkpoint of Weft, Megatron-Core or torch DCP, or Hugging Face folder.")
    ],
    target: Annotated[
        Path, typer.Argument(help="Output folder, or the URL of one on an object store; must not exist.")
    ],
    to: Annotated[Literal["hf", "weft", "megatron", "dcp"], typer.Option(help="Output format.")],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Dtype of the weights, with --to hf or megatron; default: that of the source."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer folder, with --to hf; default: that of the run of the checkpoint.")
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(
            help="Job as TOML: model of a Megatron-Core or DCP folder, and job that will resume from the checkpoint."
        ),
    ] = None,
    key_file: KeyFile = "",
) -> None:
    """Convert between Weft, Hugging Face, Megatron-Core and DCP.

    Converts a checkpoint, or a folder of Hugging Face, Megatron-Core or torch DCP, to each of the other formats. From a
    checkpoint to DCP and back, the state of the optimizer is converted too.
    """
    from weft.checkpoint.remote import require_local
    from weft.checkpoint.remote_export import local_folder
    from weft.inputs import check_folder
    from weft.job import Job
    from weft.object_store import as_url

    require_local(source)
    chosen = Job.load(job) if job else None
    check_folder(source)
    if tokenizer and to != "hf":
        raise typer.BadParameter("--tokenizer belongs to --to hf; no other format has a tokenizer")
    if dtype and to not in ("hf", "megatron"):
        raise typer.BadParameter(
            "--dtype belongs to --to hf and megatron; a checkpoint has the dtypes of the job's plan, and a DCP folder those "
            "of its source"
        )
    with local_folder(target, source) as folder:
        note = _convert(source, folder, to, dtype, tokenizer, chosen, key_file)
    print(as_url(target))
    if note:
        print(note)


def _convert(
    source: Path,
    target: Path,
    to: str,
    dtype: str | None,
    tokenizer: Path | None,
    job: "Job | None",
    key_file: str,
) -> str:
    """Convert a folder; a line about what the target lacks, or ""."""
    import transformers

    from weft.checkpoint.convert import to_checkpoint, to_dcp, to_huggingface, to_megatron
    from weft.checkpoint.dcp import DcpFolder
    from weft.checkpoint.key import read_key
    from weft.checkpoint.source_folder import detect_format

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if to == "hf":
        to_huggingface(source, target, dtype=dtype, tokenizer=tokenizer, job=job, key=read_key(key_file))
        if not any(target.glob("tokenizer*")):
            return (
                "The folder has no tokenizer, because no run of the source names one; set it with --tokenizer FOLDER."
            )
    elif to == "megatron":
        to_megatron(source, target, dtype=dtype, job=job, key=read_key(key_file))
    elif to == "dcp":
        to_dcp(source, target, job=job, key=read_key(key_file))
        if not any(name.startswith("optimizer.state.") for name in DcpFolder(target).tensors):
            return "The weights alone: no states of an optimizer are converted from this source."
    else:
        to_checkpoint(source, target, job=job)
        if detect_format(source) == "megatron":
            return "The weights alone: optimizer states of Megatron-Core are not converted, and AdamW starts anew."
    return ""


def fetch(
    url: Annotated[str, typer.Argument(help="URL of a run on an object store, for its newest checkpoint, or of one.")],
    folder: Annotated[Path, typer.Argument(help="Output folder; must not exist.")],
    key_file: KeyFile = "",
) -> None:
    """Copy a checkpoint from an object store, and verify it."""
    from weft.checkpoint.key import read_key
    from weft.checkpoint.remote import fetch as fetch_checkpoint
    from weft.inputs import check_new

    check_new(folder)
    manifest = fetch_checkpoint(url, folder, read_key(key_file))
    size = manifest.bytes / 2**20
    print(f"{folder} is good: step {manifest.position.step}, {len(manifest.files)} files, {size:.1f} MiB")


for command in (ls, verify, diff, convert, fetch):
    add_command(checkpoint, command)
