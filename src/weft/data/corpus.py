"""Documents: where they are found, and how each source is read, one document at a time."""

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.errors import DataError
from weft.job import Data

FOLDER_PATTERNS = {"text": "*", "jsonl": "*.jsonl", "parquet": "*.parquet"}


def find_files(data: Data) -> list[Path]:
    """The files of a source, sorted by path.

    `data.path` is a file, a folder (searched to any depth; hidden files and folders are left out) or a glob.

    Raises:
        DataError: no path is given, or there is nothing at it.
    """
    if data.source == "python":
        library = Path(sysconfig.get_path("stdlib"))
        installed = {"site-packages", "dist-packages"}
        return sorted(p for p in library.rglob("*.py") if installed.isdisjoint(p.relative_to(library).parts))
    if not data.path:
        raise DataError(f"source {data.source} has no path", where="data.path", fix="set data.path to a file or folder")
    path = Path(data.path).expanduser()
    if path.is_dir():
        pattern = FOLDER_PATTERNS[data.source]
        below = [p for p in path.rglob(pattern) if not any(part[0] == "." for part in p.relative_to(path).parts)]
    else:
        pattern = str(path)
        below = [path] if path.exists() else [Path(p) for p in glob.glob(pattern, recursive=True)]
    files = sorted(p for p in below if p.is_file())
    if not files:
        what = f"no file matches {pattern} below {path}" if path.is_dir() else f"there is no file at {path}"
        fix = "check the path; it is relative to the current folder"
        raise DataError(what, where="data.path", rule="data.path is a file, a folder or a glob", fix=fix)
    return files


def digest_files(files: Sequence[Path], *, ordered: bool) -> str:
    """One digest of the contents of all files, whatever their names; `ordered` says whether their order counts.

    Raises:
        DataError: a file cannot be read.
    """
    digests = []
    for path in files:
        try:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}", where=str(path)) from None
    return hashlib.blake2b(b"".join(digests if ordered else sorted(digests))).hexdigest()


def documents(source: str, files: Sequence[Path]) -> Iterator[str]:
    """Every document of the files in order, without empty ones.

    Args:
        source: python, text, jsonl or parquet.
        files: as `find_files` gives them.

    Raises:
        DataError: a file is damaged or a record has no text; the message says where.
    """
    for path in files:
        for text in READERS[source](path):
            if text:
                yield text


def _read_python(path: Path) -> Iterator[str]:
    raw = path.read_bytes()
    if b"\0" in raw:  # test data of the parser, not text
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
            fix="convert the file, or name the text files alone with a glob, such as data.path = 'corpus/**/*.txt'",
        ) from None


def _read_jsonl(path: Path) -> Iterator[str]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}, byte {offset}"
            offset += len(line)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # also text that is not UTF-8
                rule = "each line is one JSON object"
                raise DataError(f"broken JSON record: {error}", where=where, rule=rule, fix="repair the line") from None
            yield _checked(record.get("text") if isinstance(record, dict) else None, where)


def _read_parquet(path: Path) -> Iterator[str]:
    # Read here alone: a rank that trains never loads Arrow.
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                _checked(None, f"{path}, whose columns are {', '.join(file.schema_arrow.names)}")
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    yield _checked(text, f"{path}, record {number}")
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is damaged or truncated: {error}",
            where=f"{path}, record {number}, file of {path.stat().st_size} bytes",
            rule="a Parquet file ends with its index; one that was cut off has none",
            fix="copy or download the file again",
        ) from None


def _checked(text: object, where: str) -> str:
    """The text of a record, if it is one that a tokenizer takes."""
    rule = 'each record has a field "text" that holds a string'
    if not isinstance(text, str):
        raise DataError(f"record without text: {text!r}", where=where, rule=rule, fix="name the column or field text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"text with half a character: {error}", where=where, rule="text is Unicode") from None
    return text


READERS = {"python": _read_python, "text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}
