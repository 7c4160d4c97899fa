"""Rows of preferences and prompts: reading, and a check of every row before the ranks start."""

from pathlib import Path
from typing import Any

from weft.errors import DataError
from weft.posttraining.inputs import find_rows
from weft.posttraining.job import Kind, Rows

REQUIRED: dict[Kind, tuple[str, ...]] = {
    "dpo": ("chosen", "rejected"),
    "reward": ("chosen", "rejected"),
    "kto": ("prompt", "completion", "label"),
    "grpo": ("prompt",),
    "rloo": ("prompt",),
}
"""Columns that a trainer of TRL needs. Preferences may have `prompt`; rewards get all further columns."""
MESSAGES = ("prompt", "chosen", "rejected", "completion")
"""Columns that hold a text, or a list of messages with role and content."""


def read_rows(rows: Rows, seed: int) -> tuple[Any, Any]:
    """Read the rows to train on and those to evaluate on.

    Args:
        rows: table `data` of the job.
        seed: seed of the choice of held-out rows.

    Returns:
        Two objects of `datasets.Dataset`; the second is None without rows to evaluate on.

    Raises:
        DataError: a file is missing or cannot be read, or no row is left.
    """
    train = _read(rows.path, "data.path")
    if rows.eval_path:
        return train, _read(rows.eval_path, "data.eval_path")
    if not rows.held_out:
        return train, None
    held_out = round(len(train) * rows.held_out)
    if not 0 < held_out < len(train):
        raise DataError(
            f"{held_out} of {len(train)} rows are held out",
            where=f"data.held_out = {rows.held_out}",
            rule="at least one row is left to train on, and one to evaluate on",
            fix="change data.held_out, or set it to 0",
        )
    parts = train.train_test_split(test_size=held_out, seed=seed)
    return parts["train"], parts["test"]


def check_rows(dataset: Any, kind: Kind, where: str, *, has_template: bool) -> None:
    """Check the columns and every row of a dataset.

    Args:
        dataset: `datasets.Dataset`.
        kind: kind of the trainer.
        where: path of the rows, for the message.
        has_template: True if the tokenizer has a chat template, which rows of messages need.

    Raises:
        DataError: names the row, counted from 1, and the column.
    """
    required = REQUIRED[kind]
    missing, found = [name for name in required if name not in dataset.column_names], ", ".join(dataset.column_names)
    if missing:
        raise DataError(
            f"the rows have no column {missing[0]}",
            where=where,
            rule=f"rows of trainer.kind = {kind} have the columns {', '.join(required)}; these have {found}",
            fix="rename the columns, or choose the trainer of these rows",
        )
    names = [name for name in MESSAGES if name in dataset.column_names]
    for number, row in enumerate(dataset, 1):
        for name in names:
            if problem := _problem(row[name], is_answer=name != "prompt"):
                raise DataError(
                    f"{name} of row {number} {problem}",
                    where=where,
                    rule=f"{name} is a text, or a list of messages with role and content",
                    fix="correct or remove the row",
                )
        if isinstance(row[names[0]], list) and not has_template:
            raise DataError(
                f"row {number} has messages, and the tokenizer has no chat template",
                where=where,
                rule="messages are rendered by the tokenizer's own template",
                fix="use the folder of an instruct model, or rows of texts",
            )
        if kind == "kto" and not isinstance(row["label"], bool):
            raise DataError(
                f"label of row {number} is {row['label']!r}",
                where=where,
                rule="the label of a judged answer is true (wanted) or false (unwanted)",
                fix="correct or remove the row",
            )


def _problem(value: Any, *, is_answer: bool) -> str:
    """Problem of a text or a list of messages; "" without one."""
    if isinstance(value, str):
        return "" if value.strip() else "is empty"
    if not isinstance(value, list) or not value:
        return "is empty" if value in (None, []) else f"is {type(value).__name__}"
    for message in value:
        if not isinstance(message, dict) or not message.get("role") or "content" not in message:
            return f"has a message without role and content: {str(message)[:80]}"
    if is_answer and value[-1]["role"] != "assistant":
        return f"ends with a message of {value[-1]['role']}, not of the assistant"
    return ""


def _read(path: str, key: str) -> Any:
    import datasets  # here, because it takes a second

    datasets.disable_progress_bars()
    where = f"{key} = {path!r}"
    files = find_rows(path, key)
    try:
        if Path(path).is_dir():
            found = datasets.load_from_disk(path)
        else:
            builder = "parquet" if files[0].endswith(".parquet") else "json"
            found = datasets.load_dataset(builder, data_files=files, split="train")
    except Exception as error:  # of the library's own classes, and of Arrow's
        raise DataError(
            f"the rows cannot be read: {_last_line(error)}",
            where=where,
            rule="each line of a .jsonl file is a JSON object, with the same types of values in every row",
            fix="correct the file",
        ) from None
    if not isinstance(found, datasets.Dataset) or not len(found):
        raise DataError(
            f"{path} has {'no rows' if isinstance(found, datasets.Dataset) else 'several splits'}",
            where=where,
            rule="rows are one non-empty dataset",
            fix="name a file with rows, or the folder of one split",
        )
    return found


def _last_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return str(cause).strip().rpartition("\n")[2][:200]
