"""Errors for unknown keys and invalid values of a job, each with its value, its rule and its fix. Imports no torch."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from weft.errors import JobError
from weft.names import OTHER_NAMES, RENAMED
from weft.plan import Plan, Table

SHOWN_ERRORS, SHOWN_CHARACTERS = 5, 80  # maximum errors per message, and characters per value
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


@dataclass(frozen=True)
class Origin:
    """Sources of the keys of a job."""

    file: str
    """TOML file, or a text that stands for one."""
    assignments: tuple[str, ...] = ()
    """Settings of the command line, `key=value`, which replace those of the file."""
    plan: str = ""
    """Separate TOML file of the table plan; "" without one."""

    def of(self, key: str) -> str:
        """Setting or line that has a dotted key; the file if there is none."""
        path = key.split(".")
        in_plan = bool(self.plan) and path[0] == "plan"
        for assignment in reversed(self.assignments):
            assigned = _parts(assignment.partition("=")[0])
            if _overlap(assigned, path) and not (in_plan and assigned == ["plan"]):
                return f"--set {assignment}"
        file = self.plan if in_plan else self.file
        line = _line_of(file, path[1:] if in_plan else path)
        return f"{file}:{line}" if line else file


def _line_of(file: str, path: list[str]) -> int | None:
    """Number of the line of a TOML file that has a key or its table; None if it is not found."""
    table: list[str] = []
    lines = Path(file).read_text(encoding="utf-8").splitlines() if Path(file).is_file() else []
    for number, line in enumerate(lines, 1):
        if header := re.match(r"\s*\[+([^\[\]]+)\]", line):
            table = _parts(header[1])
            if table[: len(path)] == path:
                return number
        elif (entry := re.match(r"\s*([\w.\"' -]+?)\s*=", line)) and _overlap([*table, *_parts(entry[1])], path):
            return number
    return None


def _parts(key: str) -> list[str]:
    """Parts of a dotted key of TOML, without quotes."""
    return [part.strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.\s]+", key)]


def _overlap(first: list[str], second: list[str]) -> bool:
    """True if one of two paths is the beginning of the other."""
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


def keys_of(table: type[Table], prefix: str = "") -> list[str]:
    """All dotted keys of a table, in order."""
    keys = []
    for name, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            keys += keys_of(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def explain(error: ValidationError, root: type[Table], tables: dict[str, Any], origin: Origin) -> JobError:
    """Combine all errors of pydantic into one `JobError` that gives value, rule and fix of each key.

    Args:
        error: validation error of pydantic.
        root: class of the job.
        tables: input tables.
        origin: where they were written.
    """
    # By key, because a value that fits no branch of a union has one error per branch.
    found: dict[str, tuple[str, str, str]] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            path = [str(part) for part in item["loc"]]
            key = ".".join(path)
            found[key] = f"unknown key {key}", "", _fix_key(root, path, item["input"])
            continue
        key, field = _find_field(root, item["loc"])
        if key not in found:
            found[key] = _fix_value(key, field, item)
    lines, rules, fixes = ([part for part in parts if part] for parts in zip(*found.values(), strict=True))
    more = [f"and {len(lines) - SHOWN_ERRORS} more"] * (len(lines) > SHOWN_ERRORS)
    if set(tables) <= set(Plan.model_fields):
        file = origin.file
        fixes = [f'this file is a plan: write plan = "{file}" into a job, or pass a job with --set plan={file}']
    places = dict.fromkeys(origin.of(key.partition("[")[0]) for key in list(found)[:SHOWN_ERRORS])
    return JobError(
        "\n".join([*lines[:SHOWN_ERRORS], *more]),
        where=", ".join(places),
        rule="; ".join(rules[:SHOWN_ERRORS]) or "`weft schema` lists all keys of a job",
        fix="; ".join(dict.fromkeys(fixes[:SHOWN_ERRORS])),
    )


def _rule(key: str, field: FieldInfo) -> str:
    """Rule of a key: its type and bounds, and its meaning if that is short."""
    words = f"{key} is {_in_words(field.annotation, field.metadata)}"
    meaning = field.description or ""
    return f"{words} ({meaning.rstrip('.')})" if 0 < len(meaning) <= SHOWN_CHARACTERS else words


def _find_field(root: type[Table], loc: tuple[int | str, ...]) -> tuple[str, FieldInfo]:
    """Dotted key, with an index for an element of a list, and field of a value that pydantic refused."""
    fields, key = root.model_fields, ""
    for depth, part in enumerate(loc):
        field = fields[str(part)]
        key = f"{key}.{part}" if key else str(part)
        inner = _table_of(field.annotation)
        if inner is None or depth == len(loc) - 1:
            break
        fields = inner.model_fields
    return key + "".join(f"[{part}]" for part in loc[depth + 1 :] if isinstance(part, int)), field


def _fix_value(key: str, field: FieldInfo, item: Any) -> tuple[str, str, str]:
    """Message, rule and fix for a value that breaks its rule."""
    value, name = item["input"], key.partition("[")[0]
    allowed = _choices(field.annotation)
    rule = _rule(name, field)
    if table := _table_of(field.annotation):
        return f"{key} = {_toml(value)}", rule, f"write [{key}], and its keys below: {', '.join(table.model_fields)}"
    example = _example(field)
    if item["type"] == "missing":
        if field.is_required():  # only keys of plan.prediction, which no user writes
            return f"{name} is missing", "", "remove plan.prediction, or copy the complete table that `weft plan` wrote"
        return f"{name} = {_toml(value)} has too few values", rule, f"for example {name} = {example}"
    near = difflib.get_close_matches(str(value).lower(), allowed, 1, 0.5)
    if near and get_origin(field.annotation) is tuple:
        fix = f'write {name} = ["{near[0]}"]'
    elif near:
        fix = f'did you mean {name} = "{near[0]}"?'
    elif item["type"] == "string_type" and isinstance(value, int | float):
        fix = f'write it in quotes: {name} = "{value}"'
    else:
        fix = f"for example {name} = {example}"
    return f"{key} = {_toml(value)}", rule, fix


def _fix_key(root: type[Table], path: list[str], value: Any) -> str:
    """Fix for an unknown key: the most similar known key or table, else the keys of its table."""
    if renamed := RENAMED.get(".".join(path)):
        return f"{'.'.join(path)} is now {renamed}"
    if answers := _settings_of(root, path, value):
        return "; ".join(answers)
    name = path[-1]
    table = root
    for part in path[:-1]:
        table = _table_of(table.model_fields[part].annotation) or table
    tables = {k: t for k, t in _tables(root) if k}
    known = [*keys_of(root), *tables]
    beside = difflib.get_close_matches(name, table.model_fields, 1, 0.65)
    # The last part decides: a right name in the wrong table is the usual slip.
    same = [k for k in known if k.rsplit(".", 1)[-1] == name]
    if same or beside:
        near = same[0] if same else ".".join([*path[:-1], *beside])
    elif isinstance(value, dict) and value:  # a table with an unknown name and known keys
        near = max(tables, key=lambda k: len(set(tables[k].model_fields) & set(value)))
        near = near if set(tables[near].model_fields) & set(value) else ""
    else:
        names = {k.rsplit(".", 1)[-1]: k for k in known}
        near = next((names[n] for n in difflib.get_close_matches(name, names, 1, 0.75)), "")
    if near:
        return f"did you mean {f'[{near}]' if near in tables else near}?"
    parent = ".".join(path[:-1])
    fix = f"`weft schema` lists all keys; {f'[{parent}]' if parent else 'a job'} has {', '.join(table.model_fields)}"
    return fix + f"; settings of the library are keys of {parent}.options" * ("options" in table.model_fields)


def _settings_of(root: type[Table], path: list[str], value: Any) -> list[str]:
    """Settings of Weft for an unknown key, or for the keys of an unknown table, whose names are those of other frameworks."""
    inner = value if isinstance(value, dict) else {}
    if found := [text for name in inner for text in _settings_of(root, [*path, name], inner[name])]:
        return found[:SHOWN_ERRORS]
    answer = OTHER_NAMES.get(".".join(path[-2:])) or OTHER_NAMES.get(path[-1], "")
    if any(setting in answer for setting in ("--", *keys_of(root))):  # not a key of another kind of job
        return [f"instead of {'.'.join(path)}, write {answer}"]
    return []


def _tables(table: type[Table], prefix: str = "") -> Iterator[tuple[str, type[Table]]]:
    """All tables of the job with their dotted keys; the key of the job itself is empty."""
    yield prefix, table
    for name, field in table.model_fields.items():
        if inner := _table_of(field.annotation):
            yield from _tables(inner, f"{prefix}.{name}" if prefix else name)


def _table_of(annotation: Any) -> type[Table] | None:
    """Class of the table that a field holds; None for a field without a table."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
    return None


