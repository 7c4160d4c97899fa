"""World size of a restarted job: without ranks that failed twice, and without lost hosts."""

from pathlib import Path

from weft.errors import RankFailure, WeftError
from weft.files import replace_file
from weft.job import Job, resolve_job
from weft.plan import Plan
from weft.training.job_checks import check_model


class Resize:
    """World size of a restarted job: excludes a rank that fails twice in a row, and lost hosts.

    Args:
        job: job as written by the user.
        ranks: world size of the first attempt.
        path: file of the resolved job for the ranks, which is rewritten.
    """

    def __init__(self, job: Job, ranks: int, path: Path):
        self.job, self.initial_ranks, self.ranks, self.path = job, ranks, ranks, path
        self.last_failed: int | None = None

    def usable(self, available: int) -> int:
        """Largest number of ranks, up to those that are available, that the plan fits; 0 if it fits none."""
        found = fit_plan(self.job, available, self.initial_ranks)
        return found[0] if found else 0

    def __call__(self, failure: RankFailure, available: int) -> int:
        """World size of the next attempt; see `weft.launch.launcher.launch`.

        Args:
            failure: failure of the last attempt.
            available: number of available ranks.

        Raises:
            RankFailure: `failure`, if the plan fits no available world size; or the run folder cannot be written.
        """
        repeated, self.last_failed = failure.rank is not None and failure.rank == self.last_failed, failure.rank
        resized = fit_plan(self.job, available, self.initial_ranks)
        if repeated and (fewer := fit_plan(self.job, self.ranks - 1, self.initial_ranks)):
            resized, self.last_failed = fewer, None
        if resized is None:
            raise failure
        ranks, job = resized
        if ranks != self.ranks:
            try:
                replace_file(self.path, job.to_toml())
            except OSError as error:
                raise RankFailure(
                    f"{failure.what}\nthe job cannot continue with {ranks} ranks: "
                    f"{self.path} cannot be written: {error.strerror}",
                    rank=failure.rank,
                    where=failure.where,
                    rule="the ranks read their plan from the run folder",
                    fix="make the run folder writable, then continue with --resume auto",
                ) from None
        self.ranks = ranks
        return ranks


def fit_plan(job: Job, ranks: int, initial_ranks: int) -> tuple[int, Job] | None:
    """Largest world size up to `ranks` that the plan of a job fits, and the resolved job; None if no size fits.

    The global batch size does not change.

    Args:
        job: job as written by the user.
        ranks: maximum world size.
        initial_ranks: world size of the first attempt; for other world sizes the number of data ranks may change.
    """
    for world_size in range(ranks, 0, -1):
        plan = job.plan if world_size == initial_ranks else _with_flexible_data_ranks(job.plan)
        try:
            given = job.model_copy(update={"plan": plan})
            resolved = resolve_job(given, world_size, native_bf16=False)  # the job has its dtypes
            check_model(resolved)
        except WeftError:
            continue
        return world_size, resolved
    return None


def _with_flexible_data_ranks(plan: Plan) -> Plan:
    """Copy of a plan whose number of data ranks follows from the world size, with equal numbers of rows."""
    parallel = plan.parallel.model_copy(update={"dp_shard": -1, "dp_replicate": 1, "rows_per_rank": ()})
    return plan.model_copy(update={"parallel": parallel})
