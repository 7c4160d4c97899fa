"""Spike detector on realistic curves: no false alarm, immediate detection of injected spikes, equal results after a resume."""

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from weft.precision.spikes import SpikeDetector, predict_next

Step = tuple[float, float]


def curve(
    seed: int, steps: int, *, loss_noise: float = 0.04, norm_noise: float = 0.08, memory: float = 0.0
) -> list[Step]:
    """Loss and gradient norm of a run: power laws with noise, which may be autocorrelated.

    The noise of the norm is skewed as in real runs: a gamma variable with its long tail above.
    """
    random = np.random.default_rng(seed)
    t = np.arange(steps)
    loss = 1.9 + 9.0 * (1 + t / 60) ** -0.55
    norm = 0.25 + 4.0 * (1 + t / 40) ** -0.7
    white = random.standard_normal(steps) * loss_noise
    shape = 16.0
    skewed = (random.gamma(shape, size=steps) - shape) / math.sqrt(shape) * norm_noise
    for noise in (white, skewed):
        for i in range(1, steps):
            noise[i] = memory * noise[i - 1] + math.sqrt(1 - memory**2) * noise[i]
    return [(float(x), float(y)) for x, y in zip(loss + white, norm * np.exp(skewed), strict=True)]


@pytest.mark.parametrize(
    ("steps", "runs", "settings"),
    [
        (20_000, 2, {}),
        (20_000, 1, {"memory": 0.5}),
        (10_000, 1, {"loss_noise": 0.1}),
        (10_000, 1, {"norm_noise": 0.2}),
        (1_000, 20, {}),  # mostly the steep part
    ],
    ids=["long", "with memory", "noisy loss", "noisy norm", "many starts"],
)
def test_100_000_steps_without_a_false_alarm(steps: int, runs: int, settings: dict[str, float]) -> None:
    """100,000 steps over all cases, without a spike."""
    for seed in range(runs):
        detector = SpikeDetector()
        alarms = [(i, why) for i, step in enumerate(curve(seed, steps, **settings)) if (why := detector.observe(*step))]
        assert alarms == []


@pytest.mark.parametrize("count", [64, 65, 128])
def test_prediction_follows_a_line(count: int) -> None:
    end, deviation = predict_next([5 - 0.25 * i for i in range(count)])
    assert end == pytest.approx(5 - 0.25 * count)
    assert deviation == pytest.approx(0, abs=1e-12)


def seen_steps(spikes: dict[int, Step]) -> Iterator[tuple[int, str | None]]:
    """Reasons of the detector in a run with injected (rise of the loss, factor on the norm) at some steps."""
    detector = SpikeDetector()
    for i, (loss, norm) in enumerate(curve(3, 3000)):
        rise, factor = spikes.get(i, (0.0, 1.0))
        yield i, detector.observe(loss + rise, norm * factor)


@pytest.mark.must("fault: A loss or a gradient norm is far from the previous ones")
@pytest.mark.parametrize(("spike", "words"), [((0.5, 1.0), "loss"), ((0.0, 3.0), "gradient norm"), ((0.5, 3.0), "; ")])
def test_every_injected_spike_is_detected_immediately(spike: Step, words: str) -> None:
    steps = [*range(400, 3000, 97), 2000, 2001, 2002]  # some in a row
    found = {i: why for i, why in seen_steps(dict.fromkeys(steps, spike)) if why}
    assert sorted(found) == sorted(steps)
    assert all(words in why for why in found.values())
    if words != "; ":
        assert not any("; " in why for why in found.values())


def test_reason_names_value_and_trend() -> None:
    detector = SpikeDetector()
    for i in range(100):
        assert detector.observe(2 + 0.001 * (i % 5), 1 + 0.01 * (i % 5)) is None
    assert detector.observe(3.0, 4.0) == (
        "loss 3 exceeds its recent trend of 2.002; gradient norm 4 exceeds its recent trend of 1.02"
    )


@pytest.mark.parametrize("step", [(math.nan, 1.0), (2.0, math.inf), (2.0, math.nan), (-math.inf, 1.0)])
def test_nonfinite_values_are_spikes_from_the_first_step_and_are_not_recorded(step: Step) -> None:
    detector = SpikeDetector()
    assert "not both finite" in str(detector.observe(*step))
    for values in curve(0, 200):
        detector.observe(*values)
    before = detector.state()
    for _ in range(50):
        assert "not both finite" in str(detector.observe(*step))
    assert detector.state() == before


def test_no_detection_during_warm_up() -> None:
    detector = SpikeDetector(warm_up=64)
    reasons = [detector.observe(2.0, 1.0 if i % 63 else 50.0) for i in range(64)]
    assert reasons == [None] * 64
    assert detector.observe(2.0, 50.0) is not None


def test_persistent_value_becomes_the_new_level() -> None:
    detector = SpikeDetector(patience=16, warm_up=64)
    for step in curve(0, 500):
        detector.observe(*step)
    noise = [loss - 2 for loss, _ in curve(1, 20_000)[-500:]]
    reasons = [detector.observe(6 + x, 0.3) for x in noise]
    assert all(reason and "loss" in reason for reason in reasons[:15])
    assert reasons[15:] == [None] * 485
    assert detector.observe(6.7, 0.3) is not None  # measured from the new level


def test_intermittent_rise_never_becomes_the_new_level() -> None:
    detector = SpikeDetector(patience=4)
    for step in curve(0, 3000):
        detector.observe(*step)
    level = detector.state()["loss"][-1]
    reasons = [detector.observe(level + (0.0 if i % 4 == 0 else 1.0), 0.45) is not None for i in range(100)]
    assert reasons == [i % 4 != 0 for i in range(100)]


def test_falling_or_constant_value_is_no_spike() -> None:
    detector = SpikeDetector()
    reasons = [detector.observe(2.0, 1.0) for _ in range(200)] + [detector.observe(1.0, 0.1) for _ in range(200)]
    assert reasons == [None] * 400
    assert detector.observe(1.03, 0.1) is not None
    assert detector.observe(1.01, 0.14) is None  # below the least rises
    assert detector.observe(1.0, 0.16) is not None
    assert detector.observe(1.0, 0.0) is None


@pytest.mark.parametrize("cut", [10, 64, 700, 1503])
def test_resume_from_state_is_equal(cut: int) -> None:
    steps = curve(5, 2000)
    for i in (600, 1500, 1501, 1502, 1503, 1504, 1900):
        steps[i] = (steps[i][0] + 0.5, steps[i][1] * 3)
    steps[1700:1800] = [(loss + 1, norm) for loss, norm in steps[1700:1800]]  # a level that stays for a while
    one = SpikeDetector()
    expected = [one.observe(*step) for step in steps]
    first = SpikeDetector()
    reasons = [first.observe(*step) for step in steps[:cut]]
    text = json.dumps(first.state())
    second = SpikeDetector.from_state(json.loads(text))
    assert reasons + [second.observe(*step) for step in steps[cut:]] == expected
    assert second.state() == one.state()
    assert len(text) < 10_000
    assert sum(why is not None for why in expected) == 7 + 15


def test_settings_may_change_on_resume() -> None:
    detector = SpikeDetector(window=128)
    for step in curve(0, 300):
        detector.observe(*step)
    shorter = SpikeDetector.from_state(detector.state(), window=80)
    for step in curve(0, 310)[300:]:
        assert shorter.observe(*step) is None
    assert len(shorter.state()["loss"]) == 80