def _choices(annotation: Any) -> list[str]:
    """Allowed strings of a value, including strings inside lists and unions."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Type and bounds of a value in words, from the annotation of its field."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if words := [info for info in (*metadata, *(inner[1:] if origin is Annotated else ())) if isinstance(info, str)]:
        return words[0]
    if origin is Annotated:
        return _in_words(inner[0], [m for info in inner[1:] for m in getattr(info, "metadata", [info])])
    if origin is Literal:
        return _or([_toml(choice) for choice in inner])
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)} values, each {_in_words(inner[0])}"
    if origin is tuple:
        return f"a list of values, each {_in_words(inner[0])}"
    if origin is dict or _table_of(annotation):
        return "a table"
    if inner:
        return _or([_in_words(kind) for kind in inner if kind is not type(None)])
    bounds = [
        f"{word} {value:g}"
        for bound in metadata
        for name, word in BOUNDS.items()
        if (value := getattr(bound, name, None)) is not None
    ]
    return " ".join([TYPES[annotation], " and ".join(bounds)]).strip()


def _or(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else words[0]


def _example(field: FieldInfo) -> str:
    """Valid example value: the default, or a value of the same type if the default is empty."""
    if field.default == {}:
        return "{}"
    if field.default not in (None, ()) and not field.is_required():
        return _toml(field.default)
    if choices := _choices(field.annotation):
        return _toml(choices[:1])
    return "[1]" if get_origin(field.annotation) is tuple else '"NAME"'


def _toml(value: Any) -> str:
    """TOML text of a value, shortened; a table is given by its keys."""
    if isinstance(value, dict):
        return f"a table of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(_toml, value))}]"
    elif value is None:
        text = "nothing"
    else:
        text = tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


def refuse_invalid_numbers(given: dict[str, Any], read: Table, origin: Origin, prefix: str = "") -> None:
    """Refuse values that pydantic accepts as numbers: true, false, infinity, and NaN if the field has no bound.

    Args:
        given: input table.
        read: the same table, parsed by pydantic.
        origin: where the table was written.
        prefix: dotted key of the table, with a final dot.
    """
    for name, value in given.items():
        found, field, key = getattr(read, name), type(read).model_fields[name], prefix + name
        if isinstance(found, Table) and isinstance(value, dict):
            refuse_invalid_numbers(value, found, origin, f"{key}.")
            continue
        given_values, parsed_values = (part if isinstance(part, list | tuple) else [part] for part in (value, found))
        invalid = [number for number in given_values if _is_invalid(number)]
        # The text "inf".
        invalid += [number for number in parsed_values if isinstance(number, float) and _is_invalid(number)]
        if invalid and not isinstance(found, bool):
            rule = _rule(key, field) + ", and finite" * isinstance(invalid[0], float)
            fix = f"for example {key} = {_example(field)}"
            raise JobError(f"{key} = {_toml(value)}", where=origin.of(key), rule=rule, fix=fix)


def _is_invalid(number: Any) -> bool:
    return isinstance(number, bool) or (isinstance(number, float) and not math.isfinite(number))
