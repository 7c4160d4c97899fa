"""Tensor-by-tensor comparison of two plans of one job, on the same weights and rows.

Each side runs in separate ranks (`compare_rank.py`) and writes a folder with side.json and with every recorded tensor,
unsharded and in the element order of the original model. The folders are compared in the order in which a fault propagates:
outputs in forward order, gradients in backward order, then updated weights. The first tensor that differs is therefore close to
the fault. The method is that of a parity test, for any job and without a reference program.

By default the first step is compared. If its tensors agree but losses or gradient norms differ later, both sides run again and
record the step before the first difference, whose update may be wrong, and then the step of the first difference.

Tolerances are relative to a scale that depends on the kind of tensor:

    output      largest value of the tensor
    gradient    largest value of the tensor, but at least a thousandth of the largest gradient of all tensors, because some
                gradients consist of rounding errors alone
    weight      learning rate, because it bounds an update of Adam, plus the rounding of the weight itself. Elements whose
                gradients are rounding errors are ignored, because Adam may update them in any direction. After a step other
                than the first, the changes of the weights in this step are compared
"""

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from weft.adapters.model import build_model
from weft.checkpoint.model_config import read_config
from weft.data import Prepared, prepare
from weft.device.detect import detect_for_launcher
from weft.errors import DataError, JobError
from weft.job import Job, ResolvedJob, keys, resolve_job
from weft.launch.launcher import launch
from weft.parallel.operators import LIBRARY_ATTENTION
from weft.plan import BYTES, Compute, Parallel, Plan, Precision, min_ranks
from weft.training.compare_records import KINDS, Comparison, Difference, RecordedTensor, Side, tensor_file
from weft.training.job_checks import check_model, check_tokens

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
SMALL_GRADIENT = 1e-3  # fraction of the largest gradient of all tensors
ROUNDINGS = 8  # allowed rounding error of an updated weight, in units of the epsilon of its dtype
MAY_DIFFER = ("plan.", "train.micro_batch_size")


# Run both sides


def untouched(job: Job) -> Job:
    """The job with the plan nearest to the model of its authors: one rank, zero 0, attention and operators of the library.

    Only the dtypes of its plan are kept.

    Args:
        job: job of the plan to compare.

    Raises:
        ModelError: the model cannot be built.
    """
    precision = job.plan.precision.resolve(detect_for_launcher().supports("bf16"))
    dtypes = precision.model_dump(include={"param_dtype", "reduce_dtype", "update", "loss_scale"})
    own = build_model(job, torch.float32).config._attn_implementation
    attention = next((name for name, library in LIBRARY_ATTENTION.items() if library == own), "auto")
    compute = Compute.model_validate({"attention": attention, "kernels": "reference"})
    plan = Plan(parallel=Parallel(zero=0), precision=Precision(**dtypes), compute=compute)
    return job.model_copy(update={"plan": plan})


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
) -> Comparison:
    """Run two plans of one job, one after the other, on the devices of this machine, and compare their tensors.

    Args:
        job_a: job of side A.
        job_b: the same job, except for the keys in `MAY_DIFFER`.
        out: folder for both sides, `a` and `b`; an earlier comparison in it is replaced. Each side needs disk space for the
            outputs and for two copies of the weights (gradients and updated weights), or three for a step after the first.
        steps: number of steps to run, at most the steps of the job.
        step: step whose tensors are compared, counted from 1; `steps` is raised to it. None: the first step, and if its
            tensors agree but losses or gradient norms differ later, both sides run again for the first step that differs and
            the step before it.
        ranks_a: number of processes of side A; default: the minimum of its plan.
        ranks_b: number of processes of side B; default: the minimum of its plan.
        tolerance: maximum relative difference, see `TOLERANCE`; default: by the coarsest dtype of both plans.

    Raises:
        JobError: the jobs are equal or differ in other keys, the job has no such step, or `out` has other content.
        DataError: the disk has too little space.
        WeftError: a side was refused or failed; see `weft.errors`.
    """
    check_same_job(job_a, job_b)
    if step is not None and step > job_a.train.steps:
        raise JobError(
            f"step {step} of a job with {job_a.train.steps} steps",
            where="--step",
            rule="the compared step lies between 1 and train.steps",
            fix=f"choose a --step of at most {job_a.train.steps}",
        )
    ranks = ranks_a or min_ranks(job_a.plan), ranks_b or min_ranks(job_b.plan)
    native_bf16 = detect_for_launcher().supports("bf16")
    jobs = [resolve_job(job, count, native_bf16=native_bf16) for job, count in zip((job_a, job_b), ranks, strict=True)]
    if jobs[0] == jobs[1]:
        raise JobError(
            f"both sides are the same plan: {describe(jobs[0], ranks[0])}",
            where="--set-a, --set-b",
            rule="the sides differ; without --set-a, side A is the untouched model on one rank",
            fix="set the plan to check with --set-b, such as --set-b plan.parallel.tp=2",
        )
    checked, _ = (check_model(job) for job in jobs)
    config, anatomy = checked.config, checked.anatomy
    prepared = prepare(job_a.data, model_folder=Path(job_a.model.path) if job_a.model.path else None, log=print)
    check_tokens(jobs[0], prepared, config)
    for name, job, count in zip("AB", jobs, ranks, strict=True):
        print(f"{name}: {describe(job, count)}")
    tolerance = tolerance or max(map(_tolerance, jobs))

    def run(steps: int, recorded: int) -> Comparison:
        _clear(out)
        _check_space(jobs, out, anatomy.parameters, len(anatomy.blocks), recorded)
        for name, job, count in zip("ab", jobs, ranks, strict=True):
            _run_side(job, prepared, out / name, count, steps, recorded)
        return compare_folders(out / "a", out / "b", tolerance)

    result = run(max(steps, step or 1), step or 1)
    first_step = result.first_step
    if step is None and result.first is None and first_step is not None and first_step > 1:
        for recorded in range(max(2, first_step - 1), first_step + 1):  # losses differ one step after a wrong update
            print(
                f"The tensors of step {result.step} agree, losses differ from step {first_step} on: comparing step {recorded}"
            )
            result = replace(run(recorded, recorded), steps=result.steps)
            if result.first is not None:
                break
    return result


