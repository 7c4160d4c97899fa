"""Own tasks from JSONL files: one record per line, of one of three kinds. Imports no torch.

    kind             keys                                   metrics
    multiple choice  question or prompt, choices, answer    acc, acc_norm
    generation       question or prompt, answer             exact_match
    perplexity       text                                   word_perplexity, byte_perplexity, bits_per_byte

`question` is written as "Question: ...\\nAnswer:", `prompt` is used as it is. A record may have an `id`.
"""

import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from weft.errors import DataError

Kind = Literal["multiple choice", "generation", "perplexity"]
KEYS: dict[Kind, str] = {
    "multiple choice": "question or prompt, choices, answer",
    "generation": "question or prompt, answer",
    "perplexity": "text",
}
KNOWN = {"question", "prompt", "choices", "answer", "text", "id"}
RULE = "a record has the keys " + "; or ".join(f"{keys} ({kind})" for kind, keys in KEYS.items())


def read_records(path: Path) -> tuple[Kind, list[dict[str, Any]]]:
    """Read a task file.

    Returns:
        kind: the same for all records of a file.
        records: {"prompt", "choices", "answer"} with the index of the right choice, {"prompt", "answer"}, or {"text"}.

    Raises:
        DataError: names the file and the line of the first record that breaks a rule.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            where="tasks",
            rule="a task of your own is a JSONL file in UTF-8",
            fix="check the path; it is relative to the current folder",
        ) from None
    records: list[dict[str, Any]] = []
    first: Kind | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        kind, record = _parse(line, f"{path}:{number}")
        if first not in (None, kind):
            _refuse(
                f"a record for {kind} in a file for {first}",
                f"{path}:{number}",
                "all records of a file are of the same kind",
                "write the records of each kind to a file of their own",
            )
        first = kind
        records.append(record)
    if first is None:
        _refuse(f"{path} has no records", str(path), RULE, "write one JSON object per line")
    return first, records


def _parse(line: str, where: str) -> tuple[Kind, dict[str, Any]]:
    """Kind and normalized form of a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        _refuse(f"not JSON: {error}", where, "every line is one JSON object", "write the record on one line, as JSON")
    if not isinstance(record, dict):
        _refuse(f"{_short(record)} is no object", where, "every line is one JSON object", "write {...}")
    if unknown := sorted(record.keys() - KNOWN):
        _refuse(f"unknown key {unknown[0]}", where, RULE, f"remove or rename {', '.join(unknown)}; id is ignored")
    if "text" in record:
        if others := sorted(record.keys() - {"text", "id"}):
            _refuse(f"text together with {', '.join(others)}", where, RULE, "keep text, or the other keys")
        return "perplexity", {"text": _text(record, "text", where)}
    asked = [name for name in ("question", "prompt") if name in record]
    if len(asked) != 1:
        what = "both question and prompt" if asked else "no question, prompt or text"
        _refuse(f"a record with {what}", where, RULE, "give one of them")
    prompt = _text(record, asked[0], where)
    prompt = f"Question: {prompt}\nAnswer:" if asked == ["question"] else prompt
    if "answer" not in record:
        _refuse("a record without answer", where, RULE, "add the right answer")
    if "choices" in record:
        choices = _choices(record["choices"], where)
        return "multiple choice", {
            "prompt": prompt,
            "choices": choices,
            "answer": _index(record["answer"], choices, where),
        }
    answer = _text(record, "answer", where).strip()
    if "\n" in answer:
        rule = "a generated answer is one line: generation ends at the first line break"
        _refuse(f"answer = {_short(answer)}", where, rule, "shorten the answer to one line, or give choices")
    return "generation", {"prompt": prompt, "answer": answer}


def _text(record: dict[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        fix = "write it as text" + (", or give choices" if key == "answer" else "")
        _refuse(f"{key} = {_short(value)}", where, f"{key} is a string that is not empty", fix)
    return value


def _choices(value: Any, where: str) -> list[str]:
    texts = isinstance(value, list) and all(isinstance(choice, str) and choice.strip() for choice in value)
    if not texts or len(value) < 2 or len(set(value)) < len(value):
        rule = "choices is a list of at least two different strings, none of them empty"
        _refuse(f"choices = {_short(value)}", where, rule, 'for example "choices": ["Paris", "Rome"]')
    return value


def _index(answer: Any, choices: list[str], where: str) -> int:
    """Index of the right choice, given as index or as text."""
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    rule = f"answer is the index of a choice, from 0 to {len(choices) - 1}, or its exact text"
    _refuse(f"answer = {_short(answer)}", where, rule, f'for example "answer": {json.dumps(choices[0])}')


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]} ..."


def _refuse(what: str, where: str, rule: str, fix: str) -> NoReturn:
    raise DataError(what, where=where, rule=rule, fix=fix)
