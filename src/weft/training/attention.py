"""Attention kernel of a run: chosen at its start by measured times, the same on all ranks, and used to its end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from weft.comm.objects import all_gather_json, all_ranks, broadcast_json
from weft.compute.attention_choice import (
    AttentionChoice,
    AttentionShape,
    Timings,
    candidates,
    choose_attention,
    named_choice,
    refused_kernel,
    time_attention,
    use_attention,
)
from weft.data import MicroBatch
from weft.errors import DataError
from weft.launch.heartbeat import Heartbeat
from weft.parallel.runtime import runtime
from weft.parallel.sequence.dropout import has_attention_dropout
from weft.parallel.sequence.varlen import attention_shape, kernel_of
from weft.training.metrics import ATTEMPTS, Attempt, read_lines
from weft.training.session import Session, train_batches


class RunAttention(NamedTuple):
    """Attention kernels of a run, as `Attempt` records them."""

    text: str = ""
    """Kernels and the reason for them; "" where torch's own order is kept without a measurement."""
    measured: AttentionChoice | None = None
    """Kernels that times have chosen."""


@contextmanager
def run_attention(
    session: Session, heartbeat: Heartbeat, log: Callable[[str], None], out: Path
) -> Iterator[RunAttention]:
    """Context of all steps and evaluations of a run, which have the kernels of `plan.compute.kernels.attention`. Collective.

    Args:
        session: training state of this rank.
        heartbeat: heartbeat of this rank: some packages compile their kernels at the first call.
        log: function that prints a line.
        out: run folder, with the kernels of the attempt that is continued.

    Yields:
        Kernels of the run.

    Raises:
        PlanError: the kernel that the plan names does not run on a rank, or the model does not use it; the same on all ranks.
    """
    name = session.job.plan.compute.kernels.attention
    names = candidates(session.device) if name == "auto" else [name]
    is_measured = name == "auto" and len(names) > 1
    if name == "reference" or (name == "auto" and not is_measured):
        yield RunAttention()
        return
    shape = find_shape(session)
    if shape is None:
        if not is_measured:
            why = "chosen for causal language models without attention dropout, which call SDPA or the flash operators"
            raise refused_kernel(name, session.device, why)
        yield RunAttention()
        return
    earlier = earlier_choice(out, names) if session.position.step and is_measured else None
    if earlier is not None:
        text = f"{earlier.rows} for rows, {earlier.flash} for documents, as before the restart"
        log(f"{'attention':<12}{text}")
        with use_attention(earlier):
            yield RunAttention(text, earlier)
        return
    heartbeat.phase("measuring attention")
    by_rows = session.job.plan.parallel.cp == 1 and not (shape.kernel is not None and shape.window_hides)
    names = ["reference", *names] if is_measured else names
    timings = agree(time_attention(shape, names, session.device, session.torch_device, by_rows=by_rows))
    if not is_measured and name in timings.failures:
        raise refused_kernel(name, session.device, timings.failures[name])
    choice = choose_attention(timings.rows, timings.documents) if is_measured else named_choice(name)
    text = choice.text(timings) if is_measured else f"{name}, the plan asks for it"
    log(f"{'attention':<12}{text}")
    with use_attention(choice):
        yield RunAttention(text, choice if is_measured else None)


def earlier_choice(out: Path, names: Sequence[str]) -> AttentionChoice | None:
    """Kernels that the last attempt of a run has measured, if all ranks have them. Collective.

    Args:
        out: run folder.
        names: kernels of this rank.
    """
    found: Sequence[str] | None = None
    if dist.get_rank() == 0:
        with suppress(DataError):  # a damaged line
            attempts: list[Attempt] = read_lines(out / ATTEMPTS, Attempt)
            found = next((each.measured_kernels for each in reversed(attempts) if each.measured_kernels), None)
    found = broadcast_json(found)
    is_known = found is not None and set(found) <= {"reference", "flash", *names}
    return AttentionChoice(*found) if all_ranks(is_known) and found is not None else None


def find_shape(session: Session) -> AttentionShape | None:
    """Attention of the first micro-batch; None where neither SDPA nor the variable-length flash operator computes it."""
    model, plan = session.model, session.job.plan
    if session.job.task.kind != "causal" or has_attention_dropout(model):  # FA3 and FA4 have no dropout
        return None
    by_documents = runtime(model).attention_plans is not None
    kernel, slow = kernel_of(model, plan, session.device.type)
    if slow if by_documents else model.config._attn_implementation != "sdpa":
        return None
    batch = next(train_batches(session, session.position))[0]
    assert isinstance(batch, MicroBatch)
    return attention_shape(model, plan, documents_of(batch.host_positions()), kernel if by_documents else None)


def documents_of(positions: Tensor) -> tuple[tuple[int, ...], ...]:
    """Lengths of the documents of each row, from positions [rows, tokens] that restart at 0 with each document."""
    found = []
    for row in positions:
        borders = [0, *((row[1:] == 0).nonzero().flatten() + 1).tolist(), len(row)]
        found.append(tuple(stop - start for start, stop in pairwise(borders)))
    return tuple(found)


def agree(own: Timings) -> Timings:
    """Largest time of each kernel over all ranks, without kernels that failed on one of them. Collective."""
    ranks = [Timings(*each) for each in all_gather_json(own)]
    failures = {name: reason for each in ranks for name, reason in each.failures.items()}
    rows, documents = (
        {name: max(times[name] for times in tables) for name in tables[0] if name not in failures}
        for tables in ([each.rows for each in ranks], [each.documents for each in ranks])
    )
    return Timings(rows, documents, failures)
