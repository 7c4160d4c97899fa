"""Resumed jobs with a trainer: bit-equal at every step, nothing after the last step, changed inputs refused."""

from pathlib import Path

import pytest

from tests.posttraining.resumes import CASES, STEPS, resume_everywhere


@pytest.mark.parametrize("case", CASES)
def test_a_job_resumed_after_any_step_is_bit_equal(case: str, small_model: Path, tmp_path: Path) -> None:
    assert resume_everywhere(case, small_model, tmp_path) == dict.fromkeys(range(1, STEPS), "")
