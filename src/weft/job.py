"""Job: what a user writes. Model, data, optimizer, training, plan and output folder; TOML in and out. Imports no torch."""

import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from weft.errors import JobError
from weft.plan import Plan, Table

BF16_STEP = 2**-8  # of a number: half of what lies between 1 and the next one, so that less may be rounded away

SHOWN_ERRORS, SHOWN_CHARACTERS = 5, 80  # of one message, and of one value in it
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}

Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Model(Table):
    """The model: a folder with weights to continue from, or a configuration to start fresh from. Exactly one of the two."""

    path: str | None = None
    """Hugging Face folder with config.json and safetensors weights."""
    config: str | dict[str, Any] | None = None
    """Path of a Hugging Face config.json, or its contents as a table (with its model_type)."""
    init_seed: Seed = 0
    """Seed of the first weights: the same numbers as plain Transformers after torch.manual_seed(init_seed)."""


class Data(Table):
    """Text or tokens, and how they become rows."""

    source: Literal["python", "text", "jsonl", "parquet", "tokens"] = "python"
    """python: this interpreter's standard library without its tests; text: files by glob; jsonl / parquet: records with a
    "text" field, by glob or a Hugging Face dataset folder; tokens: an .npy of [rows, seq_len + 1] integers."""
    path: str | None = None
    """File, folder or glob; not needed for python."""
    tokenizer: str = "train"
    """Folder with a tokenizer, or "train": the model's own if its folder has one, else a byte-level BPE trained on the text."""
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    """Entries of a tokenizer that is trained here: 256 bytes, the end-of-text token, and merges."""
    seq_len: Annotated[int, Field(ge=2)] = 256
    """Tokens a row feeds to the model."""
    packing: bool = True
    """Fill rows with several documents, whose positions restart and whose attention stays inside; false: one piece a row."""
    shuffle: bool = True
    """Visit rows in an order drawn from train.seed; false: in the order of the source."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the tokens kept for evaluation."""
    cache: str = "~/.cache/weft"
    """Folder for tokenised text, shared by all jobs, named by content."""


class Optimizer(Table):
    """The update rule, clipping and the course of the learning rate."""

    name: Literal["adamw", "onebit-adam"] = "adamw"
    """The update rule: AdamW (Loshchilov and Hutter, 2019), fused; or 1-bit Adam (Tang et al., 2021), which is AdamW until its
    second moment is frozen, and then sends changes of momenta as signs, with plan.comm.compression = "1-bit"."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate, reached at the end of warm-up."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Applied to matrices; vectors (norms, biases) do not decay."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; larger ones are scaled down to it. 0 switches clipping off."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine to a tenth; wsd: constant, then linear to zero over the last fifth; or constant."""
    warmup_steps: Number = 10
    """Steps in which the learning rate rises from zero."""
    freeze_steps: Count = 1000
    """Of onebit-adam: updates after which the second moment is frozen; 15 to 25 % of all steps, and past warm-up."""


class Train(Table):
    """Length and rhythm of training."""

    steps: Count = 100
    """Optimizer steps."""
    global_batch: Count = 8
    """Rows of one optimizer step, over all ranks and micro-batches."""
    micro_batch: Count = 8
    """Rows a rank takes through forward and backward at once, at most."""
    seed: Seed = 0
    """Seed of the data order and of dropout."""
    evaluate_every: Number = 0
    """Steps between evaluations on held-out text, the first before training; 0: only one, at the end."""
    evaluate_rows: Count = 256
    """Held-out rows an evaluation looks at, at most."""


class Checkpoint(Table):
    """Checkpoints of the whole state, to resume from."""

    every: Number = 0
    """Steps between checkpoints (step-00000100/), and one after the last step; 0: only one, when a signal ends the run."""
    folder: str = ""
    """Where they go; empty: into the run's folder."""
    keep: Number = 2
    """How many of the newest stay; 0: all."""
    keep_hours: Annotated[float, Field(ge=0)] = 0.0
    """Of those older than that, the first of every so many hours stays; 0: none."""
    when_busy: Literal["wait", "skip"] = "wait"
    """While the checkpoint before is still being written: wait for it, or leave this one out."""
    memory_every: Number = 0
    """Steps between copies in the memory of this host and of a neighbour (Linux): a restart needs no disk; 0: none."""


