"""Startup screen: summary of a run, printed before its ranks start."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from weft.anatomy.roles import Anatomy
from weft.data import OF_TOKENS, Prepared, Rows, RowSplit
from weft.data.tokenizer import load_tokenizer
from weft.device.device import Device
from weft.job import Job, ResolvedJob, states_of
from weft.parallel.choices import Choices
from weft.parallel.operators import explain_operators
from weft.plan import BYTES, DEGREES, Plan, ResolvedPlan, bytes_per_state_element
from weft.training.metrics import format_count

PARTS, CHARACTERS = 6, 90
"""Parts of a chat on the startup screen, and characters of a part."""


def startup_screen(
    job: ResolvedJob, prepared: Prepared, device: Device, ranks: int, anatomy: Anatomy, out: Path, forward: str
) -> list[str]:
    """Device, precision, model, data, steps, checkpoints and output folder of a run, one line each.

    Args:
        device: device of this host.
        ranks: number of ranks on all hosts.
        anatomy: anatomy of the full model.
        out: run folder, which exists.
        forward: forward dtype and the reason for it, see `weft.precision.dtypes.explain_precision`.
    """
    table = {
        "device": describe_device(device, ranks, job.plan),
        "precision": f"{forward}; {job.plan.precision.reduce_dtype} reduction, {job.plan.precision.update} update"
        + ", frozen weights in 4 bits" * (job.plan.precision.frozen_weights == "nf4"),
        "model": _model(anatomy),
        **({"adapter": _adapter(job, anatomy)} if job.adapter.kind != "none" else {}),
        "data": _data(job, prepared),
        "training": _training(job, prepared),
        "checkpoint": _checkpoint(job, anatomy, out),
        "output": str(out),
    }
    lines = [f"{name:<12}{text}" for name, text in table.items()]
    return [*lines, *_sample(prepared)] if job.data.format == "chat" else lines


def _sample(prepared: Prepared) -> list[str]:
    """First chat of the train split: lines with + have a loss, lines with - have none."""
    tokenizer = load_tokenizer(Path(str(prepared.tokenizer)))
    first = prepared.train[0]
    tokens = Rows([first], seq_len=first.last - first.first, packing=False, shuffle=False, seed=0)[0].tokens.numpy()
    parts = np.split(tokens, np.flatnonzero(np.diff(tokens < 0)) + 1)
    lines = [f"{'sample':<12}first chat: {(tokens[1:] >= 0).sum()} of {len(tokens)} tokens have a loss, those after +"]
    for part in parts[:PARTS]:
        text = tokenizer.decode(np.where(part < 0, ~part, part))
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        if len(text) > CHARACTERS:
            text = f"{text[: CHARACTERS // 2]} ... {text[-CHARACTERS // 2 :]}"
        lines.append(f"{'':<12}{'-' if part[0] < 0 else '+'} {text}")
    if len(parts) > PARTS:
        lines.append(f"{'':<12}and {len(parts) - PARTS} more parts")
    return lines


def describe_operators(model: Any, choices: Choices, device_type: str) -> str:
    """Line with the implementation of each operator; `weft anatomy` prints the reasons. Arguments as of `explain_operators`."""
    names: dict[str, list[str]] = {}
    if not choices.anatomy.has_roles:
        return f"{'operators':<12}those of the library of the model"
    for row in explain_operators(model, choices, device_type):
        names.setdefault(row.operator, []).append(row.implementation)
    return f"{'operators':<12}" + ", ".join(f"{name} {' and '.join(dict.fromkeys(own))}" for name, own in names.items())


def explain_joint_experts(job: ResolvedJob, device_type: str, hosts: int) -> list[str]:
    """Line that says why joint forwards and backwards gain nothing in a run; empty where they gain or are not asked for.

    Args:
        device_type: "cpu", "cuda" or "npu".
        hosts: number of hosts.
    """
    if job.plan is None or job.plan.comm.expert_overlap != "joint":
        return []
    count = RowSplit.of_job(job).num_micro_batches
    reason = ""
    if count < 2:
        reason = (
            f"a step has {count} micro-batch, and no forward to run beside its backward; lower train.micro_batch_size"
        )
    elif device_type == "cpu" and hosts == 1:
        reason = "the ranks of one CPU host exchange rows through shared memory, and compute nothing meanwhile"
    return [f'{"overlap":<12}plan.comm.expert_overlap = "joint" gains nothing: {reason}'] if reason else []


def explain_rows(job: ResolvedJob) -> list[str]:
    """Line with the rows of each data rank and their micro-batches; empty for equal numbers of rows."""
    split = RowSplit.of_job(job)
    if not split.rows_per_rank:
        return []
    shares = ", ".join(map(str, split.rows_per_rank))
    return [f"{'rows':<12}{shares} of a global batch for each data rank, in {split.num_micro_batches} micro-batches"]


def explain_relocation(plan: ResolvedPlan) -> list[str]:
    """Line that says when experts move to other ranks; empty where they stay."""
    every = plan.parallel.expert_relocate_every
    what = f"move to other ranks after every {every} updates, where the load of the ranks of a layer is uneven"
    return [f"{'experts':<12}{what}"] if every else []


def explain_capacity(plan: ResolvedPlan) -> list[str]:
    """Line that says what a capacity of experts changes; empty without one."""
    capacity = plan.parallel.expert_capacity
    if not capacity:
        return []
    dropped = {"probs": "with the smallest router weights", "position": "of the last tokens"}[plan.parallel.expert_drop]
    what = f"copies beyond {capacity:g} x an even load are dropped, those {dropped}"
    return [f"{'experts':<12}{what}: the loss is another one, and depends on the layout"]


def checkpoint_bytes(job: Job, parameters: int) -> float:
    """Bytes of a checkpoint: weights and optimizer state, without buffers, headers and random number generators.

    Args:
        parameters: number of parameters of the full model; with adapters, of the adapters.
    """
    precision, states = job.plan.precision, states_of(job.optimizer.name)
    return parameters * (BYTES[precision.update] + states * bytes_per_state_element(precision))


def describe_device(device: Device, ranks: int, plan: Plan | None) -> str:
    """Text about the ranks, their hardware and a resolved plan; None: a plan that is not known yet."""
    parts = [device.name, f"{os.cpu_count()} cores" if device.type == "cpu" else "", device.instruction_set]
    hardware = ", ".join(filter(None, parts))
    if plan is None:
        return f"{ranks} rank{'s' * (ranks > 1)} on {hardware}; the planner chooses the plan"
    degrees = {name: getattr(plan.parallel, name) for name in DEGREES}
    layout = " x ".join(f"{name} {value}" for name, value in degrees.items() if value > 1)
    return f"{ranks} rank{'s' * (ranks > 1)} on {hardware}" + (
        f": {layout}, zero {plan.parallel.zero}" if layout else ""
    )


def _model(anatomy: Anatomy) -> str:
    active = f" ({format_count(anatomy.active_parameters)} active)"
    return f"{anatomy.family}, {format_count(anatomy.parameters)} parameters" + active * (
        anatomy.active_parameters != anatomy.parameters
    )


def _adapter(job: Job, anatomy: Anatomy) -> str:
    adapter, trained = job.adapter, anatomy.parameters - anatomy.frozen_parameters
    return (
        f"{adapter.kind}, r {adapter.r}, alpha {adapter.alpha:g}: {format_count(trained)} parameters trained "
        f"({trained / anatomy.parameters:.2%})"
    )


def _data(job: Job, prepared: Prepared) -> str:
    train, held_out = prepared.train_tokens, prepared.held_out_tokens
    if job.task.kind not in OF_TOKENS:
        return f"{train} records to train on, {held_out} held out; task {job.task.kind}"
    text = f"{format_count(train)} tokens to train on, {format_count(held_out)} held out"
    return f"{text} ({held_out / (train + held_out):.1%})"


def _training(job: Job, prepared: Prepared) -> str:
    if job.task.kind not in OF_TOKENS:
        rows = job.train.steps * job.train.global_batch_size
        return (
            f"{job.train.steps} steps of {job.train.global_batch_size} rows: {rows / prepared.train_tokens:.3g} epochs"
        )
    tokens = job.train.steps * job.train.global_batch_size * job.data.seq_len
    epochs = tokens / prepared.train_tokens
    return (
        f"{job.train.steps} steps of {job.train.global_batch_size} rows x {job.data.seq_len} tokens: "
        f"{format_count(tokens)} tokens, {format_count(epochs) + ' times' if epochs >= 1 else f'{epochs:.1%} of'} the text"
    )


def _checkpoint(job: Job, anatomy: Anatomy, out: Path) -> str:
    settings, folder = job.checkpoint, Path(job.checkpoint.folder or out)
    size = checkpoint_bytes(job, anatomy.parameters - anatomy.frozen_parameters)
    schedule = "only when a signal ends the run"
    if settings.every:
        kept = f"the newest {settings.keep} are kept" if settings.keep else "all are kept"
        schedule = f"every {settings.every} steps and at the end, {kept}"
    while not folder.exists():
        folder = folder.absolute().parent
    return f"about {_format_bytes(size)} each, {schedule}; {_format_bytes(shutil.disk_usage(folder).free)} of disk are free"


def _format_bytes(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
