"""`compress`: write a smaller model, block by block."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from weft.checkpoint.export_files import finish_folder
from weft.checkpoint.weight_files import weight_files
from weft.compress.prune import prune
from weft.compress.ranks import Ranks
from weft.compress.recipe import Recipe
from weft.compress.rows import need_rows
from weft.compress.source import new_folder
from weft.compress.work import change_weights
from weft.device.detect import detect
from weft.errors import DataError
from weft.launch.launcher import launch, thread_variables
from weft.versions import explain_versions

PRUNED, COMPRESSED, ERRORS = "pruned", "compressed", "errors.json"
"""Names in the folder in which a compression is made."""


@dataclass
class Compressed:
    """Sizes and errors of a compressed model."""

    bytes_before: int = 0
    bytes_after: int = 0
    """Bytes of the files with weights."""
    errors: dict[str, float] = field(default_factory=dict)
    """Squared error of the outputs of each linear layer on its calibration inputs, relative to that of zeros; without
    calibration, of its weights. Of a weight of all experts, the mean over experts."""


@dataclass(frozen=True)
class Settings:
    """Settings of the ranks, passed to them in a JSON file."""

    source: str
    part: str
    """Folder in which rank 0 writes."""
    recipe: dict[str, Any]
    rows: str
    """File with the calibration rows; "" without."""


def compress(
    source: Path,
    out: Path,
    recipe: Recipe,
    rows: Tensor | None = None,
    log: Callable[[str], None] = print,
    ranks: int = 1,
) -> Compressed:
    """Write a compressed copy of a model, block by block; the folder appears complete or not at all.

    Peak memory is the largest block, what is outside of blocks, and the hidden states of a rank's calibration rows.

    Args:
        source: Hugging Face folder of a causal language model, with weights that are not quantized.
        out: folder to write.
        recipe: what becomes of the weights.
        rows: token ids of calibration rows [rows, tokens], int64; None for a recipe that needs none.
        log: called with a line of progress; with several ranks, rank 0 prints its lines.
        ranks: processes of this host that share the work.

    Raises:
        CheckpointError: weights are missing or damaged, or `out` exists.
        DataError: too few calibration rows.
        ModelError: the family or its sizes do not fit the recipe.
    """
    for line in explain_versions(("torch", "transformers", "compressed-tensors")):
        log(line)
    found = Compressed(sum(path.stat().st_size for path in weight_files(source)))
    with new_folder(out) as part:
        if ranks == 1:
            found.errors = compress_into(source, part, recipe, rows, log)
        else:
            found.errors = _compress_on_ranks(source, part, recipe, rows, ranks, out.with_name(f"{out.name}.logs"))
        finish_folder(part / (COMPRESSED if recipe.changes_weights else PRUNED), "config.json", None, out, source)
    found.bytes_after = sum(path.stat().st_size for path in weight_files(out))
    return found


def _compress_on_ranks(
    source: Path, part: Path, recipe: Recipe, rows: Tensor | None, ranks: int, logs: Path
) -> dict[str, float]:
    """Launch the ranks. Returns the error of each layer."""
    if rows is not None and len(rows) < ranks:
        raise DataError(
            f"{len(rows)} calibration rows on {ranks} ranks",
            where="--nproc-per-node",
            rule="each rank runs the model on at least one row",
            fix="use fewer ranks, or more rows",
        )
    file = part.absolute() / "rows.safetensors"
    if rows is not None:
        save_file({"rows": rows.contiguous()}, file)
    settings = Settings(
        str(source.absolute()), str(part.absolute()), recipe.model_dump(), "" if rows is None else str(file)
    )
    path = part / "settings.json"
    path.write_text(json.dumps(asdict(settings)), encoding="utf-8")
    argv = [sys.executable, "-m", "weft.compress.rank", str(path)]
    device = detect()
    variables = thread_variables(device, ranks)
    launch(argv, ranks=ranks, log_dir=logs, environment=variables, use_forkserver=device.supports_fork)
    shutil.rmtree(logs, ignore_errors=True)  # kept after a failure
    errors: dict[str, float] = json.loads((part / ERRORS).read_text(encoding="utf-8"))
    return errors


def compress_into(
    source: Path,
    part: Path,
    recipe: Recipe,
    rows: Tensor | None,
    log: Callable[[str], None],
    ranks: Ranks = Ranks(),  # noqa: B008 - it is frozen
) -> dict[str, float]:
    """Prune and compress a model into the folders `PRUNED` and `COMPRESSED` of a folder. Collective; rank 0 writes.

    Args:
        source, recipe, rows, log: as for `compress`; all ranks have the same.
        part: existing folder.
        ranks: ranks that share the work.

    Returns:
        Error of each layer.
    """
    smaller = source
    if recipe.prunes:
        smaller = part / PRUNED
        prune(source, smaller, recipe, need_rows(rows), log, ranks)
        ranks.wait()
    return change_weights(smaller, part / COMPRESSED, recipe, rows, log, ranks) if recipe.changes_weights else {}