def _tolerance(job: ResolvedJob) -> float:
    """Maximum relative difference for the dtypes of a plan."""
    precision = job.plan.precision
    return max(TOLERANCE[name] for name in (precision.param_dtype, precision.update, precision.reduce_dtype))


def _run_side(job: Job, prepared: Prepared, folder: Path, ranks: int, steps: int, recorded: int) -> None:
    """Launch the ranks of one side, which record the tensors of one step in a folder."""
    folder.mkdir()
    (folder / "job.toml").write_text(job.to_toml(), encoding="utf-8")
    (folder / "prepared.json").write_text(prepared.to_json(), encoding="utf-8")
    argv = [sys.executable, "-m", "weft.training.compare_rank", str(folder), str(steps), str(recorded)]
    launch(argv, ranks=ranks, log_dir=folder / "logs", use_forkserver=detect_for_launcher().supports_fork)


def check_same_job(a: Job, b: Job) -> None:
    """Refuse two jobs with different weights, rows or updates.

    Raises:
        JobError: lists all keys that differ.
    """

    def value(job: Job, key: str) -> object:
        return reduce(getattr, key.split("."), job)

    different = [key for key in keys() if not key.startswith(MAY_DIFFER) and value(a, key) != value(b, key)]
    if different:
        raise JobError(
            "\n".join(f"{key} = {value(a, key)!r} in A, {value(b, key)!r} in B" for key in different),
            where="--set-a, --set-b",
            rule="both sides train the same weights on the same rows; only plan.* and train.micro_batch_size may differ",
            fix="change other keys with --set, for both sides",
        )


def describe(job: Job, ranks: int) -> str:
    """One-line description of a side: degrees above 1, schedule, ZeRO stage, dtypes and micro-batch size."""
    p, pipeline, precision = job.plan.parallel, job.plan.pipeline, job.plan.precision
    names = ("dp_replicate", "dp_shard", "tp", "cp", "cp_ulysses", "ep", "etp", "pp")
    degrees = [f"{name} {getattr(p, name)}" for name in names if getattr(p, name) > 1]
    virtual = f", {pipeline.stages_per_rank} virtual stages per rank" if pipeline.stages_per_rank > 1 else ""
    schedule = [f"schedule {pipeline.schedule}{virtual}"] if p.pp > 1 else []
    sequence = [f"sp {str(p.sp).lower()}"] if p.tp > 1 else []
    dtypes = f"{precision.param_dtype} forward, {precision.update} update, {precision.reduce_dtype} reduce"
    parts = [*degrees, *schedule, *sequence, f"zero {p.zero}", dtypes, f"micro-batch {job.train.micro_batch_size}"]
    return f"{ranks} rank{'s' if ranks > 1 else ''}: {', '.join(parts)}"


def _clear(out: Path) -> None:
    """Create a folder, or remove an earlier comparison from it."""
    sides = [out / "a", out / "b"]
    other_files = [path for path in out.iterdir() if path not in sides] if out.is_dir() else []
    if other_files or any(side.exists() and not (side / "job.toml").exists() for side in sides):
        raise JobError(
            f"{out} has content other than a comparison",
            where="--out",
            rule="only an earlier comparison is replaced",
            fix="name a new folder",
        )
    for side in sides:
        shutil.rmtree(side, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)


