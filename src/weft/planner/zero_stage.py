"""ZeRO stage of a job with plan.parallel.zero = "auto": the lowest that fits in memory, since it sends the fewest bytes.

`weft train` chooses on host 0, before it writes the job for the ranks. Other hosts are taken to have as much memory.
"""

from collections.abc import Sequence

from weft.anatomy.roles import Anatomy
from weft.device.device import Device
from weft.errors import WeftError
from weft.job import Job, ResolvedJob, resolve_job, states_of
from weft.parallel.data.state_size import model_state_bytes
from weft.plan import BYTES
from weft.plan.resolve import STAGES, with_zero
from weft.planner.costmodel.hardware import GIB
from weft.planner.costmodel.local_device import memory_of_rank
from weft.planner.dryrun.extrapolate import trace_in_brief
from weft.planner.search.space import MARGIN
from weft.training.job_checks import check_model

SMALL = 0.1
"""Share of the memory below which model states decide nothing, so that no dry run is needed."""


def choose_zero(job: Job, ranks_by_host: Sequence[int], device: Device) -> tuple[Job, str]:
    """Give a job its ZeRO stage.

    Where the model states of a whole replica are small, it is stage 0. Else a step is dry-run under each stage, from 0 on,
    until its peak fits; else it is the highest stage that the job allows. An optimizer off the device takes that one too:
    the ranks of a host share the memory in which it is.

    Args:
        job: job with dtypes.
        ranks_by_host: number of ranks of each host.
        device: device of this host.

    Returns:
        Job with a stage, and the reason for it; the same job and "" if it has a stage.

    Raises:
        WeftError: the job cannot run under any stage; a subclass, as of `resolve_job` and `check_model`.
    """
    if job.plan.parallel.zero != "auto":
        return job, ""
    ranks, memory = sum(ranks_by_host), memory_of_rank(device, max(ranks_by_host))
    off_device = job.plan.memory.optimizer_device != "device" and ranks > 1
    highest: Job | None = None
    refused: WeftError | None = None
    for zero in STAGES:
        candidate = job.model_copy(update={"plan": with_zero(job.plan, zero)})
        try:
            resolved = resolve_job(candidate, ranks, native_bf16=device.supports("bf16"))
            anatomy = check_model(resolved, device).choices.anatomy
        except WeftError as error:
            refused = refused or error
            continue
        highest = candidate
        if zero == STAGES[-1] or off_device:
            continue
        needed = _replica_bytes(resolved, anatomy) if zero == 0 else memory
        what = "model states take"
        if needed > SMALL * memory:
            found = trace_in_brief(resolved, ranks, device.type)
            needed, what = max(float(one.count.peak) for one in found), "a step takes"
        if needed <= MARGIN * memory:
            return candidate, f"stage {zero}: {what} {needed / GIB:.2g} of {memory / GIB:.3g} GiB of a rank"
    if highest is None:
        assert refused is not None
        raise refused
    why = "optimizer states off the device are sharded" if off_device else "no lower stage fits"
    return highest, f"stage {highest.plan.parallel.zero}: {why}"


def _replica_bytes(job: ResolvedJob, anatomy: Anatomy) -> float:
    """Most bytes of the model states of a rank under stage 0: those of an even share of the model, and casts for forward."""
    plan = job.plan
    parts = plan.parallel.tp * plan.parallel.pp
    trained, frozen = (anatomy.parameters - anatomy.frozen_parameters) / parts, anatomy.frozen_parameters / parts
    sizes = model_state_bytes(int(trained), plan, states=states_of(job.optimizer.name), frozen=(int(frozen), 0))
    casts = plan.precision.param_dtype != plan.precision.update
    return sum(sizes.values()) + casts * BYTES[plan.precision.param_dtype] * (trained + frozen)
