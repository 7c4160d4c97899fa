"""Job: what a user writes. Model, data, optimizer, training, plan and output folder; TOML in and out. Imports no torch."""

import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError

from weft.errors import JobError
from weft.plan import Plan, Table
from weft.refusal import explain, keys_of, refuse_odd_numbers

BF16_STEP = 2**-8  # of a number: half of what lies between 1 and the next one, so that less may be rounded away

LARGEST_TOML = 2**20  # bytes
Count = Annotated[int, Field(ge=1, lt=2**63)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
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
    global_batch_size: Count = 8
    """Rows of one optimizer step, over all ranks and micro-batches."""
    micro_batch_size: Count = 8
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
    key_file: str = ""
    """A file with 64 hexadecimal digits, mode 600, that manifests are signed with: checkpoints without that key do not load;
    empty: they are not signed."""
    memory_every: Number = 0
    """Steps between copies in the memory of this host and of a neighbour (Linux): a restart needs no disk; 0: none."""


class Guard(Table):
    """What is done about steps that go wrong."""

    spikes: Literal["off", "warn", "skip", "rollback"] = "warn"
    """A step whose loss or gradient norm stands out: only print it; leave its update out; or go back to a checkpoint and leave
    out the batches since then."""
    rollback_steps: Number = 100
    """A rollback goes to the newest checkpoint that is at least so many steps older than the spike."""
    sdc_check_interval: Number = 0
    """Steps between comparisons of the weights that several ranks hold, and before each checkpoint; where they differ,
    training goes back and runs the steps again; 0: none."""
    max_skipped: Annotated[int, Field(ge=1)] = 20
    """Training ends when the updates of so many steps in a row were left out. fp16's loss scale may need 16 to come down."""
    hang_timeout_seconds: Annotated[float, Field(gt=0, lt=1800)] = 600.0
    """A job is ended, or started again, when no rank has made progress for that long. After 1800 s collectives give up by
    themselves, without naming a culprit."""
    node_rejoin_seconds: Annotated[float, Field(ge=0)] = 60.0
    """A host that is lost may come back, or be replaced, for that long; then the job goes on without it."""


class Cluster(Table):
    """Communication between the hosts of a job."""

    encrypt: bool = False
    """TLS 1.3 for the launchers' connections between hosts, and for those of gloo between ranks where this PyTorch's gloo has
    TLS; NCCL has none. The same on all hosts; no effect on one host. Needs `pip install "weft-train[encrypt]"`."""


class Job(Table):
    """Everything that decides a run. The same job gives the same bits on the same layout and machine."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    cluster: Cluster = Cluster()
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
            raise explain(error, cls, tables, where) from None
        refuse_odd_numbers(tables, job, where)
        if (job.model.path is None) == (job.model.config is None):
            raise JobError(
                "model names both a path and a config" if job.model.path else "model names neither a path nor a config",
                where=where,
                rule="a model is a folder with weights (path) or a fresh start from a configuration (config)",
                fix='set one of them, for example --set model.config="config.json"',
            )
        if job.plan.precision.optimizer_state_dtype == "bf16" and 1 - job.optimizer.betas[1] < BF16_STEP:
            raise JobError(
                f"optimizer.betas[1] = {job.optimizer.betas[1]} with plan.precision.optimizer_state_dtype = bf16",
                where=where,
                rule="the second moment moves by 1 - betas[1] of itself a step, and bfloat16 may lose less "
                f"than {BF16_STEP:.4f}: it would never fall again",
                fix='set optimizer.betas[1] to 0.99 at most, or plan.precision.optimizer_state_dtype to "int8"',
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
        with Path(path).open("rb") as file:
            raw = file.read(LARGEST_TOML + 1)
        if len(raw) > LARGEST_TOML:
            raise JobError(
                f"{path} has more than {LARGEST_TOML} bytes",
                rule=rule,
                fix="name a TOML file; text to train on goes to data.path",
            )
        return tomllib.loads(raw.decode())
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
    except (ValueError, RecursionError):  # no TOML, or a number with thousands of digits
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


def keys() -> list[str]:
    """Every dotted key of the job, in order."""
    return keys_of(Job)