def _check_space(jobs: Sequence[Job], out: Path, parameters: int, blocks: int, recorded: int) -> None:
    config = read_config(jobs[0].model).get_text_config()
    elements = (blocks + 2) * config.hidden_size + config.vocab_size  # of all outputs, per token
    tokens = jobs[0].train.global_batch_size * jobs[0].data.seq_len
    needed = sum(
        (2 + (recorded > 1)) * parameters * BYTES[precision.update] + tokens * elements * BYTES[precision.param_dtype]
        for precision in (job.plan.precision for job in jobs)
    )
    free = shutil.disk_usage(out).free
    if needed > free:
        raise DataError(
            f"a comparison needs {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free",
            where=str(out),
            rule="each side writes outputs, gradients and updated weights of one step",
            fix="set fewer --rows, a shorter data.seq_len, or an --out on a larger disk",
        )


# Compare two folders


def compare_folders(a: Path, b: Path, tolerance: float) -> Comparison:
    """Compare the recorded tensors of two sides, in the order of `Side.tensors`. Holds one piece of one tensor in memory.

    Args:
        a: folder of side A, written by `weft.training.compare_rank.record`.
        b: folder of side B.
        tolerance: maximum difference of equal tensors relative to their scale, and of equal losses and gradient norms relative
            to their value.
    """
    sides = Side.read(a), Side.read(b)
    recorded = [{(tensor.kind, tensor.name): tensor for tensor in side.tensors} for side in sides]
    floor = SMALL_GRADIENT * max(
        (t.largest for side in sides for t in side.tensors if t.kind == "gradient"), default=0.0
    )
    tensors = []
    for kind, name in sorted({**recorded[0], **recorded[1]}, key=lambda key: KINDS.index(key[0])):
        if any((kind, name) not in side for side in recorded):
            only = "A" if (kind, name) in recorded[0] else "B"
            tensors.append(Difference(kind, name, math.inf, tolerance, note=f"present in {only} only"))
            continue
        pair = recorded[0][kind, name], recorded[1][kind, name]
        tensors.append(_compare_tensor((a, b), pair, tolerance, floor, sides[0].learning_rate))
    return Comparison(list(zip(sides[0].steps, sides[1].steps, strict=False)), tensors, tolerance, sides[0].step)


def _compare_tensor(
    folders: tuple[Path, Path],
    recorded: tuple[RecordedTensor, RecordedTensor],
    tolerance: float,
    floor: float,
    learning_rate: float,
) -> Difference:
    kind, name = recorded[0].kind, recorded[0].name
    pieces = [sorted(tensor_file(folder, kind, name).parent.iterdir()) for folder in folders]
    largest, rounding, index = 0.0, 0.0, tuple[int, ...]()
    if [path.name for path in pieces[0]] != [path.name for path in pieces[1]]:
        return Difference(kind, name, math.inf, tolerance, note=f"{len(pieces[0])} rows in A, {len(pieces[1])} in B")
    for row, paths in enumerate(zip(*pieces, strict=True)):
        x, y = (load_file(path)["tensor"] for path in paths)
        if x.shape != y.shape:
            note = f"shape {tuple(x.shape)} in A, {tuple(y.shape)} in B"
            return Difference(kind, name, math.inf, tolerance, note=note)
        difference = _abs_difference(x, y)
        before = [tensor_file(folder, "weight before", name) for folder in folders]
        if kind == "weight" and all(file.exists() for file in before):
            updates = (after - load_file(file)["tensor"] for after, file in zip((x, y), before, strict=True))
            difference = _abs_difference(*updates)
        if kind == "weight":
            difference = difference.masked_fill(_is_gradient_noise(folders, name, tolerance), 0)
            rounding = ROUNDINGS * max(torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps)
        if (size := difference.max().item()) > largest:
            within = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
            largest, index = size, (row, *within) if kind == "output" else within
    magnitude, note = max(tensor.largest for tensor in recorded), ""
    scale = {"output": magnitude, "gradient": max(magnitude, floor), "weight": learning_rate}[kind]
    allowed = tolerance + rounding * magnitude / scale if kind == "weight" else tolerance
    for side, tensor in zip("AB", recorded, strict=True):
        if tensor.spread > max(largest, allowed * scale):
            largest, index, note = tensor.spread, (), f"the ranks of {side} hold different values"
    return Difference(kind, name, largest / max(scale, sys.float_info.min), allowed, index, note)


def _abs_difference(x: Tensor, y: Tensor) -> Tensor:
    """Elementwise absolute difference; 0 for equal values or two NaNs, otherwise infinite if a value is not finite."""
    x, y = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (x, y))
    same = (x == y) | (x.isnan() & y.isnan())
    return (x - y).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)


def _is_gradient_noise(folders: tuple[Path, Path], name: str, tolerance: float) -> Tensor:
    """Mask of elements whose gradient is so small that it consists of rounding errors."""
    files = [tensor_file(folder, "gradient", name) for folder in folders]
    if not all(file.exists() for file in files):
        return torch.tensor(False)
    x, y = (load_file(file)["tensor"] for file in files)
    return _abs_difference(x, y) > tolerance * y.abs()
