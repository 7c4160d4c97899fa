"""Documents from a function of the user's own: the tokens of a file with the same documents; errors name the function."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.data.prepare import Prepared, prepare
from weft.data.rows import Rows
from weft.errors import DataError
from weft.job import Data

TEXTS = [f"{n} plus {n} is {2 * n}. " * (1 + n % 9) for n in range(300)]


def documents(data: Data) -> Iterator[str]:
    """Texts up to the number in data.path."""
    yield from TEXTS[: int(data.path or 0)]


def one_string(data: Data) -> str:
    return "text"


def numbers(data: Data) -> list[Any]:
    return ["text", 7]


def failing(data: Data) -> Iterator[str]:
    yield "text"
    open("/no/such/file")  # noqa: SIM115 - it does not exist


def prepare_in(folder: Path, name: str, path: str, lines: list[str] | None = None, **settings: Any) -> Prepared:
    data = Data(source=name, path=path, seq_len=32, vocab_size=300, cache=str(folder / "cache"), **settings)
    return prepare(data, model_folder=None, log=(lines if lines is not None else []).append)


def rows_of(prepared: Prepared) -> list[list[int]]:
    rows = Rows(prepared.train, seq_len=32, packing=True, shuffle=True, seed=0)
    return [rows[index].tokens.tolist() for index in range(len(rows))]


@pytest.mark.must("format: text, a function", case="True")
@pytest.mark.parametrize("shuffle", [True, False])
def test_documents_of_a_function_are_those_of_a_file(shuffle: bool, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    expected = prepare_in(tmp_path, "jsonl", str(file), shuffle=shuffle)
    found = prepare_in(tmp_path, f"{__name__}:documents", "300", shuffle=shuffle)
    assert rows_of(found) == rows_of(expected)
    assert found.held_out_tokens == expected.held_out_tokens


def test_tokens_are_cached_by_content_and_documents_are_removed(tmp_path: Path) -> None:
    name, lines = f"{__name__}:documents", list[str]()
    first = prepare_in(tmp_path, name, "300")
    again = prepare_in(tmp_path, name, "300", lines)
    assert again == first
    assert any("using tokens from the cache" in line for line in lines)
    assert prepare_in(tmp_path, name, "299") != first
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("function", "path", "words"),
    [
        ("one_string", "", "it returned one string"),
        ("numbers", "", "record without text: 7"),
        ("failing", "", "failed after 1 documents: FileNotFoundError"),
        ("documents", "many", "failed after 0 documents: ValueError: invalid literal"),
        ("documents", "0", "the corpus is empty"),
    ],
)
def test_a_function_without_documents_is_refused(function: str, path: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words) as caught:
        prepare_in(tmp_path, f"{__name__}:{function}", path)
    assert function in caught.value.where or function in caught.value.what
    assert caught.value.fix
    assert not list((tmp_path / "cache").glob(".*"))