class Guard(Table):
    """What is done about steps that go wrong."""

    spikes: Literal["off", "warn", "skip", "rollback"] = "warn"
    """A step whose loss or gradient norm stands out: only print it; leave its update out; or go back to a checkpoint and leave
    out the batches since then."""
    rollback_steps: Number = 100
    """A rollback goes to the newest checkpoint that is at least so many steps older than the spike."""
    replicas_every: Number = 0
    """Steps between comparisons of the weights that several ranks hold, and before each checkpoint; where they differ,
    training goes back and runs the steps again; 0: none."""
    patience_seconds: Annotated[float, Field(gt=0, lt=1800)] = 600.0
    """A job is ended, or started again, when no rank has made progress for that long. After 1800 s collectives give up by
    themselves, without naming a culprit."""
    rejoin_seconds: Annotated[float, Field(ge=0)] = 60.0
    """A host that is lost may come back, or be replaced, for that long; then the job goes on without it."""


class Job(Table):
    """Everything that decides a run. The same job gives the same bits on the same layout and machine."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    plan: Plan = Plan()
    out: str = "runs/first"
    """Folder for everything the run leaves; an earlier run in it is moved aside."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], assignments: Iterable[str] = ()) -> "Job":
        """Read a job from TOML and apply `key=value` assignments with dotted keys.

        Raises:
            JobError: the file is missing or no TOML, a key is unknown, or a value breaks its rule.
        """
        return cls.parse(read_toml(path), assignments, where=str(path))

    @classmethod
    def parse(cls, tables: dict[str, Any], assignments: Iterable[str] = (), *, where: str = "job") -> "Job":
        """Make a job from nested tables, with `key=value` assignments on top. `plan` may be the path of a TOML file.

        Raises:
            JobError: a key is unknown, or a value breaks its rule.
        """
        for assignment in assignments:
            tables = _assign(tables, assignment)
        if isinstance(tables.get("plan"), str):
            tables = {**tables, "plan": read_toml(tables["plan"])}
        try:
            job = cls.model_validate(tables)
        except ValidationError as error:
            raise _explain(error, tables, where) from None
        _refuse_odd_numbers(tables, job, where)
        if (job.model.path is None) == (job.model.config is None):
            raise JobError(
                "model names both a path and a config" if job.model.path else "model names neither a path nor a config",
                where=where,
                rule="a model is a folder with weights (path) or a fresh start from a configuration (config)",
                fix='set one of them, for example --set model.config="config.json"',
            )
        if job.plan.precision.states == "bf16" and 1 - job.optimizer.betas[1] < BF16_STEP:
            raise JobError(
                f"optimizer.betas[1] = {job.optimizer.betas[1]} with plan.precision.states = bf16",
                where=where,
                rule="the second moment moves by 1 - betas[1] of itself a step, and bfloat16 may lose less "
                f"than {BF16_STEP:.4f}: it would never fall again",
                fix='set optimizer.betas[1] to 0.99 at most, or plan.precision.states to "int8"',
            )
        _check_one_bit(job, where)
        return job

    def to_toml(self) -> str:
        """The whole job as TOML that `Job.load` reads back to an equal job."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def _check_one_bit(job: Job, where: str) -> None:
    """That signs are sent with the optimizer that can use them, and that it comes to that."""
    optimizer, compression = job.optimizer, job.plan.comm.compression
    if (optimizer.name == "onebit-adam") != (compression == "1-bit"):
        raise JobError(
            f"optimizer.name = {optimizer.name} with plan.comm.compression = {compression}",
            where=where,
            rule="signs lose what Adam's second moment is made of: they suit onebit-adam, which freezes it, and nothing else",
            fix='set both optimizer.name = "onebit-adam" and plan.comm.compression = "1-bit", or neither; "2:4" and "int8" '
            "suit every optimizer",
        )
    if optimizer.name == "onebit-adam" and not optimizer.warmup_steps <= optimizer.freeze_steps < job.train.steps:
        raise JobError(
            f"optimizer.freeze_steps = {optimizer.freeze_steps} with {optimizer.warmup_steps} steps of warm-up and "
            f"{job.train.steps} in all",
            where=where,
            rule="the second moment is frozen when the learning rate has risen, and before the end",
            fix=_freeze_steps(job),
        )


def _refuse_odd_numbers(given: dict[str, Any], read: Table, where: str, prefix: str = "") -> None:
    """Refuse what pydantic takes for a number: true, false, infinity, and NaN where there is no bound."""
    for name, value in given.items():
        found, field, key = getattr(read, name), type(read).model_fields[name], prefix + name
        if isinstance(found, Table) and isinstance(value, dict):
            _refuse_odd_numbers(value, found, where, f"{key}.")
            continue
        odd = [number for number in (value if isinstance(value, list) else [value]) if _is_odd(number)]
        if odd and not isinstance(found, bool):
            rule = _rule(key, field) + ", and finite" * isinstance(odd[0], float)
            fix = f"for example {key} = {_example(field)}"
            raise JobError(f"{key} = {_toml(value)}", where=where, rule=rule, fix=fix)


def _is_odd(number: Any) -> bool:
    return isinstance(number, bool) or (isinstance(number, float) and not math.isfinite(number))


def _freeze_steps(job: Job) -> str:
    """15 to 25 % of all steps; later where the learning rate has not risen by then."""
    warmup, steps = job.optimizer.warmup_steps, job.train.steps
    if steps < 2:
        return 'set optimizer.name to "adamw" and plan.comm.compression to "none"'
    if warmup < steps:
        return f"set optimizer.freeze_steps to {max(1, steps // 5, warmup)}"
    return f"set optimizer.warmup_steps to {steps // 10} and optimizer.freeze_steps to {max(1, steps // 5)}"


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file into nested tables.

    Raises:
        JobError: the file is missing or is not TOML.
    """
    rule = "jobs, plans, topologies and clusters are TOML files"
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except IsADirectoryError:
        inside = Path(path) / "job.toml"
        fix = f"name the file in it: {inside}" if inside.is_file() else "name a TOML file"
        raise JobError(f"{path} is a folder", rule=rule, fix=fix) from None
    except (FileNotFoundError, NotADirectoryError):
        raise JobError(
            f"there is no file {path}", rule=rule, fix="check the path; it is relative to the current folder"
        ) from None
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}", rule=rule, fix="check its permissions") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or a path with a null character
        raise JobError(
            f"{path} is not a TOML file: {error}", rule=rule, fix="see https://toml.io for the format"
        ) from None


