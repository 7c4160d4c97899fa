"""Rows of preferences and prompts: reading, and a check of every row before the ranks start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from weft.data.chat import join_parts
from weft.data.digests import digest_file
from weft.errors import DataError
from weft.posttraining.inputs import find_rows
from weft.posttraining.job import Rows
from weft.posttraining.kinds import KINDS, Kind

MESSAGES = ("prompt", "chosen", "rejected", "completion", "messages")
"""Columns that hold a list of messages with role and content, or, but for the last, a text."""
ARGUMENTS = "chat_template_kwargs"
"""Column with arguments of the chat template."""
CONTENT = "'content': "


def read_rows(rows: Rows, seed: int, kind: Kind | None = None) -> tuple[Any, Any]:
    """Read the rows to train on and those to evaluate on.

    Args:
        rows: table `data` of the job.
        seed: seed of the choice of held-out rows.
        kind: kind of the trainer, if it reads the arguments of the chat template from the rows.

    Returns:
        Two objects of `datasets.Dataset`; the second is None without rows to evaluate on.

    Raises:
        DataError: a file is missing or cannot be read, or no row is left.
    """
    arguments = rows.chat_template_args if kind is not None and KINDS[kind].template == "row" else {}
    train = _with_arguments(_read(rows.path, "data.path"), arguments)
    if rows.eval_path:
        return train, _with_arguments(_read(rows.eval_path, "data.eval_path"), arguments)
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
    required = KINDS[kind].columns
    missing, found = [name for name in required if name not in dataset.column_names], ", ".join(dataset.column_names)
    if missing:
        raise DataError(
            f"the rows have no column {missing[0]}",
            where=where,
            rule=f"rows of trainer.kind = {kind} have the columns {', '.join(required)}; these have {found}",
            fix="rename the columns, or choose the trainer of these rows",
        )
    if ARGUMENTS in dataset.column_names and KINDS[kind].template != "row":
        raise DataError(
            f"the column {ARGUMENTS} for trainer.kind = {kind}",
            where=where,
            rule="this trainer of TRL renders all rows with the same arguments",
            fix="remove the column" + "; set data.chat_template_args" * bool(KINDS[kind].template),
        )
    names = [name for name in MESSAGES if name in dataset.column_names]
    names = [name for name in names if name != "messages" or name in required]
    has_images = any(name in dataset.column_names for name in ("image", "images"))
    for number, row in enumerate(dataset, 1):
        arguments = row.get(ARGUMENTS, {})
        if not isinstance(arguments, dict) or None in arguments.values():
            raise DataError(
                f"{ARGUMENTS} of row {number} is {arguments}",
                where=where,
                rule="each row has the same arguments of the chat template: Arrow fills others with nulls",
                fix="give all rows all arguments; or set data.chat_template_args, which fills them",
            )
        for name in names:
            if problem := _problem(row[name], name, has_images):
                raise DataError(
                    f"{name} of row {number} {problem}",
                    where=where,
                    rule=f"{name} is {'a text, or ' * (name != 'messages')}a list of messages with role and content",
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


def _problem(value: Any, name: str, has_images: bool) -> str:
    """Problem of a text or a list of messages; "" without one."""
    if isinstance(value, str) and name != "messages":
        return "" if value.strip() else "is empty"
    if not isinstance(value, list) or not value:
        return "is empty" if value in (None, []) else f"is {type(value).__name__}"
    for message in value:
        if not isinstance(message, dict) or not message.get("role") or "content" not in message:
            return f"has a message without role and content: {str(message)[:80]}"
        if not isinstance(message["content"], str) and not message.get("tool_calls") and not has_images:
            return f"has a content that is no text: {str(message['content'])[:80]}"
    if name != "prompt" and value[-1]["role"] != "assistant":
        return f"ends with a message of {value[-1]['role']}, not of the assistant"
    return ""


def digest_rows(path: str, key: str) -> str:
    """Digest of the contents of rows: of their files, or of the tables of a folder of `Dataset.save_to_disk`.

    Args:
        path: value of the key.
        key: key of the job, for the message.

    Raises:
        DataError: there are no rows.
        OSError: a file cannot be read.
    """
    digest = blake3()
    for part in map(Path, find_rows(path, key)):
        tables = (file for file in sorted(part.rglob("*.arrow")) if not file.name.startswith("cache-"))
        for file in tables if part.is_dir() else [part]:
            digest.update(digest_file(file).encode())
    return digest.hexdigest()


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
            # The library knows a file by its path and time: another one of the same time would have the rows of the first.
            cache = Path(datasets.config.HF_DATASETS_CACHE, f"weft-{digest_rows(path, key)[:24]}")
            found = datasets.load_dataset(builder, data_files=files, split="train", cache_dir=str(cache))
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
    return _with_joined_parts(found)


def _with_joined_parts(dataset: Any) -> Any:
    """Rows whose messages have a text as content where it is in parts; rows with parts that are no text stay as they are."""
    kinds = {name: str(dataset.features[name]) for name in MESSAGES if name in dataset.column_names}
    names = [name for name, kind in kinds.items() if kind.startswith("List(") and f"{CONTENT}Value" not in kind]
    if not names:
        return dataset

    def join(row: dict[str, Any]) -> dict[str, Any]:
        return {name: [_with_text(message) for message in row[name] or ()] for name in names}

    messages = (message for row in dataset.select_columns(names) for found in join(row).values() for message in found)
    are_texts = not any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages)
    return dataset.map(join) if are_texts else dataset


def _with_text(message: Any) -> Any:
    has_content = isinstance(message, dict) and "content" in message
    return {**message, "content": join_parts(message["content"])} if has_content else message


def _with_arguments(dataset: Any, arguments: Mapping[str, Any]) -> Any:
    """Rows with the arguments of the chat template that the job sets for all of them."""

    def add(row: dict[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in (row.get(ARGUMENTS) or {}).items() if value is not None}
        return {ARGUMENTS: {**arguments, **own}}

    return dataset.map(add) if arguments else dataset


def _last_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return str(cause).strip().rpartition("\n")[2][:200]
