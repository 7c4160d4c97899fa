"""Inputs that the ranks of each host read by themselves, compared between hosts before the first step.

Versions, the code of Weft and of the user, the model folder and the tokens. One rank of each host reads at most 1.2 MB of each
file, so that terabytes of weights take seconds. On a single host nothing is read.
"""

import platform
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3
from torch.utils.data import TensorDataset

from weft.backends.hierarchical import host_id
from weft.checkpoint.export_files import source_of
from weft.comm.objects import all_gather_json, run_together, same_on_all
from weft.data import Prepared
from weft.errors import JobError
from weft.job import Job
from weft.own_code import load_module, package_version
from weft.training.functions import digest_functions
from weft.versions import TESTED

WEFT = Path(__file__).parents[1]
BLOCKS, BLOCK_BYTES = 18, 2**16  # of each file that a sampled digest reads
SAMPLED_ROWS = 64
READ_BY_LIBRARIES = (".safetensors", ".json", ".py", ".jinja", ".model", ".txt")
"""Ends of the files of a model folder that ranks may read."""
MODULE, VERSION, MODEL_OF_SCRIPT = "module ", "version of ", "model folder of the script: "
"""Begins of names that a host need not have: ranks of one host may import a module, or load a folder, and others not."""


def first_ranks() -> list[int]:
    """First rank of each host. Collective."""
    if same_on_all(host_id()):
        return [0]
    firsts: dict[tuple[str, ...], int] = {}
    for rank, place in enumerate(all_gather_json(host_id())):
        firsts.setdefault(tuple(place), rank)
    return list(firsts.values())


def compare_hosts(read: Callable[[], Mapping[str, str]]) -> None:
    """Refuse hosts that differ in what their ranks read by themselves. Collective.

    Args:
        read: returns values by name, such as versions and digests; called on the first rank of each of several hosts.

    Raises:
        JobError: names the first difference with the values of two hosts; the same on every rank.
    """
    firsts = first_ranks()
    if len(firsts) == 1:
        return
    own = run_together(lambda: dict(read()) if dist.get_rank() in firsts else {})
    if same_on_all(sorted(own.items()), counts=dist.get_rank() in firsts):
        return
    nodes, tables = zip(*all_gather_json([platform.node(), own]), strict=True)
    names = dict.fromkeys(name for rank in firsts for name in tables[rank])
    different = [pair for name in names if (pair := _difference(name, firsts, tables))]
    if not different:
        return
    name, one, other = different[0]
    values = [f"{tables[rank].get(name, 'missing')} on {nodes[rank]} (rank {rank})" for rank in (one, other)]
    more = f"; {len(different) - 1} more differ, such as {different[1][0]}" if len(different) > 1 else ""
    raise JobError(
        f"{name}: {values[0]}, and {values[1]}{more}",
        where=f"{nodes[one]} and {nodes[other]}",
        rule="the ranks of each host read versions, code, model and tokens by themselves, and all hosts have the same",
        fix="install the same versions and code, and copy the same files, on all hosts; or use a shared file system for them",
    )


def _difference(name: str, firsts: list[int], tables: Sequence[dict[str, str]]) -> tuple[str, int, int] | None:
    """Name and two ranks that have different values of it; None if all hosts have the same."""
    ranks = [rank for rank in firsts if name in tables[rank] or not name.startswith((MODULE, VERSION, MODEL_OF_SCRIPT))]
    other = next((rank for rank in ranks if tables[rank].get(name) != tables[ranks[0]].get(name)), None)
    return None if other is None else (name, ranks[0], other)


def read_job_inputs(job: Job, prepared: Prepared) -> dict[str, str]:
    """Values of this host for a job of `weft train`.

    Raises:
        JobError: a module of the user cannot be imported.
    """
    if job.model.package:
        load_module(job.model.package, f"model.package = {job.model.package}")
    digest_functions(job)  # imports their modules
    found = read_code()
    files = {"model.path": job.model.path, "distillation.teacher": job.distillation.teacher}
    files |= {"adapter.path": job.adapter.path}
    files |= {"model.config": job.model.config if isinstance(job.model.config, str) else None}
    if job.task.kind != "causal" or job.eval.tasks:
        files["data.tokenizer"] = prepared.tokenizer
    for key, path in files.items():
        found |= read_files(path, key) if path else {}
    for path in token_files(prepared):
        found |= read_files(path, "tokens", ends=("",))
    return found


