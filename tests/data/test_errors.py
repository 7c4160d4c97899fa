"""Errors for invalid, damaged or missing data."""

import gc
import json
import os
import random
import string
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.data.synthetic import rows_of, saved_rows
from weft.data import TokenSpan, prepare
from weft.data import tokenizer as tok
from weft.data.sealed import write_sealed
from weft.errors import DataError
from weft.job import Data

TEXT = "A text of some length, that is long enough for a few rows of tokens.\n" * 20


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tok.train_tokenizer([TEXT], vocab_size=257, folder=folder)
    return folder


@pytest.fixture
def refused(tmp_path, tokenizer_folder):
    """Function that prepares an invalid data table, checks that the cache has no scratch folders, and returns the message."""

    def run(**settings) -> str:
        cache = Path(settings.get("cache", tmp_path / "cache"))
        defaults = {"source": "text", "cache": str(cache), "tokenizer": str(tokenizer_folder), "seq_len": 16}
        with pytest.raises(DataError) as caught:
            prepare(Data(**{**defaults, **settings}), model_folder=None, log=lambda line: None)
        assert caught.value.where
        assert caught.value.exit_code == 2
        assert not list(cache.glob(".*"))
        return str(caught.value)

    return run


def test_missing_files_are_refused(tmp_path, refused):
    assert "text has no path" in refused()
    assert "tokens has no path" in refused(source="tokens")
    assert "there is no file at" in refused(path=str(tmp_path / "nowhere"))
    assert "there is no file at" in refused(path=str(tmp_path / "*.txt"))
    (tmp_path / "notes.txt").touch()
    assert "no file matches *.parquet below" in refused(source="parquet", path=str(tmp_path))


@pytest.mark.parametrize(
    ("source", "name", "content"),
    [("text", "a.txt", ""), ("jsonl", "a.jsonl", ""), ("jsonl", "b.jsonl", '{"text": ""}\n\n{"text": ""}\n')],
)
def test_an_empty_corpus_is_refused_before_tokenizing(tmp_path, source, name, content):
    (tmp_path / name).write_text(content)
    data, said = Data(source=source, path=str(tmp_path / name), cache=str(tmp_path / "cache"), vocab_size=257), []
    with pytest.raises(DataError, match=f"the corpus is empty: no text in 1 file of {len(content)} bytes"):
        prepare(data, model_folder=None, log=said.append)
    assert said == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("source", "content", "fix"),
    [
        ("jsonl", b"It was a dark night.\n", 'looks like text: set data.source = "text"'),
        ("jsonl", b"\n\n5 people were there.\n", 'looks like text: set data.source = "text"'),
        ("jsonl", b"5\n6\n", 'looks like text: set data.source = "text"'),
        ("jsonl", b"\xc3\xa9" * 3000, 'looks like text: set data.source = "text"'),
        ("jsonl", b'[{"text": "a"}]', "looks like a JSON array: write one object per line"),
        ("jsonl", b'{\n  "text": "a"\n}\n', "write each object on a single line"),
        ("jsonl", b'{"text": "a"}\nIt was a dark night.\n', "fix:   repair the line"),
        (
            "jsonl",
            b'{"id": 1, "content": "a"}\n',
            'rename the field that holds the text to "text"; the record has id, content',
        ),
        ("jsonl", b"\x1f\x8b\x08\0", "compressed with gzip: decompress it"),
        ("jsonl", b"PAR1\0\1", 'looks like Parquet: set data.source = "parquet"'),
        ("text", b"PAR1\xff\0", 'looks like Parquet: set data.source = "parquet"'),
        ("text", b"\x93NUMPY\1\0", 'looks like an array of tokens: set data.source = "tokens"'),
        ("text", b"\x7fELF\xff\0", "looks binary: select only text files"),
        ("text", b"caf\xe9", "convert the file"),
        ("parquet", b'{"text": "a"}\n', 'set data.source = "jsonl"'),
        ("parquet", b"It was a dark night.\n", 'looks like text: set data.source = "text"'),
        ("parquet", b"PAR1 cut off", "copy or download the file again"),
        ("datasets", b"\xff\xff\xff\xff cut off", "copy or download the file again"),
        ("datasets", b"PAR1\0\1", 'looks like Parquet: set data.source = "parquet"'),
        ("parquet", b"\xff\xff\xff\xff\0\1", 'looks like Arrow: set data.source = "datasets"'),
    ],
)
def test_the_fix_names_the_detected_file_type(tmp_path, refused, source, content, fix):
    (tmp_path / "corpus").write_bytes(content)
    assert fix in refused(source=source, path=str(tmp_path / "corpus"))


