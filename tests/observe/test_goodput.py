"""Goodput and cost of a run by hand-made records."""

import pytest

from weft.job import Cluster
from weft.observe.goodput import bill, bill_lines, divide_time, goodput_text
from weft.training.metrics import Attempt, StepMetrics


def attempt(time: float, step: int = 0, number: int = 0) -> Attempt:
    return Attempt(number, time, step, 4, 4, "RAPL")


def step(
    number: int, end: float, *, skipped: bool = False, saving: float = 0.0, joules: float | None = 10.0
) -> StepMetrics:
    row = StepMetrics(number, 3.0, 1.0, 0.1, 1000, 1.0, 1000.0, None, 2**20, 7, 1.0, skipped)
    return StepMetrics(**{**vars(row), "checkpoint_seconds": saving, "time": end, "joules": joules})


# The ranks start in 2 s; step 3 is skipped; saving takes 0.5 s before step 3. They fail 1 s after step 4, and restart 3 s later
# from step 2. Step 4 is followed by an evaluation of 2 s.
ATTEMPTS = [attempt(100), attempt(111.5, 2, 1)]
STEPS = [
    step(1, 103),
    step(2, 104),
    step(3, 105.5, saving=0.5, skipped=True),
    step(4, 107.5),
    step(3, 114.5),
    step(4, 115.5),
    step(5, 118.5),
]


def test_time_is_divided_by_purpose() -> None:
    found = divide_time(ATTEMPTS, STEPS)
    assert found is not None
    assert found.seconds == pytest.approx(
        {
            "start of the ranks": 2 + 2,
            "steps that count": 2 + 3,
            "skipped steps": 1,
            "repeated steps": 1,
            "checkpoints": 0.5,
            "evaluation and records": 1 + 2,
            "failures and restarts": 4,
        }
    )
    assert found.total == pytest.approx(18.5)
    assert found.share == pytest.approx(5 / 18.5)
    assert goodput_text(found).startswith("27.0% of 18s; ")


def test_the_pause_before_a_new_command_is_no_loss() -> None:
    found = divide_time([attempt(0), attempt(1000, 2)], [step(1, 1), step(2, 2), step(3, 1001)])
    assert found is not None
    assert found.seconds == pytest.approx({"steps that count": 3})
    assert found.share == 1


def test_a_start_that_failed_before_its_first_step_is_a_loss() -> None:
    found = divide_time([attempt(0), attempt(5, 0, 1)], [step(1, 7)])
    assert found is not None
    assert found.seconds == pytest.approx({"failed starts": 5, "start of the ranks": 1, "steps that count": 1})


def test_runs_without_times_have_no_goodput() -> None:
    assert divide_time([], STEPS) is None
    assert divide_time(ATTEMPTS, [*STEPS, step(6, 0.0)]) is None
    assert divide_time(ATTEMPTS, []) is None


def test_devices_are_paid_for_the_whole_time_and_tokens_count_once() -> None:
    cluster = Cluster(dollars_per_hour=3.6, grams_co2_per_kwh=360.0)
    found = bill(ATTEMPTS, STEPS, cluster)
    assert found is not None
    assert found.spent.joules == 70  # repeated steps cost energy too
    assert found.spent.dollars == pytest.approx(4 * 3.6 * 18.5 / 3600)
    assert found.spent.grams_co2 == pytest.approx(70 / 3.6e6 * 360)
    assert found.tokens == 5000
    assert bill_lines(found)["energy"] == "70 J, 71.4 tokens/J (RAPL)"
    assert bill_lines(found)["cost"] == "$0.074, $14.80 per million tokens"


def test_nothing_known_gives_no_bill() -> None:
    assert bill(ATTEMPTS, [step(1, 103, joules=None)], Cluster()) is None