def _assign(tables: dict[str, Any], assignment: str) -> dict[str, Any]:
    """A copy of the tables with one `dotted.key=value` set. The value is TOML; what is no TOML is taken as a string."""
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise JobError(
            f"cannot read --set {assignment!r}",
            where="command line",
            rule="a setting is written key=value, with dots in the key",
            fix="for example --set train.steps=100; `weft schema` lists the keys",
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text

    def put(table: dict[str, Any], path: list[str]) -> dict[str, Any]:
        head, *rest = path
        if not rest:
            return {**table, head: value}
        inner = table.get(head, {})
        if isinstance(inner, str) and head == "plan":  # plan = "plan.toml", with a key of it changed
            inner = read_toml(inner)
        if not isinstance(inner, dict):
            raise JobError(
                f"--set {assignment}: {head} is a value, not a table",
                where="command line",
                rule="only a table has keys",
                fix=f"leave out what follows {head}, or see `weft schema` for the keys of the job",
            )
        return {**table, head: put(inner, rest)}

    return put(tables, key.strip().split("."))


def keys(table: type[Table] = Job, prefix: str = "") -> list[str]:
    """Every dotted key of the job, in order."""
    found = []
    for name, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            found += keys(field.annotation, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def _explain(error: ValidationError, tables: dict[str, Any], where: str) -> JobError:
    """One error of ours from pydantic's: each key with its value, its rule and its fix."""
    found: dict[str, tuple[str, str, str]] = {}  # by key: a value that fits no branch of a union has an error for each
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            path = [str(part) for part in item["loc"]]
            key = ".".join(path)
            found[key] = f"unknown key {key}", "", _fix_key(path, item["input"])
            continue
        key, field = _find_field(item["loc"])
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


def _find_field(loc: tuple[int | str, ...]) -> tuple[str, FieldInfo]:
    """The dotted key of a value that pydantic refused, with an index where it is in a list, and its field."""
    fields, key = Job.model_fields, ""
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


def _fix_key(path: list[str], value: Any) -> str:
    """The known key or table that is most like an unknown one, or those that there are beside it."""
    name = path[-1]
    table: type[Table] = Job
    for part in path[:-1]:
        table = _table_of(table.model_fields[part].annotation) or table
    tables = {k: t for k, t in _tables(Job) if k}
    known = [*keys(), *tables]
    beside = difflib.get_close_matches(name, table.model_fields, 1, 0.6)
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
