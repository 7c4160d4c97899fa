"""Corpus reader: finds the files of a data source and iterates over their documents."""

import codecs
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from weft.errors import DataError
from weft.inputs import find_files as find_files
from weft.job import Data

if TYPE_CHECKING:
    import pyarrow

HEAD_BYTES = 4096
BYTE_ORDER_MARK = "\ufeff"
"""First character of files of some editors; not a part of the text."""
SHOWN = 120  # characters of an invalid record that an error shows
MAGIC = {
    b"PAR1": "parquet",
    b"\xff\xff\xff\xff": "datasets",
    b"\x93NUMPY": "tokens",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}
"""File types by their first bytes."""
FIXES = {
    "text": 'the file looks like text: set data.source = "text"',
    "jsonl": 'the file looks like JSON: write one record per line, and set data.source = "jsonl"',
    "array": "the file looks like a JSON array: write one object per line",
    "parquet": 'the file looks like Parquet: set data.source = "parquet"',
    "datasets": 'the file looks like Arrow: set data.source = "datasets"',
    "tokens": 'the file looks like an array of tokens: set data.source = "tokens"',
    "binary": "the file looks binary: select only text files with a glob, such as data.path = 'corpus/**/*.txt'",
    **{name: f"the file is compressed with {name}: decompress it" for name in ("gzip", "zstd", "bzip2", "xz", "zip")},
}
"""Fixes by file type, for files that do not match data.source."""
BATCH_RECORDS = 1024


def check_not_empty(data: Data, files: Sequence[Path]) -> None:
    """Refuse a corpus without text; reads up to the first document.

    Args:
        files: files from `find_files`.

    Raises:
        DataError: all documents are empty, or a file before the first document is damaged.
    """
    of_function = ":" in data.source
    source = "jsonl" if of_function else data.source  # written by `write_documents`
    if next(documents(source, files), None) is None:
        size = sum(path.stat().st_size for path in files)
        raise DataError(
            f"the corpus is empty: no text in {len(files)} file{'s' * (len(files) > 1)} of {size:,} bytes",
            where=f"data.path = {data.path}" if data.path and not of_function else f"data.source = {data.source}",
            rule="a corpus has at least one non-empty document",
            fix="let the function yield text" if of_function else "set data.path to files with text",
        )


def documents(source: str, files: Sequence[Path]) -> Iterator[str]:
    """Iterate over the non-empty documents of the files, in order, without byte order marks.

    Args:
        source: python, text, jsonl, parquet or datasets.
        files: files from `find_files`.

    Raises:
        DataError: a file is damaged or a record has no text; the message has the location.
    """
    for path in files:
        try:
            for text in READERS[source](path):
                if text := text.removeprefix(BYTE_ORDER_MARK):
                    yield text
        except OSError as error:
            raise unreadable(path, error) from None


def write_documents(function: Callable[[Data], Iterable[str]], data: Data, path: Path) -> str:
    """Write the documents that a function of the user yields as JSON lines.

    Args:
        function: function that `data.source` names.
        data: its argument.
        path: file to write.

    Returns:
        Digest of the file.

    Raises:
        DataError: the function raises, or yields something else than valid Unicode strings.
    """
    digest = blake3()
    with path.open("wb") as file:
        for number, text in enumerate(results_of(function, data)):
            line = json.dumps({"text": _checked(text, f"document {number} of {data.source}")}).encode() + b"\n"
            digest.update(line)
            file.write(line)
    return digest.hexdigest()


def results_of(
    function: Callable[[Data], Iterable[Any]], data: Data, noun: str = "documents", type_: str = "strings"
) -> Iterator[Any]:
    """Results of a function of the user; its exceptions become errors with their location.

    Args:
        function: function that `data.source` names.
        data: its argument.
        noun: what it returns, for the message.
        type_: their type, for the message.

    Raises:
        DataError: the function raises, or returns a string.
    """
    number = 0
    try:
        results = function(data)
        if isinstance(results, str):
            raise TypeError(f"it returned one string, which is no list of {noun}")
        for result in results:
            number += 1
            yield result
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{data.source} failed after {number} {noun}: {type(error).__name__}: {error}",
            where=f"data.source = {data.source}, {last.filename}:{last.lineno}",
            rule=f"the function gets the [data] table and returns an iterable of {type_}",
            fix="mend the function",
        ) from None


def unreadable(path: Path, error: OSError) -> DataError:
    """Error for a corpus file that cannot be read."""
    return DataError(
        f"cannot read {path}: {error.strerror}",
        where=str(path),
        rule="every file of the corpus is readable",
        fix="make the file readable, or select the other files with a glob",
    )


def _read_python(path: Path) -> Iterator[str]:
    raw = path.read_bytes()
    if b"\0" in raw:  # test data of the parser
        return
    try:
        yield raw.decode("utf-8")
    except UnicodeDecodeError:  # test data of the codecs
        return


