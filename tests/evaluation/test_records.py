"""Own tasks from JSONL files: what is read, and which records are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.errors import DataError
from weft.evaluation.records import read_records

CHOICE = {"question": "2 + 2?", "choices": ["3", "4"], "answer": "4"}


def write(folder: Path, *records: Any) -> Path:
    path = folder / "own.jsonl"
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))
    return path


@pytest.mark.must("format: tasks of evaluation, jsonl and YAML")
@pytest.mark.parametrize(
    ("record", "kind", "normalized"),
    [
        (CHOICE, "multiple choice", {"prompt": "Question: 2 + 2?\nAnswer:", "choices": ["3", "4"], "answer": 1}),
        ({"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": 0}, "multiple choice", None),
        ({"id": 7, "prompt": "2 + 2 =", "answer": " 4 "}, "generation", {"prompt": "2 + 2 =", "answer": "4"}),
        ({"text": "a b c"}, "perplexity", {"text": "a b c"}),
    ],
)
def test_kinds(record: dict[str, Any], kind: str, normalized: dict[str, Any] | None, tmp_path: Path) -> None:
    found = read_records(write(tmp_path, record, "", record))
    assert found[0] == kind
    assert len(found[1]) == 2
    assert normalized is None or found[1][0] == normalized


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "not JSON"),
        ([1], "is no object"),
        ({**CHOICE, "choises": []}, "unknown key choises"),
        ({"choices": ["a", "b"], "answer": 0}, "no question, prompt or text"),
        ({**CHOICE, "prompt": "x"}, "both question and prompt"),
        ({**CHOICE, "answer": 2}, "answer = 2"),
        ({**CHOICE, "answer": "5"}, 'answer = "5"'),
        ({**CHOICE, "answer": True}, "answer = true"),
        ({**CHOICE, "choices": ["a"]}, 'choices = ["a"]'),
        ({**CHOICE, "choices": ["a", "a"]}, "choices ="),
        ({"question": "2 + 2?", "choices": ["a", "b"]}, "without answer"),
        ({"question": " ", "answer": "4"}, 'question = " "'),
        ({"prompt": "2 + 2 =", "answer": 4}, "answer = 4"),
        ({"prompt": "2 + 2 =", "answer": "4\n5"}, "answer ="),
        ({"text": "a", "answer": "b"}, "text together with answer"),
        ({"text": ""}, 'text = ""'),
        ({"text": "a"}, "a record for perplexity in a file for multiple choice"),
    ],
)
def test_bad_record_is_refused_with_file_and_line(record: Any, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, CHOICE, record)
    with pytest.raises(DataError) as caught:
        read_records(path)
    assert text in caught.value.what
    assert caught.value.where == f"{path}:2"
    assert caught.value.rule
    assert caught.value.fix


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": "abc"})
    plain = read_records(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_records(path) == plain


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no records"):
        read_records(write(tmp_path))
    with pytest.raises(DataError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")
