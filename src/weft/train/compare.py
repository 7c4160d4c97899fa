"""Two plans of one job on the same weights and the same rows: do they do the same, and if not, where does it begin?

Each side runs as ranks of its own (`weft.train.compare_rank`) and leaves a folder: side.json, and every tensor it saw, whole,
in natural order. The folders are compared tensor by tensor, in the order in which a fault travels: outputs of a step as forward
makes them, gradients as backward makes them, weights after it. So the first tensor that differs stands close to the fault.
It is the same idea as a parity test, for any job, without a second program to compare with.

The step is the first one. Where its tensors agree, but losses or gradient norms differ later, both sides run again and leave
the tensors of the step before the first that differs, whose update may be wrong, and then of that step.

How large a difference may be, as a share of a scale:

    output      the largest value of the tensor
    gradient    the same; but at least a thousandth of the largest gradient of all, as some gradients are nothing but rounding
    weight      the learning rate, for that is how far Adam goes, plus the rounding of the weight itself. Elements whose
                gradients are mere rounding go as far in any direction: they are left out. After another step than the first,
                what that step has changed is compared
"""

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from weft.checkpoint.model_config import read_config
from weft.data import Prepared, prepare
from weft.device.device import detect
from weft.errors import DataError, JobError
from weft.job import Job, keys
from weft.launch.launcher import launch
from weft.plan import BYTES, Plan
from weft.train.run import check_model, check_tokens

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
SMALL_GRADIENT = 1e-3  # of the largest gradient of all tensors
ROUNDINGS = 8  # of a weight's format that its update may be off by
MAY_DIFFER = ("plan.", "train.micro_batch_size")

Kind = Literal["output", "gradient", "weight", "weight before"]
"""Kinds of tensors that a side writes; the weights before a step only where it is not the first, to see what it changes."""
KINDS: tuple[Kind, ...] = ("output", "gradient", "weight")
"""In the order in which they are compared."""


@dataclass(frozen=True)
class Seen:
    """One tensor that a side left."""

    kind: Kind
    name: str
    """Of the module (output) or of the parameter."""
    largest: float = 0.0
    """Magnitude of its largest value."""
    spread: float = 0.0
    """How far the ranks of this side are apart that should hold the same values; the stages of a tied weight too."""


@dataclass(frozen=True)
class SeenStep:
    """What a side says of one step."""

    loss: float
    grad_norm: float
    problem: str | None = None
    """Why the step was skipped, if it was."""