def test_text_that_is_not_utf8_is_refused(tmp_path, refused):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    message = refused(path=str(tmp_path / "a.txt"))
    assert "not UTF-8" in message
    assert "a.txt, byte 3" in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "cut o', "broken JSON"),
        (b'{"text": "caf\xe9"}', "broken JSON"),
        (b'{"txt": "a"}', "record without text"),
        (b'{"text": 5}', "record without text: 5"),
        (b'["text"]', "record without text"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_a_broken_json_line_is_refused_with_its_line_and_byte(tmp_path, refused, line, words):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    message = refused(source="jsonl", path=str(tmp_path))
    assert words in message
    assert "a.jsonl, line 3, byte 18" in message


def test_parquet_without_text_column_or_truncated_is_refused(tmp_path, refused):
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"body": ["a"]}), path)
    assert "with columns body" in refused(source="parquet", path=str(path))
    parquet.write_table(arrow.table({"text": ["a", None]}), path)
    assert "a.parquet, record 1" in refused(source="parquet", path=str(path))
    whole = path.read_bytes()
    for size in (len(whole) - 10, 3, 0):
        path.write_bytes(whole[:size])
        message = refused(source="parquet", path=str(path))
        assert "damaged or truncated" in message
        assert f"file of {size} bytes" in message


