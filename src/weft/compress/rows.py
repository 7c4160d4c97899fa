"""Calibration and held-out texts of `weft compress`: of a data table, or of the job of a run.

A row has one text or several: each is run alone, as a row in training does not see from one document into another.
"""

from collections.abc import Callable, Sequence
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
    """Token ids of each text, int64."""

    calibration: list[Tensor]
    held_out: list[Tensor]
    """A token that is no target, as in a chat, is stored as the bitwise complement of its id."""


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
    """Texts of the rows of both splits, as a run trains on them.

    Args:
        data: data table; its tokens are prepared as for training.
        folder: model folder, for its tokenizer.
        calibration: number of rows of the train split, in shuffled order; fewer if it has fewer.
        held_out: number of rows of the held-out split, likewise, in the order in which a run evaluates them.
        log: called with a line of progress.

    Raises:
        DataError: the data are missing or damaged.
    """
    prepared = prepare(data, model_folder=folder, log=log)
    texts = _texts(prepared.train, data, calibration, shuffle=True)
    inputs = [torch.where(text < 0, ~text, text)[:-1] for text in texts]
    return Split(inputs, _texts(prepared.held_out, data, held_out, shuffle=len(data.sets) > 1))


def _texts(spans: tuple[TokenSpan, ...], data: Data, count: int, *, shuffle: bool) -> list[Tensor]:
    rows = Rows(spans, seq_len=data.seq_len, packing=data.packing, shuffle=shuffle, seed=SEED)
    found = [rows[position] for position in range(min(count, len(rows)))]
    texts = [text.long() for row in found for text in row.tokens.tensor_split(row.starts.tolist())]
    return [text for text in texts if len(text) > 1]


def check_tokenizer(data: Data, folder: Path) -> None:
    """Check that text becomes the tokens of a model that was trained on another text.

    Args:
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


def check_texts(split: Split, size: int, positions: int | None, data: Data) -> None:
    """Check that the model knows all tokens, and has as many positions as each text.

    Args:
        split: texts of the data table.
        size: number of tokens of the model.
        positions: number of positions of the model; None: any.

    Raises:
        DataError: an id is not below `size`, or a text has more tokens than the model has positions.
    """
    longest = max((len(text) - (texts is split.held_out) for texts in split for text in texts), default=0)
    if positions is not None and longest > positions:
        raise DataError(
            f"a text of {longest} tokens",
            where="--calibrate",
            rule=f"the model has {positions} positions (max_position_embeddings)",
            fix=f"set data.seq_len to {positions} or less",
        )
    largest = max((int(torch.where(text < 0, ~text, text).max()) for texts in split for text in texts), default=0)
    if largest >= size:
        raise DataError(
            f"a token with the id {largest}",
            where="--calibrate",
            rule=f"the model knows {size} tokens",
            fix="use token ids of this model"
            if data.source == "tokens"
            else "remove data.tokenizer, so that the model's own tokenizer is used",
        )


def need_rows(rows: Sequence[Tensor] | None) -> Sequence[Tensor]:
    """Calibration rows of a recipe that needs them.

    Raises:
        DataError: there are none.
    """
    if rows is None or not len(rows):
        raise DataError(
            "there are no calibration rows",
            where="calibration",
            rule="this recipe needs a text on which the model runs",
            fix='name a text with --calibrate; rounding without calibration is method = "nearest" in a recipe file',
        )
    return rows
