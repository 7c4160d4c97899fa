"""Plans of tests, resolved for the devices of this machine."""

from weft.device.detect import detect
from weft.job import Job, ResolvedJob, with_plan
from weft.plan import Plan, ResolvedPlan, resolve_plan


def resolved(plan: Plan, ranks: int) -> ResolvedPlan:
    """The plan for a number of ranks on this machine."""
    return resolve_plan(plan, ranks, native_bf16=detect().supports("bf16"))


def resolved_job(job: Job, ranks: int) -> ResolvedJob:
    """The job for a number of ranks on this machine."""
    return with_plan(job, resolved(job.plan, ranks))
