"""Errors for keys and values that a table of settings refuses: each with its value, its rule and its fix. Imports no torch."""

import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from weft.errors import JobError
from weft.plan import Plan, Table

SHOWN_ERRORS, SHOWN_CHARACTERS = 5, 80  # of one message, and of one value in it
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
RENAMED = {
    "train.global_batch": "train.global_batch_size",
    "train.micro_batch": "train.micro_batch_size",
    "guard.patience_seconds": "guard.hang_timeout_seconds",
    "guard.rejoin_seconds": "guard.node_rejoin_seconds",
    "guard.replicas_every": "guard.sdc_check_interval",
    "plan.precision.forward": "plan.precision.param_dtype",
    "plan.precision.reduce": "plan.precision.reduce_dtype",
    "plan.precision.states": "plan.precision.optimizer_state_dtype",
    "plan.precision.float32": "plan.precision.fp32_modules",
    "plan.memory.recompute_every": "plan.memory.recompute_interval",
    "plan.memory.offload_ahead": "plan.memory.offload_prefetch",
    "plan.memory.optimizer": "plan.memory.optimizer_device",
    "plan.memory.folder": "plan.memory.offload_dir",
    "plan.comm.compress_level": "plan.comm.compress_scope",
    "plan.comm.head_groups": "plan.comm.ulysses_chunks",
    "--ranks": "--nproc-per-node",
    "--ranks-a": "--nproc-per-node-a",
    "--ranks-b": "--nproc-per-node-b",
    "--hosts": "--nnodes",
    "--host": "--node-rank",
    "--meet": "--rdzv-endpoint",
    "--world": "--world-size",
}
"""Keys and command-line options of version 0.1, and their names since."""
BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


def keys_of(table: type[Table], prefix: str = "") -> list[str]:
    """Every dotted key of a table, in order."""
    found = []
    for name, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            found += keys_of(field.annotation, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def explain(error: ValidationError, root: type[Table], tables: dict[str, Any], where: str) -> JobError:
    """One error from all that pydantic found: each key with its value, its rule and its fix.

    Args:
        error: of pydantic.
        root: the job.
        tables: that were read.
        where: the file, for the message.
    """
    found: dict[str, tuple[str, str, str]] = {}  # by key: a value that fits no branch of a union has an error for each
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
        fixes = [f'this file is a plan: write plan = "{where}" into a job, or give the job and --set plan={where}']
    return JobError(
        "\n".join([*lines[:SHOWN_ERRORS], *more]),
        where=where,
        rule="; ".join(rules[:SHOWN_ERRORS]) or "a job has only the keys that `weft schema` lists",
        fix="; ".join(dict.fromkeys(fixes[:SHOWN_ERRORS])),
    )


def _rule(key: str, field: FieldInfo) -> str:
    """What a value may be, and what it means where that is short."""
    words = f"{key} is {_in_words(field.annotation, field.metadata)}"
    meaning = field.description or ""
    return f"{words} ({meaning.rstrip('.')})" if 0 < len(meaning) <= SHOWN_CHARACTERS else words


def _find_field(root: type[Table], loc: tuple[int | str, ...]) -> tuple[str, FieldInfo]:
    """The dotted key of a value that pydantic refused, with an index where it is in a list, and its field."""
    fields, key = root.model_fields, ""
    for place, part in enumerate(loc):
        field = fields[str(part)]
        key = f"{key}.{part}" if key else str(part)
        inner = _table_of(field.annotation)
        if inner is None or place == len(loc) - 1:
            break
        fields = inner.model_fields
    return key + "".join(f"[{part}]" for part in loc[place + 1 :] if isinstance(part, int)), field


def _fix_value(key: str, field: FieldInfo, item: Any) -> tuple[str, str, str]:
    """A value that breaks its rule, the rule, and an example."""
    value, name = item["input"], key.partition("[")[0]
    allowed = _choices(field.annotation)
    rule = _rule(name, field)
    if table := _table_of(field.annotation):
        return f"{key} = {_toml(value)}", rule, f"write [{key}], and its keys below: {', '.join(table.model_fields)}"
    example = _example(field)
    if item["type"] == "missing":
        if field.is_required():  # of the prediction alone, which no user writes
            return f"{name} is missing", "", "leave out plan.prediction, or take all of what weft plan wrote"
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
    """The known key or table that is most like an unknown one, or those that there are beside it."""
    if renamed := RENAMED.get(".".join(path)):
        return f"it is now {renamed}"
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
    elif isinstance(value, dict) and value:  # a table of another name, with keys that are known
        near = max(tables, key=lambda k: len(set(tables[k].model_fields) & set(value)))
        near = near if set(tables[near].model_fields) & set(value) else ""
    else:
        names = {k.rsplit(".", 1)[-1]: k for k in known}
        near = next((names[n] for n in difflib.get_close_matches(name, names, 1, 0.75)), "")
    if near:
        return f"did you mean {f'[{near}]' if near in tables else near}?"
    place = f"[{'.'.join(path[:-1])}]" if path[1:] else "a job"
    return f"`weft schema` lists all keys; {place} has {', '.join(table.model_fields)}"


def _tables(table: type[Table], prefix: str = "") -> Iterator[tuple[str, type[Table]]]:
    """Every table of the job with its dotted key; the job itself has an empty one."""
    yield prefix, table
    for name, field in table.model_fields.items():
        if inner := _table_of(field.annotation):
            yield from _tables(inner, f"{prefix}.{name}" if prefix else name)


def _table_of(annotation: Any) -> type[Table] | None:
    """The table that a field holds, if it holds one."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
    return None


def _choices(annotation: Any) -> list[str]:
    """The strings that a value may be, also inside of lists and unions."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a value may be, from the type of its field."""
    origin, inner = get_origin(annotation), get_args(annotation)
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
    """A value that is right: the default, or one of the same type where that is empty."""
    if field.default not in (None, ()) and not field.is_required():
        return _toml(field.default)
    if choices := _choices(field.annotation):
        return _toml(choices[:1])
    return "[1]" if get_origin(field.annotation) is tuple else '"NAME"'


def _toml(value: Any) -> str:
    """A value as TOML has it, shortened; a table by its keys alone."""
    if isinstance(value, dict):
        return f"a table of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(_toml, value))}]"
    elif value is None:
        text = "nothing"
    else:
        text = tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


def refuse_odd_numbers(given: dict[str, Any], read: Table, where: str, prefix: str = "") -> None:
    """Refuse what pydantic takes for a number: true, false, infinity, and NaN where there is no bound."""
    for name, value in given.items():
        found, field, key = getattr(read, name), type(read).model_fields[name], prefix + name
        if isinstance(found, Table) and isinstance(value, dict):
            refuse_odd_numbers(value, found, where, f"{key}.")
            continue
        written, understood = (part if isinstance(part, list | tuple) else [part] for part in (value, found))
        odd = [number for number in written if _is_odd(number)]
        odd += [number for number in understood if isinstance(number, float) and _is_odd(number)]  # of the text "inf"
        if odd and not isinstance(found, bool):
            rule = _rule(key, field) + ", and finite" * isinstance(odd[0], float)
            fix = f"for example {key} = {_example(field)}"
            raise JobError(f"{key} = {_toml(value)}", where=where, rule=rule, fix=fix)


def _is_odd(number: Any) -> bool:
    return isinstance(number, bool) or (isinstance(number, float) and not math.isfinite(number))
