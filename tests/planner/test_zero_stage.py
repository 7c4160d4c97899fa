"""The ZeRO stage of a job with plan.parallel.zero = "auto"."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import observe
from weft.device.cpu import Cpu
from weft.errors import PlanError
from weft.job import Job
from weft.plan import Parallel, Plan, Precision, resolve_plan
from weft.plan.resolve import with_zero
from weft.planner.dryrun.extrapolate import trace_in_brief
from weft.planner.zero_stage import SMALL, choose_zero
from weft.training.session import Session

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 512, "num_key_value_heads": 4}
FP32 = {"param_dtype": "fp32"}


class Small(Cpu):
    """CPU with little memory."""

    def __init__(self, memory: float):
        self.memory = int(memory)

    @property
    def total_memory_bytes(self) -> int:
        return self.memory


def job_of(**tables: Any) -> Job:
    plan = {"precision": FP32} | tables.pop("plan", {})
    train = {"global_batch_size": 4, "micro_batch_size": 2}
    return Job.parse(
        {
            "model": {"config": {**family("llama"), **SIZES}},
            "data": {"seq_len": 32},
            "train": train,
            "plan": plan,
            **tables,
        }
    )


def test_the_lowest_stage_that_fits_is_chosen() -> None:
    job = job_of()
    needed = {}
    for zero in (0, 1):
        one = job.model_copy(update={"plan": with_zero(job.plan, zero)})
        needed[zero] = max(float(found.count.peak) for found in trace_in_brief(one, 4, "cpu"))
    assert needed[0] > needed[1]
    found = [choose_zero(job, [4], Small(4 * memory)) for memory in (1.12 * needed[0], 1.12 * needed[1], needed[1] / 2)]
    assert [chosen.plan.parallel.zero for chosen, _ in found] == [0, 1, 3]
    assert found[0][1].startswith("stage 0: a step takes")
    assert found[2][1] == "stage 3: no lower stage fits"


def test_small_states_need_no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.planner.zero_stage.trace_in_brief", lambda *_: pytest.fail("dry run"))
    _, why = choose_zero(job_of(), [2], Small(1e12 / SMALL))
    assert why.startswith("stage 0: model states take")


def test_a_stage_of_the_job_stays() -> None:
    job = job_of(plan={"parallel": {"zero": 2}, "precision": FP32})
    assert choose_zero(job, [2], Small(1e12)) == (job, "")


def test_stages_that_the_job_refuses_are_not_chosen() -> None:
    job = job_of(plan={"precision": FP32 | {"reduce_dtype": "bf16"}})  # replicas reduce in the dtype of the update
    assert choose_zero(job, [2], Small(1e12))[0].plan.parallel.zero == 1
    with pytest.raises(PlanError, match="3 ranks cannot be divided"):
        choose_zero(job_of(plan={"parallel": {"tp": 2}, "precision": FP32}), [3], Small(1e12))


def test_an_optimizer_off_the_device_is_sharded() -> None:
    job = job_of(plan={"precision": FP32, "memory": {"optimizer_device": "host"}})
    assert choose_zero(job, [2], Small(1e12))[0].plan.parallel.zero == 3
    assert choose_zero(job, [1], Small(1e12))[0].plan.parallel.zero == 0


@pytest.mark.parametrize(
    ("plan", "ranks", "zero"),
    [
        (Plan(), 1, 0),
        (Plan(), 2, 3),
        (Plan(parallel=Parallel(tp=2)), 2, 0),
        (Plan(parallel=Parallel(cp=2)), 2, 3),
        (Plan(precision=Precision(reduce_dtype="bf16")), 1, 3),
    ],
)
def test_stage_where_no_memory_is_known(plan: Plan, ranks: int, zero: int) -> None:
    assert resolve_plan(plan, ranks, native_bf16=False).parallel.zero == zero


def stage_of(session: Session) -> int:
    return session.job.plan.parallel.zero


def test_a_run_prints_and_records_its_stage(tmp_path: Path) -> None:
    run = observe(Job.load(write_job(tmp_path)), 2, probe=stage_of)
    assert any(line.startswith("zero        stage 0: model states take") for line in run.screen)
    assert Job.load(run.folder / "job.toml").plan.parallel.zero == 0
    assert run.facts == [0, 0]