def test_a_tokenizer_that_is_missing_or_has_no_end_of_text_is_refused(tmp_path, refused, tokenizer_folder):
    (tmp_path / "a.txt").write_text(TEXT)
    text = {"path": str(tmp_path / "a.txt")}
    assert "there is no folder" in refused(**text, tokenizer=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "cannot load a tokenizer" in refused(**text, tokenizer=str(tmp_path / "empty"))
    endless = tok.load_tokenizer(tokenizer_folder)
    endless.eos_token = None
    endless.save_pretrained(tmp_path / "endless")
    assert "no end-of-text token" in refused(**text, tokenizer=str(tmp_path / "endless"))


def test_a_corpus_too_small_for_a_row_of_each_split_is_refused(tmp_path, refused):
    (tmp_path / "a.txt").write_text("tiny")
    assert "the train split has 5 tokens" in refused(path=str(tmp_path / "a.txt"), held_out=0)
    (tmp_path / "a.txt").write_text(TEXT)
    assert "the held-out split has 14 tokens" in refused(path=str(tmp_path / "a.txt"), held_out=0.01)
    assert "the train split has 0 tokens" in refused(
        source="tokens", path=saved_rows(tmp_path / "rows.npy", 1, 16)[0].tokens
    )


def test_rows_of_wrong_shape_dtype_or_order_are_refused(tmp_path, refused):
    path = tmp_path / "rows.npy"

    def message(array) -> str:
        np.save(path, array)
        return refused(source="tokens", path=str(path))

    good = np.zeros((4, 17), np.int32)
    assert "has the shape [68]" in message(good.ravel())
    assert "[4, 17] in column-major order" in message(np.asfortranarray(good))
    assert "holds float32" in message(good.astype(np.float32))
    assert "holds >i4" in message(good.astype(">i4"))
    assert "holds object" in message(good.astype(object))
    assert "set data.seq_len = 15" in message(good[:, :16])
    assert "has no rows" in message(good[:0])
    path.write_bytes(b"PK no array")
    assert "is not an .npy file" in refused(source="tokens", path=str(path))
    assert "cannot read" in refused(source="tokens", path=str(tmp_path / "nowhere.npy"))


def test_rows_of_wrong_file_size_are_refused(tmp_path, refused):
    path = Path(saved_rows(tmp_path / "rows.npy", 4, 16)[0].tokens)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    message = refused(source="tokens", path=str(path))
    assert f"expected {len(whole)} bytes, has {len(whole) - 7}" in message
    assert f"rows.npy, byte {len(whole) - 7}" in message
    path.write_bytes(whole + b"more")
    assert "too long" in refused(source="tokens", path=str(path))


def test_a_damaged_cache_is_refused(tmp_path, refused, tokenizer_folder):
    (tmp_path / "a.txt").write_text(TEXT)
    text = {"path": str(tmp_path / "a.txt")}
    settings = {"source": "text", "cache": str(tmp_path / "cache"), "tokenizer": str(tokenizer_folder), "seq_len": 16}
    prepared = prepare(Data(**settings, **text), model_folder=None, log=lambda line: None)
    shard = Path(prepared.train[0].tokens)
    whole = shard.read_bytes()

    shard.write_bytes(whole[:-4])
    message = refused(**text)
    assert f"expected {len(whole)} bytes, has {len(whole) - 4}" in message
    assert f"{shard}, byte {len(whole) - 4}" in message
    assert f"delete the folder {shard.parent}" in message
    with pytest.raises(DataError, match="truncated"):  # the error on a rank
        rows_of(prepared.train, 16)

    shard.write_bytes(whole[:-4] + b"\1\2\3\4")
    assert "does not match the manifest" in refused(**text)
    shard.unlink()
    assert "has 0" in refused(**text)
    shard.write_bytes(whole)
    (shard.parent / "manifest.json").write_text("{")
    assert "the manifest is damaged" in refused(**text)


def test_a_missing_shard_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        rows_of([TokenSpan(str(tmp_path / "gone.npy"), None, 0, 17)], 16)


@pytest.fixture
def small_disk(tmp_path):
    """File system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    gc.collect()  # the traceback of the error still holds a map of the file
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_gets_full_is_an_error_without_leftovers(tmp_path, refused, small_disk):
    letters = random.Random(0).choices(
        string.ascii_letters, k=200_000
    )  # each letter is a token: 1.6 MB, estimated 0.4 MB
    (tmp_path / "a.txt").write_text("".join(letters))
    message = refused(path=str(tmp_path / "a.txt"), cache=str(small_disk / "cache"))
    assert "not enough space for the token cache: it needs more than" in message
    assert "1048576 bytes are free" in message
    assert list((small_disk / "cache").iterdir()) == []


def test_a_disk_with_less_space_than_estimated_is_refused(tmp_path, refused, small_disk):
    (tmp_path / "a.txt").write_text("many words " * 100_000)
    message = refused(path=str(tmp_path / "a.txt"), cache=str(small_disk / "cache"))
    assert "it needs about 2200000 bytes, 1048576 bytes are free" in message


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, refused):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "file").touch()
    message = refused(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "file" / "cache"))
    assert "cannot write the token cache" in message


@pytest.mark.parametrize("edit", ['"vocab_size": 257', '"documents": 1', '"format": 2'])
def test_an_edited_cache_manifest_is_refused(tmp_path, refused, tokenizer_folder, edit):
    (tmp_path / "a.txt").write_text(TEXT)
    text = {"path": str(tmp_path / "a.txt")}
    settings = {"source": "text", "cache": str(tmp_path / "cache"), "tokenizer": str(tokenizer_folder), "seq_len": 16}
    prepared = prepare(Data(**settings, **text), model_folder=None, log=lambda line: None)
    manifest = Path(prepared.train[0].tokens).parent / "manifest.json"
    whole = manifest.read_text()
    assert edit in whole
    manifest.write_text(whole.replace(edit, edit + "7"))
    assert "its contents do not match its digest" in refused(**text)
    table = {**table_of(whole), "files": {"../tokens-00000.npy": {"bytes": 1, "digest": ""}}}
    write_sealed(manifest, table)  # a path outside the folder
    assert "1 of its fields are invalid or missing" in refused(**text)
    manifest.unlink()
    os.mkfifo(manifest)
    assert "not a regular file" in refused(**text)


def table_of(text: str) -> dict:
    """Content of a sealed file without its digest."""
    return {name: value for name, value in json.loads(text).items() if name != "blake3"}