def _read_text(path: Path) -> Iterator[str]:
    try:
        yield path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error.reason}",
            where=f"{path}, byte {error.start}",
            rule="text files are UTF-8",
            fix=_fix(
                path,
                "text",
                "convert the file, or select only text files with a glob, such as data.path = 'corpus/**/*.txt'",
            ),
        ) from None


def _read_jsonl(path: Path) -> Iterator[str]:
    for number, (record, where) in enumerate(json_records(path)):
        if not isinstance(record, dict):
            fix = 'write {"text": "..."} on the line'
            raise _no_text(record, where, fix if number else _fix(path, "jsonl", fix))
        if "text" not in record:
            raise _no_text(record, where, f'rename the field that holds the text to "text"; {_fields(record)}')
        yield _checked(record["text"], where)


def json_records(path: Path) -> Iterator[tuple[Any, str]]:
    """Iterate over the lines of a file of JSON lines, without empty lines.

    Args:
        path: file of the corpus.

    Yields:
        (value, location) of each line.

    Raises:
        DataError: a line is not JSON.
    """
    offset, records = 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}, byte {offset}"
            offset += len(line)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # also text that is not UTF-8
                rule, fix = "each line is one JSON object", "repair the line"
                # If the first record is broken, the file probably has another type; otherwise it is damaged.
                fix = fix if records else _fix(path, "jsonl", f"{fix}; write each object on a single line")
                raise DataError(f"broken JSON record: {error}", where=where, rule=rule, fix=fix) from None
            yield record, where
            records += 1


def _read_table(source: str, path: Path) -> Iterator[str]:
    """Read the column "text" of a Parquet or Arrow file."""
    number = 0
    for batch in arrow_batches(source, path, "text"):
        for text in batch.column("text").to_pylist():
            yield _checked(text, f"{path}, record {number}")
            number += 1


def arrow_batches(source: str, path: Path, column: str | None = None) -> Iterator["pyarrow.RecordBatch"]:
    """Iterate over a Parquet file, or an Arrow file of `datasets.Dataset.save_to_disk`, in batches of bounded size.

    Args:
        source: parquet or datasets.
        path: file of the corpus.
        column: column to read; None: all columns.

    Raises:
        DataError: the file is damaged or has no such column.
    """
    # Imported here so that training ranks never load Arrow.
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        if source == "parquet":
            with parquet.ParquetFile(path) as file:
                _check_column(column, file.schema_arrow.names, path)
                for batch in file.iter_batches(batch_size=BATCH_RECORDS, columns=[column] if column else None):
                    yield batch
                    number += batch.num_rows
            return
        with arrow.memory_map(str(path)) as mapped, arrow.ipc.open_stream(mapped) as stream:
            _check_column(column, stream.schema.names, path)
            for batch in stream:
                yield batch
                number += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        rules = {
            "parquet": "a Parquet file ends with its index, which a truncated file lacks",
            "datasets": "Dataset.save_to_disk writes Arrow streams",
        }
        raise DataError(
            f"{path} is damaged or truncated: {error}",
            where=f"{path}, record {number}, file of {path.stat().st_size} bytes",
            rule=rules[source],
            fix=_fix(path, source, "copy or download the file again"),
        ) from None


def _check_column(column: str | None, names: list[str], path: Path) -> None:
    if column is not None and column not in names:
        where = f"{path}, with columns {', '.join(names)}"
        raise _no_text(None, where, f'rename the column that holds the text to "{column}"')


def _checked(text: object, where: str) -> str:
    """Text of a record, checked to be a valid Unicode string."""
    if not isinstance(text, str):
        raise _no_text(text, where, "remove the record, or set its text to a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text with half a surrogate pair: {error}",
            where=where,
            rule="text is valid Unicode",
            fix=r"write a character above U+FFFF as two \u escapes (a surrogate pair), or as UTF-8",
        ) from None
    return text


def _no_text(record: object, where: str, fix: str) -> DataError:
    shown = repr(record)
    rule = 'each record has a field "text" that holds a string'
    return DataError(
        f"record without text: {shown[:SHOWN] + ' ...' * (len(shown) > SHOWN)}", where=where, rule=rule, fix=fix
    )


def _fields(record: dict[str, object]) -> str:
    return f"the record has {', '.join(record)}" if record else "the record has no fields"


def _fix(path: Path, source: str, otherwise: str) -> str:
    """Fix for a file that its source cannot read, by its detected type."""
    file_type = _detect_type(path)
    return otherwise if file_type == source else FIXES.get(file_type, otherwise)


def _detect_type(path: Path) -> str:
    """File type by first bytes, one of the keys of `FIXES`; empty if unknown."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    for magic, file_type in MAGIC.items():
        if head.startswith(magic):
            return file_type
    if b"\0" in head:
        return "binary"
    if json_type := {b"{": "jsonl", b"[": "array"}.get(head.lstrip()[:1]):
        return json_type
    try:  # incremental, because the head may end inside a character
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return ""
    return "text" if head.strip() else ""


READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    "python": _read_python,
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": partial(_read_table, "parquet"),
    "datasets": partial(_read_table, "datasets"),
}
