"""Calibration and held-out rows of `weft compress`: of a data table, or of the job of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from weft.data.prepare import prepare
from weft.data.rows import Rows
from weft.data.shards import TokenSpan
from weft.data.tokenizer import has_tokenizer
from weft.errors import DataError, JobError
from weft.job import Data, Job, has_trainer, read_toml
from weft.refusal import Origin, explain

SEED = 0


class Split(NamedTuple):
    """Token ids [rows, seq_len + 1], int64."""

    calibration: Tensor
    held_out: Tensor


def read_data(path: Path | None, run: Path) -> Data | None:
    """Data table of a TOML file, else of the job of a run folder; None without either, or with a trainer of TRL.

    Args:
        path: file with a table `data`, as in a job; all other tables of a job are ignored.
        run: folder that may have a job.toml.

    Raises:
        JobError: the file has no table `data`, an unknown key, or an invalid value.
    """
    if path is None:
        job = run / "job.toml"
        return Job.load(job).data if job.is_file() and not has_trainer(job) else None
    tables = read_toml(path)
    if "data" not in tables:
        raise JobError(
            f"{path} has no table data",
            where="--calibrate",
            rule="the file has a table [data] with source and path, as a job",
            fix="see docs/data.md; the file of a job can be named",
        )
    try:
        return Data.model_validate(tables["data"])
    except ValidationError as error:
        raise explain(error, Data, tables["data"], Origin(str(path))) from None


def read_rows(data: Data, folder: Path, calibration: int, held_out: int, log: Callable[[str], None]) -> Split:
    """Rows of whole length from both splits, in shuffled order; documents in a row follow each other.

    Args:
        data: data table; its tokens are prepared as for training.
        folder: model folder, for its tokenizer.
        calibration: number of rows of the train split; fewer if it has fewer.
        held_out: number of rows of the held-out split, likewise.
        log: called with a line of progress.

    Raises:
        DataError: the data are missing or damaged.
    """
    prepared = prepare(data, model_folder=folder, log=log)
    return Split(_rows(prepared.train, data, calibration), _rows(prepared.held_out, data, held_out))


def _rows(spans: tuple[TokenSpan, ...], data: Data, count: int) -> Tensor:
    rows = Rows(spans, seq_len=data.seq_len, packing=True, shuffle=True, seed=SEED)
    found = [rows[position].tokens.long() for position in range(min(count, len(rows)))]
    whole = [torch.where(row < 0, ~row, row) for row in found if len(row) == data.seq_len + 1]
    return torch.stack(whole) if whole else torch.empty(0, data.seq_len + 1, dtype=torch.int64)


def check_tokenizer(data: Data, folder: Path) -> None:
    """Check that text becomes the tokens of a model that was trained on another text.

    Args:
        data: data table.
        folder: model folder.

    Raises:
        DataError: a tokenizer would be trained.
    """
    if data.source != "tokens" and data.tokenizer == "train" and not has_tokenizer(folder):
        raise DataError(
            f"there is no tokenizer in {folder}",
            where="--calibrate",
            rule="text becomes tokens by the tokenizer of the model; one that is trained on this text has other tokens",
            fix="copy the tokenizer of the model into its folder, or name it in data.tokenizer",
        )


def check_vocabulary(split: Split, size: int, data: Data) -> None:
    """Check that the model knows all tokens.

    Args:
        split: rows of the data table.
        size: number of tokens of the model.
        data: the data table.

    Raises:
        DataError: an id is not below `size`.
    """
    largest = max((int(part.max()) for part in split if part.numel()), default=0)
    if largest >= size:
        raise DataError(
            f"a token with the id {largest}",
            where="--calibrate",
            rule=f"the model knows {size} tokens",
            fix="use token ids of this model"
            if data.source == "tokens"
            else "remove data.tokenizer, so that the model's own tokenizer is used",
        )


def need_rows(rows: Tensor | None) -> Tensor:
    """Calibration rows of a recipe that needs them.

    Raises:
        DataError: there are none.
    """
    if rows is None or not rows.numel():
        raise DataError(
            "there are no calibration rows",
            where="calibration",
            rule="this recipe needs a text on which the model runs",
            fix='name a text with --calibrate; rounding without calibration is method = "nearest" in a recipe file',
        )
    return rows