def token_files(prepared: Prepared) -> list[str]:
    """Files, and folders of records, that ranks read rows from."""
    paths = [path for span in (*prepared.train, *prepared.held_out) for path in (span.tokens, span.starts) if path]
    return list(dict.fromkeys(paths))


def read_script_inputs(*objects: Any) -> dict[str, str]:
    """Values of this host for a script or a loop of the user.

    Args:
        objects: models, whose folder is read if there is one, data loaders, data sets, and objects of other kinds.
    """
    found = read_code()
    for index, value in enumerate(objects):
        if isinstance(value, torch.nn.Module) and (folder := source_of(value)):
            found |= {f"{MODEL_OF_SCRIPT}{name}": text for name, text in read_files(folder, "model").items()}
        rows = getattr(value, "dataset", value)
        if isinstance(rows, list | tuple | TensorDataset) or type(rows).__module__.startswith("datasets."):
            found |= _read_rows(rows, f"rows of data set {index}")
    return found


def read_code() -> dict[str, str]:
    """Versions of Python, Weft and the libraries that this process has imported, and digests of modules of the user."""
    found = {f"{VERSION}python": platform.python_version()}
    for package in TESTED:
        if version := getattr(sys.modules.get(package.replace("-", "_")), "__version__", ""):
            found[f"{VERSION}{package}"] = str(version)
    found[f"{VERSION}weft"] = f"{package_version()}, digest {digest_of_weft()}"
    return found | {f"{MODULE}{name}": _describe(file) for name, file in _own_modules()}


def digest_of_weft() -> str:
    """Digest of the source of this Weft, short."""
    return digest_files((path, str(path.relative_to(WEFT))) for path in sorted(WEFT.rglob("*.py")))[:12]


def read_files(path: str | Path, key: str, ends: tuple[str, ...] = READ_BY_LIBRARIES) -> dict[str, str]:
    """Size and digest of a file, or of the files in a folder, by name.

    Args:
        path: file or folder.
        key: what names it.
        ends: ends of the names of files of a folder that count.
    """
    path = Path(path).expanduser()
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.is_file() and file.name.endswith(ends)]
    return {f"{file} ({key})": _describe(file) for file in files}


def digest_files(files: Iterable[tuple[Path, str]]) -> str:
    """Digest of files by name, size and 18 blocks of 64 KiB of each, so that terabytes take seconds.

    Args:
        files: each file, and the name that enters the digest.
    """
    digest = blake3()
    for path, name in files:
        length = path.stat().st_size
        digest.update(f"{name}\0{length}\0".encode())
        with path.open("rb") as file:
            if length <= BLOCKS * BLOCK_BYTES:
                digest.update(file.read())
                continue
            for block in range(BLOCKS):
                file.seek(block * (length - BLOCK_BYTES) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _describe(file: Path) -> str:
    try:
        return f"{file.stat().st_size} bytes, digest {digest_files([(file, file.name)])[:12]}"
    except OSError as error:
        return f"missing ({error.strerror})"


def _own_modules() -> Iterator[tuple[str, Path]]:
    """Imported modules of the user, with their files: those that are neither installed nor of Python or Weft."""
    others = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")), str(WEFT))
    for name, module in sorted(sys.modules.items()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if file and "-packages/" not in file and not file.startswith(others):
            yield name, Path(file)


def _read_rows(rows: Any, name: str) -> dict[str, str]:
    """Number of rows, and digest of some of them. Rows of a data set of Hugging Face are read without its transforms."""
    if hasattr(rows, "with_format"):
        rows = rows.with_format(None)
    try:
        count = len(rows)
    except TypeError:  # a stream
        return {}
    digest = blake3()
    for index in sorted({round(part) for part in np.linspace(0, count - 1, min(SAMPLED_ROWS, count))}):
        digest.update(_text(rows[index]).encode())
    return {name: f"{count} rows, digest {digest.hexdigest()[:12]}"}


def _text(value: Any) -> str:
    """Text that is equal for equal values on all hosts; of objects that it does not know, the name of the class."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return str(value.tolist())
    return repr(value) if isinstance(value, str | bytes | int | float | bool | None) else type(value).__name__
