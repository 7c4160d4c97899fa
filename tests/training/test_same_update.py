"""Check of optimizer settings on resume: changes are named, a longer run with the same learning rates is allowed."""

from typing import Any

import pytest

from weft.errors import JobError
from weft.job import Job
from weft.training.resume_checks import check_same_update

MODEL = {"config": {"model_type": "llama", "hidden_size": 64}}


def job_of(steps: int = 100, seed: int = 0, plan: dict[str, Any] | None = None, **optimizer: Any) -> Job:
    tables = {"model": MODEL, "train": {"steps": steps, "seed": seed}, "optimizer": optimizer, "plan": plan or {}}
    return Job.parse(tables)


def refusal(now: Job, before: Job, step: int = 50) -> str:
    try:
        check_same_update(now, before.model_dump(mode="json"), step, "step-00000050")
    except JobError as error:
        return error.what
    return ""


def test_every_change_is_named_with_both_values() -> None:
    with pytest.raises(JobError) as refused:
        check_same_update(job_of(lr=0.01), job_of(lr=0.02).model_dump(mode="json"), 50, "step-00000050")
    assert "--accept-changes" in (refused.value.fix or "")
    assert refusal(job_of(lr=0.01, weight_decay=0.0), job_of(lr=0.02, weight_decay=0.1)).splitlines() == [
        "optimizer.lr = 0.01, it was 0.02",
        "optimizer.weight_decay = 0.0, it was 0.1",
    ]
    assert refusal(job_of(betas=(0.9, 0.99)), job_of()) == "optimizer.betas = [0.9, 0.99], it was [0.9, 0.95]"
    other = job_of().model_copy(update={"model": job_of().model.model_copy(update={"config": {"model_type": "gpt2"}})})
    assert refusal(other, job_of()).startswith("model.config = {'model_type': 'gpt2'}, it was {'model_type': 'llama'")


@pytest.mark.parametrize(
    ("schedule", "step", "named"),
    [("constant", 100, False), ("wsd", 50, False), ("wsd", 90, True), ("cosine", 50, True), ("cosine", 5, False)],
)
def test_more_steps_are_refused_if_past_learning_rates_depend_on_them(schedule: str, step: int, named: bool) -> None:
    found = refusal(job_of(200, schedule=schedule), job_of(100, schedule=schedule), step)
    assert found == (f"train.steps = 200, it was 100: the {schedule} schedule depends on it" if named else "")


def test_allowed_changes() -> None:
    assert refusal(job_of(), job_of()) == ""
    assert refusal(job_of(plan={"parallel": {"tp": 2}, "precision": {"param_dtype": "fp32"}}), job_of()) == ""
    assert refusal(job_of(lr=0.01), job_of(lr=0.02), step=0) == ""  # no step has been trained


def test_checkpoint_without_newer_keys() -> None:
    before = job_of().model_dump(mode="json")
    del before["optimizer"]["freeze_steps"]
    check_same_update(job_of(freeze_steps=7), before, 50, "step-00000050")
    with pytest.raises(JobError, match="it was"):
        check_same_update(job_of(lr=1.0), before, 50, "step-00000050")


def test_encryption_may_change_between_two_runs() -> None:
    encrypted = Job.parse({"model": MODEL, "cluster": {"encrypt": True}})
    assert not refusal(encrypted, job_of())
    assert not refusal(job_of(), encrypted)
    older = job_of().model_dump(mode="json")
    del older["cluster"]
    check_same_update(encrypted, older, 50, "step-00000050")
