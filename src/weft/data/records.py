"""Records of tasks other than text: stored once by the launcher as a folder of Arrow files, and read by position by each rank.

Reading, types of columns and images are those of the library datasets, which maps the files into memory.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.data import corpus, store
from weft.data import tokenizer as tok
from weft.data.digests import digest_file, digest_files
from weft.data.images import has_processor
from weft.data.labels import encode_names, read_labels
from weft.data.languages import generation_settings, in_languages
from weft.data.noise import make_scheduler
from weft.data.prepared import Prepared
from weft.data.record_files import LEFT_OUT, WHERE, decode_files, place_of, source_of
from weft.data.remote_cache import find_folder
from weft.data.shards import TokenSpan
from weft.errors import DataError
from weft.job import Data, Task
from weft.own_code import import_extra, load_function

SOURCES = ("jsonl", "parquet", "datasets")
FIELDS = {
    "seq2seq": (("source", "target"), ("audio", "target")),
    "classification": (("text", "label"), ("image", "label"), ("audio", "label")),
    "vlm": (("image", "prompt", "answer"),),
    "diffusion": (("image",), ("image", "label")),
}
"""Fields of the records of each task, in all possible combinations."""
TEXTS = ("source", "target", "text")
"""Fields from which a tokenizer is trained."""
FILES = ("image", "audio")
"""Fields that may be paths of files."""
SIZES = ("sampling_rate", "samples", "height", "width", WHERE)
"""Columns that are added to stored records."""
VERSION = 3
"""Version of stored records; a cache has no others."""


def prepare_records(data: Data, task: Task, *, model_folder: Path | None, log: Callable[[str], None]) -> Prepared:
    """Store the records of a source in the cache, or find them there, and find or train their tokenizer.

    Args:
        model_folder: model folder, whose tokenizer or processor is used; None for a model without weights.
        log: called with a line of progress.

    Raises:
        DataError: the source has no records, or they lack the fields of the task.
    """
    _check_source(data, task)
    cache = Path(data.cache).expanduser().resolve()
    library = import_extra("datasets", "tasks", "task.kind", "records are read by the library datasets")
    with _without_progress_bars(library):
        folder = _store_records(library, data, task, cache, log)
    if (folder / LEFT_OUT).is_file():
        log((folder / LEFT_OUT).read_text(encoding="utf-8"))
    records = library.load_from_disk(str(folder))
    uses_text = any(name in records.column_names for name in (*TEXTS, "prompt"))
    if task.noise == "ddpm":
        tokenizer: Path | None = _store_scheduler(task, cache)
    elif uses_text:
        tokenizer = _find_tokenizer(data, model_folder, folder, records, cache, log)
        tokenizer = in_languages(tokenizer, task, cache) if task.kind == "seq2seq" else tokenizer
    else:
        tokenizer = _find_processor(data, model_folder)
    vocab_size = 0
    if tokenizer is not None and uses_text:
        vocab_size = max(tok.load_tokenizer(tokenizer, needs_end=False).get_vocab().values()) + 1
    held_out = max(1, round(len(records) * data.held_out)) if data.held_out else 0
    cut = len(records) - held_out
    if cut < 1:
        raise DataError(
            f"{len(records)} records",
            where=source_of(data),
            rule="each split has at least one record",
            fix="use more records, or another data.held_out (0: no held-out split)",
        )
    fields = tuple(name for name in records.column_names if name not in SIZES)
    log(f"{cut} records to train on, {held_out} held out: {', '.join(fields)}")
    return Prepared(
        train=(TokenSpan(str(folder), None, 0, cut),),
        held_out=(TokenSpan(str(folder), None, cut, len(records)),) if held_out else (),
        tokenizer=str(tokenizer) if tokenizer else None,
        vocab_size=vocab_size,
        end_of_text=None,
        labels=read_labels(records, source_of(data)) if "label" in records.column_names else None,
        generation=generation_settings(tokenizer, model_folder is None) if tokenizer and task.kind == "seq2seq" else {},
        fields=fields,
        digest=store.cache_key(folder.name, tok.digest_tokenizer(tokenizer) if tokenizer else ""),
    )


def _find_processor(data: Data, model_folder: Path | None) -> Path | None:
    """Folder with the processor of records without text."""
    if data.tokenizer != "train":
        return Path(data.tokenizer).expanduser().resolve()
    return model_folder if has_processor(model_folder) else None


def _store_scheduler(task: Task, cache: Path) -> Path:
    """Folder with the scheduler of diffusion, from which an export copies it."""
    folder = cache / store.cache_key("scheduler", task.scheduler)
    if not folder.is_dir():
        with store.build_folder(folder, estimate=0) as scratch:
            make_scheduler(task).save_pretrained(scratch)
    return folder


@contextmanager
def _without_progress_bars(library: Any) -> Iterator[None]:
    shown = not library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bars()


def _store_records(library: Any, data: Data, task: Task, cache: Path, log: Callable[[str], None]) -> Path:
    """Folder of the records in the cache."""
    if ":" in data.source:
        with store.scratch_folder(cache / store.cache_key("records", data.source), estimate=0) as scratch:
            log(f"reading the records of {data.source}")
            return _save(_from_function(library, data, scratch), cache, data, task)
    files = corpus.find_files(data)
    lines = _json_records(files, task) if data.source == "jsonl" else None
    named = [line.get(field) for field in _file_fields(task) for line in lines or ()]
    contained = [path for value in named if isinstance(value, str) and (path := Path(value)).is_file()]
    digests = [contents.digest for contents in digest_files([*files, *contained], cache)]
    settings = VERSION, task.kind, data.source, task.fields, data.bad_files
    folder = cache / store.cache_key("records", *settings, *digests)
    if not find_folder(folder, data, log):
        log(f"reading the records of {len(files)} files")
        with store.scratch_folder(folder, estimate=sum(file.stat().st_size for file in files)) as scratch:
            _save(_load(library, data, files, lines, scratch), cache, data, task, folder)
    return folder


def _check_source(data: Data, task: Task) -> None:
    """Check that a source has records.

    Raises:
        DataError: names the key.
    """
    problem, rule, fix = "", "", ""
    if data.source not in SOURCES and ":" not in data.source:
        problem, rule = (
            f'data.source = "{data.source}"',
            f"records are in {', '.join(SOURCES)} or of a function of yours",
        )
        fix = 'set data.source = "jsonl", and data.path to a file with one record per line'
    elif data.format != "text" or data.sets or data.chat_template_args:
        problem = 'data.format = "chat"' if data.format != "text" else "data.sets or data.chat_template_args"
        rule = "chats are for causal models"
        fix = "remove data.format, data.sets and data.chat_template_args"
    if problem:
        raise DataError(f'{problem} with task.kind = "{task.kind}"', where="data", rule=rule, fix=fix)


def _records(data: Data) -> Iterator[dict[str, Any]]:
    """Records of a function of the user."""
    function = load_function(data.source, "data.source")
    yield from corpus.results_of(lambda table: map(dict, function(table)), data, "records", "dictionaries")


def _from_function(library: Any, data: Data, scratch: Path) -> Any:
    """Dataset of the records of a function of the user."""
    try:
        return library.Dataset.from_generator(_records, gen_kwargs={"data": data}, cache_dir=str(scratch))
    except Exception as error:  # the library wraps what the generator raises
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise


def _json_records(files: list[Path], task: Task) -> list[dict[str, Any]]:
    """Records of JSON lines with their location; paths of images and audio are relative to their file."""
    found, root = [], os.path.commonpath([file.parent for file in files])
    for file in files:
        for record, where in corpus.json_records(file):
            if not isinstance(record, dict):
                rule, fix = "each line is one JSON object", 'write {"source": "...", "target": "..."} on the line'
                raise DataError(f"a record is {str(record)[:80]}", where=where, rule=rule, fix=fix)
            named = [field for field in _file_fields(task) if isinstance(record.get(field), str)]
            paths = {field: str(file.parent / record[field]) for field in named}
            found.append({**record, **paths, WHERE: where.removeprefix(f"{root}/")})
    return found


def _file_fields(task: Task) -> list[str]:
    return [task.fields.get(name, name) for name in FILES]


def _load(library: Any, data: Data, files: list[Path], lines: list[dict[str, Any]] | None, scratch: Path) -> Any:
    """Dataset of the files of a source."""
    try:
        if lines is not None:
            return library.Dataset.from_list(lines)
        if data.source == "datasets":
            return library.load_from_disk(str(data.path))
        return library.Dataset.from_parquet([str(file) for file in files], cache_dir=str(scratch))
    except Exception as error:  # the library raises many types of exceptions
        raise DataError(
            f"the records cannot be read: {' '.join(str(error).split())[:200]}",
            where=f"data.path = {data.path}",
            rule="all records have the same fields, with values of the same types",
            fix="check the files",
        ) from None


def _save(found: Any, cache: Path, data: Data, task: Task, folder: Path | None = None) -> Path:
    """Store a dataset under the names of the fields of the task, with the contents of its images and audio.

    Args:
        found: dataset.
        cache: folder for it.
        folder: final folder; None: named after the contents.
    """
    where = source_of(data)
    if WHERE not in found.column_names:
        found = found.add_column(WHERE, [f"record {index}" for index in range(len(found))])
    names = [name for name in found.column_names if name != WHERE]
    for field, own in task.fields.items():
        if own not in names:
            raise _without_fields(task, names, where)
        found = found if own == field else found.rename_column(own, field)
    fields = next((given for given in FIELDS[task.kind][::-1] if set(given) <= set(found.column_names)), None)
    if fields is None:
        raise _without_fields(task, names, where)
    found = found.select_columns([*fields, WHERE])
    for name in fields:
        empty = found.data.column(name).null_count
        is_text = getattr(found.features[name], "dtype", "") in ("string", "large_string")  # pandas writes the latter
        if empty or (name not in (*FILES, "label") and not is_text):
            raise DataError(
                f"{empty} records have no {name}" if empty else f"{name} is of the type {found.features[name]}",
                where=place_of(found, found.data.column(name).is_null().index(True).as_py(), data) if empty else where,
                rule=f"every record has {' and '.join(fields)}; texts are strings",
                fix="leave such records out, or correct them",
            )
    found, left_out = decode_files(found, data)
    if "label" in fields:
        found = encode_names(found, where)
    scratch_name = folder or cache / store.cache_key("records", where)
    with store.scratch_folder(scratch_name, estimate=found.data.nbytes) as scratch:
        found.save_to_disk(str(scratch / "records"))
        if left_out:
            (scratch / "records" / LEFT_OUT).write_text(left_out, encoding="utf-8")
        folder = folder or cache / store.cache_key(
            "records", *map(digest_file, sorted((scratch / "records").glob("*.arrow")))
        )
        if not folder.is_dir():
            (scratch / "records").rename(folder)
    return folder


def _without_fields(task: Task, names: list[str], where: str) -> DataError:
    choices = " or ".join(" and ".join(fields) for fields in FIELDS[task.kind])
    return DataError(
        f"the records have the fields {', '.join(names)}",
        where=where,
        rule=f'records of task.kind = "{task.kind}" have {choices}',
        fix='rename them, or name yours: task.fields = {source = "article"}',
    )


def _find_tokenizer(
    data: Data, model_folder: Path | None, folder: Path, records: Any, cache: Path, log: Callable[[str], None]
) -> Path:
    """Folder of the tokenizer or processor; a tokenizer is trained on the texts if neither the job nor the model names one."""
    if data.tokenizer != "train":
        return Path(data.tokenizer).expanduser().resolve()
    if model_folder is not None and tok.has_tokenizer(model_folder):
        return model_folder.expanduser().resolve()
    if "prompt" in records.column_names:
        raise DataError(
            'data.tokenizer = "train" with task.kind = "vlm"',
            where="data.tokenizer",
            rule="images and their places in the text are made by a processor of Transformers",
            fix="set data.tokenizer to the folder of a processor",
        )
    made = cache / store.cache_key("tokenizer", folder.name, data.vocab_size)
    if not find_folder(made, data, log):
        log(f"training a tokenizer with {data.vocab_size} entries")
        texts = [name for name in TEXTS if name in records.column_names]
        with store.build_folder(made, estimate=64 * data.vocab_size) as scratch:
            rows = records.select_columns(texts)
            tok.train_tokenizer(
                (row[name] for row in rows for name in texts),
                vocab_size=data.vocab_size,
                folder=scratch,
                ends="target" in texts,
            )
    return made
