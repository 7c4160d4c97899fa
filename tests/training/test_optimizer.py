"""Learning-rate schedules and loss scale."""

import pytest

from weft.job import Optimizer
from weft.precision.scaling import INITIAL_SCALE, WINDOW, LossScale
from weft.training.optimizer import learning_rate


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str) -> None:
    settings = Optimizer(lr=1.0, schedule=schedule, warmup_steps=10)  # type: ignore[arg-type]
    assert [learning_rate(step, 100, settings) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


def test_schedules_after_warm_up() -> None:
    def rates(schedule: str) -> list[float]:
        settings = Optimizer(lr=1.0, schedule=schedule, warmup_steps=0)  # type: ignore[arg-type]
        return [learning_rate(step, 100, settings) for step in range(1, 101)]

    cosine, wsd = rates("cosine"), rates("wsd")
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[49] == pytest.approx(0.55, abs=1e-9)
    assert cosine[-1] == pytest.approx(0.1)
    assert wsd[:80] == [1.0] * 80
    assert wsd[-1] == pytest.approx(0.05)
    assert rates("constant") == [1.0] * 100


def test_a_warm_up_longer_than_training() -> None:
    settings = Optimizer(lr=1.0, warmup_steps=1000)
    assert learning_rate(5, 5, settings) == 1.0


def test_dynamic_scale_grows_after_a_window_and_never_falls_below_one() -> None:
    scale = LossScale.from_plan("dynamic")
    assert scale.value == INITIAL_SCALE == 65536
    for _ in range(WINDOW):
        scale = scale.after(finite=True)
    assert scale == LossScale(2 * INITIAL_SCALE, dynamic=True)
    for _ in range(40):
        scale = scale.after(finite=False)
    assert scale.value == 1.0


def test_overflow_restarts_the_window() -> None:
    scale = LossScale(8.0, dynamic=True, good_steps=WINDOW - 1).after(finite=False).after(finite=True)
    assert scale == LossScale(4.0, dynamic=True, good_steps=1)


def test_fixed_scale_is_constant() -> None:
    assert LossScale.from_plan(128).after(finite=False) == LossScale(128.0)
    assert LossScale.from_plan("none") == LossScale(1.0)