@dataclass(frozen=True)
class Side:
    """What a side left beside its tensors: side.json."""

    steps: list[SeenStep]
    learning_rate: float
    """Of the step whose tensors are here."""
    tensors: list[Seen]
    """In the order in which they are compared."""
    step: int = 1
    """Whose tensors they are, from 1."""

    def write(self, folder: Path) -> None:
        (folder / "side.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Side":
        fields = json.loads((folder / "side.json").read_text(encoding="utf-8"))
        steps, tensors = [SeenStep(**step) for step in fields["steps"]], [Seen(**seen) for seen in fields["tensors"]]
        return cls(steps, fields["learning_rate"], tensors, fields["step"])


def tensor_file(folder: Path, kind: Kind, name: str, piece: int = 0) -> Path:
    """Where a side keeps a tensor: outputs in a piece for each row of the global batch, the others in one."""
    return folder / kind / name / f"{piece:06d}.safetensors"


@dataclass(frozen=True)
class Difference:
    """How far two sides are apart in one tensor."""

    kind: Kind
    name: str
    size: float
    """Largest difference, as a share of the tensor's scale."""
    tolerance: float
    """What size may be."""
    place: tuple[int, ...] = ()
    """Of the largest difference; of an output: row of the global batch, token, unit."""
    note: str = ""

    @property
    def exceeds(self) -> bool:
        return not self.size <= self.tolerance

    def __str__(self) -> str:
        scale = "the learning rate" if self.kind == "weight" else "its largest value"
        size = f"off by {self.size:.1e} of {scale}, tolerance {self.tolerance:.1e}"
        what = size if math.isfinite(self.size) else "" if self.note else "finite on one side only"
        place = f"at {list(self.place)}" if self.place else ""
        return f"{self.kind} of {self.name}: {', '.join(part for part in (what, place, self.note) if part)}"


@dataclass(frozen=True)
class Comparison:
    """Two sides, step by step and tensor by tensor."""

    steps: list[tuple[SeenStep, SeenStep]]
    tensors: list[Difference]
    tolerance: float
    step: int = 1
    """Whose tensors they are, from 1."""

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs by more than rounding."""
        return next((tensor for tensor in self.tensors if tensor.exceeds), None)

    @property
    def first_step(self) -> int | None:
        """The first step, from 1, whose loss or gradient norm differs by more than rounding."""
        apart = [max(relative(a.loss, b.loss), relative(a.grad_norm, b.grad_norm)) for a, b in self.steps]
        return next((step for step, size in enumerate(apart, 1) if size > self.tolerance), None)

    @property
    def agrees(self) -> bool:
        return self.first is None and self.first_step is None

    def by_kind(self) -> dict[Kind, list[Difference]]:
        """Tensors of each kind, in order; kinds without tensors are left out."""
        kinds = dict.fromkeys(tensor.kind for tensor in self.tensors)
        return {kind: [tensor for tensor in self.tensors if tensor.kind == kind] for kind in kinds}

    def problems(self) -> list[tuple[str, int, str]]:
        """Side, step and reason of each step that was skipped."""
        named = [
            (side, n, step.problem)
            for n, pair in enumerate(self.steps, 1)
            for side, step in zip("AB", pair, strict=True)
        ]
        return [(side, number, problem) for side, number, problem in named if problem]


def relative(a: float, b: float) -> float:
    """Difference of two numbers as a share of the larger one; 0 if neither is finite, infinite if one of them is not."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(abs(a), abs(b), sys.float_info.min)
    return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf


# From outside: run both sides


def compare(
    job_a: Job,
    job_b: Job,
    out: Path,
    *,
    steps: int = 3,
    step: int | None = None,
    ranks_a: int | None = None,
    ranks_b: int | None = None,
    tolerance: float | None = None,
    say: Callable[[str], None] = print,
) -> Comparison:
    """Run two plans of one job, one after the other, on this machine's devices, and compare what they did.

    Args:
        job_a: a job.
        job_b: the same job, but for the keys of `MAY_DIFFER`.
        out: folder for both sides, `a` and `b`; the sides of an earlier comparison there are replaced. Each side takes
            twice the weights on disk (gradients and updated weights), three times for another step than the first, and the
            outputs.
        steps: steps to run; all there are if the job has fewer.
        step: whose tensors are compared, from 1; `steps` is at least as many. None: the first, and if they agree but losses
            or gradient norms differ later, the step where that begins, or the one before, for which both sides run again.
        ranks_a: processes of each side; as few as the plan needs by default.
        ranks_b: the same.
        tolerance: see `TOLERANCE`; by default that of the coarsest number format in both plans.
        say: receives lines of progress.

    Raises:
        JobError: the jobs differ in more than how they run, they have no such step, or `out` holds something else.
        DataError: there is no space on the disk.
        WeftError: what else is refused before a run, or fails in it; see `weft.errors`.
    """
    check_same_job(job_a, job_b)
    if step is not None and step > job_a.train.steps:
        raise JobError(
            f"step {step} of a job of {job_a.train.steps} steps",
            where="--step",
            rule="the tensors of one step are compared, from 1 to train.steps",
            fix=f"choose a --step of at most {job_a.train.steps}",
        )
    ranks = ranks_a or least_ranks(job_a.plan), ranks_b or least_ranks(job_b.plan)
    jobs = [
        job.model_copy(update={"plan": job.plan.resolve(count).resolve_precision(detect().supports("bf16"))})
        for job, count in zip((job_a, job_b), ranks, strict=True)
    ]
    (config, anatomy), _ = (check_model(job) for job in jobs)
    prepared = prepare(job_a.data, model_folder=Path(job_a.model.path) if job_a.model.path else None, say=say)
    check_tokens(job_a, prepared, config)
    for name, job, count in zip("AB", jobs, ranks, strict=True):
        say(f"{name}: {describe(job, count)}")
    precisions = [job.plan.precision for job in jobs]
    formats = {
        value for precision in precisions for value in (precision.param_dtype, precision.update, precision.reduce_dtype)
    }
    tolerance = tolerance or max(TOLERANCE[name] for name in formats)

    def run(steps: int, recorded: int) -> Comparison:
        _clear(out)
        _check_space(jobs, out, anatomy.parameters, len(anatomy.blocks), recorded)
        for name, job, count in zip("ab", jobs, ranks, strict=True):
            _run_side(job, prepared, out / name, count, steps, recorded)
        return compare_folders(out / "a", out / "b", tolerance)

    found = run(max(steps, step or 1), step or 1)
    begins = found.first_step
    if step is None and found.first is None and begins is not None and begins > 1:
        for recorded in range(max(2, begins - 1), begins + 1):  # losses differ one step behind a wrong update
            say(
                f"The tensors of step {found.step} agree, losses differ from step {begins} on: now those of step {recorded}"
            )
            found = replace(run(recorded, recorded), steps=found.steps)
            if found.first is not None:
                break
    return found


def _run_side(job: Job, prepared: Prepared, folder: Path, ranks: int, steps: int, recorded: int) -> None:
    """Let the ranks of one side run its steps and leave the tensors of one of them in a folder."""
    folder.mkdir()
    (folder / "job.toml").write_text(job.to_toml(), encoding="utf-8")
    (folder / "prepared.json").write_text(prepared.to_json(), encoding="utf-8")
    argv = [sys.executable, "-m", "weft.train.compare_rank", str(folder), str(steps), str(recorded)]
    launch(argv, ranks=ranks, log_dir=folder / "logs", warm=detect().supports_fork)


def check_same_job(a: Job, b: Job) -> None:
    """Refuse two jobs that do not have the same weights, rows and updates.

    Raises:
        JobError: with the keys in which they differ.
    """

    def value(job: Job, key: str) -> object:
        return reduce(getattr, key.split("."), job)

    wrong = [key for key in keys() if not key.startswith(MAY_DIFFER) and value(a, key) != value(b, key)]
    if wrong:
        raise JobError(
            "\n".join(f"{key} = {value(a, key)!r} in A, {value(b, key)!r} in B" for key in wrong),
            where="--set-a, --set-b",
            rule="the sides train the same weights on the same rows; only plan.* and train.micro_batch_size may differ",
            fix="change other keys with --set, for both sides",
        )


def least_ranks(plan: Plan) -> int:
    """The smallest number of ranks a plan can run on; dp_shard = -1 is as small as ep allows."""
    p = plan.parallel
    inside = p.cp * p.tp * (p.dp_replicate if p.zero == 0 else 1)
    shards = p.dp_shard if p.dp_shard > 0 else p.ep // math.gcd(p.ep, inside)
    return p.dp_replicate * shards * p.cp * p.tp * p.pp


def describe(job: Job, ranks: int) -> str:
    """One line on how a side runs: its degrees above 1, schedule, ZeRO stage, formats and micro-batch."""
    p, pipeline, precision = job.plan.parallel, job.plan.pipeline, job.plan.precision
    names = ("dp_replicate", "dp_shard", "tp", "cp", "cp_ulysses", "ep", "pp")
    degrees = [f"{name} {getattr(p, name)}" for name in names if getattr(p, name) > 1]
    virtual = f", {pipeline.stages_a_rank} virtual stages a rank" if pipeline.stages_a_rank > 1 else ""
    order = [f"schedule {pipeline.schedule}{virtual}"] if p.pp > 1 else []
    sequence = [f"sp {str(p.sp).lower()}"] if p.tp > 1 else []
    formats = f"{precision.param_dtype} forward, {precision.update} update, {precision.reduce_dtype} reduce"
    what = [*degrees, *order, *sequence, f"zero {p.zero}", formats, f"micro-batch {job.train.micro_batch_size}"]
    return f"{ranks} rank{'s' if ranks > 1 else ''}: {', '.join(what)}"


def _clear(out: Path) -> None:
    """Make an empty folder, or empty one that holds an earlier comparison."""
    sides = [out / "a", out / "b"]
    others = [path for path in out.iterdir() if path not in sides] if out.is_dir() else []
    if others or any(side.exists() and not (side / "job.toml").exists() for side in sides):
        raise JobError(
            f"{out} holds something else than a comparison",
            where="--out",
            rule="the sides of an earlier comparison are replaced, nothing else is",
            fix="name a new folder",
        )
    for side in sides:
        shutil.rmtree(side, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)


def _check_space(jobs: list[Job], out: Path, parameters: int, blocks: int, recorded: int) -> None:
    config = read_config(jobs[0].model).get_text_config()
    numbers = (blocks + 2) * config.hidden_size + config.vocab_size  # a token
    tokens = jobs[0].train.global_batch_size * jobs[0].data.seq_len
    needed = sum(
        (2 + (recorded > 1)) * parameters * BYTES[precision.update] + tokens * numbers * BYTES[precision.param_dtype]
        for precision in (job.plan.precision for job in jobs)
    )
    free = shutil.disk_usage(out).free
    if needed > free:
        raise DataError(
            f"a comparison needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            where=str(out),
            rule="each side writes the outputs, the gradients and the updated weights of one step",
            fix="choose fewer --rows, a shorter data.seq_len, or an --out on a larger disk",
        )


# Two folders


def compare_folders(a: Path, b: Path, tolerance: float) -> Comparison:
    """Compare what two sides left, in the order of `Side.tensors`. One piece of one tensor is in memory at a time.

    Args:
        a: folder of a side, as `weft.train.compare_rank.record` writes it.
        b: the other one.
        tolerance: largest share of its scale by which a tensor may differ without being called different; of losses and
            gradient norms the same share of themselves.
    """
    sides = Side.read(a), Side.read(b)
    seen = [{(tensor.kind, tensor.name): tensor for tensor in side.tensors} for side in sides]
    floor = SMALL_GRADIENT * max(
        (t.largest for side in sides for t in side.tensors if t.kind == "gradient"), default=0.0
    )
    tensors = []
    for kind, name in sorted({**seen[0], **seen[1]}, key=lambda key: KINDS.index(key[0])):
        if any((kind, name) not in side for side in seen):
            only = "A" if (kind, name) in seen[0] else "B"
            tensors.append(Difference(kind, name, math.inf, tolerance, note=f"only {only} has it"))
            continue
        pair = seen[0][kind, name], seen[1][kind, name]
        tensors.append(_compare_tensor((a, b), pair, tolerance, floor, sides[0].learning_rate))
    return Comparison(list(zip(sides[0].steps, sides[1].steps, strict=False)), tensors, tolerance, sides[0].step)


def _compare_tensor(
    folders: tuple[Path, Path], seen: tuple[Seen, Seen], tolerance: float, floor: float, learning_rate: float
) -> Difference:
    kind, name = seen[0].kind, seen[0].name
    pieces = [sorted(tensor_file(folder, kind, name).parent.iterdir()) for folder in folders]
    largest, rounding, place = 0.0, 0.0, tuple[int, ...]()
    if [path.name for path in pieces[0]] != [path.name for path in pieces[1]]:
        return Difference(kind, name, math.inf, tolerance, note=f"{len(pieces[0])} rows in A, {len(pieces[1])} in B")
    for row, paths in enumerate(zip(*pieces, strict=True)):
        x, y = (load_file(path)["tensor"] for path in paths)
        if x.shape != y.shape:
            note = f"shape {tuple(x.shape)} in A, {tuple(y.shape)} in B"
            return Difference(kind, name, math.inf, tolerance, note=note)
        apart = _apart(x, y)
        before = [tensor_file(folder, "weight before", name) for folder in folders]
        if kind == "weight" and all(file.exists() for file in before):
            apart = _apart(*(after - load_file(file)["tensor"] for after, file in zip((x, y), before, strict=True)))
        if kind == "weight":
            apart = apart.masked_fill(_direction_is_chance(folders, name, tolerance), 0)
            rounding = ROUNDINGS * max(torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps)
        if (size := apart.max().item()) > largest:
            within = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
            largest, place = size, (row, *within) if kind == "output" else within
    magnitude, note = max(tensor.largest for tensor in seen), ""
    scale = {"output": magnitude, "gradient": max(magnitude, floor), "weight": learning_rate}[kind]
    allowed = tolerance + rounding * magnitude / scale if kind == "weight" else tolerance
    for side, tensor in zip("AB", seen, strict=True):
        if tensor.spread > max(largest, allowed * scale):
            largest, place, note = tensor.spread, (), f"the ranks of {side} do not have the same values"
    return Difference(kind, name, largest / max(scale, sys.float_info.min), allowed, place, note)


def _apart(x: Tensor, y: Tensor) -> Tensor:
    """Elementwise difference; infinite where only one of them is a number."""
    x, y = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (x, y))
    same = (x == y) | (x.isnan() & y.isnan())
    return (x - y).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)


def _direction_is_chance(folders: tuple[Path, Path], name: str, tolerance: float) -> Tensor:
    """Where the gradients of a parameter are so small that what is left of them is rounding."""
    files = [tensor_file(folder, "gradient", name) for folder in folders]
    if not all(file.exists() for file in files):
        return torch.tensor(False)
    x, y = (load_file(file)["tensor"] for file in files)
    return _apart(x, y) > tolerance * y.abs()
