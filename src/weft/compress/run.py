"""`compress`: write a smaller model, block by block."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from weft.checkpoint.export_files import finish_folder, new_folder
from weft.checkpoint.weight_files import weight_files
from weft.compress.folder import WeightReader
from weft.compress.formats import error_bounds
from weft.compress.measure import PlainTransformers, Quality, check_model, checked_row
from weft.compress.prune import prune
from weft.compress.ranks import Ranks
from weft.compress.recipe import Recipe, check_recipe
from weft.compress.rows import need_rows
from weft.compress.source import read_causal_config
from weft.compress.work import change_weights
from weft.device.detect import detect
from weft.errors import DataError
from weft.launch.launcher import launch, thread_variables
from weft.versions import explain_versions

PRUNED, COMPRESSED, ERRORS = "pruned", "compressed", "errors.json"
"""Names in the folder in which a compression is made."""


@dataclass
class Compressed:
    """Sizes, errors and quality of a compressed model."""

    bytes_before: int = 0
    bytes_after: int = 0
    """Bytes of the files with weights."""
    errors: dict[str, float] = field(default_factory=dict)
    """Squared error of the outputs of each linear layer on its calibration inputs, relative to that of zeros; without
    calibration, of its weights. Of a weight of all experts, the mean over experts."""
    seconds: float = 0.0
    """Time of the compression, without measurements."""
    before: Quality | None = None
    after: Quality | None = None
    """Held-out loss and speed; None if they were not measured."""


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
    rows: Sequence[Tensor] | None = None,
    log: Callable[[str], None] = print,
    ranks: int = 1,
    held_out: Sequence[Tensor] = (),
    complete: Callable[[Path, Compressed], None] = lambda folder, found: None,
) -> Compressed:
    """Write a compressed copy of a model, block by block; the folder appears complete or not at all.

    Peak memory is the largest block, what is outside of blocks, and the hidden states of a rank's calibration rows; at the end,
    that of plain Transformers, which loads both models in a process without Weft and compares their logits.

    Args:
        source: Hugging Face folder of a causal language model, with weights that are not quantized.
        out: folder to write.
        recipe: what becomes of the weights.
        rows: token ids of each calibration row, int64; None for a recipe that needs none.
        log: called with a line of progress; with several ranks, rank 0 prints its lines.
        ranks: processes of this host that share the work.
        held_out: texts on which both models are measured, see `PlainTransformers.read`.
        complete: called with the new folder before it gets its name.

    Raises:
        CheckpointError: weights are missing, damaged or not finite, or `out` exists or cannot be written.
        DataError: too few calibration rows.
        JobError: two keys of the recipe exclude each other.
        ModelError: the family or its sizes do not fit the recipe, or plain Transformers does not load the folder, or computes
            something else with it than the format explains.
    """
    check_recipe(recipe)
    for line in explain_versions(("torch", "transformers", "compressed-tensors")):
        log(line)
    with WeightReader(source) as reader:
        reader.check_values()
    found, began = Compressed(_bytes_of(source)), time.monotonic()
    with new_folder(out) as part:
        if ranks == 1:
            found.errors = compress_into(source, part, recipe, rows, log)
        else:
            found.errors = _compress_on_ranks(source, part, recipe, rows, ranks, out.with_name(f"{out.name}.logs"))
        made = part / (COMPRESSED if recipe.changes_weights else PRUNED)
        found.bytes_after, found.seconds = _bytes_of(made), time.monotonic() - began
        log("loading both models with plain Transformers")
        found.before, found.after = _check_folder(source, made, out, recipe, () if rows is None else rows, held_out)
        complete(made, found)
        finish_folder(made, "config.json", None, out, source)
    return found


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def _check_folder(
    source: Path, made: Path, out: Path, recipe: Recipe, rows: Sequence[Tensor], held_out: Sequence[Tensor]
) -> tuple[Quality | None, Quality | None]:
    """Check that plain Transformers loads a new folder, and computes what the recipe explains; and measure both models.

    Raises:
        ModelError: it does not.
    """
    config = read_causal_config(source).get_text_config()
    row = checked_row(rows, config.vocab_size, getattr(config, "max_position_embeddings", None))
    dtype = "float32" if recipe.dtype == "fp32" else "auto"  # numbers of the source may overflow in its own dtype
    with PlainTransformers() as plain:
        before = reference = plain.read(source, row, held_out, dtype=dtype)
        if recipe.prunes and recipe.changes_weights:  # a pruned model computes something else
            reference = plain.read(made.with_name(PRUNED), row, dtype=dtype, where=out)
        after = plain.read(made, row, held_out, where=out)
    check_model(after, reference, error_bounds(recipe), out)
    return before.quality, after.quality


def _compress_on_ranks(
    source: Path, part: Path, recipe: Recipe, rows: Sequence[Tensor] | None, ranks: int, logs: Path
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
        save_file({str(index): row.contiguous() for index, row in enumerate(rows)}, file)
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
    rows: Sequence[Tensor] | None,
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
